"""A function that is audited, and the states that are kept of it."""

import threading
from typing import Any, NamedTuple

from .._programs import Operands, Recorded, host_copies
from .origin import Origin
from .program import Conditions
from .states import States

# How many states of one function are kept: the first, and others that are far from each other.
MOST = 16
# How many calls are looked at while their number doubles.
_PER_OCTAVE = 32
_FORWARD = frozenset({"jvp", "jacfwd", "linearize"})


class Point(NamedTuple):
    """A state: the program of a call, the values of the program's operands, and what the call returned, if known."""

    program: Recorded
    operands: Operands
    returned: Operands | None = None


class Place:
    """A function that is differentiated at one line with arguments of one kind.

    Attributes:
        origin: The function.
        where: The file and line that differentiate it.
        running: What was running, such as the name of a test.
        transform: The name of the transform.
        kind: What is the same for one program with arguments of one kind, wherever it is differentiated.
        conditions: The settings of JAX there.
        is_forward: Whether only forward mode is used.
        reason: Why its program could not be kept; empty if it was.
        is_closed: Whether no more states are kept, since the program has run.
        is_called: Whether the function was called, and not differentiated.
    """

    is_called = False

    def __init__(self, origin: Origin, where: tuple[str, int], running: str, transform: str, kind: Any):
        self.kind = kind
        self.origin, self.where, self.running, self.transform = origin, where, running, transform
        self.conditions = Conditions.now()
        self.is_forward = transform in _FORWARD
        self.reason, self.is_closed = "", False
        self._states: States[Point] = States(MOST)
        # Callbacks come from several threads.
        self._lock = threading.Lock()

    @property
    def points(self) -> list[Point]:
        """The states that are kept, the first one first."""
        return list(self._states)

    def arrive(self, program: Recorded, *operands: Any) -> None:
        """Keep a state, if it is one of the few."""
        try:
            with self._lock:
                if not self.is_closed:
                    self._states.offer(operands, lambda: Point(program, host_copies(operands)))
        except Exception as error:
            # In a callback an error would stop the program, which does not know of it.
            self.reason = f"its state cannot be kept: {last_line(error)}"


def last_line(error: BaseException) -> str:
    """An error in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def is_looked_at(number: int) -> bool:
    """Whether a call is looked at, by its number: the first ones, and then ever fewer, as looking takes time."""
    return number <= 2 * _PER_OCTAVE or number % (1 << (number.bit_length() - _PER_OCTAVE.bit_length())) == 0
