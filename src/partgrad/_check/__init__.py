"""check: run a function and its derivatives, and say what is wrong, in which leaf, at which line."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec

import jax
import numpy as np

from .._selection import Target
from .._transforms import Arguments, Call
from .._trees import describe, flatten, refuse_non_bools, refuse_uncallable, written
from ..errors import ArgumentError
from .examine import Options, examine, is_rounding_products, refuse_tracers
from .finding import Finding as Finding
from .intended import Meant
from .progress import Progress
from .report import GradientReport as GradientReport

P = ParamSpec("P")


def check(
    f: Callable[P, Any],
    wrt: Any = None,
    *,
    argnums: int | Sequence[int] | None = None,
    argnames: str | Sequence[str] | None = None,
    has_aux: bool = False,
    forward: bool = False,
    intended: Meant | Sequence[Meant] = (),
    exhaustive: bool = False,
    search: bool | float = False,
    bounds: Any = None,
    seed: int = 0,
    directions: int = 3,
    progress: bool | Callable[[int, int, str], object] | None = None,
) -> Callable[P, GradientReport]:
    """Create a function that evaluates `f` and its derivatives, and reports what is wrong with them.

    It compares the value of `f` in every mode, and the forward and reverse derivatives of each leaf with each other and
    with finite differences of the traced function. Finite differences are evaluated in float64, whatever the precision
    of `f`, and without running its Python again. Whatever is not finite, out of bounds, zero, random, tied or lost to
    rounding is traced back to the leaf and to the line of the user's code. JAX's configuration does not change outside
    the call.

    Args:
        f: A function from any pytrees to an array or a tree of arrays. If there are several outputs, a random weighted
            sum of them is differentiated.
        wrt: A selector. None selects every floating or complex leaf that no mark holds. For several arguments a tuple
            of selectors.
        argnums: Which arguments, by position; the first one if neither this nor `argnames` is given.
        argnames: Which arguments, by name.
        has_aux: Whether `f` returns a pair of the value to differentiate and auxiliary data, which is ignored.
        forward: Whether the derivative is only used in forward mode (`jacfwd`, `jvp`), so that no gradient is needed.
        intended: Causes that are intentional: a function (the rule itself, or one that was running there), the
            qualified name of either (of a rule, as the report prints it), a line as `file.py:42`, or the path of a
            leaf. Findings of these causes become notes; an entry that matches no finding is a warning.
        exhaustive: Whether to compare every element of every leaf as well as sampled directions.
        search: Whether to look for bad points near the given one too: operands of `sqrt`, `/`, `arccos`, `norm` and the
            like are driven to where they have no derivative, comparisons and competitions to ties. What is wrong there
            although the value is finite is a finding like any other, and says which leaves were moved; a slope that is
            truly infinite is a note. Silence is no proof. A number is the seconds that it may take; what is left out
            is said.
        bounds: For the search, a pair of lower and upper bounds: None (open), a number, or a tree like the gradient.
        seed: The seed for the directions and the weights.
        directions: How many directions are sampled for each leaf; each takes about ten evaluations.
        progress: None shows a bar on a terminal after two seconds if tqdm is installed, True at once, False never; a
            function is called with the number of steps done, the number known so far, and what was done.

    Returns:
        A function of the arguments of `f` that returns a `GradientReport`, which prints as a table with a line for each
        leaf and has `verdict`, `ok`, `findings`, `rows`, `cost` and `raise_if_failed()`.

    Raises:
        SelectionError: When called, if the selector does not fit the argument.
        ArgumentError: If an option is not valid; or, when called, inside a transformation or if `f` returns nothing
            that has a derivative.

    Example:
        >>> import jax.numpy as jnp, partgrad as pg
        >>> def loss(p):
        ...     return jnp.sum(jnp.where(p["x"] > 0, jnp.log(p["x"]), 0.0)) * p["scale"]
        >>> report = pg.check(loss)({"x": jnp.array([0.0, 1.0]), "scale": 2.0, "old": 1.0})
        >>> report.ok
        False
        >>> [(finding.kind, finding.leaves) for finding in report.findings]
        [('nan', ("['x']",)), ('zero', ("['old']",)), ('zero', ("['scale']",))]
    """
    refuse_uncallable("check", f)
    refuse_non_bools(has_aux=has_aux, forward=forward, exhaustive=exhaustive)
    if not isinstance(search, int | float):
        raise ArgumentError(
            f"`search` is {written(search):.60}.",
            "Expected a bool, or the seconds that the search may take.",
            fix="write search=True.",
        )
    if isinstance(directions, bool) or not isinstance(directions, int) or directions < 1:
        raise ArgumentError(
            f"`directions` is {directions!r:.80}.", "Expected an int of at least 1.", fix="omit it (it is 3)."
        )
    if any(isinstance(leaf, float | complex | np.ndarray | jax.Array) for leaf in jax.tree.leaves(wrt)):
        raise ArgumentError(
            f"`check` got {describe(wrt)} as its selector, which looks like a value to differentiate.",
            "Expected a function, and then a selector or nothing.",
            fix="write partgrad.check(f)(x): the check is a function of the arguments of f.",
        )
    arguments = Arguments(f, wrt, argnums, argnames)
    shown = Progress(progress)
    meant = (intended,) if isinstance(intended, str) or callable(intended) else tuple(intended)
    options = Options(exhaustive, seed, directions, has_aux, forward, meant)

    # Not `__dict__`: a model with __call__ keeps its parameters there.
    @functools.wraps(f, updated=())
    def checked(*args: Any, **kwargs: Any) -> GradientReport:
        refuse_tracers(f, flatten((args, kwargs))[0])
        targets = arguments.targets(args, kwargs)
        Call(f, args, kwargs, targets).refuse_empty()
        with shown, _undisturbed():
            report = examine(f, args, kwargs, targets, options, shown)
            if search is False:
                return report
            # Not every check needs it.
            from .nearby import with_nearby

            def at_others(moved: list[Target]) -> GradientReport:
                there, named = list(args), dict(kwargs)
                for target in moved:
                    place: Any = named if isinstance(target.position, str) else there
                    place[target.position] = target.tree
                return examine(f, tuple(there), named, moved, options, shown)

            of_selected = Call(f, args, kwargs, targets)
            seconds = math.inf if search is True else float(search)
            return with_nearby(report, of_selected, targets, has_aux, bounds, seed, seconds, at_others, shown.tick)

    return checked


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A context in which NaN, infinity, transfers and promotion raise no error: the check looks for them or has them.

    By default, an accelerator multiplies matrices with fewer digits than the dtype has. With `jax_disable_jit`, each
    operation of what the check evaluates many times, loops among them, would run by itself: it would take hours.
    """
    products = jax.default_matmul_precision("highest") if is_rounding_products() else contextlib.nullcontext()
    promotion = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    refusals = (
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
        *promotion,
        jax.disable_jit(False),
    )
    with np.errstate(all="ignore"), contextlib.ExitStack() as contexts:
        for context in (*refusals, products):
            contexts.enter_context(context)
        yield
