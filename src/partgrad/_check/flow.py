"""What flows where in a jaxpr: sets of sources, from its inputs through every equation to its outputs.

A set is the bits of an int, so that a union is `|`. What an equation passes on is decided by whoever asks.
"""

from collections.abc import Callable, Iterable
from typing import Any

from jax.extend.core import Jaxpr, Literal

from .._programs import CALLS, CHECKPOINTS, inner_jaxprs, is_custom_rule, is_floating, opened, scan_counts
from .program import Chain

Masks = list[int]
# From an equation, what it is inside of, and what flows into its operands, to what flows out of its results.
Transfer = Callable[[Chain, Masks], Masks]

# The derivative of these is zero wherever it exists.
FLAT = frozenset({"stop_gradient", "floor", "ceil", "round", "sign", "nextafter"})
_DRAWS = frozenset({"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32", "random_wrap"})


class Flow:
    """What flows into and out of every equation.

    Args:
        jaxpr: An open jaxpr.
        masks: What its inputs bear.
        transfer: What a primitive equation passes on.
        through_control: Whether a condition and the number of steps of a loop flow into what they decide.
        into_rules: Whether the function of a custom rule is looked into.

    Attributes:
        chains: All equations, each with what it is inside of, what contains others before these.
        outputs: What flows out of the jaxpr.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        masks: Masks,
        transfer: Transfer,
        *,
        through_control: bool = False,
        into_rules: bool = False,
    ):
        self._transfer, self._through_control, self._into_rules = transfer, through_control, into_rules
        self._records: dict[tuple[int, ...], tuple[Masks, Masks]] = {}
        self._chains: dict[tuple[int, ...], Chain] = {}
        self.outputs = self._through(jaxpr, masks, ())

    @property
    def chains(self) -> list[Chain]:
        """All equations, each with what it is inside of."""
        return list(self._chains.values())

    def knows(self, chain: Chain) -> bool:
        """Whether an equation was met."""
        return _key(chain) in self._records

    def into(self, chain: Chain) -> Masks:
        """What flows into the operands of an equation; nothing is known of one that was not met."""
        return self._records.get(_key(chain), ([0] * len(chain[-1].invars), []))[0]

    def out_of(self, chain: Chain) -> Masks:
        """What flows out of the results of an equation."""
        return self._records.get(_key(chain), ([], [0] * len(chain[-1].outvars)))[1]

    def _through(self, jaxpr: Jaxpr, masks: Masks, inside: Chain) -> Masks:
        known = {**dict.fromkeys(jaxpr.constvars, 0), **dict(zip(jaxpr.invars, masks, strict=True))}
        read = lambda atom: 0 if isinstance(atom, Literal) else known[atom]
        for equation in jaxpr.eqns:
            chain = (*inside, equation)
            given = [read(atom) for atom in equation.invars]
            self._chains.setdefault(_key(chain), chain)
            results = self._of(chain, given)
            self._records[_key(chain)] = given, results
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _of(self, chain: Chain, masks: Masks) -> Masks:
        equation = chain[-1]
        name, inner = equation.primitive.name, list(inner_jaxprs(equation))
        if name == "scan":
            constants, carried = scan_counts(equation)
            return self._of_loop(chain, inner[0], masks, constants, carried, lambda carry: 0)
        if name == "while":
            return self._of_while(chain, masks)
        if name == "cond":
            decided = masks[0] if self._through_control else 0
            return [
                union(each) | decided for each in zip(*(self._through(b, masks[1:], chain) for b in inner), strict=True)
            ]
        is_entered = name in CALLS | CHECKPOINTS or (self._into_rules and is_custom_rule(chain[-1]))
        if is_entered and len(inner) == 1 and len(inner[0].invars) == len(masks):
            return self._through(inner[0], masks, chain)
        return self._transfer(chain, masks)

    def _of_while(self, chain: Chain, masks: Masks) -> Masks:
        parameters = chain[-1].params
        test, body = opened(parameters["cond_jaxpr"])[0], opened(parameters["body_jaxpr"])[0]
        carried = len(chain[-1].outvars)
        tested, rest = masks[: len(test.invars) - carried], masks[len(test.invars) - carried :]

        def decided(carry: Masks) -> int:
            flowing = union(self._through(test, [*tested, *carry], chain))
            return flowing if self._through_control else 0

        return self._of_loop(chain, body, rest, len(body.invars) - carried, carried, decided)

    def _of_loop(
        self, chain: Chain, body: Jaxpr, masks: Masks, constants: int, carried: int, decided: Callable[[Masks], int]
    ) -> Masks:
        consts, carry, xs = masks[:constants], masks[constants:][:carried], masks[constants + carried :]
        while True:
            outputs = self._through(body, [*consts, *carry, *xs], chain)
            control = decided(carry)
            grown = [before | after | control for before, after in zip(carry, outputs, strict=False)]
            if grown == carry:
                return [*carry, *outputs[carried:]]
            carry = grown


def union(masks: Iterable[int]) -> int:
    """What is in any of the masks."""
    total = 0
    for mask in masks:
        total |= mask
    return total


def by_value(jaxpr: Jaxpr, masks: Masks, transfer: Transfer | None = None) -> Flow:
    """What the value of everything depends on, through conditions and indices too."""
    return Flow(jaxpr, masks, transfer or _everything, through_control=True, into_rules=True)


def differentiably(jaxpr: Jaxpr, masks: Masks) -> Flow:
    """What the derivative of everything may depend on: nothing flows through integers, comparisons or stops."""
    return Flow(jaxpr, masks, _smoothly)


def of_cotangents(jaxpr: Jaxpr, count: int) -> Flow:
    """What in a derivative depends on its last inputs, the tangents or cotangents."""
    first = len(jaxpr.invars) - count
    return Flow(jaxpr, [0] * first + [1] * count, _smoothly)


def of_draws(jaxpr: Jaxpr) -> Flow:
    """What depends on random bits drawn inside."""
    return Flow(jaxpr, [0] * len(jaxpr.invars), _with_draws, into_rules=True)


def reaching(jaxpr: Jaxpr, chains: Iterable[Chain]) -> list[Chain]:
    """Those of some equations on whose results the value of the output depends."""
    chains = list(chains)
    reached = union(arriving(jaxpr, chains))
    return [chain for number, chain in enumerate(chains) if reached >> number & 1]


def arriving(jaxpr: Jaxpr, chains: Iterable[Chain]) -> Masks:
    """For each output, on the results of which of some equations its value depends: a bit for each of them."""
    bits = {_key(chain): 1 << number for number, chain in enumerate(chains)}

    def marked(chain: Chain, masks: Masks) -> Masks:
        # What is inside of one of them is part of it.
        own = union(bits.get(_key(chain[:length]), 0) for length in range(1, len(chain) + 1))
        return [union(masks) | own] * len(chain[-1].outvars)

    return by_value(jaxpr, [0] * len(jaxpr.invars), marked).outputs


def last_of(jaxpr: Jaxpr, chains: Iterable[Chain]) -> list[Chain]:
    """Those of some equations from which the value reaches the output without going through another of them."""
    chains = list(chains)
    bits = {_key(chain): 1 << number for number, chain in enumerate(chains)}

    def marked(chain: Chain, masks: Masks) -> Masks:
        return [bits.get(_key(chain), union(masks))] * len(chain[-1].outvars)

    reached = union(by_value(jaxpr, [0] * len(jaxpr.invars), marked).outputs)
    return [chain for chain in chains if reached & bits[_key(chain)]]


def _everything(chain: Chain, masks: Masks) -> Masks:
    return [union(masks)] * len(chain[-1].outvars)


def _smoothly(chain: Chain, masks: Masks) -> Masks:
    equation = chain[-1]
    operands = zip(equation.invars, masks, strict=True)
    total = 0 if equation.primitive.name in FLAT else union(mask for atom, mask in operands if has_tangent(atom))
    return [total if has_tangent(result) else 0 for result in equation.outvars]


def _with_draws(chain: Chain, masks: Masks) -> Masks:
    drawn = int(chain[-1].primitive.name in _DRAWS)
    return [union(masks) | drawn] * len(chain[-1].outvars)


def has_tangent(atom: Any) -> bool:
    """Whether a variable or literal of a jaxpr is floating or complex."""
    aval: Any = atom.aval
    try:
        return is_floating(aval)
    except (AttributeError, TypeError):
        # A token, a key or a reference.
        return False


def _key(chain: Chain) -> tuple[int, ...]:
    return tuple(map(id, chain))
