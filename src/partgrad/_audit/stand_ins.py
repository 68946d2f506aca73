"""What stands in for JAX's transforms, and for what starts another process, while the audit records."""

import copy
import functools
import os
from collections import deque
from collections.abc import Callable
from typing import Any

# The `Recorder` of `recorder.py`, which imports this module and is told of each call.
Recorder = Any


def _spare(function: Any) -> Any:
    """A function that can be called once more: flax gives JAX objects that use up what they hold in a call."""
    used_up = {name: held for name, held in getattr(function, "__dict__", {}).items() if isinstance(held, deque)}
    if not used_up:
        return function
    try:
        spare = copy.copy(function)
        spare.__dict__.update({name: held.copy() for name, held in used_up.items()})
    except Exception:
        # Whatever its class does: the program is to run as it is.
        return function
    return spare


def _of_function(recorder: Recorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For transforms that return a function."""

    @functools.wraps(original)
    def transform(fun: Any, *options: Any, **named: Any) -> Any:
        transformed = original(fun, *options, **named)
        argnums = named.get("argnums", options[0] if options else 0)
        has_aux = named.get("has_aux", options[1] if len(options) > 1 else False)

        @functools.wraps(transformed)
        def call(*args: Any, **kwargs: Any) -> Any:
            spare = _spare(fun)
            result = transformed(*args, **kwargs)
            return recorder.see(name, spare, args, kwargs, argnums, has_aux, result)

        return call

    return transform


def _of_primals(recorder: Recorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For `vjp` and `linearize`, which take the primals after the function."""

    @functools.wraps(original)
    def transform(fun: Any, *primals: Any, **named: Any) -> Any:
        spare = _spare(fun)
        result = original(fun, *primals, **named)
        return recorder.see(name, spare, primals, {}, range(len(primals)), named.get("has_aux", False), result)

    return transform


def _of_tangents(recorder: Recorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For `jvp`, which takes a tuple of primals."""

    @functools.wraps(original)
    def transform(fun: Any, primals: Any, tangents: Any, has_aux: bool = False) -> Any:
        spare = _spare(fun)
        result = original(fun, primals, tangents, has_aux=has_aux)
        return recorder.see(name, spare, tuple(primals), {}, range(len(primals)), has_aux, result)

    return transform


def starting(recorder: Recorder, how: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For what starts another process."""

    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.see_child(how, args[0] if args else kwargs.get("args"))
        return original(self, *args, **kwargs)

    return start


def is_python(command: Any) -> bool:
    """Whether a command of `subprocess` runs Python, as far as its first word tells."""
    words = [command] if isinstance(command, str | bytes | os.PathLike) else list(command or ())[:1]
    first = os.fsdecode(words[0]) if words and isinstance(words[0], str | bytes | os.PathLike) else ""
    return os.path.basename(first.split(" ")[0].strip("'\"")).lower().startswith(("python", "pypy"))


WRAPPERS: dict[str, Callable[[Recorder, str, Any], Any]] = {
    **dict.fromkeys(("grad", "value_and_grad", "jacfwd", "jacrev", "hessian"), _of_function),
    **dict.fromkeys(("vjp", "linearize"), _of_primals),
    "jvp": _of_tangents,
}
