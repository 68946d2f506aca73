"""Run a program with something done to each of its named values, at any depth.

What belongs to the sites of a jaxpr is a list, in their order, which travels beside the operands: it is read in the
steps of a scan like any other input, kept in the carry of a `while`, and split among the devices of a `shard_map`. What
comes back of the sites is a list again.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from .._double_where import double_where, is_double_where
from .._programs import (
    Operands,
    as_array,
    bind,
    branches_of,
    opened,
    primal_jaxpr,
    reenter,
    shard_map_like,
    shard_map_specs,
    source_of,
    step_through,
    while_parts,
)
from .sites import Site, is_site, sites_in, sites_of, spec_of, split_axes, united

# From the name of a site, its value and what belongs to it to the value that takes its place.
Change = Callable[[str, Any, Any], Any]


class Visit:
    """Something to be done to every site whose name matches.

    Args:
        pattern: A name, or a glob.
        change: What to do.
    """

    def __init__(self, pattern: str, change: Change):
        self._pattern, self._change = pattern, change

    def run(self, jaxpr: Jaxpr, consts: Operands, operands: Operands, own: Operands) -> tuple[Operands, Operands]:
        """The outputs of a jaxpr, and the values of its sites; `own` is what belongs to these."""
        rest, found = list(own), []

        def step(equation: JaxprEqn, given: Operands) -> Operands:
            sites = sites_of(equation, self._pattern)
            if not sites:
                return bind(equation, given)
            mine = [rest.pop(0) for _ in sites]
            results, values = self._at(equation, given, sites, mine)
            found.extend(values)
            return results

        return step_through(jaxpr, consts, operands, step), found

    def _at(self, equation: JaxprEqn, given: Operands, sites: list[Site], own: Operands) -> tuple[Operands, Operands]:
        if is_site(equation, self._pattern):
            (site,), (mine,) = sites, own
            # The name stays with the value that is used, as the policies of checkpoints go by it.
            value = as_array(given[0], equation.invars[0].aval)
            results = bind(equation, [self._change(site.name, value, mine)])
            return results, results
        name = equation.primitive.name
        if name == "shard_map":
            results = self._shard_map(equation, given, sites, own)
        else:
            run, given = self._joined, [*given, *own]
            if name == "cond":
                run = self._branch(equation, sites)
            elif name == "while":
                # In the carry stands what belongs to a site, and its value in the last step.
                run, given = self._turn(equation, len(sites)), [*given, *(site.full(0) for site in sites)]
            results = self._entered(equation, given, run)
        count = len(equation.outvars)
        return results[:count], results[-len(sites) :]

    def _entered(self, equation: JaxprEqn, given: Operands, run: Callable[..., Operands]) -> Operands:
        if is_double_where(equation):
            return list(double_where(lambda *given: run(*opened(primal_jaxpr(equation)), list(given)))(*given))
        return reenter(equation, given, run) or []

    def _joined(self, jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
        """The outputs and then the values, from the operands and then what belongs to the sites."""
        count = len(jaxpr.invars)
        outputs, found = self.run(jaxpr, consts, operands[:count], operands[count:])
        return [*outputs, *found]

    def _turn(self, equation: JaxprEqn, count: int) -> Callable[..., Operands]:
        body, _ = opened(while_parts(equation).body)

        def turn(jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
            inputs, own = operands[: len(jaxpr.invars)], operands[len(jaxpr.invars) :][:count]
            if jaxpr is not body:
                return step_through(jaxpr, consts, inputs, bind)
            outputs, found = self.run(jaxpr, consts, inputs, own)
            return [*outputs, *own, *found]

        return turn

    def _branch(self, equation: JaxprEqn, sites: list[Site]) -> Callable[..., Operands]:
        _, numbers = united(equation, self._pattern)
        # By identity: a jaxpr that occurs twice has the same sites.
        of = {id(opened(branch)[0]): own for branch, own in zip(branches_of(equation), numbers, strict=True)}

        def branch(jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
            count, own = len(jaxpr.invars), of[id(jaxpr)]
            given = operands[count:]
            outputs, found = self.run(jaxpr, consts, operands[:count], [given[number] for number in own])
            values = dict(zip(own, found, strict=True))
            return [*outputs, *(values[n] if n in values else site.full(0) for n, site in enumerate(sites))]

        return branch

    def _shard_map(self, equation: JaxprEqn, given: Operands, sites: list[Site], own: Operands) -> Operands:
        inner, consts = opened(primal_jaxpr(equation))
        inside = sites_in(inner, self._pattern)
        count = len(given)
        # Every device has one piece along each axis over which a value differs.
        axes = [tuple(range(len(split_axes(equation, site)))) for site in inside]

        def body(*operands: Any) -> tuple[Any, ...]:
            mine = [
                piece if piece is None else piece.reshape(site.shape)
                for piece, site in zip(operands[count:], inside, strict=True)
            ]
            outputs, found = self.run(inner, consts, list(operands[:count]), mine)
            pieces = [jax.numpy.expand_dims(value, own_axes) for value, own_axes in zip(found, axes, strict=True)]
            return (*outputs, *pieces)

        in_specs, out_specs = shard_map_specs(equation)
        specs = tuple(spec_of(equation, site) for site in inside)
        with source_of(equation):
            return list(shard_map_like(equation, body, (*in_specs, *specs), (*out_specs, *specs))(*given, *own))
