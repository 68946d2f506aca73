"""Where a program names values, and what it does not show.

`jax.ad_checkpoint.checkpoint_name` leaves an equation with the name in the jaxpr.
"""

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from .._double_where import double_where, is_double_where
from .._message import listed, near_misses
from .._programs import (
    Operands,
    Site,
    Visitor,
    as_array,
    bind,
    custom_rule_body,
    explicit_sharding,
    inner_jaxprs,
    is_custom_rule,
    jaxpr_and_consts,
    line,
    name_of,
    varying_axes,
    while_of,
    written,
)
from ..errors import NoMatchError, SelectionError

# Names that partgrad gives to values of its own begin with this.
_OWN = "partgrad."
# From the name of a value, the value and what belongs to it to what takes its place.
Change = Callable[[str, Any, Any], Any]


class Wanted(NamedTuple):
    """The names of which values are meant: one name, or all that match a glob.

    Attributes:
        text: The name or the glob.
        is_glob: Which of the two.
    """

    text: str
    is_glob: bool

    def matches(self, name: str) -> bool:
        """Whether a name is one of them."""
        return fnmatch.fnmatchcase(name, self.text) if self.is_glob else name == self.text


class AnyOf(NamedTuple):
    """The values that one of several names or globs means."""

    several: tuple[Wanted, ...]

    def matches(self, name: str) -> bool:
        """Whether a name is one of them."""
        return any(wanted.matches(name) for wanted in self.several)


ALL = Wanted("*", True)


def wanted_in(jaxpr: Jaxpr, text: str) -> Wanted:
    """What is meant in a program: a name that it has, `layers[0].h` too, or else a glob."""
    is_name = any(site.name == text for site in sites_in(jaxpr, ALL))
    return Wanted(text, not is_name and any(character in text for character in "*?["))


def name_given(equation: JaxprEqn) -> str:
    """The name that an equation gives to a value; empty if it gives none."""
    name = name_of(equation) if equation.primitive.name == "name" else ""
    return "" if name.startswith(_OWN) else name


def _names(equation: JaxprEqn, wanted: Wanted | AnyOf) -> bool:
    """Whether an equation names a value, and the name is meant."""
    name = name_given(equation)
    return bool(name) and wanted.matches(name)


class Named(Visitor):
    """Changes the values whose names match, and brings them back.

    Args:
        wanted: Their names.
        change: What to do.
    """

    def __init__(self, wanted: Wanted | AnyOf, change: Change = lambda name, value, own: value):
        self._wanted, self._change = wanted, change

    def site_of(self, equation: JaxprEqn) -> Site | None:
        """A named value."""
        if not _names(equation, self._wanted):
            return None
        aval = equation.outvars[0].aval
        return Site(name_of(equation), tuple(aval.shape), aval.dtype, varying_axes(aval), explicit_sharding(aval))

    def at(self, equation: JaxprEqn, site: Site, operands: Operands, own: Any) -> tuple[Operands, Any]:
        """The changed value."""
        value = as_array(operands[0], equation.invars[0].aval)
        # The name stays with the value that is used, as the policies of checkpoints go by it.
        results = bind(equation, [self._change(site.name, value, own)])
        return results, results[0]

    def guise(self, equation: JaxprEqn) -> Any:
        """A function under `double_where` stays under it."""
        return double_where if is_double_where(equation) else None


def sites_in(jaxpr: Jaxpr, wanted: Wanted | AnyOf) -> list[Site]:
    """The values of a jaxpr whose names match, at any depth."""
    return Named(wanted).sites_in(jaxpr)


def refuse_unknown(jaxpr: Jaxpr, wanted: Wanted, sites: list[Site]) -> None:
    """Raise if no value has the name."""
    if sites:
        return
    names = sorted({site.name for site in sites_in(jaxpr, ALL)})
    hidden = [(name, where) for name, where in _hidden(jaxpr) if wanted.matches(name)]
    if hidden:
        name, where = hidden[0]
        raise NoMatchError(
            f"The value `{name}` is named only inside {where}.",
            "What a custom derivative rule, the condition of a loop or another library's primitive computes inside is "
            "not part of the program that is differentiated.",
            fix="name a value outside of it: what is passed to it, or what it returns.",
        )
    near = near_misses(wanted.text, names)
    raise NoMatchError(
        f"The function names no value `{wanted.text}`.",
        f"Expected a name that jax.ad_checkpoint.checkpoint_name gives in it, got {listed(names) or 'no name at all'}.",
        fix=f"write {near[0]!r}."
        if near
        else "name the value where it is computed, x = jax.ad_checkpoint.checkpoint_name(x, 'x')"
        + (", or choose one of these names." if names else "."),
    )


def _hidden(jaxpr: Jaxpr) -> Iterator[tuple[str, str]]:
    """The names of values that are not sites, each with the equation that hides it."""
    for equation in jaxpr.eqns:
        test = jaxpr_and_consts(while_of(equation).test)[0] if equation.primitive.name == "while" else None
        for inner in inner_jaxprs(equation):
            if inner is test:
                yield from ((name, f"the condition of a loop at {line((equation,))}") for name in _names_in(inner))
            elif Named(ALL).is_entered(equation):
                yield from _hidden(inner)
            else:
                rule = written(custom_rule_body(equation)).name if is_custom_rule(equation) else name_of(equation)
                where = f"`{rule}`, called at {line((equation,))}"
                yield from ((name, where) for name in _names_in(inner))


def _names_in(jaxpr: Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        if _names(equation, ALL):
            yield name_of(equation)
        for inner in inner_jaxprs(equation):
            yield from _names_in(inner)


def refuse_overlap(entries: Mapping[str, list[Site]]) -> None:
    """Raise if two entries of `wrt`, each as it is written, mean the same value."""
    owners: dict[str, str] = {}
    for text, sites in entries.items():
        for name in {site.name for site in sites}:
            if name in owners:
                raise SelectionError(
                    f"Two entries of `wrt` select the value `{name}`: {{{owners[name]}, {text}}}.",
                    "Expected every value in one entry: its gradient has one place to go.",
                    fix="write globs that have no name in common.",
                )
            owners[name] = text


def refuse_undifferentiable(sites: list[Site]) -> None:
    """Raise if a value has no derivative because of its dtype."""
    for site in sites:
        if not jnp.issubdtype(site.dtype, jnp.inexact):
            raise SelectionError(
                f"The value `{site.name}` has no derivative.",
                f"Expected a floating or complex dtype, got {site.type}.",
                fix="name the value before it is rounded or compared.",
            )


def by_name(wanted: Wanted, sites: list[Site], values: list[Any]) -> Any:
    """Values of sites as users see them: one, a tuple of those of one name, or for a glob a dict of these."""
    found: dict[str, list[Any]] = {}
    for site, value in zip(sites, values, strict=True):
        found.setdefault(site.name, []).append(value)
    named = {name: own[0] if len(own) == 1 else tuple(own) for name, own in found.items()}
    return named if wanted.is_glob else named[wanted.text]
