"""Where a program names values, and what it does not show.

`jax.ad_checkpoint.checkpoint_name` leaves an equation with the name in the jaxpr. Such an equation is a *site*. The
sites of a jaxpr are always listed in one order: that of its equations, and of the equations in these.
"""

import fnmatch
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec, reshard

from .._double_where import is_double_where
from .._message import listed, near_misses
from .._programs import (
    ENTERED,
    branches_of,
    custom_rule_body,
    explicit_sharding,
    inner_jaxprs,
    is_custom_rule,
    line,
    name_of,
    opened,
    primal_jaxpr,
    scan_parts,
    shard_map_axes,
    varying_axes,
    while_parts,
    written,
)
from ..errors import NoMatchError, SelectionError

# Names that partgrad gives to values of its own begin with this.
_OWN = "partgrad."


class Site(NamedTuple):
    """A named value; where it is in a loop or in a `shard_map`, what these stack of it.

    Attributes:
        name: Its name.
        shape: Its shape, after an axis for each `scan` around it, and one for each mesh axis over which it differs.
        dtype: Its dtype.
        varying: The mesh axes over which it differs and that no `shard_map` in this jaxpr takes over.
        sharding: Its sharding, if that is part of its type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    varying: frozenset[Any] = frozenset()
    sharding: NamedSharding | None = None

    def full(self, number: float) -> Any:
        """An array like the value, of one number."""
        array = jnp.full(self.shape, number, self.dtype)
        if self.sharding is not None:
            array = reshard(array, self.sharding)
        return lax.pcast(array, tuple(sorted(self.varying)), to="varying") if self.varying else array


def is_pattern(name: str) -> bool:
    """Whether a name is a glob, which stands for all names that match."""
    return any(character in name for character in "*?[")


def is_site(equation: JaxprEqn, pattern: str) -> bool:
    """Whether an equation names a value, and the name matches."""
    if equation.primitive.name != "name":
        return False
    name = name_of(equation)
    return not name.startswith(_OWN) and fnmatch.fnmatchcase(name, pattern)


def _is_entered(equation: JaxprEqn) -> bool:
    return equation.primitive.name in ENTERED or is_double_where(equation)


def sites_in(jaxpr: Jaxpr, pattern: str) -> list[Site]:
    """The sites of a jaxpr whose names match, at any depth."""
    return list(itertools.chain.from_iterable(sites_of(equation, pattern) for equation in jaxpr.eqns))


def sites_of(equation: JaxprEqn, pattern: str) -> list[Site]:
    """The sites of an equation: itself, or those of the jaxprs in it."""
    name = equation.primitive.name
    if is_site(equation, pattern):
        aval = equation.outvars[0].aval
        return [Site(name_of(equation), tuple(aval.shape), aval.dtype, varying_axes(aval), explicit_sharding(aval))]
    if not _is_entered(equation):
        return []
    if name == "cond":
        return united(equation, pattern)[0]
    if name == "while":
        return sites_in(opened(while_parts(equation).body)[0], pattern)
    if name == "scan":
        parts = scan_parts(equation)
        inner = sites_in(opened(parts.body)[0], pattern)
        return [_stacked(site, parts.length) for site in inner]
    inner = sites_in(opened(primal_jaxpr(equation))[0], pattern)
    return [_joined(equation, site) for site in inner] if name == "shard_map" else inner


def _stacked(site: Site, length: int) -> Site:
    old = site.sharding
    new = None if old is None else NamedSharding(old.mesh, PartitionSpec(None, *old.spec))
    return site._replace(shape=(length, *site.shape), sharding=new)


def united(equation: JaxprEqn, pattern: str) -> tuple[list[Site], list[list[int]]]:
    """The sites of a conditional, and which of them each branch has.

    A branch's first value of a name is the first of the others too, and so on: one of them is computed.
    """
    together: dict[tuple[str, int], Site] = {}
    keys = []
    for branch in branches_of(equation):
        sites = sites_in(opened(branch)[0], pattern)
        names = [site.name for site in sites]
        keys.append([(name, names[:number].count(name)) for number, name in enumerate(names)])
        for key, site in zip(keys[-1], sites, strict=True):
            other = together.setdefault(key, site)
            if other[1:3] != site[1:3]:
                raise SelectionError(
                    f"The branches of a conditional name different values `{site.name}`, at {line((equation,))}.",
                    f"Expected one shape and dtype, got {_type(other)} and {_type(site)}.",
                    fix="give them different names.",
                )
            together[key] = site._replace(varying=other.varying | site.varying)
    numbers = {key: number for number, key in enumerate(together)}
    return list(together.values()), [[numbers[key] for key in own] for own in keys]


def split_axes(equation: JaxprEqn, site: Site) -> tuple[Any, ...]:
    """The mesh axes of a `shard_map` over which a value in it differs, in the order of the mesh."""
    mesh, taken = equation.params["mesh"], shard_map_axes(equation)
    # Without the check, no value says over which axes it differs.
    differs = site.varying if equation.params["check_vma"] else taken
    return tuple(axis for axis in mesh.axis_names if axis in taken and axis in differs)


def _joined(equation: JaxprEqn, site: Site) -> Site:
    axes = split_axes(equation, site)
    sizes = tuple(equation.params["mesh"].shape[axis] for axis in axes)
    return site._replace(shape=(*sizes, *site.shape), varying=site.varying - shard_map_axes(equation), sharding=None)


def spec_of(equation: JaxprEqn, site: Site) -> PartitionSpec:
    """How what a `shard_map` joins of a value is split among the devices."""
    return PartitionSpec(*split_axes(equation, site))


def refuse_unknown(jaxpr: Jaxpr, pattern: str, sites: list[Site]) -> None:
    """Raise if no value has the name."""
    if sites:
        return
    known = sorted({site.name for site in sites_in(jaxpr, "*")})
    hidden = [(name, where) for name, where in _hidden(jaxpr) if fnmatch.fnmatchcase(name, pattern)]
    if hidden:
        name, where = hidden[0]
        raise NoMatchError(
            f"The value `{name}` is named only inside {where}.",
            "What a custom derivative rule or another library's primitive computes inside is not part of the program "
            "that is differentiated.",
            fix="name a value outside of it: what is passed to it, or what it returns.",
        )
    near = near_misses(pattern, known)
    raise NoMatchError(
        f"The function names no value `{pattern}`.",
        f"Expected a name that jax.ad_checkpoint.checkpoint_name gives in it, got {listed(known) or 'no name at all'}.",
        fix=f"write {near[0]!r}."
        if near
        else "name the value where it is computed, x = jax.ad_checkpoint.checkpoint_name(x, 'x')"
        + (", or choose one of these names." if known else "."),
    )


def _hidden(jaxpr: Jaxpr) -> Iterator[tuple[str, str]]:
    """The names of values that are not sites, each with the equation that hides it."""
    for equation in jaxpr.eqns:
        for inner in inner_jaxprs(equation):
            if _is_entered(equation):
                yield from _hidden(inner)
            else:
                rule = written(custom_rule_body(equation)).name if is_custom_rule(equation) else name_of(equation)
                where = f"`{rule}`, called at {line((equation,))}"
                yield from ((name, where) for name in _names_in(inner))


def _names_in(jaxpr: Jaxpr) -> Iterator[str]:
    for equation in jaxpr.eqns:
        if is_site(equation, "*"):
            yield name_of(equation)
        for inner in inner_jaxprs(equation):
            yield from _names_in(inner)


def refuse_undifferentiable(sites: list[Site]) -> None:
    """Raise if a value has no derivative because of its dtype."""
    for site in sites:
        if not jnp.issubdtype(site.dtype, jnp.inexact):
            raise SelectionError(
                f"The value `{site.name}` has no derivative.",
                f"Expected a floating or complex dtype, got {_type(site)}.",
                fix="name the value before it is rounded or compared.",
            )


def _type(site: Site) -> str:
    return f"{site.dtype}{list(site.shape)}"


def by_name(pattern: str, sites: list[Site], values: list[Any]) -> Any:
    """Values of sites as users see them: one, a tuple of those of one name, or for a glob a dict of these."""
    found: dict[str, list[Any]] = {}
    for site, value in zip(sites, values, strict=True):
        found.setdefault(site.name, []).append(value)
    named = {name: own[0] if len(own) == 1 else tuple(own) for name, own in found.items()}
    return named if is_pattern(pattern) else named[pattern]
