"""NaN and infinity in a derivative: which operation produces it first, and what fixes it."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import cached_property
from .._programs import (
    Chain,
    Operands,
    any_equation,
    bind,
    differentiably,
    feeding,
    ids,
    is_custom_rule,
    is_floating,
    is_in_library,
    is_mutating,
    line,
    of_cotangents,
    quick_jit,
)
from .births import asking, births_in
from .finding import Finding
from .names import element_of, finding, steps_of
from .own import Own, is_finite, pulled
from .point import Point
from .probe import Answer, probe, probing
from .program import Program
from .remedies import Cause, Derivative, Remedies, lost_in

# What is infinite in their derivatives is so in the value.
_PRODUCTS = frozenset({"mul", "integer_pow", "square", "dot_general"})
# Where an infinity among the operands makes a derivative NaN.
_MEETING = _PRODUCTS | {"div"}
# How far each element of a leaf is moved whose gradient is not finite.
_BESIDE = 1e-3


def nonfinite(own: Own, point: Callable[[], Point]) -> Iterator[Finding]:
    """Findings for each leaf whose gradient, or else whose forward derivative, is not finite, the value's first."""
    program = own.program
    bad = [leaf for leaf, gradient in enumerate(own.gradients) if not is_finite(gradient)]
    if not own.is_finite:
        yield from _of_the_value(own, bad, point())
    told: list[Cause] = []
    if bad:
        births = _births_of_gradient(own) if program.cotangent is not None else []
        of = lambda function: (pulled(function), [program.leaves, own.cotangents])
        derivative = Derivative("gradient", of, lambda results, leaf: results[leaf])
        of_gradient = _NotFinite(own, point, births, derivative)
        yield from of_gradient.findings(bad)
        told = of_gradient.told
    others = [leaf for leaf in range(len(program.leaves)) if leaf not in bad]
    if others and own.is_finite and program.tangent is not None and not _tangents_are_finite(point(), bad):
        # A zero tangent that meets an infinite derivative is NaN: where the gradient of others is not finite, that was
        # said, and what reverse mode gives here is right.
        try:
            yield from _of_tangents(own, point, others, told)
        except jax.errors.JaxRuntimeError:
            # What raises in forward mode, as `equinox.error_if` does in a rule, has a gradient all the same.
            return


def _births_of_gradient(own: Own) -> list[Answer]:
    program, operands = own.program, [*own.program.leaves, *own.cotangents]
    assert program.cotangent is not None
    found = births_in(program.cotangent, operands, program.pulled, own.gradients)
    if found or not any_equation(program.cotangent.jaxpr, is_mutating):
        return found
    # What goes through a mutable reference is not followed: everything may depend on everything.
    everything = differentiably(program.cotangent.jaxpr, [1] * len(operands))
    return births_in(program.cotangent, operands, everything, own.gradients)


def _tangents_are_finite(point: Point, bad: list[int]) -> bool:
    """Whether the forward derivative of all leaves is finite, or else that of the good ones with the bad ones moved."""
    ones = [np.ones_like(x) for x in point.leaves]
    along = [one * (leaf not in bad) for leaf, one in enumerate(ones)]
    if _is_finite(point.exact.forward(point.leaves, ones)):
        return True
    # Beside what is infinite there, it is finite, and hides nothing.
    by = [_BESIDE * np.random.default_rng(leaf).uniform(0.5, 1.5, x.shape) for leaf, x in enumerate(point.leaves)]
    moved = lambda side: [
        x + side * b * (leaf in bad) for leaf, (x, b) in enumerate(zip(point.leaves, by, strict=True))
    ]
    return bool(bad) and any(_is_finite(point.exact.forward(moved(side), along)) for side in (1, -1))


def _is_finite(tangents: Any) -> bool:
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


def _each_along(program: Program, leaves: list[int], function: Any) -> tuple[Callable[..., Operands], Operands]:
    """The same along each leaf alone, whose numbers are the first axis of the results: one program for all."""
    derivative, operands = _along(program, leaves, function)

    def each(*operands: Any) -> Operands:
        own, ones = operands[: len(leaves)], operands[len(leaves) :]
        single = lambda number: [jnp.where(number == other, one, 0 * one) for other, one in enumerate(ones)]
        return list(lax.map(lambda number: derivative(*own, *single(number)), jnp.arange(len(leaves))))

    return each, operands


def _is_finite_along(program: Program, leaves: list[int], held: list[Cause]) -> bool:
    """Whether the forward derivative along leaves is finite but for what some causes make of it."""
    origins = {ids(origin) for cause in held for origin in cause.origins}

    def rule(chain: Chain, operands: Operands) -> Operands | None:
        if ids(chain) not in origins:
            return None
        return list(bind(chain[-1], [lax.stop_gradient(x) if is_floating(x) else x for x in operands]))

    derivative, operands = _along(program, leaves, lambda leaves: program.run(leaves, rule))
    return all(map(is_finite, quick_jit(derivative)(*operands)))


def _of_tangents(own: Own, point: Callable[[], Point], leaves: list[int], told: list[Cause]) -> Iterator[Finding]:
    """Findings for each leaf whose forward derivative is not finite, unless the cause was told.

    All are asked by the same programs. Where only what another leaf meets is not finite, that hides what a leaf itself
    meets: such leaves are asked again without the other. Leaves that meet the same have the same remedies.
    """
    # Without a gradient that is not finite, it is known that something is not.
    is_known = not told
    while leaves and (is_known or not _is_finite_along(own.program, leaves, told)):
        groups: dict[Any, tuple[list[Answer], list[int]]] = {}
        hidden = []
        for leaf, births in _births_along(own.program, leaves):
            if births:
                groups.setdefault(tuple(ids(birth.chain) for birth in births), (births, []))[1].append(leaf)
            else:
                hidden.append(leaf)
        for births, alike in groups.values() if groups else [([], hidden)]:
            yield from _NotFinite(own, point, births, _forward(own.program, alike), told).findings(alike)
        leaves, is_known = (hidden if groups else []), False


def _forward(program: Program, leaves: list[int]) -> Derivative:
    """The forward derivative along each of some leaves."""
    part = lambda results, leaf: np.concatenate([np.ravel(result[leaves.index(leaf)]) for result in results])
    return Derivative("forward-mode derivative", functools.partial(_each_along, program, leaves), part)


def _births_along(program: Program, leaves: list[int]) -> Iterator[tuple[int, list[Answer]]]:
    """Each leaf along which the derivative is not finite, and where it stops being so, if the leaf goes there."""
    along, operands = _along(program, leaves, program.run)
    jaxpr = jax.make_jaxpr(along)(*operands)
    ask = probing(jaxpr, asking(of_cotangents(jaxpr.jaxpr, len(leaves))))
    own, ones = operands[: len(leaves)], operands[len(leaves) :]
    for number, leaf in enumerate(leaves):
        tangents, births = ask([*own, *(one * (other == number) for other, one in enumerate(ones))])
        if not all(map(is_finite, tangents)):
            yield leaf, _reached(program, births, leaf)


def _reached(program: Program, births: list[Answer], leaf: int) -> list[Answer]:
    """The births where the derivative of a leaf may first stop being finite."""
    origins = ((birth, program.origin(birth.chain)) for birth in births)
    reached = [birth for birth, origin in origins if not origin or leaf in program.leaves_into(origin)]
    # What goes through a mutable reference is not followed.
    return reached or [birth for birth in births if any_equation(program.jaxpr.jaxpr, is_mutating)]


def _place_of(chain: Chain) -> Any:
    """The line of an equation, or the equation if there is no line: one cause."""
    return line(chain) or ids(chain)


class _NotFinite:
    """A derivative that is not finite: where it first becomes NaN or infinite, and which remedy makes it finite."""

    def __init__(
        self,
        own: Own,
        point: Callable[[], Point],
        births: list[Answer],
        derivative: Derivative,
        known: Sequence[Cause] = (),
    ):
        self._own, self._program, self._mode = own, own.program, derivative.mode
        self._known, self._found = set(map(self._key, known)), set[Any]()
        self._births = births
        self._numbers: dict[Any, int] = {}
        self._remedies = Remedies(own, point, derivative, self._grouped(births))

    def findings(self, leaves: list[int]) -> Iterator[Finding]:
        """One for each cause of a leaf whose derivative is not finite, unless its value is to blame.

        And what else is wrong with such a leaf once remedies make its derivative finite.
        """
        program = self._program
        for leaf in leaves:
            births = _reached(program, self._births, leaf)
            if not births:
                if self._own.is_finite:
                    yield self._from_nothing(leaf)
                continue
            causes = self._grouped(births)
            if all(map(self._is_known, causes)):
                continue
            for cause, (reason, more) in self._remedies.of(leaf, causes):
                is_unsure = reason not in ("not taken", "singular") and not self._own.is_finite
                if is_unsure or self._is_known(cause):
                    continue
                self._found.add(self._key(cause))
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
                    first="NaN" if self._is_nan(first, cause.chain, of_value) else "infinite",
                    of_value=of_value,
                    meets_nan=not of_value and first.numbers[2] == 1 and _is_product(cause.chain),
                    element=() if of_value else element,
                    steps=steps_of(alike),
                    **more,
                )
        yield from self._remedies.others

    def _is_nan(self, first: Answer, chain: Chain, of_value: bool) -> bool:
        """Whether it is NaN that an operation makes, in the value or in the derivative."""
        return chain in self._births_of_value[0] if of_value else bool(first.numbers[1])

    @property
    def told(self) -> list[Cause]:
        """The causes that were found so far, each with all of its births."""
        return [cause for cause in self._grouped(self._births) if self._key(cause) in self._found]

    def _is_known(self, cause: Cause) -> bool:
        return bool(cause.chain) and self._key(cause) in self._known

    def _key(self, cause: Cause) -> Any:
        return _place_of(self._place(cause.births[0], cause.chain))

    @cached_property
    def _births_of_value(self) -> tuple[list[Chain], list[Chain]]:
        """The operations that make NaN, and infinities, of what is finite, in a value that a derivative needs.

        Only those that such a value depends on are asked: to ask each of a program takes long to compile.
        """
        program, flow = self._program, self._program.value
        needed = [program.origin(birth.chain) for birth in self._births if self._needs(birth)]
        asked = {ids(chain) for into in needed if into for chain in feeding(program.jaxpr.jaxpr, flow.chains, into)}
        found = births_in(program.jaxpr, program.leaves, flow, self._own.plain, asked)
        with_lines = [birth for birth in found if line(birth.chain)]
        # What adds an infinity, as a mask, does not make it.
        made = [b.chain for b in with_lines if not b.numbers[1] and not b.numbers[2]]
        return [b.chain for b in with_lines if b.numbers[1]], made

    def _needs(self, birth: Answer) -> bool:
        """Whether a value of the function that is not finite makes a derivative NaN, and not the operation itself."""
        _, is_nan, of_value = birth.numbers
        origin = self._program.origin(birth.chain) if of_value else ()
        is_met = bool(origin) and origin[-1].primitive.name in _MEETING
        return bool(origin and (of_value == 1 or (is_nan and is_met)))

    def _origins(self, birth: Answer) -> list[Chain]:
        """The operation whose derivative is not finite; or those that made a NaN among the values that it needs."""
        chain, of_value = self._program.origin(birth.chain), birth.numbers[2]
        if not self._needs(birth):
            return [chain]
        feed = lambda made: feeding(self._program.jaxpr.jaxpr, made, chain) if made else []
        nans, infinities = self._births_of_value
        return (feed(nans) if of_value == 1 else []) or feed(infinities) or [chain]

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
            key = _place_of(place)
            number = self._numbers.setdefault(key, len(self._numbers))
            cause = causes.setdefault(key, Cause(number, origin, [], []))
            cause.births.append(birth)
            cause.origins.append(origin)
        return list(causes.values())

    def _from_nothing(self, leaf: int) -> Finding:
        """For a derivative that is not finite although no operation produced that: a rule returns it for any input."""
        program = self._program
        on_path = [c for c in program.smooth.chains if is_custom_rule(c[-1]) and leaf in program.leaves_into(c)]
        return finding("nan", "error", "rule", [program.paths[leaf]], on_path[0] if on_path else (), mode=self._mode)


def _is_product(chain: Chain) -> bool:
    return bool(chain) and chain[-1].primitive.name in _PRODUCTS


def _of_the_value(own: Own, bad: list[int], point: Point) -> Iterator[Finding]:
    """For a function whose value is not finite, with the operation that made it so first."""
    program = own.program
    if not bad and (chosen := _written(own)):
        yield finding("nan", "warning", "written", [], chosen)
        return
    first = _first_in_value(own)
    chain = first.chain if first else ()
    # Those that flow into that operation, and those whose gradient is not finite because of it.
    into = program.leaves_into(chain, program.value) if first else ()
    paths = [path for leaf, path in enumerate(program.paths) if leaf in bad or leaf in into]
    what = None if first is None else "NaN" if first.numbers[1] else "infinite"
    more: dict[str, Any] = {"first": what, "dtype": "", "steps": steps_of([first] if first else [])}
    if is_finite(point.start):
        results = chain[-1].outvars if chain else program.out_avals
        more |= {"dtype": str(getattr(results[0], "aval", results[0]).dtype), "lost": lost_in(own)}
    yield finding("nan", "error", "value", paths, chain, **more)


def _first_in_value(own: Own) -> Answer | None:
    """Where the value first stops being finite; not where an infinity comes in that is meant, as in a mask."""
    ask = functools.partial(births_in, own.program.jaxpr, own.program.leaves, own.program.value, own.plain)
    births = ask()
    made = [birth for birth in births if birth.numbers[1] or not birth.numbers[2]]
    is_nan = any(bool(np.isnan(output).any()) for output in own.plain)
    return next(iter(made or (ask(of_nan=True) if births and is_nan else []) or births), None)


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
