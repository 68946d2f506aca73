"""Which custom derivative rule is to blame: each rule is compared with the derivative of its function."""

import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from .._compat import cached_property
from .._programs import (
    Chain,
    Operands,
    bind,
    custom_rule_body,
    has_rule_outside_jax,
    ids,
    is_custom_rule,
    is_floating,
    is_in_library,
    jaxpr_and_consts,
    line,
    run,
    union,
    zeros_like_aval,
)
from .names import element_of, rule_of, steps_of
from .probe import Answer, probe
from .program import Program
from .repeated import Repeated

# What differs; or what cannot be compared, because the derivative of the function is not finite.
_VALUE, _DERIVATIVE, _UNKNOWN = 0, 1, 2


class Blame(NamedTuple):
    """A custom rule that computes another value than its function, or else another derivative.

    The element is the one that is furthest off, in some steps of the loops around it. A rule stops if it gives no
    derivative by anything at all, as `stop_gradient` does. Its derivatives by some operands are wrong, or all of them.
    """

    chain: Chain
    of_value: bool
    stops: bool
    element: tuple[int, ...]
    steps: list[tuple[int, ...]]
    operands: frozenset[int]


class Rules:
    """The custom rules in a program, each compared once with the derivative of its own function."""

    def __init__(self, program: Program):
        self._program = program
        # With what was raised.
        self._incomparable: dict[Chain, str] = {}

    def wrong_values(self) -> list[Blame]:
        """The rules that change the value, one for each name and line."""
        return _unlike([blame for blame in self._blamed if blame.of_value])

    def to_blame_for(self, leaf: int) -> list[Blame]:
        """The rules on the path of a leaf that differ from their functions, one for each name and line."""
        wrong = [blame for blame in self._blamed if leaf in self._leaves_into(blame)]
        # A right rule hides those inside its function, whose derivative is not used.
        blamed = {id(blame.chain[-1]) for blame in self._blamed}
        hides = lambda equation: _is_users_rule((equation,)) and id(equation) not in blamed
        wrong = [blame for blame in wrong if not any(map(hides, blame.chain[:-1]))]
        # A rule is wrong if a rule inside it is.
        outer = {id(equation) for blame in wrong for equation in blame.chain[:-1]}
        wrong = [blame for blame in wrong if id(blame.chain[-1]) not in outer]
        return _unlike(sorted(wrong, key=lambda blame: blame.of_value))

    def _leaves_into(self, blame: Blame) -> list[int]:
        """The leaves whose derivative a rule makes wrong: those that go into an operand by which it is wrong."""
        flow = self._program.smooth
        if not flow.knows(blame.chain):
            return self._program.leaves_into(blame.chain)
        mask = union(mask for place, mask in enumerate(flow.into(blame.chain)) if place in blame.operands)
        return [leaf for leaf in range(len(self._program.leaves)) if mask >> leaf & 1]

    def left_out(self, rules: Sequence[Chain] | None = None) -> Program:
        """The program without some rules, or all that differ: JAX derives the derivatives of their functions."""
        rules = [blame.chain for blame in self._blamed] if rules is None else rules
        program, wrong = self._program, {id(chain[-1]) for chain in rules}

        def rule(chain: Chain, operands: Operands) -> Operands | None:
            is_wrong = id(chain[-1]) in wrong
            return _without_users_rules(custom_rule_body(chain[-1]), operands) if is_wrong else None

        # Not `program.run`: another program gives its own numbers to its equations.
        body, consts = jaxpr_and_consts(program.jaxpr)
        return Program(lambda leaves: run(body, consts, list(leaves), rule), program.leaves, program.paths)

    def incomparable_for(self, leaf: int) -> list[tuple[Chain, str]]:
        """The rules on the path of a leaf that cannot be compared, as for a callback, and why."""
        _ = self._blamed
        own = [c for c in self._incomparable if line(c) and leaf in self._program.leaves_into(c)]
        return [
            (b.chain, self._incomparable[b.chain])
            for b in _unlike([Blame(chain, False, False, (), [], frozenset()) for chain in own])
        ]

    def wrong_within(self, chain: Chain) -> list[Blame]:
        """The rules that the rule of an equation uses and that differ from their functions, as one by hand may."""
        origin = self._program.origin
        return _unlike([b for b in self._blamed_within if (found := origin(b.chain)) and found[-1] is chain[-1]])

    @cached_property
    def _blamed_within(self) -> list[Blame]:
        """Of the rules that are met in the derivative only, those that differ from their functions."""
        program = self._program
        derivative, more = program.tangent, program.leaves
        if derivative is None:
            derivative, more = program.value_and_cotangent, [zeros_like_aval(aval) for aval in program.out_avals]
        if derivative is None:
            return []
        # The first of its functions tells a rule: what its derivative was traced with hangs on it as well.
        first = lambda chain: next((id(function) for function in rule.functions), 0) if (rule := rule_of(chain)) else 0
        met_before = {0, *map(first, program.smooth.chains)}

        def question(chain: Chain, operands: Operands, results: Operands) -> Any:
            is_new = first(chain) not in met_before and self._is_compared(chain)
            return self._asked(chain, operands) if is_new else None

        grouped: dict[tuple[int, ...], list[Answer]] = {}
        for answer in probe(derivative, [*program.leaves, *more], question)[1]:
            if answer.numbers[1] != _UNKNOWN:
                grouped.setdefault(ids(answer.chain), []).append(answer)
        return list(map(_blame, grouped.values()))

    def refusing(self, error: Exception) -> Chain:
        """The rule that raises such an error when it is differentiated by itself, on a user's line; empty if none."""
        reverse = (c for c in self._program.smooth.chains if is_custom_rule(c[-1]) and _is_reverse(c[-1]) and line(c))
        return next((chain for chain in reverse if self._raises(chain, type(error))), ())

    def _raises(self, chain: Chain, kind: type[Exception]) -> bool:
        differentiated = self._differentiated(chain)
        operands = [zeros_like_aval(atom.aval) for atom in chain[-1].invars]
        try:
            jax.eval_shape(lambda operands: _differing(chain[-1], operands, differentiated), operands)
        except Exception as error:  # It is the user's rule, which raised before.
            return isinstance(error, kind)
        return False

    def ruled_for(self, leaf: int) -> list[Chain]:
        """The rules on the path of a leaf, whether or not they can be compared."""
        program = self._program
        return [
            c for c in program.value.chains if is_custom_rule(c[-1]) and leaf in program.leaves_into(c, program.value)
        ]

    @cached_property
    def _blamed(self) -> list[Blame]:
        if not any(is_custom_rule(chain[-1]) for chain in self._program.smooth.chains):
            return []
        grouped: dict[tuple[Any, ...], list[Answer]] = {}
        for answer in self._answers():
            grouped.setdefault((*map(id, answer.chain), answer.numbers[1]), []).append(answer)
        for (*_, kind), (first, *_) in grouped.items():
            if kind == _UNKNOWN:
                self._incomparable[first.chain] = "whose own derivative is not finite there"
        return [_blame(answers) for (*_, kind), answers in grouped.items() if kind != _UNKNOWN]

    def _answers(self) -> list[Answer]:
        chains = [chain for chain in self._program.smooth.chains if self._is_compared(chain)]
        repeated = Repeated(self._program, chains, self._asked)
        rest = [chain for chain in chains if chain not in repeated]

        def question(chain: Chain, operands: Operands, results: Operands) -> Any:
            is_asked = self._is_compared(chain) and chain not in repeated
            return self._asked(chain, operands) if is_asked else None

        found = probe(self._program.jaxpr, self._program.leaves, question)[1] if rest else []
        return [*found, *repeated.answers()]

    def _is_compared(self, chain: Chain) -> bool:
        if not is_custom_rule(chain[-1]) or _is_librarys_own(chain):
            return False
        # It depends on which tangents are zero, and those that flow nowhere may not be.
        is_of_zeros = is_in_library(chain) and chain[-1].params.get("symbolic_zeros")
        return not is_of_zeros or all(self._differentiated(chain))

    def _asked(self, chain: Chain, operands: Operands) -> Any:
        """The element that is furthest off, of value or derivative, of which array, and whether the rule stops.

        Then for each operand whether the derivative by it is off.
        """
        try:
            return _differing(chain[-1], operands, self._differentiated(chain))
        except Exception as error:  # The rule is the user's code and may raise anything, which the finding says.
            told = str(error).strip().partition("\n")[0]
            self._incomparable[chain] = f"{type(error).__name__}: {textwrap.shorten(told, 80, placeholder=' ...')}"
            return None

    def _differentiated(self, chain: Chain) -> list[bool]:
        """By which operands a rule is differentiated in the program; by others it may refuse to be.

        A rule of a library that refuses leaves JAX without what it keeps of that rule for the next derivative.
        """
        smooth, value = self._program.smooth, self._program.value
        flow = smooth if smooth.knows(chain) else value
        return [bool(mask) for mask in flow.into(chain)] if flow.knows(chain) else [True] * len(chain[-1].invars)


def _blame(answers: list[Answer]) -> Blame:
    (worst, kind, array, *_), equation = answers[0].numbers, answers[0].chain[-1]
    atoms = equation.invars if kind == _DERIVATIVE and _is_reverse(equation) else equation.outvars
    place = element_of(int(worst), atoms[array].aval.shape)
    stops = all(answer.numbers[3] for answer in answers)
    off = [place for answer in answers for place in np.flatnonzero(answer.numbers[4:]).tolist()]
    operands = range(len(equation.invars)) if kind == _VALUE else off
    return Blame(answers[0].chain, kind == _VALUE, stops, place, steps_of(answers), frozenset(operands))


def _unlike(blames: list[Blame]) -> list[Blame]:
    """One call of each rule at each line."""
    ruled = lambda chain: rule.functions if (rule := rule_of(chain)) else ()
    named = lambda blame: (line(blame.chain), rule_of(blame.chain), tuple(map(id, ruled(blame.chain))))
    return list({named(blame): blame for blame in reversed(blames)}.values())[::-1]


def _is_librarys_own(chain: Chain) -> bool:
    """Whether a rule is used inside another rule of its library, which is responsible for it."""
    return is_in_library(chain) and any(map(is_custom_rule, chain[:-1]))


def _is_reverse(equation: JaxprEqn) -> bool:
    return equation.primitive.name.startswith("custom_vjp")


def _differing(equation: JaxprEqn, operands: Operands, differentiated: Sequence[bool]) -> Any:
    body = custom_rule_body(equation)
    # By what its function closes over, a rule gives no derivative.
    closed_over = equation.params.get("num_consts", 0)
    is_one = lambda i: i >= closed_over and differentiated[i] and is_floating(jnp.asarray(operands[i]))
    where = list(filter(is_one, range(len(operands))))
    floating_results = [i for i, atom in enumerate(equation.outvars) if is_floating(atom.aval)]
    if not where or not floating_results:
        return None

    def of_floating(run: Callable[[Operands], Operands]) -> Callable[..., list[Any]]:
        def function(*floating: Any) -> list[Any]:
            given = list(operands)
            for i, value in zip(where, floating, strict=True):
                given[i] = value
            return [result for result in run(given) if is_floating(result)]

        return function

    by_rule = of_floating(lambda given: bind(equation, given))
    by_function = of_floating(lambda given: _without_users_rules(body, given))
    point = [jnp.asarray(operands[i]) for i in where]
    derivative = _pullbacks if _is_reverse(equation) else _pushforwards
    (value, slopes), (own_value, own_slopes) = derivative(by_rule, point), derivative(by_function, point)
    of_slope = where if _is_reverse(equation) else floating_results
    of_value, _ = _furthest(value, own_value, floating_results, _VALUE)
    compared = [_furthest(*pair, of_slope, _DERIVATIVE) for pair in zip(slopes, own_slopes, strict=True)]
    best = jnp.stack([numbers for numbers, _ in compared])
    of_derivative = best[jnp.argmax(jnp.stack([jnp.max(off, initial=0.0) for _, off in compared]))]
    parts = [pair for one in zip(slopes, own_slopes, strict=True) for pair in zip(*one, strict=True)]
    is_zero = jnp.all(jnp.array([jnp.all(part == 0) for part, _ in parts]))
    differs = jnp.where(of_value[0] >= 0, of_value, of_derivative)
    is_known = jnp.all(jnp.array([jnp.isfinite(own).all() | ~jnp.isfinite(part).all() for part, own in parts]))
    unknown = jnp.where(is_known, differs, jnp.array([0, _UNKNOWN, of_slope[0] if of_slope else 0], jnp.int32))
    told = jnp.append(jnp.where(differs[0] >= 0, differs, unknown), is_zero.astype(jnp.int32))
    # By operand: in forward mode there is one slope for each, in reverse mode one part of each slope.
    offs = jnp.stack([off for _, off in compared])
    by_operand = jnp.any(offs > 0, axis=0 if _is_reverse(equation) else 1).astype(jnp.int32)
    return jnp.concatenate([told, jnp.zeros(len(operands), jnp.int32).at[np.array(where, int)].set(by_operand)])


def _is_users_rule(chain: Chain) -> bool:
    return has_rule_outside_jax(chain[-1]) and not is_in_library(chain)


def _without_users_rules(body: Any, given: Operands) -> Operands:
    """The results of a function whose derivative is that of its operations, and not of rules that the user wrote."""

    def rule(chain: Chain, operands: Operands) -> Operands | None:
        return _without_users_rules(custom_rule_body(chain[-1]), operands) if _is_users_rule(chain) else None

    return run(*jaxpr_and_consts(body), given, rule)


def _pushforwards(function: Callable[..., list[Any]], point: Operands) -> tuple[Operands, list[Operands]]:
    """The value, and the tangents for each operand alone: what is small beside that of another counts too."""
    push = lambda tangents: jax.jvp(function, tuple(point), tuple(tangents))
    if len(point) == 1:
        value, tangents = push(_weights(point))
        return value, [tangents]
    values, found = lax.map(lambda number: push(_alone(number, _weights(point))), jnp.arange(len(point)))
    return [value[0] for value in values], [[part[i] for part in found] for i in range(len(point))]


def _pullbacks(function: Callable[..., list[Any]], point: Operands) -> tuple[Operands, list[Operands]]:
    """The value, and the cotangents of the operands for each result alone."""
    value, pullback = jax.vjp(function, *point)
    if len(value) == 1:
        return value, [list(pullback(_weights(value)))]
    found = lax.map(lambda number: list(pullback(_alone(number, _weights(value)))), jnp.arange(len(value)))
    return value, [[part[i] for part in found] for i in range(len(value))]


def _alone(number: Any, arrays: Operands) -> Operands:
    """One of several arrays, and zeros for the others."""
    return [jnp.where(number == i, array, jnp.zeros_like(array)) for i, array in enumerate(arrays)]


def _weights(like: Operands) -> Operands:
    random = np.random.default_rng(0)
    draw = lambda value: random.uniform(0.5, 1.5, np.shape(value))
    return [
        jnp.asarray(draw(value) + 1j * draw(value) if jnp.iscomplexobj(value) else draw(value)).astype(value.dtype)
        for value in like
    ]


def _furthest(found: Operands, meant: Operands, places: list[int], kind: int) -> tuple[Any, Any]:
    """The element that is furthest off, if by more than rounding: its flat index, the kind and the array.

    And by how much each array is off, relative to its size; zero where that is rounding.
    """
    worst, offs = [jnp.zeros((), jnp.int32)] * len(found), [jnp.zeros(())] * len(found)
    for i, (one, other) in enumerate(zip(found, meant, strict=True)):
        if not one.size:
            continue
        gap, size = jnp.ravel(jnp.abs(one - other)), jnp.max(jnp.abs(other))
        tolerance = float(jnp.finfo(one.dtype).eps) ** 0.6
        # A rule often exists to give a number where the function gives NaN.
        off = jnp.where(jnp.isfinite(gap), gap, 0) / (jnp.where(jnp.isfinite(size), size, jnp.inf) + 1e-30)
        worst[i] = jnp.argmax(off).astype(jnp.int32)
        offs[i] = jnp.where(off[worst[i]] > tolerance, off[worst[i]], 0.0).astype(jnp.zeros(()).dtype)
    of_arrays = jnp.stack([*offs, jnp.zeros(())])
    most = jnp.argmax(of_arrays)
    numbers = jnp.stack(
        [jnp.stack([*worst, jnp.int32(0)])[most], jnp.int32(kind), jnp.array([*places, 0], jnp.int32)[most]]
    )
    return jnp.where(of_arrays[most] > 0, numbers, jnp.array([-1, kind, 0], jnp.int32)), of_arrays[:-1]
