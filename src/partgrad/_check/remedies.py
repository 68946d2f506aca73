"""What makes a derivative finite that is not: each remedy is tried, and compared with the differences.

A cause is a line at which a derivative becomes NaN or infinite. If there are several, each is tried alone, with the
operands of the others held: only what still is not finite then is a cause, and where `double_where` helps, the value
does not take its path.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import safe
from .._compat import cached_property
from .._double_where import double_where
from .._programs import Chain, Operands, bind, has_rule_outside_jax, is_custom_rule, is_floating, is_in_library, line
from .agreement import Agreement
from .compare import SPECTRAL, Comparison
from .digits import first_losing
from .exact import Exact
from .finding import Finding, Fix
from .names import operation_of
from .own import Own, is_finite, tried
from .point import Point
from .probe import Answer
from .program import Array, Program
from .questions import Answer as Found, Search
from .rules import Rules
from .verdict import OK, Evidence, row_of

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

# The rows of derivatives that differences refute, and of remedies that do not help.
_WRONG = ("wrong", "removable")
_WORSE = (*_WRONG, "modes", "not finite")
# What may be wrong with a leaf besides, and what is known of the remedy then: differences tell nothing of it.
_OTHER_CAUSES = ("rule", "rule value", "rule stop", "stop", "mark", "stop beside", "unconverged")
_UNTOLD = Evidence(sides="noise", match="unknown")

# What a derivative is called, and why it is not finite, with details.
Reason = tuple[str, dict[str, Any]]


class Derivative(NamedTuple):
    """A derivative of any function of the leaves.

    Attributes:
        mode: What it is called.
        of: The derivative of a function, and its operands.
        part: The part of its results that belongs to a leaf.
    """

    mode: str
    of: Callable[[Any], tuple[Callable[..., Operands], Operands]]
    part: Callable[[Operands, int], Array]


class Cause(NamedTuple):
    """A line at which a derivative becomes NaN or infinite.

    Attributes:
        number: Which of the causes of a derivative it is.
        chain: The first operation there whose derivative does; empty if it is unknown.
        births: Where the derivative does, in order of execution.
        origins: The operations of the function from which these are derived.
    """

    number: int
    chain: Chain
    births: list[Answer]
    origins: list[Chain]


class Remedies:
    """The remedies for the causes of a derivative that is not finite. Each is tried once."""

    def __init__(self, own: Own, point: Callable[[], Point], derivative: Derivative, causes: list[Cause]):
        self._own, self._point, self._program = own, point, own.program
        self._derivative, self._causes = derivative, causes
        self._tried: dict[Any, Operands | None] = {}
        # What else is wrong with derivatives once they are finite.
        self.others: list[Finding] = []
        # The function, with the reverse derivative of a remedy.
        self._remedied: dict[Any, Exact] = {}

    def of(self, leaf: int, causes: list[Cause]) -> list[tuple[Cause, Reason]]:
        """Each cause for a leaf, why the derivative is not finite there, and what was tried."""
        real = [cause for cause in causes if self._is_finite_with(cause, leaf) is False]
        told, wrapped = real or causes[:1], self._wrapped(leaf)
        if (shared := self._of_all(leaf, wrapped)) is not None:
            return [(cause, shared) for cause in told]
        if len(told) == 1:
            (cause,) = told
            alike = cause.origins if real else [origin for one in self._causes for origin in one.origins]
            return [(cause, self._of_one(leaf, cause, alike, wrapped))]
        if wrapped is not None:
            return [(cause, self._undecided(wrapped)) for cause in told]
        return self._of_several(leaf, told)

    def _of_all(self, leaf: int, wrapped: Found | None) -> Reason | None:
        """What explains all causes at once: that the value takes none of their paths, or that digits are lost."""
        if wrapped is not None and is_confirmed(wrapped):
            return self._unwrapped(wrapped)
        return self._rounding(leaf) if self._is_rounding(leaf) else None

    @cached_property
    def _rules(self) -> Rules:
        return Rules(self._program)

    # --- one cause ---------------------------------------------------------------------------------------------------

    def _of_one(self, leaf: int, cause: Cause, alike: list[Chain], wrapped: Found | None) -> Reason:
        replaced = None
        # Those of all leaves at that line come first: they are tried once.
        at_line = [origin for one in self._causes if one.number == cause.number for origin in one.origins]
        for origins in (at_line, [cause.chain], alike):
            if replaced is None and cause.chain and _has_safe(cause.chain):
                replaced = self._replaced(leaf, origins)
        if wrapped is not None and (replaced is None or wrapped.row.name not in _WRONG):
            return self._undecided(wrapped)
        return self._singular(cause, replaced, ()) if replaced is not None else self._without_remedy(leaf, cause)

    def _wrapped(self, leaf: int) -> Found | None:
        program = self._program
        # What the function itself writes to references would change what differences start from.
        function = program.run if program.is_mutating else program.outputs
        return self._answer("double_where", double_where(function), leaf)

    def _unwrapped(self, wrapped: Found) -> Reason:
        return "not taken", {"fix": fix_of("f", "partgrad.double_where(f)", wrapped)}

    def _undecided(self, wrapped: Found) -> Reason:
        """What is said of `double_where` where the differences do not confirm it."""
        if wrapped.seen is not None and wrapped.seen.is_outside:
            return "no remedy", {}
        if wrapped.row.name not in _WRONG or wrapped.seen is None:
            return "not taken", {"by": "partgrad.double_where(f)", "has_others": wrapped.evidence is _UNTOLD}
        shown = wrapped.seen.reading.telling
        return "refuted", {"got": shown.got, "expected": shown.expected}

    def _is_rounding(self, leaf: int) -> bool:
        exact = self._point().gradient
        return self._derivative.mode == "gradient" and exact is not None and is_finite(exact[leaf])

    def _rounding(self, leaf: int) -> Reason:
        return "rounding", {"dtype": str(self._program.leaves[leaf].dtype), "lost": lost_in(self._own)}

    def _replaced(self, leaf: int, origins: list[Chain], *, wrap: bool = False) -> Found | None:
        """What the safe functions in place of some operations give, if that is a derivative."""
        replaced = {id(origin[-1]) for origin in origins if origin}
        function = self._replacing(replaced)
        found = self._answer((frozenset(replaced), wrap), double_where(function) if wrap else function, leaf)
        return None if found is None or found.row.name in _WORSE else found

    def _singular(self, cause: Cause, found: Found, beside: tuple[str, ...]) -> Reason:
        name = self._spoken(cause.chain)
        by = f"partgrad.safe.{name}"
        if not is_confirmed(found):
            return "singular", {"by": by}
        own = operation_of(cause.chain)
        written = own if own == name else _COMPOSED.get(name, own)
        return "singular", {"fix": fix_of(written, by, found, beside), "by": by}

    def _without_remedy(self, leaf: int, cause: Cause) -> Reason:
        found = self._slope(leaf)
        if found is None:
            return "no remedy", {}
        slope, is_defined = found
        if not is_defined:
            return "edge", {"slope": slope}
        is_rule = bool(cause.chain) and has_rule_outside_jax(cause.chain[-1]) and not is_in_library(cause.chain)
        return "smooth", {"slope": slope, "of_rule": is_rule}

    # --- several causes ----------------------------------------------------------------------------------------------

    def _of_several(self, leaf: int, causes: list[Cause]) -> list[tuple[Cause, Reason]]:
        """Of several causes, which the value takes, and what all their remedies do together."""
        taken = [cause for cause in causes if self._is_finite_with(cause, leaf, wrap=True) is not True]
        needs_wrap = len(taken) < len(causes)
        helped = [cause for cause in taken if cause.chain and _has_safe(cause.chain)]
        origins = [origin for cause in helped for origin in cause.origins]
        found = self._replaced(leaf, origins, wrap=needs_wrap) if len(helped) == len(taken) else None
        reasons: list[tuple[Cause, Reason]] = []
        for cause in causes:
            others = tuple(
                f"write `partgrad.safe.{self._spoken(other.chain)}` at {line(other.chain)}"
                for other in helped
                if other is not cause
            )
            reason: Reason
            if cause not in taken and found is not None and is_confirmed(found):
                reason = "not taken", {"fix": fix_of("f", "partgrad.double_where(f)", found, others)}
            elif cause not in taken:
                reason = "beside", {"others": _lines(taken)}
            elif found is not None:
                wrap = ("differentiate `partgrad.double_where(f)`",) * needs_wrap
                reason = self._singular(cause, found, (*wrap, *others))
            else:
                reason = self._without_remedy(leaf, cause)
            reasons.append((cause, reason))
        return reasons

    def _is_finite_with(self, cause: Cause, leaf: int, *, wrap: bool = False) -> bool | None:
        """Whether the derivative is finite if this is the only cause; None if that cannot be tried."""
        if len(self._causes) == 1:
            return False
        if ("alone", wrap) not in self._tried:
            self._tried["alone", wrap] = self._alone(wrap)
        found = self._tried["alone", wrap]
        return None if found is None else is_finite(self._derivative.part([part[cause.number] for part in found], leaf))

    def _alone(self, wrap: bool) -> Operands | None:
        """The derivatives with each cause alone, in one program: the operands of the other causes are held."""
        places = {_ids(origin): cause.number for cause in self._causes for origin in cause.origins}

        def with_only(place: Any, leaves: Operands) -> Operands:
            def rule(chain: Chain, operands: Operands) -> Operands | None:
                if (own := places.get(_ids(chain))) is None:
                    return None
                hold = lambda x: jnp.where(place == own, x, lax.stop_gradient(x)) if is_floating(x) else x
                return list(bind(chain[-1], list(map(hold, operands))))

            return self._program.run(leaves, rule)

        def derivatives(*operands: Any) -> Operands:
            def at(place: Any) -> Operands:
                function = lambda leaves: with_only(place, leaves)
                return self._derivative.of(double_where(function) if wrap else function)[0](*operands)

            return list(lax.map(at, jnp.arange(len(self._causes))))

        return tried(derivatives, *self._derivative.of(self._program.run)[1])

    # --- trying ------------------------------------------------------------------------------------------------------

    def _answer(self, key: Any, function: Any, leaf: int) -> Found | None:
        """What the differences say of a remedy; None if the derivative is not finite with it."""
        if key not in self._tried:
            derivative, operands = self._derivative.of(function)
            self._tried[key] = tried(derivative, *operands)
        found = self._tried[key]
        if found is None or not is_finite(self._derivative.part(found, leaf)):
            return None
        point = self._point()
        if key not in self._remedied:
            remedied = Program(function, self._program.leaves, self._program.paths)
            self._remedied[key] = point.exact.with_derivatives_of(remedied, forward=False)
        search = Search(point.of(self._remedied[key]), np.random.default_rng(0), [leaf])
        search.look_around(1, False, lambda done, of: None)
        answer = search.answer(leaf)
        is_spectral = any(cause.chain and cause.chain[-1].primitive.name in SPECTRAL for cause in self._causes)
        if is_spectral and answer.row.name == "kink" and answer.seen and (seen := search.outside(leaf, answer.seen)):
            evidence = answer.evidence._replace(sides="equal", match="off")
            answer = answer._replace(seen=seen, evidence=evidence, row=row_of(evidence))
        return answer if answer.row.name not in _WORSE else self._with_other_causes(search, leaf, answer)

    def _with_other_causes(self, search: Search, leaf: int, answer: Found) -> Found:
        """The answer on a remedy that differences refute, if all that is left has causes of its own."""
        comparison = Comparison(self._own, search, self._rules, {leaf: answer})
        others = [found for found in comparison.findings() if found.reason in _OTHER_CAUSES]
        self.others += others
        return answer._replace(evidence=_UNTOLD, row=row_of(_UNTOLD)) if others else answer

    def _slope(self, leaf: int) -> tuple[float, bool] | None:
        """The slope by finite differences, if several elements along all of them, and whether both sides have it.

        None if there is none.
        """
        point, direction = self._point(), [np.zeros_like(x) for x in self._point().leaves]
        # No two move alike: what is equal, as eigenvalues may be, does not stay so.
        strides = np.random.default_rng(0).uniform(0.5, 1.5, direction[leaf].shape)
        direction[leaf] += strides if direction[leaf].size > 1 else 1.0
        found = point.slope(direction)
        if found.kind.any():
            return None
        slope = float((point.weights * found.derivative).real.sum())
        return slope, point.is_defined_beside(direction, min(found.steps))

    # --- names -------------------------------------------------------------------------------------------------------

    def _replacing(self, replaced: set[int]) -> Any:
        def rule(chain: Chain, operands: Operands) -> Operands | None:
            if id(chain[-1]) not in replaced or not _has_safe(chain):
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


def _lines(causes: list[Cause]) -> str:
    lines = [line(cause.chain) for cause in causes if line(cause.chain)]
    return f" at {', '.join(lines)}" if lines else ""


def _has_safe(chain: Chain) -> bool:
    return chain[-1].primitive.name in _SAFE


def _ids(chain: Chain) -> tuple[int, ...]:
    """An equation, or the custom rule that it is in, which is not entered."""
    rules = [number for number, equation in enumerate(chain, 1) if is_custom_rule(equation)]
    return tuple(id(equation) for equation in chain[: rules[0] if rules else None])


def fix_of(replaces: str, by: str, found: Found, beside: tuple[str, ...] = ()) -> Fix:
    """The fix that was tried, with the numbers of the reading that shows it."""
    shown = found.seen.reading.telling if found.seen else Agreement("")
    return Fix(replaces, by, shown.got, None if found.row.name == "kink" else shown.expected, beside)


def is_confirmed(found: Found) -> bool:
    """Whether the differences confirm a remedy: its derivative is theirs, or at a kink between those of the sides."""
    if found.row.verdict != OK or found.row.name == "kink" or found.seen is None:
        return found.row.verdict == OK
    reading, shown = found.seen.reading, found.seen.reading.telling
    off, size = abs(shown.got - shown.expected), max(abs(shown.got), abs(shown.expected))
    return bool(np.isfinite(off) and off <= _CONFIRMED * size + _NOISES * reading.noise)


def lost_in(own: Own) -> tuple[str, str] | None:
    """The operation that loses the digits, and its line."""
    chain = first_losing(own)
    return (operation_of(chain), line(chain)) if chain else None
