"""last_nonfinite: the arguments of the first gradient that was not finite, and what is wrong with it."""

from .._check import GradientReport, check
from .._compat import cached_property
from .._transforms import Kept, forget, kept


class NonFiniteGradient:
    """A call whose gradient was not finite.

    Attributes:
        function: The name of the function.
        args: Its positional arguments, with arrays on the host.
        kwargs: Its keyword arguments.
    """

    def __init__(self, call: Kept):
        self.function = call.name
        self.args, self.kwargs = call.arguments(call.arrays)
        self._call = call

    @cached_property
    def report(self) -> GradientReport:
        """What `check` says of the function at these arguments; made when it is asked for."""
        call = self._call
        return check(call.program.function(call.operands))(call.program.point(call.operands))

    def clear(self) -> None:
        """Drop the copy that partgrad keeps, so that the next gradient that is not finite is kept."""
        forget()

    def __repr__(self) -> str:
        return f"<the arguments of `{self.function}`, whose gradient is not finite>"


def last_nonfinite() -> NonFiniteGradient | None:
    """Return the first call of `grad` or `value_and_grad` with `nonfinite="report"` whose gradient was not finite.

    Returns:
        An object with `function`, `args`, `kwargs`, the `report` of `check` at these arguments, and `clear()`; None if
        there was no such call, or none since the last `clear()`.

    Example:
        >>> import jax, jax.numpy as jnp, partgrad as pg
        >>> step = jax.jit(pg.grad(lambda x: jnp.sum(jnp.sqrt(x)), nonfinite="report"))
        >>> _ = jax.block_until_ready(step(jnp.array([0.0, 1.0])))
        >>> found = pg.last_nonfinite()
        >>> print(found.args, found.report.findings[0].operation)
        (array([0., 1.], dtype=float32),) sqrt
        >>> found.clear()
    """
    call = kept()
    return None if call is None else NonFiniteGradient(call)
