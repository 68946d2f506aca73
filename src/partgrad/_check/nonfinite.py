"""NaN and infinity in a derivative: which operation produces it first, and what fixes it."""

import functools
from collections.abc import Callable, Container, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from .._compat import cached_property
from .._programs import (
    Chain,
    Dependence,
    Operands,
    Sources,
    all_finite,
    any_equation,
    bind,
    differentiably,
    feeding,
    is_custom_rule,
    is_floating,
    is_in_library,
    is_mutating,
    line,
    of_cotangents,
    quick_jit,
)
from .finding import Finding
from .float64 import widened
from .names import element_of, finding, steps_of
from .own import Own, is_finite, pulled
from .point import Point
from .probe import Answer, probe
from .program import Program
from .remedies import Cause, Derivative, Remedies, lost_in


def nonfinite(own: Own, point: Callable[[], Point]) -> Iterator[Finding]:
    """Findings for each leaf whose gradient, or else whose forward derivative, is not finite, the value's first."""
    program = own.program
    bad = [leaf for leaf, gradient in enumerate(own.gradients) if not is_finite(gradient)]
    if not own.is_finite:
        yield from _of_the_value(own, bad, point())
    if bad:
        births = _births_of_gradient(own) if program.cotangent is not None else []
        of = lambda function: (pulled(function), [program.leaves, own.cotangents])
        derivative = Derivative("gradient", of, lambda results, leaf: results[leaf])
        yield from _NotFinite(own, point, births, derivative).findings(bad)
    if own.is_finite and program.tangent is not None and not _tangent_is_finite(point()):
        others = [leaf for leaf in range(len(program.leaves)) if leaf not in bad]
        # First together, then one by one.
        if len(others) == 1 or (others and not _is_finite_along(program, others)):
            for leaf in others:
                if not _is_finite_along(program, [leaf]):
                    yield from _forward(own, point, leaf).findings([leaf])


def _births_of_gradient(own: Own) -> list[Answer]:
    program, operands = own.program, [*own.program.leaves, *own.cotangents]
    assert program.cotangent is not None
    found = _births(program.cotangent, operands, program.pulled, own.gradients)
    if found or not any_equation(program.cotangent.jaxpr, is_mutating):
        return found
    # What goes through a mutable reference is not followed: everything may depend on everything.
    everything = differentiably(program.cotangent.jaxpr, [1] * len(operands))
    return _births(program.cotangent, operands, everything, own.gradients)


def _tangent_is_finite(point: Point) -> bool:
    """Whether the forward derivative of all leaves together is finite."""
    tangents = point.exact.forward(point.leaves, [np.ones_like(x) for x in point.leaves])
    return tangents is not None and is_finite(tangents)


def _along(program: Program, leaves: list[int], function: Any) -> tuple[Callable[..., Operands], Operands]:
    """The forward derivative of a function of all leaves along some of them, as a function, and its operands.

    The other leaves are constants, so no zero tangents of theirs are multiplied.
    """
    own = [program.leaves[leaf] for leaf in leaves]

    def derivative(*operands: Any) -> Operands:
        def of_own(*own: Any) -> Any:
            replaced = dict(zip(leaves, own, strict=True))
            return function([replaced.get(leaf, value) for leaf, value in enumerate(program.leaves)])

        return list(jax.jvp(of_own, operands[: len(own)], operands[len(own) :])[1])

    return derivative, [*own, *(np.ones(x.shape, x.dtype) for x in own)]


def _is_finite_along(program: Program, leaves: list[int]) -> bool:
    derivative, operands = _along(program, leaves, program.run)
    return all(map(is_finite, quick_jit(derivative)(*operands)))


def _forward(own: Own, point: Callable[[], Point], leaf: int) -> "_NotFinite":
    program = own.program
    along, operands = _along(program, [leaf], program.run)
    jaxpr = jax.make_jaxpr(along)(*operands)

    whole = lambda results, leaf: np.concatenate([np.ravel(result) for result in results])
    derivative = Derivative("forward-mode derivative", lambda function: _along(program, [leaf], function), whole)
    births = _births(jaxpr, operands, of_cotangents(jaxpr.jaxpr, 1))
    return _NotFinite(own, point, births, derivative)


def _births(
    jaxpr: ClosedJaxpr,
    operands: Operands,
    flowing: Dependence,
    seen: Operands | None = None,
    asked: Container[tuple[int, ...]] | None = None,
) -> list[Answer]:
    """Where a derivative first stops being finite, in order of execution.

    Args:
        jaxpr: The derivative, or the function.
        operands: Where it runs.
        flowing: What flows in it.
        seen: What the user's own run computed.
        asked: Which equations may be the place, by the identities of their chains; None for any.
    """

    def question(chain: Chain, operands: Operands, results: Operands) -> Any:
        if is_mutating(chain[-1]) or (asked is not None and _ids(chain) not in asked):
            return None
        return _birth(operands, flowing.into(chain), results)

    def is_seen(outputs: Operands) -> bool:
        pairs = zip(outputs, seen or (), strict=True)
        return all(np.array_equal(*(np.isfinite(widened(x)) for x in pair)) for pair in pairs)

    return probe(jaxpr, operands, question, trusted=all_finite if seen is None else is_seen)[1]


def _birth(operands: Operands, masks: Sources, results: Operands) -> Any:
    """The element of the first result that is not finite although all operands are, and whether it is NaN.

    And whether an operand that is a constant of the derivative, a value, is NaN itself.
    """
    pairs = [pair for pair in zip(operands, masks, strict=True) if hasattr(pair[0], "dtype")]
    made = [_worst(result) for result in results if hasattr(result, "dtype") and _is_floating(result)]
    if not any(mask for _, mask in pairs) or not made:
        return None
    worst = [(bool(mask), _worst(x)) for x, mask in pairs if _is_floating(x)]
    is_finite = jnp.stack([True, *(x == _FINITE for flows, x in worst if flows)]).all()
    of_value = jnp.stack([False, *(x < _INFINITE for flows, x in worst if not flows)]).any()
    first = functools.reduce(lambda first, then: jnp.where(first < _FINITE, first, then), made)
    return jnp.stack([jnp.where(is_finite & (first < _FINITE), first % _INFINITE, -1), first < _INFINITE, of_value])


# The first places of an infinity, and of an element that is finite: one reduction tells all that is asked of an array.
_INFINITE, _FINITE = 1 << 29, 1 << 30


def _worst(value: Any) -> Any:
    """The place of the first NaN in an array, else that of the first infinity, else what is beyond them."""
    flat = jnp.ravel(value)
    place = lax.iota(np.int32, flat.size)
    told = jnp.where(jnp.isnan(flat), place, jnp.where(jnp.isfinite(flat), _FINITE, _INFINITE + place))
    return jnp.min(told, initial=_FINITE)


def _is_floating(value: Any) -> bool:
    return is_floating(value) and value.dtype != jax.dtypes.float0


def _ids(chain: Chain) -> tuple[int, ...]:
    return tuple(map(id, chain))


class _NotFinite:
    """A derivative that is not finite: where it first becomes NaN or infinite, and which remedy makes it finite."""

    def __init__(self, own: Own, point: Callable[[], Point], births: list[Answer], derivative: Derivative):
        self._own, self._program, self._mode = own, own.program, derivative.mode
        self._births = births
        self._numbers: dict[Any, int] = {}
        self._remedies = Remedies(own, point, derivative, self._grouped(births))

    def findings(self, leaves: list[int]) -> Iterator[Finding]:
        """One for each cause of a leaf whose derivative is not finite, unless its value is to blame."""
        program = self._program
        for leaf in leaves:
            births = self._births_of(leaf)
            if not births:
                # What goes through a mutable reference is not followed.
                births = [birth for birth in self._births if any_equation(self._program.jaxpr.jaxpr, is_mutating)]
            if not births:
                if self._own.is_finite:
                    yield self._from_nothing(leaf)
                continue
            for cause, (reason, more) in self._remedies.of(leaf, self._grouped(births)):
                if reason not in ("not taken", "singular") and not self._own.is_finite:
                    continue
                first, alike = cause.births[0], [b for b in cause.births if program.origin(b.chain) == cause.chain]
                of_value = cause.chain != program.origin(first.chain)
                element = element_of(int(first.numbers[0]), first.chain[-1].outvars[0].aval.shape)
                yield finding(
                    "nan",
                    "error",
                    reason,
                    [program.paths[leaf]],
                    self._place(first, cause.chain),
                    mode=self._mode,
                    first="NaN" if first.numbers[1] else "infinite",
                    of_value=of_value,
                    element=() if of_value else element,
                    steps=steps_of(alike),
                    **more,
                )

    @cached_property
    def _births_of_value(self) -> list[Chain]:
        """The operations that make NaN of what is finite, in a value that a derivative needs.

        Only those that such a value depends on are asked: to ask each of a program takes long to compile.
        """
        program, flow = self._program, self._program.value
        needed = [program.origin(birth.chain) for birth in self._births if birth.numbers[2]]
        asked = {_ids(chain) for into in needed if into for chain in feeding(program.jaxpr.jaxpr, flow.chains, into)}
        found = _births(program.jaxpr, program.leaves, flow, self._own.plain, asked)
        return [birth.chain for birth in found if birth.numbers[1] and line(birth.chain)]

    def _origins(self, birth: Answer) -> list[Chain]:
        """The operation whose derivative is not finite; or those that made a NaN among the values that it needs."""
        chain = self._program.origin(birth.chain)
        made = self._births_of_value if birth.numbers[2] and chain else []
        return (feeding(self._program.jaxpr.jaxpr, made, chain) if made else []) or [chain]

    def _place(self, birth: Answer, origin: Chain) -> Chain:
        """What a finding names."""
        # A rule of a library that runs the user's code.
        is_rule_of_library = bool(origin) and is_custom_rule(origin[-1]) and is_in_library(origin)
        return birth.chain if is_rule_of_library and line(birth.chain) else origin

    def _grouped(self, births: list[Answer]) -> list[Cause]:
        """The births by line."""
        causes: dict[Any, Cause] = {}
        for birth, origin in [(one, origin) for one in births for origin in self._origins(one)]:
            place = self._place(birth, origin)
            key = line(place) or _ids(place)
            number = self._numbers.setdefault(key, len(self._numbers))
            cause = causes.setdefault(key, Cause(number, origin, [], []))
            cause.births.append(birth)
            cause.origins.append(origin)
        return list(causes.values())

    def _births_of(self, leaf: int) -> list[Answer]:
        """Where the derivative of a leaf may first stop being finite."""
        origins = ((birth, self._program.origin(birth.chain)) for birth in self._births)
        return [birth for birth, origin in origins if not origin or leaf in self._program.leaves_into(origin)]

    def _from_nothing(self, leaf: int) -> Finding:
        """For a derivative that is not finite although no operation produced that: a rule returns it for any input."""
        program = self._program
        on_path = [c for c in program.smooth.chains if is_custom_rule(c[-1]) and leaf in program.leaves_into(c)]
        return finding("nan", "error", "rule", [program.paths[leaf]], on_path[0] if on_path else (), mode=self._mode)


def _of_the_value(own: Own, bad: list[int], point: Point) -> Iterator[Finding]:
    """For a function whose value is not finite, with the operation that made it so first."""
    program = own.program
    if not bad and (chosen := _written(own)):
        yield finding("nan", "warning", "written", [], chosen)
        return
    first = next(iter(_births(program.jaxpr, program.leaves, program.value, own.plain)), None)
    paths = [program.paths[leaf] for leaf in bad]
    chain = first.chain if first else ()
    what = None if first is None else "NaN" if first.numbers[1] else "infinite"
    more: dict[str, Any] = {"first": what, "dtype": "", "steps": steps_of([first] if first else [])}
    if is_finite(point.start):
        more |= {"dtype": str(own.program.out_avals[0].dtype), "lost": lost_in(own)}
    yield finding("nan", "error", "value", paths, chain, **more)


def _written(own: Own) -> Chain:
    """The selection that takes an infinity in which no leaf has a part, if the value is finite without such infinities.

    A density is zero outside of its support; its logarithm is infinite there because the function says so.
    """
    program = own.program
    if any(bool(np.isnan(output).any()) for output in own.plain):
        return ()

    def constant(chain: Chain) -> list[int]:
        """The numbers of the operands that a selection among floating numbers selects, and no leaf has a part in."""
        is_one = chain[-1].primitive.name == "select_n" and is_floating(chain[-1].outvars[0].aval)
        return [n for n, mask in enumerate(program.value.into(chain)) if n and not mask] if is_one else []

    def question(chain: Chain, operands: Operands, results: Operands) -> Any:
        taken = [jnp.isinf(results[0]) & (results[0] == operands[n]) for n in constant(chain)]
        return jnp.stack(taken).any().astype(jnp.int32)[None] - 1 if taken else None

    def without(chain: Chain, operands: Operands) -> Operands | None:
        numbers = constant(chain)
        finite = lambda x: jnp.where(jnp.isinf(x), jnp.zeros_like(x), x)
        return bind(chain[-1], [finite(x) if n in numbers else x for n, x in enumerate(operands)]) if numbers else None

    taken = probe(program.jaxpr, program.leaves, question)[1]
    if not taken:
        return ()
    outputs = quick_jit(lambda leaves: program.run(leaves, without))(program.leaves)
    return taken[0].chain if all(map(is_finite, outputs)) else ()
