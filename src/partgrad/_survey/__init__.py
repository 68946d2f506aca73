"""survey: which parameters can be learned, over all the states that a program meets, and where not."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import numpy as np

from .._check import (
    GradientReport,
    Meant,
    Progress,
    check,
    counted,
    refuse_tracers,
    undisturbed,
    with_new_arguments,
)
from .._transforms import Arguments
from .._trees import flatten, refuse_non_bools, refuse_uncallable, shape_of, written
from ..errors import ArgumentError
from .gradients import gradients_at
from .patterns import checked_of, findings_of, grouped, patterns_of, rows_of
from .report import Pattern as Pattern, SurveyReport as SurveyReport, SurveyRow as SurveyRow
from .states import States as States

P = ParamSpec("P")


def survey(
    f: Callable[P, Any],
    wrt: Any = None,
    *,
    in_axes: Any = 0,
    argnums: int | Sequence[int] | None = None,
    argnames: str | Sequence[str] | None = None,
    has_aux: bool = False,
    double_where: bool = False,
    chunk_size: int | None = None,
    intended: Meant | Sequence[Meant] = (),
    search: bool | float = False,
    bounds: Any = None,
    seed: int = 0,
    progress: bool | Callable[[int, int, str], object] | None = None,
) -> Callable[P, SurveyReport]:
    """Create a function that takes the gradient of `f` at many states, and reports where it is dead, and why.

    A gradient is checked at one point, and a parameter is learned over thousands: where a valve is closed, a species
    extinct or a sensor saturated, its gradient is zero or NaN. A survey computes the gradients at all states with one
    compiled program, some states at a time, and counts. The states at which the same leaves are zero or not finite
    together have a pattern; of each pattern one state is checked by `partgrad.check`, which names cause and line. If
    differences, coarse ones at all states, are off the gradient somewhere else, the worst such state is checked too.

    Args:
        f: A function from any pytrees to an array or a tree of arrays. If there are several outputs, a random weighted
            sum of them is differentiated, the same as in `check`.
        wrt: A selector. None selects every floating or complex leaf that no mark holds. For several arguments a tuple
            of selectors.
        in_axes: Which axes are those of the states, as for `jax.vmap`: a number or None for each argument, or trees of
            these. Arguments by keyword have them first.
        argnums: Which arguments are differentiated, by position; the first one if neither this nor `argnames` is given.
        argnames: Which arguments, by name.
        has_aux: Whether `f` returns a pair of the value to differentiate and auxiliary data, which is ignored.
        double_where: Whether `partgrad.double_where(f)` is differentiated in place of `f`.
        chunk_size: How many states are computed at a time; None decides by the size of the program.
        intended: As for `check`: causes that are intentional.
        search: As for `check`, at each state that is checked.
        bounds: As for `check`.
        seed: The seed for directions and weights.
        progress: None shows a bar on a terminal after two seconds if tqdm is installed, True at once, False never; a
            function is called with the number of steps done, the number known so far, and what was done.

    Returns:
        A function of the arguments of `f`, with the states along their axes, that returns a `SurveyReport`. It prints
        as a table, and has `verdict`, `ok`, `dead`, `rows`, `patterns`, `findings`, `sizes`, `to_dict()`, `plot()` and
        `raise_if_failed()`.

    Raises:
        SelectionError: When called, if the selector does not fit the argument, or there is nothing to differentiate.
        ArgumentError: If an option is not valid; or, when called, if the axes of the states do not agree, or inside a
            transformation.

    Example:
        >>> import jax.numpy as jnp, partgrad as pg
        >>> def loss(params, state):
        ...     flow = jnp.maximum(state - params["threshold"], 0.0)
        ...     return jnp.sqrt(flow) * params["gain"]
        >>> report = pg.survey(loss, in_axes=(None, 0))({"threshold": 1.0, "gain": 2.0}, jnp.linspace(0.0, 4.0, 100))
        >>> report.verdict, report.dead
        ('error', ())
        >>> [(row.path, row.zero, row.not_finite) for row in report.rows]
        [("['gain']", 0.25, 0.0), ("['threshold']", 0.0, 0.25)]
        >>> [(finding.kind, finding.operation) for finding in report.findings if finding.severity == "error"]
        [('nan', 'sqrt')]

    See Also:
        `check`, for one point; `testing.assert_gradients`, which fails if a leaf that should be learned is dead.
    """
    refuse_uncallable("survey", f)
    refuse_non_bools(has_aux=has_aux, double_where=double_where)
    if chunk_size is not None and not (type(chunk_size) is int and chunk_size > 0):
        raise ArgumentError(
            f"`chunk_size` is {written(chunk_size):.60}.",
            "Expected how many states are computed at a time, an int of at least 1, or None.",
            fix="omit it, or write chunk_size=64.",
        )
    name = getattr(f, "__name__", type(f).__name__)
    function = _along_taken_paths(f) if double_where else f
    options = {
        "argnums": argnums,
        "argnames": argnames,
        "has_aux": has_aux,
        "intended": intended,
        "search": search,
        "bounds": bounds,
        "seed": seed,
    }
    # It refuses what it cannot take, before anything runs.
    checked = check(function, wrt, progress=False, **options)
    arguments = Arguments(with_new_arguments(function), wrt, argnums, argnames)
    shown = Progress(progress, "survey")

    @functools.wraps(f, updated=())
    def surveyed(*args: Any, **kwargs: Any) -> SurveyReport:
        refuse_tracers(name, flatten((args, kwargs))[0], "survey")
        states = States(args, kwargs, in_axes)
        with shown, undisturbed():
            gradients = gradients_at(states, arguments, has_aux, seed, chunk_size, name, shown)
            groups = grouped(gradients.sizes, gradients.doubts)
            chosen = checked_of(groups)
            at = [state for group in chosen for state in group.checked]
            shown.expect(len(at))
            reports: dict[int, GradientReport] = {}
            for state in at:
                own, named = states.at(state)
                reports[state] = checked(*own, **named)
                shown.tick("checks")
        call = arguments.call_to_check(*states.at(0))
        places = [
            (shape_of(target.leaves[i]), elements)
            for target in call.targets
            for i, elements in zip(target.plan.indices, target.plan.elements, strict=True)
        ]
        (first, *_) = reports.values()
        leaves = [row for row in first.rows if row.verdict is not None]
        paths = tuple(row.path for row in leaves)
        notes = [*first.notes]
        if gradients.values:
            notes.append(f"a value that is not finite at {counted(gradients.values, 'state')}")
        if len(chosen) < len(groups):
            notes.append(f"{len(groups) - len(chosen):,} patterns not checked: the {len(chosen)} most frequent were")
        return SurveyReport(
            name,
            states.count,
            rows_of(gradients, leaves, places, reports),
            patterns_of(groups, paths, reports),
            findings_of(groups, reports),
            np.asarray(gradients.sizes),
            paths,
            {"at a time": gradients.chunk, "checks": len(reports)},
            tuple(notes),
        )

    return surveyed


def _along_taken_paths(f: Callable[..., Any]) -> Callable[..., Any]:
    # Not every program needs it.
    from .._double_where import double_where

    return double_where(f)
