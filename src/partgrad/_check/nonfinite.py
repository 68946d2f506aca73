"""NaN and infinity in a derivative: which operation produces it first, and what fixes it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from ... import safe
from ..._double_where import double_where
from ..._programs import (
    Chain,
    Dependence,
    Operands,
    Sources,
    is_custom_rule,
    is_floating,
    is_in_library,
    line,
    of_cotangents,
)
from ..derivatives.search import LeafDerivative, derivatives
from ..evidence import Array, Evidence, at, element, is_finite, name_of, steps_of, tried
from ..finding import Finding
from ..numbered import NumberedProgram
from ..probe import Answer, probe
from ..quick import quick_jit

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
# Operations that may lie between a root and the squares under it, or between a logarithm and its exponentials.
_BETWEEN = frozenset({"reduce_sum", "mul", "integer_pow", "square", "convert_element_type", "broadcast_in_dim", "abs"})


def nan(evidence: Evidence) -> Iterator[Finding]:
    """One finding for each leaf whose gradient, or else whose forward derivative, is not finite."""
    program = evidence.program
    bad = [leaf for leaf, gradient in enumerate(evidence.gradients) if not is_finite(gradient)]
    if bad:
        operands = [*program.leaves, *evidence.cotangents]
        births = _births(program.cotangent, operands, evidence.pulled)
        yield from _NotFinite(evidence, "gradient", births, evidence.gradients_of).findings(bad)
    elif not evidence.value_is_finite:
        yield _of_the_value(evidence)
    if evidence.value_is_finite and program.has_forward and not _tangent_is_finite(evidence):
        others = [leaf for leaf in range(len(program.leaves)) if leaf not in bad]
        # First together, then one by one.
        if len(others) == 1 or (others and not _is_finite_along(evidence, others)):
            for leaf in others:
                if not _is_finite_along(evidence, [leaf]):
                    yield from _forward(evidence, leaf).findings([leaf])


def _tangent_is_finite(evidence: Evidence) -> bool:
    """Whether the forward derivative of all leaves together is finite."""
    tangents = evidence.point.exact.forward(evidence.point.leaves, [np.ones_like(x) for x in evidence.point.leaves])
    return tangents is not None and is_finite(tangents)


def _along(evidence: Evidence, leaves: list[int], function: Any) -> tuple[Callable[..., Operands], Operands]:
    """The forward derivative of a function of all leaves along some of them, as a function, and its operands.

    The other leaves are constants, so no zero tangents of theirs are multiplied.
    """
    own = [evidence.program.leaves[leaf] for leaf in leaves]

    def derivative(*operands: Any) -> Operands:
        def of_own(*own: Any) -> Any:
            replaced = dict(zip(leaves, own, strict=True))
            return function([replaced.get(leaf, value) for leaf, value in enumerate(evidence.program.leaves)])

        return list(jax.jvp(of_own, operands[: len(own)], operands[len(own) :])[1])

    return derivative, [*own, *(np.ones(x.shape, x.dtype) for x in own)]


def _is_finite_along(evidence: Evidence, leaves: list[int]) -> bool:
    derivative, operands = _along(evidence, leaves, evidence.program.run)
    return all(map(is_finite, quick_jit(derivative)(*operands)))


def _forward(evidence: Evidence, leaf: int) -> "_NotFinite":
    derivative, operands = _along(evidence, [leaf], evidence.program.run)
    jaxpr = jax.make_jaxpr(derivative)(*operands)

    def of(function: Any) -> Mapping[int, Array] | None:
        derivative, operands = _along(evidence, [leaf], function)
        tangents = tried(derivative, *operands)
        return None if tangents is None else {leaf: np.concatenate([np.ravel(tangent) for tangent in tangents])}

    births = _births(jaxpr, operands, of_cotangents(jaxpr.jaxpr, 1))
    return _NotFinite(evidence, "forward-mode derivative", births, of)


def _births(jaxpr: ClosedJaxpr, operands: Operands, flowing: Dependence) -> list[Answer]:
    """Where a derivative first stops being finite, in order of execution."""

    def question(chain: Chain, operands: Operands, results: Operands) -> Any:
        return _birth(operands, flowing.into(chain), results)

    return probe(jaxpr, operands, question)


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

    def __init__(self, evidence: Evidence, name: str, births: list[Answer], of: Callable[[Any], Any]):
        self._evidence, self._program = evidence, evidence.program
        self._name, self._births, self._of = name, births, of
        self._tried: dict[Any, Any] = {}
        # By leaf: a remedy that makes its derivative finite but, according to differences, wrong.
        self._refuted: dict[int, LeafDerivative] = {}

    def findings(self, leaves: list[int]) -> Iterator[Finding]:
        """The message for each leaf whose derivative is not finite."""
        evidence, program = self._evidence, self._program
        for leaf in leaves:
            own = self._own(leaf)
            if not own:
                yield self._from_nothing(leaf) if evidence.value_is_finite else _of_the_value(evidence, leaf)
                continue
            first, chain = own[0], program.origin(own[0].chain)
            advice = self._advice(leaf, chain)
            if advice is None and not evidence.value_is_finite:
                yield _of_the_value(evidence, leaf)
                continue
            again = [b.steps for b in own if program.origin(b.chain) == chain]
            what = "NaN" if first.numbers[1] else "infinite"
            place = f"{element(int(first.numbers[0]), first.chain[-1].outvars[0].aval.shape)}{steps_of(again)}"
            where = line(chain)
            by = f"the derivative of {name_of(chain[-1])} at {where}" if chain else "an operation outside your code"
            if _is_rule_of_library(chain) and line(first.chain):
                # It runs the user's code.
                where = line(first.chain)
                by = f"the derivative of what is at {where}"
            begin = f"the {self._name} is not finite: first {what} in {by}{place}."
            advice = advice or _without_remedy(evidence, leaf, chain, self._refuted.get(leaf))
            yield Finding("nan", "error", program.paths[leaf], where, f"{begin} {advice}")

    def _own(self, leaf: int) -> list[Answer]:
        """Where the derivative of a leaf may first stop being finite."""
        origins = ((birth, self._program.origin(birth.chain)) for birth in self._births)
        return [birth for birth, origin in origins if not origin or leaf in self._evidence.leaves_into(origin)]

    def _from_nothing(self, leaf: int) -> Finding:
        """The message for a derivative that no operation made so: a rule returns it, whatever it is given."""
        evidence = self._evidence
        on_path = [c for c in evidence.smooth.chains if is_custom_rule(c[-1]) and leaf in evidence.leaves_into(c)]
        rules = ", ".join(dict.fromkeys(map(at, on_path)))
        message = (
            f"the {self._name} is not finite, and no operation on its way made it so: a derivative rule returns it, "
            f"whatever it is given. Fix: correct that rule{f', that of {rules}' if rules else ''}."
        )
        return Finding("nan", "error", self._program.paths[leaf], line(on_path[0]) if on_path else "", message)

    def _advice(self, leaf: int, chain: Chain) -> str | None:
        """A remedy that was tried and makes the derivative finite, and equal to the slope of the function."""
        if self._mends("double_where", double_where(self._program.outputs), leaf):
            return (
                "The value does not take this path. Fix: differentiate `partgrad.double_where(f)`; tried, and its "
                "derivative is finite."
            )
        name = self._safe_function_for(leaf, chain) if chain else None
        if name is None:
            return None
        return (
            f"The value takes this path, and the function has no derivative here. Fix: `partgrad.safe.{name}` has one "
            "by convention; tried, and it makes the derivative finite."
        )

    def _safe_function_for(self, leaf: int, chain: Chain) -> str | None:
        """The safe function that makes the derivative finite if it replaces an operation, or all operations like it."""
        if chain[-1].primitive.name not in _SAFE:
            return None
        alike = {id(origin[-1]) for birth in self._births if (origin := self._program.origin(birth.chain))}
        for replaced in ({id(chain[-1])}, alike):
            if self._mends(frozenset(replaced), self._replacing(replaced), leaf):
                return self._spoken(chain)
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
        for other in reversed(self._evidence.siblings(chain)):
            if other.outvars and other.outvars[0] is operand:
                name = other.primitive.name
                if is_sum and name in terms:
                    return True
                if name not in _BETWEEN:
                    return False
                is_sum = is_sum or name == "reduce_sum"
                operand = other.invars[0]
        return False

    def _mends(self, key: Any, function: Any, leaf: int) -> bool:
        if key not in self._tried:
            self._tried[key] = self._of(function)
        found = self._tried[key]
        if found is None or not is_finite(found[leaf]):
            return False
        wrong = self._disagreement(function, leaf)
        if wrong is not None and key == "double_where":
            self._refuted[leaf] = wrong
        return wrong is None

    def _disagreement(self, function: Any, leaf: int) -> LeafDerivative | None:
        """Where finite differences say that a gradient, though finite, is wrong."""
        program, point = self._program, self._evidence.point
        remedied = NumberedProgram(function, program.leaves, program.paths)
        exact = point.exact.with_reverse_of(remedied)
        others = set(range(len(program.leaves))) - {leaf}
        found = derivatives(remedied, point.of(exact), np.random.default_rng(0), directions=1, skipped=others)
        return found[leaf] if found[leaf].status == "mismatch" else None


def _without_remedy(evidence: Evidence, leaf: int, chain: Chain, refuted: LeafDerivative | None) -> str:
    if refuted is not None:
        return (
            f"The value does not take this path; without it the derivative would be {refuted.got:.6g}, and finite "
            f"differences give {refuted.expected:.6g}: the function is smooth here, and the branch it takes does "
            "not have its slope. Fix: give that branch the slope of the points beside it, or write a custom rule."
        )
    slope = evidence.slope(leaf)
    if slope is None:
        return (
            "The value takes this path: a true singularity, which neither `double_where` nor a `safe` function "
            "removes. Fix: keep the point away from it, or write the function so that it is smooth here."
        )
    is_rule = chain and is_custom_rule(chain[-1]) and not _is_rule_of_library(chain)
    by = "The rule is at fault: the" if is_rule else "The"
    return (
        f"{by} function is smooth here, and finite differences give a slope of {slope:.6g}. "
        f"Fix: {'correct the rule, or ' * bool(is_rule)}write the function so that each of its steps has a derivative."
    )


def _is_rule_of_library(chain: Chain) -> bool:
    return bool(chain) and is_custom_rule(chain[-1]) and is_in_library(chain)


def _of_the_value(evidence: Evidence, leaf: int | None = None) -> Finding:
    """The message for a function whose value is not finite."""
    first = next(iter(_births(evidence.program.jaxpr, evidence.program.leaves, evidence.value)), None)
    by = f"; it first became so in {at(first.chain)}{steps_of([first.steps])}" if first else ""
    remedy = "make the value finite first; no gradient is meaningful there."
    message = f"the value of the function is not finite{by}. Fix: {remedy}"
    path = "" if leaf is None else evidence.program.paths[leaf]
    return Finding("nan", "error", path, line(first.chain) if first else "", message)
