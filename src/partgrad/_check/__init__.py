"""check: run a function and its derivatives, and say what is wrong, in which leaf, at which line."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec

import jax
import numpy as np

from .._message import at, listed
from .._programs import Operands
from .._transforms import Arguments, Call
from .._trees import Indexed, describe, flatten, refuse_non_bools, refuse_uncallable
from ..errors import ArgumentError, NotDifferentiableError
from .examine import (
    Options,
    examine,
    refuse_tracers as refuse_tracers,
    with_new_arguments as with_new_arguments,
)
from .finding import SEVERITIES as SEVERITIES, Finding as Finding, located as located, plain as plain
from .glance import Glance as Glance, glance
from .intended import Meant as Meant
from .own import cotangents_of as cotangents_of, weights_of as weights_of
from .printed import (
    Entry as Entry,
    counted as counted,
    marked as marked,
    said_of as said_of,
    totals_of as totals_of,
)
from .program import differentiable as differentiable
from .progress import Progress as Progress
from .references import with_own_references
from .report import GradientReport as GradientReport, LeafRow as LeafRow, Report as Report
from .rows import is_rounding_products, paths_of as paths_of
from .values import CONCRETIZATION as CONCRETIZATION
from .verdict import ERROR as ERROR, INCONCLUSIVE as INCONCLUSIVE, OK as OK, STOPPED as STOPPED, worst as worst

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
            of selectors. `partgrad.intermediate("h")`, alone or in a dict of selectors, is a value inside the function.
        argnums: Which arguments, by position; the first one if neither this nor `argnames` is given.
        argnames: Which arguments, by name.
        has_aux: Whether `f` returns a pair of the value to differentiate and auxiliary data, which is ignored.
        forward: Whether the derivative is only used in forward mode (`jacfwd`, `jvp`), so that no gradient is needed.
        intended: Causes that are intentional: a function (the rule itself, or one that was running there), the
            qualified name of either (of a rule, as the report prints it), a line as `file.py:42`, or the path of a
            leaf. Findings of these causes become notes; an entry that matches no finding is a warning.
        exhaustive: Whether to compare every element of every leaf as well as sampled directions.
        search: Whether to look for bad points near the given one too: operands of `sqrt`, `/`, `arccos`, `norm` and the
            like are driven to where they have no derivative, one by one and all together, comparisons and competitions
            to ties, exponents to where they overflow, numbers to where they are rounded; and a little beyond. Numbers
            that a mask leaves out become large and infinite. What is wrong there although the value is finite is a
            finding like any other, and says which leaves were moved; a slope that is truly infinite where the value
            takes the path is a note. Silence is no proof. A number is the seconds that it may take; what is left out is
            said.
        bounds: For the search, a pair of lower and upper bounds: None (open), a number, or a tree like the gradient.
        seed: The seed for the directions and the weights.
        directions: How many directions are sampled for each leaf; each takes about ten evaluations.
        progress: None shows a bar on a terminal after two seconds if tqdm is installed, True at once, False never; a
            function is called with the number of steps done, the number known so far, and what was done.

    Returns:
        A function of the arguments of `f` that returns a `GradientReport`, which prints as a table with a line for each
        leaf and has `verdict`, `ok`, `findings`, `rows`, `cost` and `raise_if_failed()`.

    Raises:
        SelectionError: When called, if the selector does not fit the argument, or there is nothing to check.
        ArgumentError: If an option is not valid; or, when called, inside a transformation, or if `f` returns nothing
            that has a derivative, or no pair with `has_aux=True`.

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
    _refuse_options(has_aux, forward, intended, exhaustive, search, bounds, seed, directions)
    if any(isinstance(leaf, float | complex | np.ndarray | jax.Array) for leaf in jax.tree.leaves(wrt)):
        raise ArgumentError(
            f"`check` got {describe(wrt)} as its selector, which looks like a value to differentiate.",
            "Expected a function, and then a selector or nothing.",
            fix="write partgrad.check(f)(x): the check is a function of the arguments of f.",
        )
    name, is_searched = getattr(f, "__name__", type(f).__name__), _is_searched(search)
    arguments = Arguments(with_new_arguments(f), wrt, argnums, argnames)
    shown = Progress(progress)
    meant = (intended,) if isinstance(intended, str) or callable(intended) else tuple(intended)
    options = Options(name, exhaustive, seed, directions, has_aux, forward, meant)

    # Not `__dict__`: a model with __call__ keeps its parameters there.
    @functools.wraps(f, updated=())
    def checked(*args: Any, **kwargs: Any) -> GradientReport:
        refuse_tracers(name, flatten((args, kwargs))[0])
        args, kwargs = with_own_references((args, kwargs))
        with shown, undisturbed():
            call = arguments.call_to_check(args, kwargs, of_values=True)
            if not call.selected:
                raise NotDifferentiableError(
                    f"`check` of `{name}` has nothing to check: no argument that is selected has a leaf.",
                    "Expected at least one floating or complex leaf.",
                    fix="name the arguments by argnums or argnames; without them it is the first.",
                )
            _refuse_unmovable(call)
            _refuse_twice(call)
            report = examine(call, options, shown)
            if not is_searched:
                return report
            # Not every check needs it.
            from .nearby import with_nearby

            again = lambda moved: examine(call.at(moved), options, shown)
            seconds = math.inf if isinstance(search, bool | np.bool_) else float(search)
            return with_nearby(report, call, has_aux, bounds, seed, seconds, again, shown.tick)

    return checked


def glances(
    function: Callable[[Operands], Callable[[Any], Any]],
    points: Sequence[tuple[Any, Operands]],
    *,
    forward: bool = False,
) -> list[Glance]:
    """The values of a function of some leaves and the sizes of its gradient at several points, by one compiled program.

    Args:
        function: From the operands of a program to a function of the leaves that are differentiated.
        points: These leaves, and the operands, at each point.
        forward: Whether the derivative is only used in forward mode.
    """
    with undisturbed():
        return glance(function, points, forward)


def _refuse_unmovable(call: Call) -> None:
    """Raise if finite differences cannot move a differentiated leaf, such as an object of a hijax class."""
    paths = [path for path, leaf in zip(call.paths, call.selected, strict=True) if not _is_movable(leaf)]
    if paths:
        first, *rest = paths
        others = " | ".join((f"partgrad.path({first!r})", *map(repr, rest)))
        raise NotDifferentiableError(
            f"`check` cannot check {listed(map(at, paths))}.",
            "Expected arrays of JAX's dtypes and Python numbers, which finite differences can move.",
            fix=f"leave it out: wrt=partgrad.exclude({others})."
            if first and len(paths) < len(call.paths)
            else "make an array in it the argument, and build it in the function.",
        )


def _refuse_twice(call: Call) -> None:
    """Raise if elements may be selected twice, which finite differences would move to two values at once."""
    plans = [(target, target.plan) for target in call.targets]
    found = [
        t.path(i)
        for t, plan in plans
        for i, own in zip(plan.indices, plan.elements, strict=True)
        if isinstance(own, Indexed)
    ]
    if found:
        raise ArgumentError(
            f"`check` cannot move elements of {at(found[0])}, of which some are selected twice, or are not there.",
            "Expected each element once.",
            fix="select them by jax.numpy.unique(rows).",
        )


def _is_movable(leaf: Any) -> bool:
    try:
        jax.typeof(leaf)
    except (TypeError, ValueError):
        return False
    return _is_number(leaf)


def _refuse_options(
    has_aux: Any, forward: Any, intended: Any, exhaustive: Any, search: Any, bounds: Any, seed: Any, directions: Any
) -> None:
    """Raise if an option has a value that it cannot have."""
    refuse_non_bools(has_aux=has_aux, forward=forward, exhaustive=exhaustive)
    is_whole = lambda value: isinstance(value, int | np.integer) and not isinstance(value, bool)
    is_meant = lambda value: isinstance(value, str) or callable(value)
    is_several = isinstance(intended, Iterable) and not isinstance(intended, Mapping)
    is_time = isinstance(search, bool | np.bool_) or (isinstance(search, int | float | np.number) and search >= 0)
    is_pair = isinstance(bounds, tuple) and len(bounds) == 2
    rules: tuple[tuple[str, Any, Any, str, str], ...] = (
        (
            "directions",
            directions,
            is_whole(directions) and directions > 0,
            "an int of at least 1",
            "omit it (it is 3)",
        ),
        ("seed", seed, is_whole(seed) and seed >= 0, "an int of at least 0", "omit it (it is 0)"),
        ("search", search, is_time, "a bool, or the seconds that it may take", "write search=True, or search=10.0"),
        (
            "intended",
            intended,
            is_meant(intended) or (is_several and all(map(is_meant, intended))),
            "functions, names, lines as `file.py:42` or paths of leaves: one, or a sequence of them",
            "write intended=('model.py:42',)",
        ),
        (
            "bounds",
            bounds,
            bounds is None or (is_pair and all(map(_is_number, jax.tree.leaves(bounds)))),
            "a pair of a lower and an upper bound: None, a number, or a tree like the gradient",
            "write bounds=(0.0, None) for what is not negative",
        ),
        ("bounds", bounds, bounds is None or _is_searched(search), "`search` beside it", "write search=True as well"),
    )
    for name, value, is_right, expected, fix in rules:
        if not is_right:
            found = f"{type(value).__name__} {value!r:.60}"
            raise ArgumentError(f"`{name}` is {found}.", f"Expected {expected}.", fix=f"{fix}.")


def _is_searched(search: Any) -> bool:
    """No seconds are a search, too: what is left out is said."""
    return bool(search) or not isinstance(search, bool | np.bool_)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex | np.ndarray | np.number | jax.Array)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
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
