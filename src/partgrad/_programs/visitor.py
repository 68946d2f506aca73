"""Run a program with something done at chosen equations, at any depth, with values going in and coming out.

What belongs to the chosen equations of a jaxpr, its *sites*, is a list in the order of the program. It travels beside
the operands: it is read in the steps of a scan like any other input, kept in the carry of a `while`, and split among
the devices of a `shard_map`. What comes back of the sites is a list again.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec, reshard

from ..errors import SelectionError
from .equations import (
    Operands,
    branches_of,
    jaxpr_and_consts,
    primal_jaxpr,
    scan_of,
    shard_map_axes,
    shard_map_specs,
    while_of,
)
from .interpreter import bind, reenter, shard_map_like, source_of, step_through
from .lines import line
from .primitives import (
    ENTERED,
)

# Takes a function and returns it in the guise that an equation gives it.
Guise = Callable[[Callable[..., Any]], Callable[..., Any]]


class Site(NamedTuple):
    """A chosen equation and what comes back of it; in a loop or a `shard_map`, what these stack of it.

    Attributes:
        name: Its name; in the branches of a conditional, the first site of a name in each of them is one site.
        shape: The shape of what comes back, after an axis for each `scan` around it, and one for each mesh axis over
            which it differs.
        dtype: Its dtype.
        varying: The mesh axes over which it differs and that no `shard_map` in this jaxpr takes over.
        sharding: Its sharding, if that is part of its type.
        note: What the visitor knows of the equation, the same however many loops are around it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    varying: frozenset[Any] = frozenset()
    sharding: NamedSharding | None = None
    note: Any = None

    @property
    def type(self) -> str:
        """Its dtype and shape, for a message."""
        return f"{self.dtype}{list(self.shape)}"

    def full(self, number: float) -> Any:
        """An array like what comes back, of one number."""
        # In both parts of a complex number.
        is_complex = jnp.issubdtype(self.dtype, jnp.complexfloating)
        array = jnp.full(self.shape, complex(number, number) if is_complex else number, self.dtype)
        if self.sharding is not None:
            array = reshard(array, self.sharding)
        return lax.pcast(array, tuple(sorted(self.varying)), to="varying") if self.varying else array


class Visitor:
    """What is done at which equations; subclasses say it."""

    def site_of(self, equation: JaxprEqn) -> Site | None:
        """The site that an equation itself is; None if it is none."""
        raise NotImplementedError

    def at(self, equation: JaxprEqn, site: Site, operands: Operands, own: Any) -> tuple[Operands, Any]:
        """The results of a site's equation, given what belongs to it, and what comes back."""
        raise NotImplementedError

    def guise(self, equation: JaxprEqn) -> Guise | None:
        """How the body of an equation is entered that is no call, loop or branch; None if it is left alone."""
        return None

    def sites_in(self, jaxpr: Jaxpr) -> list[Site]:
        """The sites of a jaxpr, at any depth."""
        return list(itertools.chain.from_iterable(map(self.sites_of, jaxpr.eqns)))

    def sites_of(self, equation: JaxprEqn) -> list[Site]:
        """The sites of an equation: itself, or those of the jaxprs in it."""
        own, name = self.site_of(equation), equation.primitive.name
        if own is not None:
            return [own]
        if not self.is_entered(equation):
            return []
        if name == "cond":
            return self._united(equation)[0]
        if name == "while":
            return self.sites_in(jaxpr_and_consts(while_of(equation).body)[0])
        if name == "scan":
            loop = scan_of(equation)
            return [_stacked(site, loop.length) for site in self.sites_in(jaxpr_and_consts(loop.body)[0])]
        inner = self.sites_in(jaxpr_and_consts(primal_jaxpr(equation))[0])
        return [_joined(equation, site) for site in inner] if name == "shard_map" else inner

    def is_entered(self, equation: JaxprEqn) -> bool:
        """Whether the sites inside an equation are seen."""
        return equation.primitive.name in ENTERED or self.guise(equation) is not None

    def run(self, jaxpr: Jaxpr, consts: Operands, operands: Operands, own: Operands) -> tuple[Operands, Operands]:
        """The outputs of a jaxpr, and the what comes back of its sites; `own` is what belongs to these."""
        rest, found = list(own), []

        def step(equation: JaxprEqn, given: Operands) -> Operands:
            sites = self.sites_of(equation)
            if not sites:
                return bind(equation, given)
            mine = [rest.pop(0) for _ in sites]
            results, values = self._at(equation, given, sites, mine)
            found.extend(values)
            return results

        return step_through(jaxpr, consts, operands, step), found

    def _at(self, equation: JaxprEqn, given: Operands, sites: list[Site], own: Operands) -> tuple[Operands, Operands]:
        if self.site_of(equation) is not None:
            results, back = self.at(equation, sites[0], given, own[0])
            return results, [back]
        name = equation.primitive.name
        if name == "shard_map":
            results = self._shard_map(equation, given, sites, own)
        else:
            run, given = self._joined, [*given, *own]
            if name == "cond":
                run = self._branch(equation, sites)
            elif name == "while":
                # In the carry stands what belongs to a site, if anything does, and what comes back in the last step.
                kept = [value for value in own if value is not None]
                run = self._turn(equation, len(kept))
                given = [*given[: len(equation.invars)], *kept, *(site.full(0) for site in sites)]
            results = self._entered(equation, given, run)
        count = len(equation.outvars)
        return results[:count], results[-len(sites) :]

    def _entered(self, equation: JaxprEqn, given: Operands, run: Callable[..., Operands]) -> Operands:
        guise = self.guise(equation)
        if guise is not None:
            return list(guise(lambda *given: run(*jaxpr_and_consts(primal_jaxpr(equation)), list(given)))(*given))
        return reenter(equation, given, run) or []

    def _joined(self, jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
        """The outputs and then the values, from the operands and then what belongs to the sites."""
        count = len(jaxpr.invars)
        outputs, found = self.run(jaxpr, consts, operands[:count], operands[count:])
        return [*outputs, *found]

    def _turn(self, equation: JaxprEqn, kept: int) -> Callable[..., Operands]:
        body, _ = jaxpr_and_consts(while_of(equation).body)

        def turn(jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
            count = len(jaxpr.invars)
            inputs, own = operands[:count], operands[count : count + kept]
            if jaxpr is not body:
                # What is named in the condition is changed as well; nothing belongs to it, and nothing comes back.
                nothing = [None] * len(self.sites_in(jaxpr))
                return step_through(jaxpr, consts, inputs, bind) if own else self.run(jaxpr, consts, inputs, nothing)[0]
            outputs, found = self.run(jaxpr, consts, inputs, own or [None] * len(self.sites_in(jaxpr)))
            return [*outputs, *own, *found]

        return turn

    def _branch(self, equation: JaxprEqn, sites: list[Site]) -> Callable[..., Operands]:
        _, numbers = self._united(equation)
        # By identity: a jaxpr that occurs twice has the same sites.
        of = {id(jaxpr_and_consts(branch)[0]): own for branch, own in zip(branches_of(equation), numbers, strict=True)}

        def branch(jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
            count, own = len(jaxpr.invars), of[id(jaxpr)]
            given = operands[count:]
            outputs, found = self.run(jaxpr, consts, operands[:count], [given[number] for number in own])
            values = dict(zip(own, found, strict=True))
            return [*outputs, *(values[n] if n in values else site.full(0) for n, site in enumerate(sites))]

        return branch

    def _united(self, equation: JaxprEqn) -> tuple[list[Site], list[list[int]]]:
        """The sites of a conditional, and which of them each branch has.

        A branch's first value of a name is the first of the others too, and so on: one of them is computed.
        """
        together: dict[tuple[str, int], Site] = {}
        keys = []
        for branch in branches_of(equation):
            sites = self.sites_in(jaxpr_and_consts(branch)[0])
            names = [site.name for site in sites]
            keys.append([(name, names[:number].count(name)) for number, name in enumerate(names)])
            for key, site in zip(keys[-1], sites, strict=True):
                other = together.setdefault(key, site)
                if other[1:3] != site[1:3]:
                    raise SelectionError(
                        f"The branches of a conditional name different values `{site.name}`, at {line((equation,))}.",
                        f"Expected one shape and dtype, got {other.type} and {site.type}.",
                        fix="give them different names.",
                    )
                together[key] = site._replace(varying=other.varying | site.varying)
        numbers = {key: number for number, key in enumerate(together)}
        return list(together.values()), [[numbers[key] for key in own] for own in keys]

    def _shard_map(self, equation: JaxprEqn, given: Operands, sites: list[Site], own: Operands) -> Operands:
        inner, consts = jaxpr_and_consts(primal_jaxpr(equation))
        inside = self.sites_in(inner)
        count = len(given)
        # Every device has one piece along each axis over which a value differs.
        axes = [tuple(range(len(_split_axes(equation, site)))) for site in inside]

        def body(*operands: Any) -> tuple[Any, ...]:
            mine = [
                piece if piece is None else piece.reshape(site.shape)
                for piece, site in zip(operands[count:], inside, strict=True)
            ]
            outputs, found = self.run(inner, consts, list(operands[:count]), mine)
            pieces = [jax.numpy.expand_dims(value, own_axes) for value, own_axes in zip(found, axes, strict=True)]
            return (*outputs, *pieces)

        in_specs, out_specs = shard_map_specs(equation)
        specs = tuple(_spec_of(equation, site) for site in inside)
        with source_of(equation):
            return list(shard_map_like(equation, body, (*in_specs, *specs), (*out_specs, *specs))(*given, *own))


def _stacked(site: Site, length: int) -> Site:
    old = site.sharding
    new = None if old is None else NamedSharding(old.mesh, PartitionSpec(None, *old.spec))
    return site._replace(shape=(length, *site.shape), sharding=new)


def _split_axes(equation: JaxprEqn, site: Site) -> tuple[Any, ...]:
    """The mesh axes of a `shard_map` over which a value in it differs, in the order of the mesh."""
    mesh, taken = equation.params["mesh"], shard_map_axes(equation)
    # Without the check, no value says over which axes it differs.
    differs = site.varying if equation.params["check_vma"] else taken
    return tuple(axis for axis in mesh.axis_names if axis in taken and axis in differs)


def _joined(equation: JaxprEqn, site: Site) -> Site:
    axes = _split_axes(equation, site)
    sizes = tuple(equation.params["mesh"].shape[axis] for axis in axes)
    return site._replace(shape=(*sizes, *site.shape), varying=site.varying - shard_map_axes(equation), sharding=None)


def _spec_of(equation: JaxprEqn, site: Site) -> PartitionSpec:
    """How what a `shard_map` joins of a value is split among the devices."""
    return PartitionSpec(*_split_axes(equation, site))
