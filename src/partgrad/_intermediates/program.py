"""The program of one call of a function, and the function again with something done to its named values."""

from collections.abc import Callable
from typing import Any

from .._programs import Operands, Site, TracedCall, traced_call
from .sites import Change, Named, Wanted, by_name, refuse_undifferentiable, refuse_unknown, sites_in, wanted_in


class Program:
    """The program of one call.

    Args:
        f: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(self, f: Callable[..., Any], args: Any, kwargs: Any):
        self._call: TracedCall = traced_call(f, args, kwargs)

    def sites(self, name: str) -> tuple[Wanted, list[Site]]:
        """Which names are meant by a name or a glob, and their values; an error if there is none."""
        wanted = wanted_in(self._call.jaxpr, name)
        sites = sites_in(self._call.jaxpr, wanted)
        refuse_unknown(self._call.jaxpr, wanted, sites)
        return wanted, sites

    def visited(self, wanted: Wanted, change: Change, own: Operands) -> tuple[Any, Operands]:
        """What the call returns if each named value is changed, and the values."""
        outputs, found = Named(wanted, change).run(self._call.jaxpr, self._call.consts, self._call.operands, own)
        return self._call.result(outputs), found


class Shifted:
    """A call as a function of what is added to its named values, so that its derivative is that with respect to them.

    Args:
        f: The function.
        name: The name, or a glob.
        args: The positional arguments.
        kwargs: The keyword arguments.

    Attributes:
        zeros: What changes nothing when it is added, in the shape of the gradient.
    """

    def __init__(self, f: Callable[..., Any], name: str, args: Any, kwargs: Any):
        self._program = Program(f, args, kwargs)
        self._wanted, self._sites = self._program.sites(name)
        refuse_undifferentiable(self._sites)
        # Negative zeros: what they are added to stays what it is, even if that is a zero of either sign.
        self.zeros = by_name(self._wanted, self._sites, [site.full(-0.0) for site in self._sites])

    def __call__(self, shifts: Any) -> Any:
        """What the call returns if these are added."""
        own = _in_order(self._wanted, self._sites, shifts)
        return self._program.visited(self._wanted, lambda name, value, shift: value + shift, own)[0]


def _in_order(wanted: Wanted, sites: list[Site], named: Any) -> Operands:
    """The inverse of `by_name`."""
    numbers = by_name(wanted, sites, list(range(len(sites))))
    pairs: list[tuple[int, Any]] = []
    for key in numbers if isinstance(numbers, dict) else [None]:
        number, own = (numbers, named) if key is None else (numbers[key], named[key])
        pairs += zip(number, own, strict=True) if isinstance(number, tuple) else [(number, own)]
    return [own for _, own in sorted(pairs, key=lambda pair: pair[0])]
