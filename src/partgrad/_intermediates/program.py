"""The program of one call of a function, and the function again with something done to its named values."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from .._programs import Operands, Site, TracedCall, as_array, bind, traced_call
from .._trees import without_changes
from .reduced import Reduce, Reduction, tapped
from .sites import (
    AnyOf,
    Change,
    Named,
    Wanted,
    by_name,
    refuse_overlap,
    refuse_undifferentiable,
    refuse_unknown,
    sites_in,
    wanted_in,
)


class Program:
    """The program of one call.

    Args:
        f: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(self, f: Callable[..., Any], args: Any, kwargs: Any):
        # The trace has copies, in which changes are lost.
        self._call: TracedCall = traced_call(without_changes(f), args, kwargs)

    def sites(self, name: str) -> tuple[Wanted, list[Site]]:
        """Which names are meant by a name or a glob, and their values; an error if there is none."""
        wanted = wanted_in(self._call.jaxpr, name)
        sites = sites_in(self._call.jaxpr, wanted)
        refuse_unknown(self._call.jaxpr, wanted, sites)
        return wanted, sites

    def visited(self, wanted: Wanted | AnyOf, change: Change, own: Operands) -> tuple[Any, Operands]:
        """What the call returns if each named value is changed, and the values."""
        return self.run(Named(wanted, change), own)

    def run(self, visitor: Named, own: Operands) -> tuple[Any, Operands]:
        """What the call returns if a visitor runs it, and what comes back."""
        outputs, found = visitor.run(self._call.jaxpr, self._call.consts, self._call.operands, own)
        return self._call.result(outputs), found

    def sites_of(self, visitor: Named) -> list[Site]:
        """The sites of a visitor."""
        return visitor.sites_in(self._call.jaxpr)


class Added(Named):
    """Adds to the values what belongs to them, so that a derivative is that with respect to them; or reduces that.

    Args:
        wanted: Their names.
        reductions: What is reduced in the backward pass, by the name or glob that a user wrote.
    """

    def __init__(self, wanted: AnyOf, reductions: Mapping[Wanted, Reduction]):
        super().__init__(wanted)
        self._reductions = reductions

    def site_of(self, equation: JaxprEqn) -> Site | None:
        """A named value, or what is reduced of it."""
        site = super().site_of(equation)
        if site is not None:
            for wanted, reduction in self._reductions.items():
                if wanted.matches(site.name):
                    return reduction.site(site)
        return site

    def at(self, equation: JaxprEqn, site: Site, operands: Operands, own: Any) -> tuple[Operands, Any]:
        """The value that is used; what comes back is of no interest."""
        value = as_array(operands[0], equation.invars[0].aval)
        value = value + own if site.note is None else tapped(site.note, value, own)
        return bind(equation, [value]), own


class Shifted:
    """A function of what is added to its named values too, so that its derivative is that with respect to them.

    Where a cotangent is to be reduced, nothing is added: the derivative is what the reduction makes of it.

    Args:
        f: The function.
        names: The names, or globs, by the keys of the gradient.
        args: The positional arguments of a call.
        kwargs: Its keyword arguments.
        of_values: Whether it is given what the values become, and adds the difference.
        reductions: The functions that reduce cotangents, by the keys of the gradient; the others arrive as they are.

    Attributes:
        point: What changes nothing: for each key in the shape of its part of the gradient.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        names: Mapping[Any, str],
        args: Any,
        kwargs: Any,
        of_values: bool,
        reductions: Mapping[Any, Reduce],
    ):
        self._f, self._args, self._kwargs, self._program = f, args, kwargs, Program(f, args, kwargs)
        found = {key: self._program.sites(name) for key, name in names.items()}
        for _, sites in found.values():
            refuse_undifferentiable(sites)
        refuse_overlap({f"{key!r}: partgrad.intermediate({names[key]!r})": sites for key, (_, sites) in found.items()})
        self._reductions = {found[key][0]: Reduction(reduce) for key, reduce in reductions.items()}
        self._visitor = Added(AnyOf(tuple(own for own, _ in found.values())), self._reductions)
        everything = self._program.sites_of(self._visitor)
        found = {key: (own, [site for site in everything if own.matches(site.name)]) for key, (own, _) in found.items()}
        self._found = found
        # Negative zeros: what they are added to stays what it is, even if that is a zero of either sign.
        self.point = {
            key: by_name(wanted, sites, [site.full(-0.0) for site in sites]) for key, (wanted, sites) in found.items()
        }
        self._values = {}
        if of_values:
            self.point = self._values = {key: self._values_of(*own) for key, own in found.items()}

    def _values_of(self, wanted: Wanted, sites: list[Site]) -> Any:
        values = self._program.visited(wanted, lambda _, value, __: value, [None] * len(sites))[1]
        # What is not finite cannot be moved in proportion to its size.
        return by_name(wanted, sites, [jnp.where(jnp.isfinite(value), value, 0) for value in values])

    def __call__(self, given: Mapping[Any, Any], args: Any, kwargs: Any) -> Any:
        """What the function returns for these values, or if these are added."""
        shifts = jax.tree.map(jnp.subtract, given, self._values) if self._values else given
        is_same = args is self._args and kwargs is self._kwargs
        program = self._program if is_same else Program(self._f, args, kwargs)
        in_order = {key: iter(_in_order(*own, shifts[key])) for key, own in self._found.items()}
        key_of = lambda name: next(key for key, (own, _) in self._found.items() if own.matches(name))
        own = [next(in_order[key_of(site.name)]) for site in program.sites_of(self._visitor)]
        return program.run(self._visitor, own)[0]

    @property
    def unpacked(self) -> Callable[[dict[Any, Any]], dict[Any, Any]] | None:
        """From the derivative to the gradient, both for each key; None where they are the same."""
        packings = {
            key: by_name(wanted, sites, [site.note for site in sites])
            for key, (wanted, sites) in self._found.items()
            if wanted in self._reductions
        }
        # A derivative that was found to be unused is None.
        one = lambda packing, array: None if array is None else packing.unpacked(array)
        reduced = lambda key, own: jax.tree.map(one, packings[key], own) if key in packings else own
        return (lambda parts: {key: reduced(key, own) for key, own in parts.items()}) if packings else None


def _in_order(wanted: Wanted, sites: list[Site], named: Any) -> Operands:
    """The inverse of `by_name`."""
    numbers = by_name(wanted, sites, list(range(len(sites))))
    pairs: list[tuple[int, Any]] = []
    for key in numbers if isinstance(numbers, dict) else [None]:
        number, own = (numbers, named) if key is None else (numbers[key], named[key])
        pairs += zip(number, own, strict=True) if isinstance(number, tuple) else [(number, own)]
    return [own for _, own in sorted(pairs, key=lambda pair: pair[0])]
