"""The first call whose gradient was not finite, kept on the host until it is dropped."""

import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class Kept(NamedTuple):
    """A call whose gradient is not finite.

    Attributes:
        name: The name of the function.
        program: The function of the differentiated leaves, as a program (`Recorded`).
        operands: The values that the program reads.
        arguments: From the arrays among the arguments to the arguments.
        arrays: These arrays.
    """

    name: str
    program: Any
    operands: list[Any]
    arguments: Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    arrays: list[Any]


_lock = threading.Lock()
_kept: list[Kept] = []


def kept() -> Kept | None:
    """The call that is kept, if there is one."""
    with _lock:
        return _kept[0] if _kept else None


def forget() -> None:
    """Drop it, so that the next one is kept."""
    with _lock:
        _kept.clear()


def keep(call: Kept) -> None:
    """Keep a call, if none is kept, and say so."""
    with _lock:
        if _kept:
            return
        _kept.append(call)
    print(
        f"partgrad: the gradient of `{call.name}` is not finite. Its arguments are kept: "
        "partgrad.last_nonfinite().report says which line makes it so.",
        file=sys.stderr,
    )
