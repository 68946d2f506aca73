"""last_nonfinite: the arguments of the first derivative that was not finite, and what is wrong with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._check import GradientReport, check
from .._compat import cached_property
from .._transforms import calls_in, clear, forget, kept

# The positional and the keyword arguments of a call.
Given = tuple[tuple[Any, ...], dict[str, Any]]


class NonFiniteGradient:
    """A call whose derivative was not finite.

    Attributes:
        function: The name of the function.
        args: Its positional arguments, with arrays on the host.
        kwargs: Its keyword arguments.
        before: The arguments of the calls before it, `(args, kwargs)`, the last one last, as far as they were kept.
    """

    def __init__(
        self,
        name: str,
        given: Given,
        report: Callable[[], GradientReport],
        clear: Callable[[], None],
        before: list[Given],
    ):
        self.function, (self.args, self.kwargs), self.before = name, given, before
        self._report, self._clear = report, clear

    @cached_property
    def report(self) -> GradientReport:
        """What `check` says of the function at these arguments; made when it is asked for."""
        return self._report()

    def clear(self) -> None:
        """Drop what partgrad keeps, so that the next derivative that is not finite is kept."""
        self._clear()

    def __repr__(self) -> str:
        return f"<the arguments of `{self.function}`, whose gradient is not finite>"


def last_nonfinite(
    path: Any = None, f: Callable[..., Any] | None = None, *, like: Any = None
) -> NonFiniteGradient | None:
    """Return the first call of a transform with `nonfinite="report"` whose derivative was not finite.

    With a path, it is that of a transform with `nonfinite=partgrad.KeepCalls(path)`, in this process or another one.
    Read only what you trust: the classes of arguments are stored by `pickle`.

    Args:
        path: The folder; without it, what this process has in memory.
        f: The function that was differentiated. Needed for a lambda or a function of a script, which another process
            cannot import.
        like: A tuple of the arguments of any call like it, if they have a class that `pickle` cannot store.

    Returns:
        An object with `function`, `args`, `kwargs`, the calls `before` it, the `report` of `check` at these arguments,
        and `clear()`; None if there was no such call, or none since the last `clear()`.

    Raises:
        ArgumentError: If the arguments could not be stored, and from `report` if the function is not found.

    Example:
        >>> import jax, jax.numpy as jnp, partgrad as pg
        >>> step = jax.jit(pg.grad(lambda x: jnp.sum(jnp.sqrt(x)), nonfinite="report"))
        >>> _ = jax.block_until_ready(step(jnp.array([0.0, 1.0])))
        >>> found = pg.last_nonfinite()
        >>> print(found.args, found.report.findings[0].operation)
        (array([0., 1.], dtype=float32),) sqrt
        >>> found.clear()
    """
    if path is not None:
        return _stored(Path(path), f, None if like is None else (tuple(like), {}))
    call = kept()
    if call is None:
        return None

    def report() -> GradientReport:
        function = call.program.function(call.operands)
        function.__name__ = call.name  # the program has that of the call of a transform
        return check(function)(call.program.point(call.operands))

    return NonFiniteGradient(call.name, call.arguments(call.arrays), report, forget, [])


def _stored(path: Path, f: Callable[..., Any] | None, like: Any) -> NonFiniteGradient | None:
    calls = calls_in(path)
    bad = next((call for call in calls if call.is_bad), None)
    if bad is None:
        return None
    args, kwargs = bad.arguments(like)
    before = [call.arguments(like) for call in calls if call.number < bad.number and call.kind == bad.kind]
    # Now: the folder may be gone when it is asked for.
    described = bad.described
    report = lambda: check(described.found(f), **described.options)(*args, **kwargs)
    return NonFiniteGradient(described.name, (args, kwargs), report, lambda: clear(path), before)
