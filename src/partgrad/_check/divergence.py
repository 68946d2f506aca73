"""The line at which two runs of the same Python function part."""

import itertools
import sys
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import jax

from .._programs import Operands
from .user import as_where, is_users

_MOST_STEPS = 300_000
_MOST_SECONDS = 10.0

# A step is an instruction, with its line.
Step = tuple[CodeType, int, int]


class _Activation:
    """What the user's code did from one call by a library until it returned there.

    A library may call a function in one run and know its result in the next: so what it calls is kept apart from what
    the user's code calls itself.
    """

    def __init__(self, code: CodeType | None):
        self.code = code
        self.steps: list[Step] = []
        self.calls: list[tuple[int, _Activation]] = []


def parting_line(first: Callable[[], Any], second: Callable[[], Any]) -> str:
    """The last line that two runs have in common before they take different paths.

    Only the user's code is followed, by `sys.settrace`. Exceptions end a run and are not passed on.

    Args:
        first: A run.
        second: Another one.

    Returns:
        The line, as `file.py:42`; "" where the runs do not part, where they are too long to tell, or where another
        tracer, as a debugger's, is at work.
    """
    if sys.gettrace() is not None:
        return ""
    (ours, ours_complete), (theirs, theirs_complete) = _recorded(first), _recorded(second)
    step = _last_common(ours, theirs, ours_complete and theirs_complete)
    return as_where(step[0].co_filename, step[2]) if step else ""


def eager_or_traced(outputs: Callable[[Operands], Operands], leaves: Operands) -> str:
    """The line at which a function takes another path when it is traced than when it is run."""
    # A function of its own, or JAX may find an earlier trace in its cache.
    traced = lambda: jax.make_jaxpr(lambda values: outputs(values))(list(leaves))
    return parting_line(lambda: outputs(list(leaves)), traced)


def _recorded(run: Callable[[], Any]) -> tuple[_Activation, bool]:
    """What a run did, and whether that is all of it."""
    recorder = _Recorder()
    sys.settrace(recorder.on_call)
    try:
        run()
    except Exception:
        pass
    finally:
        sys.settrace(None)
    return recorder.root, recorder.complete


class _Recorder:
    def __init__(self) -> None:
        self.root = _Activation(None)
        self.complete = True
        self._current = [self.root]
        self._left = _MOST_STEPS
        self._deadline = time.monotonic() + _MOST_SECONDS

    def on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self.complete or not is_users(frame.f_code.co_filename):
            return None
        top = self._current[-1]
        if frame.f_back is not None and is_users(frame.f_back.f_code.co_filename) and top is not self.root:
            self._current.append(top)
        else:
            called = _Activation(frame.f_code)
            top.calls.append((len(top.steps), called))
            self._current.append(called)
        # Python 3.13 takes note of the second only after the first.
        frame.f_trace = self.on_event
        frame.f_trace_opcodes = True
        return self.on_event

    def on_event(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._current.pop()
        elif event == "opcode" and self.complete:
            self._current[-1].steps.append((frame.f_code, frame.f_lasti, frame.f_lineno))
            self._left -= 1
            if self._left <= 0 or (self._left % 1024 == 0 and time.monotonic() > self._deadline):
                self.complete = False
        return self.on_event


def _last_common(first: _Activation, second: _Activation, complete: bool) -> Step | None:
    """The last step before two activations part, in what they call first if they part there."""
    alike = (ours == theirs for ours, theirs in zip(first.steps, second.steps, strict=False))
    common = sum(itertools.takewhile(bool, alike))
    reached = lambda calls: [called for position, called in calls if position <= common]
    for ours, theirs in _paired(reached(first.calls), reached(second.calls)):
        inside = _last_common(ours, theirs, complete)
        if inside is not None:
            return inside
    ends = common == len(first.steps), common == len(second.steps)
    if all(ends) or (any(ends) and not complete) or common == 0:
        return None
    return first.steps[common - 1]


def _paired(first: list[_Activation], second: list[_Activation]) -> list[tuple[_Activation, _Activation]]:
    """Calls of the same code in both, in order; those that only one run made are left out."""
    pairs, rest = [], list(second)
    for ours in first:
        match = next((i for i, theirs in enumerate(rest) if theirs.code is ours.code), None)
        if match is not None:
            pairs.append((ours, rest[match]))
            del rest[: match + 1]
    return pairs
