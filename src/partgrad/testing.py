"""Gradients in a test suite."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._check import GradientReport, check, paths_of
from ._message import listed
from ._survey import States, SurveyReport, survey
from ._transforms import Arguments, refuse_options
from ._trees import parameters_of
from .errors import ArgumentError, CheckError

__all__ = ["assert_gradients"]


def assert_gradients(
    f: Callable[..., Any],
    *args: Any,
    wrt: Any = None,
    argnums: int | Sequence[int] | None = None,
    argnames: str | Sequence[str] | None = None,
    has_aux: bool = False,
    forward: bool = False,
    intended: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] = (),
    live: Any = None,
    in_axes: Any = None,
    search: bool | float = False,
    bounds: Any = None,
    exhaustive: bool = False,
    seed: int = 0,
    directions: int = 3,
    allow_inconclusive: bool = False,
    **kwargs: Any,
) -> None:
    """Check the gradient of a function at some arguments, and fail unless it is `ok` for every checked leaf.

    Warnings do not fail; that a leaf has no gradient fails if it is named `live`. The options are those of
    `partgrad.check`, which returns the whole report. With `in_axes`, the arguments are those of many states, and
    `partgrad.survey` takes the gradient at all of them.

    Args:
        f: The function.
        *args: Its arguments.
        wrt: A selector. None selects every floating or complex leaf that no mark holds.
        argnums: Which arguments, by position; the first one if neither this nor `argnames` is given.
        argnames: Which arguments, by name.
        has_aux: Whether the function returns a pair of the value to differentiate and auxiliary data.
        forward: Whether the derivative is only used in forward mode.
        intended: What is intentional: functions, qualified names of rules, lines as `file.py:42`, leaves.
        live: A selector of leaves that have to be learned, of the same arguments as `wrt`: it fails if the gradient of
            one is exactly zero, in all of its entries, or not finite; with `in_axes`, at all states. None is none.
        in_axes: The axes of the states, as for `jax.vmap`; None if there is one state.
        search: As for `partgrad.check`.
        bounds: As for `partgrad.check`.
        exhaustive: Whether to compare every entry of the gradient instead of sampled directions.
        seed: The seed for the directions.
        directions: How many directions.
        allow_inconclusive: Whether a leaf may be inconclusive, as at a jump; one that is stopped still fails.
        **kwargs: Its keyword arguments.

    Raises:
        ArgumentError: If the function has a parameter with the name of an option, or an option is not valid.
        CheckError: If a leaf is in error, stopped or inconclusive, or one named `live` is dead. It is an
            `AssertionError`, says the worst in its first line, and shows the table of the report.

    Example:
        >>> import jax, jax.numpy as jnp, partgrad as pg
        >>> def test_distance_at_the_origin():
        ...     pg.testing.assert_gradients(jnp.linalg.norm, jnp.zeros(3))
        >>> try:
        ...     test_distance_at_the_origin()
        ... except AssertionError as error:
        ...     print(str(error).splitlines()[1])
        The gradient of `norm` did not pass its check.
        >>> pg.testing.assert_gradients(pg.safe.norm, jnp.zeros(3))
        >>> def flow(params, level):
        ...     return jnp.where(level > params["crest"], params["width"] * (level - 1.0), 0.0)
        >>> levels = jnp.linspace(0.0, 2.0, 50)
        >>> try:
        ...     pg.testing.assert_gradients(flow, {"crest": 1.0, "width": 2.0}, levels, live="**", in_axes=(None, 0))
        ... except AssertionError as error:
        ...     print(str(error).splitlines()[1])
        `['crest']` is named live, and its gradient is exactly zero at all of 50 states.

    See Also:
        `partgrad.check` and `partgrad.survey`, which return reports.
    """
    __tracebackhide__ = True
    options: dict[str, Any] = {
        "wrt": wrt,
        "argnums": argnums,
        "argnames": argnames,
        "has_aux": has_aux,
        "intended": intended,
        "search": search,
        "bounds": bounds,
        "seed": seed,
    }
    of_check: dict[str, Any] = {"forward": forward, "exhaustive": exhaustive, "directions": directions}
    _refuse_names(f, (*options, *of_check, "live", "in_axes", "allow_inconclusive"))
    refuse_options({"allow_inconclusive": allow_inconclusive})
    report: GradientReport | SurveyReport
    if in_axes is None:
        report, point = check(f, **options, **of_check, progress=False)(*args, **kwargs), (args, kwargs)
    else:
        _refuse_options_of_check(of_check)
        report = survey(f, **options, in_axes=in_axes, progress=False)(*args, **kwargs)
        point = States(args, kwargs, in_axes).at(0)
    if live is not None:
        _refuse_dead(report, _named(f, live, argnums, argnames, point))
    report.raise_if_failed(allow_inconclusive=allow_inconclusive)


def _refuse_names(f: Callable[..., Any], names: Sequence[str]) -> None:
    """Raise if a parameter of the function has the name of an option."""
    parameters = parameters_of(f) or {}
    for name in names:
        if name in parameters:
            raise ArgumentError(
                f"`{name}` is an option of `assert_gradients`, and a parameter of the function as well.",
                "Expected names that say which of the two is meant.",
                fix=f"give the function its own beforehand, `functools.partial(f, {name}=...)`, in a lambda.",
            )


def _refuse_options_of_check(given: dict[str, Any]) -> None:
    """Raise if an option is given that a survey does not have."""
    for name, default in (("forward", False), ("exhaustive", False), ("directions", 3)):
        if given[name] != default:
            raise ArgumentError(
                f"`{name}` is {given[name]!r:.40} beside `in_axes`.",
                "Expected its default: of the states of a survey, a few are checked, with the default options.",
                fix=f"omit `{name}`, or check a state by itself, without `in_axes`.",
            )


def _named(f: Callable[..., Any], live: Any, argnums: Any, argnames: Any, point: tuple[Any, Any]) -> list[str]:
    """The paths of the leaves that are named live, as the reports write them."""
    args, kwargs = point
    call = Arguments(f, live, argnums, argnames).call_to_check(args, kwargs, of_values=True)
    for target in call.targets:
        target.refuse_elements("live")
    return paths_of(call)


def _refuse_dead(report: GradientReport | SurveyReport, live: list[str]) -> None:
    """Raise if a leaf that is named live has no gradient."""
    __tracebackhide__ = True
    why = _why_dead(report)
    dead = [path for path in live if why.get(path)]
    if not dead:
        return
    told = [finding for path in dead for finding in report.findings if path in finding.leaves]
    where = f"{told[0].kind} at {told[0].where}" if told and told[0].where else told[0].kind if told else "dead"
    said = [f"`{path or 'the tree itself'}` is named live, and {why[path]}." for path in dead]
    raise CheckError(
        "\n".join(
            [f"{where} in {listed(path or 'the tree itself' for path in dead)}", *said[:_SAID], "", str(report), ""]
        ),
        "Expected a gradient that is finite and not zero, of each leaf that is named live.",
        fix="follow the finding about it, or leave out of `live` what is not to be learned.",
    )


# How many dead leaves are said to be so, one a line.
_SAID = 5


def _why_dead(report: GradientReport | SurveyReport) -> dict[str, str]:
    """For each leaf why it has no gradient; empty if it has one."""
    said: dict[str, str] = {}
    if isinstance(report, SurveyReport):
        for path, sizes in zip(report.paths, report.sizes, strict=True):
            is_zero, is_bad = sizes == 0, ~np.isfinite(sizes)
            what = "exactly zero" if is_zero.all() else "not finite" if is_bad.all() else "exactly zero or not finite"
            is_dead = bool((is_zero | is_bad).all())
            said[path] = f"its gradient is {what} at all of {report.states:,} states" if is_dead else ""
        return said
    for row in report.rows:
        if row.verdict is None:
            said[row.path] = f"it is not differentiated: {row.status}"
        elif row.gradient is not None:
            is_zero, is_bad = row.gradient == 0, not np.isfinite(row.gradient)
            said[row.path] = (
                "its gradient is exactly zero" if is_zero else "its gradient is not finite" if is_bad else ""
            )
    return said


def __dir__() -> list[str]:
    return __all__
