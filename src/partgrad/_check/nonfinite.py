"""NaN and infinity in a derivative: which operation produces it first, and what fixes it."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from .. import safe
from .._double_where import double_where
from .._programs import (
    Chain,
    Dependence,
    Operands,
    Sources,
    any_equation,
    differentiably,
    is_custom_rule,
    is_floating,
    is_in_library,
    is_mutating,
    line,
    of_cotangents,
    quick_jit,
)
from .digits import first_losing
from .evaluation import Own, is_finite, tried
from .finding import Finding, Fix
from .names import element_of, finding, operation_of, steps_of
from .probe import Answer, probe
from .program import Array, Program
from .questions import Answer as Found, Search
from .reading import Agreement, Point
from .verdict import OK

# By primitive: the function to call instead, and its name.
_SAFE: dict[str, tuple[Callable[..., Any], str]] = {
    "sqrt": (safe.sqrt, "sqrt"),
    "log": (safe.log, "log"),
    "div": (safe.divide, "divide"),
    "pow": (safe.power, "power"),
    "acos": (safe.arccos, "arccos"),
    "asin": (safe.arcsin, "arcsin"),
    "atan2": (safe.arctan2, "arctan2"),
    "cbrt": (safe.cbrt, "cbrt"),
}
# Functions of JAX that are a single call in a jaxpr and have a safe counterpart.
_WHOLE = {"norm": "norm", "_std": "std", "std": "std", "_var": "var", "var": "var", "logsumexp": "logsumexp"}
# How far the derivative of a remedy may be off, relative to the slope, and in units of the noise of the differences.
_CONFIRMED, _NOISES = 1e-2, 10.0
# What two of these are if they are not called by their names.
_COMPOSED = {"norm": "the root of a sum of squares", "logsumexp": "the logarithm of a sum of exponentials"}
# Operations that may lie between a root and the squares under it, or between a logarithm and its exponentials.
_BETWEEN = frozenset({"reduce_sum", "mul", "integer_pow", "square", "convert_element_type", "broadcast_in_dim", "abs"})


def nonfinite(own: Own, point: Callable[[], Point]) -> Iterator[Finding]:
    """Findings for each leaf whose gradient, or else whose forward derivative, is not finite, the value's first."""
    program = own.program
    bad = [leaf for leaf, gradient in enumerate(own.gradients) if not is_finite(gradient)]
    if not own.is_finite:
        yield from _of_the_value(own, bad, point())
    if bad:
        births = _births_of_gradient(own) if program.cotangent is not None else []
        of = lambda function: own.gradients_of(function)
        yield from _NotFinite(own, point, "gradient", births, of).findings(bad)
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
    found = _births(program.cotangent, operands, program.pulled)
    if found or not any_equation(program.cotangent.jaxpr, is_mutating):
        return found
    # What goes through a mutable reference is not followed: everything may depend on everything.
    everything = differentiably(program.cotangent.jaxpr, [1] * len(operands))
    return _births(program.cotangent, operands, everything)


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
    derivative, operands = _along(program, [leaf], program.run)
    jaxpr = jax.make_jaxpr(derivative)(*operands)

    def of(function: Any) -> dict[int, Array] | None:
        derivative, operands = _along(program, [leaf], function)
        tangents = tried(derivative, *operands)
        return None if tangents is None else {leaf: np.concatenate([np.ravel(tangent) for tangent in tangents])}

    births = _births(jaxpr, operands, of_cotangents(jaxpr.jaxpr, 1))
    return _NotFinite(own, point, "forward-mode derivative", births, of)


def _births(jaxpr: ClosedJaxpr, operands: Operands, flowing: Dependence) -> list[Answer]:
    """Where a derivative first stops being finite, in order of execution."""

    def question(chain: Chain, operands: Operands, results: Operands) -> Any:
        if is_mutating(chain[-1]):
            return None
        return _birth(operands, flowing.into(chain), results)

    return probe(jaxpr, operands, question)[1]


def _birth(operands: Operands, masks: Sources, results: Operands) -> Any:
    """The element of the first result that is not finite although all operands are, and whether it is NaN."""
    flowing = [jnp.asarray(operand) for operand, mask in zip(operands, masks, strict=True) if mask]
    made = [jnp.asarray(result) for result in results if hasattr(result, "dtype") and _is_floating(result)]
    if not flowing or not made:
        return None
    finite = jnp.stack([True, *(jnp.isfinite(operand).all() for operand in flowing if _is_floating(operand))]).all()
    answers = []
    for result in made:
        bad = ~jnp.isfinite(jnp.ravel(result))
        first = jnp.argmax(bad) if bad.size else 0
        is_nan = jnp.isnan(jnp.ravel(result)[first]) if bad.size else False
        answers.append(jnp.stack([jnp.where(finite & bad.any(), first, -1), is_nan]).astype(jnp.int32))
    best = jnp.stack(answers)
    return best[jnp.argmax(best[:, 0] >= 0)]


def _is_floating(value: Any) -> bool:
    return is_floating(value) and value.dtype != jax.dtypes.float0


class _NotFinite:
    """A derivative that is not finite: where it first becomes NaN or infinite, and which remedy makes it finite.

    Each remedy is tried once. `of` gives the same derivative of another function, by leaf, or None if it has none.
    """

    def __init__(self, own: Own, point: Callable[[], Point], mode: str, births: list[Answer], of: Callable[[Any], Any]):
        self._own, self._point, self._program = own, point, own.program
        self._mode, self._births, self._of = mode, births, of
        self._tried: dict[Any, Any] = {}

    def findings(self, leaves: list[int]) -> Iterator[Finding]:
        """One for each leaf whose derivative is not finite, unless its value is to blame."""
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
            first, chain = births[0], program.origin(births[0].chain)
            alike = [birth for birth in births if program.origin(birth.chain) == chain]
            reason, more = self._remedy(leaf, chain)
            if reason not in ("not taken", "singular") and not self._own.is_finite:
                continue
            # A rule of a library that runs the user's code.
            at = first.chain if _is_rule_of_library(chain) and line(first.chain) else chain
            yield finding(
                "nan",
                "error",
                reason,
                [program.paths[leaf]],
                at,
                mode=self._mode,
                first="NaN" if first.numbers[1] else "infinite",
                element=element_of(int(first.numbers[0]), first.chain[-1].outvars[0].aval.shape),
                steps=steps_of(alike),
                **more,
            )

    def _births_of(self, leaf: int) -> list[Answer]:
        """Where the derivative of a leaf may first stop being finite."""
        origins = ((birth, self._program.origin(birth.chain)) for birth in self._births)
        return [birth for birth, origin in origins if not origin or leaf in self._program.leaves_into(origin)]

    def _from_nothing(self, leaf: int) -> Finding:
        """For a derivative that is not finite although no operation produced that: a rule returns it for any input."""
        program = self._program
        on_path = [c for c in program.smooth.chains if is_custom_rule(c[-1]) and leaf in program.leaves_into(c)]
        return finding("nan", "error", "rule", [program.paths[leaf]], on_path[0] if on_path else (), mode=self._mode)

    def _remedy(self, leaf: int, chain: Chain) -> tuple[str, dict[str, Any]]:
        """Why it is not finite, and what was tried."""
        wrapped = self._tried_with("double_where", double_where(self._program.outputs), leaf)
        if wrapped is not None and _is_confirmed(wrapped):
            return "not taken", {"fix": self._fix("f", "partgrad.double_where(f)", wrapped)}
        exact = self._point().gradient
        if self._mode == "gradient" and exact is not None and is_finite(exact[leaf]):
            return "rounding", {"dtype": str(self._program.leaves[leaf].dtype), "lost": _lost_in(self._own)}
        replaced = self._safe_function_for(leaf, chain) if chain else None
        if wrapped is not None and (wrapped.row.name != "wrong" and wrapped.row.name != "removable"):
            return "not taken", {"by": "partgrad.double_where(f)"}
        if wrapped is not None and wrapped.seen is not None and replaced is None:
            shown = wrapped.seen.reading.telling
            return "refuted", {"got": shown.got, "expected": shown.expected}
        if replaced is not None:
            name, found = replaced
            by = f"partgrad.safe.{name}"
            if _is_confirmed(found):
                own = operation_of(chain)
                written = own if own == name else _COMPOSED.get(name, own)
                return "singular", {"fix": self._fix(written, by, found), "by": by}
            return "singular", {"by": by}
        slope = self._slope(leaf)
        if slope is None:
            return "no remedy", {}
        is_rule = bool(chain) and is_custom_rule(chain[-1]) and not _is_rule_of_library(chain)
        return "smooth", {"slope": slope, "of_rule": is_rule}

    def _fix(self, replaces: str, by: str, found: Found) -> Fix:
        shown = found.seen.reading.telling if found.seen else Agreement("")
        return Fix(replaces, by, shown.got, None if found.row.name == "kink" else shown.expected)

    def _slope(self, leaf: int) -> float | None:
        """The slope by finite differences, if several elements along all of them; None if there is none."""
        point, direction = self._point(), [np.zeros_like(x) for x in self._point().leaves]
        # No two move alike: what is equal, as eigenvalues may be, does not stay so.
        strides = np.random.default_rng(0).uniform(0.5, 1.5, direction[leaf].shape)
        direction[leaf] += strides if direction[leaf].size > 1 else 1.0
        found = point.slope(direction)
        return None if found.kind.any() else float((point.weights * found.derivative).real.sum())

    def _safe_function_for(self, leaf: int, chain: Chain) -> tuple[str, Found] | None:
        """The safe function that makes the derivative finite if it replaces an operation, or all operations like it."""
        if chain[-1].primitive.name not in _SAFE:
            return None
        alike = {id(origin[-1]) for birth in self._births if (origin := self._program.origin(birth.chain))}
        for replaced in ({id(chain[-1])}, alike):
            found = self._tried_with(frozenset(replaced), self._replacing(replaced), leaf)
            if found is not None and found.row.name not in ("wrong", "removable", "modes", "not finite"):
                return self._spoken(chain), found
        return None

    def _replacing(self, replaced: set[int]) -> Any:
        def rule(chain: Chain, operands: Operands) -> Operands | None:
            if id(chain[-1]) not in replaced or chain[-1].primitive.name not in _SAFE:
                return None
            function, _ = _SAFE[chain[-1].primitive.name]
            return [function(*operands)]

        return lambda leaves: self._program.run(leaves, rule)

    def _spoken(self, chain: Chain) -> str:
        for equation in chain[:-1]:
            if str(equation.params.get("name")) in _WHOLE:
                return _WHOLE[str(equation.params["name"])]
        name = chain[-1].primitive.name
        if name == "sqrt" and self._comes_from(chain, {"mul", "integer_pow", "square"}):
            return "norm"
        if name == "log" and self._comes_from(chain, {"exp"}):
            return "logsumexp"
        return _SAFE[name][1]

    def _comes_from(self, chain: Chain, terms: set[str]) -> bool:
        """Whether the operand is a sum of certain terms, in whatever way it is written."""
        operand, is_sum = chain[-1].invars[0], False
        for other in reversed(self._program.siblings(chain)):
            if other.outvars and other.outvars[0] is operand:
                name = other.primitive.name
                if is_sum and name in terms:
                    return True
                if name not in _BETWEEN:
                    return False
                is_sum = is_sum or name == "reduce_sum"
                operand = other.invars[0]
        return False

    def _tried_with(self, key: Any, function: Any, leaf: int) -> Found | None:
        """What the differences say of a remedy; None if the derivative is not finite with it."""
        if key not in self._tried:
            self._tried[key] = self._of(function)
        found = self._tried[key]
        if found is None or not is_finite(found[leaf]):
            return None
        program, point = self._program, self._point()
        remedied = Program(function, program.leaves, program.paths)
        search = Search(point.of(point.exact.with_reverse_of(remedied)), np.random.default_rng(0), [leaf])
        search.look_around(1, False, lambda done, of: None)
        return search.answer(leaf, None)


def _is_confirmed(found: Found) -> bool:
    """Whether the differences confirm a remedy: its derivative is theirs, or at a kink between those of the sides."""
    if found.row.verdict != OK or found.row.name == "kink" or found.seen is None:
        return found.row.verdict == OK
    reading, shown = found.seen.reading, found.seen.reading.telling
    off, size = abs(shown.got - shown.expected), max(abs(shown.got), abs(shown.expected))
    return bool(off <= _CONFIRMED * size + _NOISES * reading.noise)


def _lost_in(own: Own) -> tuple[str, str] | None:
    """The operation that loses the digits, and its line."""
    chain = first_losing(own)
    return (operation_of(chain), line(chain)) if chain else None


def _is_rule_of_library(chain: Chain) -> bool:
    return bool(chain) and is_custom_rule(chain[-1]) and is_in_library(chain)


def _of_the_value(own: Own, bad: list[int], point: Point) -> Iterator[Finding]:
    """For a function whose value is not finite, with the operation that made it so first."""
    program = own.program
    first = next(iter(_births(program.jaxpr, program.leaves, program.value)), None)
    paths = [program.paths[leaf] for leaf in bad]
    chain = first.chain if first else ()
    what = None if first is None else "NaN" if first.numbers[1] else "infinite"
    more: dict[str, Any] = {"first": what, "dtype": "", "steps": steps_of([first] if first else [])}
    if is_finite(point.start):
        more |= {"dtype": str(own.plain[0].dtype), "lost": _lost_in(own)}
    yield finding("nan", "error", "value", paths, chain, **more)
