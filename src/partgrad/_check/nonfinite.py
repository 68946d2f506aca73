"""NaN and infinity in a derivative: which operation made it first, and what mends it."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from .. import safe
from .._double_where import double_where
from .._programs import Operands, is_floating
from . import flow
from .evidence import Array, Evidence, at, element, is_finite, steps_of
from .finding import Finding
from .probe import Answer, probe
from .program import Chain
from .source import line

# By primitive: what to call in its place, and the name to suggest.
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
# Functions of JAX that are one call in a jaxpr, and have one safe counterpart.
_WHOLE = {"norm": "norm", "_std": "std", "std": "std", "_var": "var", "var": "var", "logsumexp": "logsumexp"}
# What lies between a root and the squares that it is the root of, or between a logarithm and its exponentials.
_BETWEEN = frozenset({"reduce_sum", "mul", "integer_pow", "square", "convert_element_type", "broadcast_in_dim", "abs"})


def nonfinite(evidence: Evidence) -> Iterator[Finding]:
    """One finding for each leaf whose gradient, or else whose forward derivative, is not finite."""
    program = evidence.program
    bad = [leaf for leaf, gradient in enumerate(evidence.gradients) if not is_finite(gradient)]
    if bad:
        operands = [*program.leaves, *evidence.cotangents]
        births = _births(program.cotangent, operands, len(evidence.cotangents))
        yield from _of_derivative(evidence, bad, births, _Remedies(evidence, births), "gradient")
    elif not evidence.value_is_finite:
        yield _of_the_value(evidence)
    if evidence.value_is_finite:
        yield from _forward(evidence, [leaf for leaf in range(len(program.leaves)) if leaf not in bad])


def _forward(evidence: Evidence, leaves: list[int]) -> Iterator[Finding]:
    """One finding for each leaf along which the forward derivative is not finite; together first, then one by one."""
    along = _Along(evidence, leaves)
    if not leaves or along.is_finite():
        return
    for leaf in leaves:
        along = _Along(evidence, [leaf])
        if not along.is_finite():
            births = _births(along.jaxpr, along.operands, 1)
            remedies = _ForwardRemedies(evidence, births, along)
            yield from _of_derivative(evidence, [leaf], births, remedies, "forward-mode derivative")


class _Along:
    """The forward derivative along some leaves; the others are constants of it, and so have no zeros to multiply by."""

    def __init__(self, evidence: Evidence, leaves: list[int]):
        self._program, self._leaves = evidence.program, leaves
        self._has_forward = evidence.has_forward
        own = [self._program.leaves[leaf] for leaf in leaves]
        self.operands = [*own, *map(jnp.ones_like, own)]

    @functools.cached_property
    def jaxpr(self) -> ClosedJaxpr:
        """Of the leaves and their tangents."""
        count = len(self._leaves)
        forward = lambda *operands: self.derivative(self._program.run, operands[:count], operands[count:])
        return jax.make_jaxpr(forward)(*self.operands)

    def derivative(self, function: Any, own: Sequence[Any], tangents: Sequence[Any]) -> Operands:
        """The forward derivative of a function of all leaves."""

        def of_own(*own: Any) -> Any:
            leaves = list(self._program.leaves)
            for leaf, value in zip(self._leaves, own, strict=True):
                leaves[leaf] = value
            return function(leaves)

        return list(jax.jvp(of_own, tuple(own), tuple(tangents))[1])

    def is_finite(self) -> bool:
        """Whether it is finite at the point, along ones; true where it does not exist."""
        if not self._has_forward:
            return True
        return all(map(is_finite, jax.jit(jaxpr_as_fun(self.jaxpr))(*self.operands)))


def _births(jaxpr: ClosedJaxpr, operands: Operands, count: int) -> list[Answer]:
    """Where what depends on the last operands stops being finite, in the order of execution."""
    flowing = flow.of_cotangents(jaxpr.jaxpr, count)

    def question(chain: Chain, operands: Operands, results: Operands) -> Any:
        return _birth(operands, flowing.into(chain), results)

    return probe(jaxpr, operands, question)


def _birth(operands: Operands, masks: flow.Masks, results: Operands) -> Any:
    """Which element of the first result is not finite although all that flows in is: it, and whether it is NaN."""
    flowing = [jnp.asarray(operand) for operand, mask in zip(operands, masks, strict=True) if mask]
    made = [jnp.asarray(result) for result in results if hasattr(result, "dtype") and _is_floating(result)]
    if not flowing or not made:
        return None
    finite = jnp.stack([jnp.isfinite(operand).all() for operand in flowing if _is_floating(operand)]).all()
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


class _Remedies:
    """What would mend a gradient, tried one after the other; each gradient is computed once."""

    def __init__(self, evidence: Evidence, births: list[Answer]):
        self._evidence, self._program = evidence, evidence.program
        self._births = births
        self._tried: dict[Any, list[Array] | None] = {}

    def double_where_mends(self, leaf: int) -> bool:
        """Whether the bad path was not taken."""
        return self._mends("double_where", double_where(self._program.outputs), leaf)

    def safe_function_for(self, leaf: int, chain: Chain) -> str | None:
        """The safe function whose use in the place of an operation, or of all that are like it, makes it finite."""
        name = chain[-1].primitive.name
        if name not in _SAFE:
            return None
        only = {id(chain[-1])}
        alike = {
            id(origin[-1]) for birth in self._births if (origin := self._program.origin(birth.chain)) and name in _SAFE
        }
        for replaced in (only, alike):
            if self._mends(frozenset(replaced), self._replacing(replaced), leaf):
                return self._spoken(chain)
        return None

    def _replacing(self, replaced: set[int]) -> Any:
        def rule(equation: JaxprEqn, operands: Operands) -> Operands | None:
            if id(equation) not in replaced or equation.primitive.name not in _SAFE:
                return None
            function, _ = _SAFE[equation.primitive.name]
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
        """Whether the operand is a sum of certain terms, however it is written."""
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
            self._tried[key] = self._derivatives(function)
        found = self._tried[key]
        return found is not None and self._is_mended(found, leaf)

    def _derivatives(self, function: Any) -> list[Array] | None:
        return self._evidence.gradients_of(function)

    def _is_mended(self, found: list[Array], leaf: int) -> bool:
        return is_finite(found[leaf])


class _ForwardRemedies(_Remedies):
    """The same for a forward derivative along some tangents."""

    def __init__(self, evidence: Evidence, births: list[Answer], along: _Along):
        super().__init__(evidence, births)
        self._along = along

    def _derivatives(self, function: Any) -> list[Array] | None:
        try:
            operands, count = self._along.operands, len(self._along.operands) // 2
            tangents = self._along.derivative(jax.jit(function), operands[:count], operands[count:])
        except Exception:  # As for gradients: a remedy that fails is none.
            return None
        return [np.asarray(tangent) for tangent in tangents]

    def _is_mended(self, found: list[Array], leaf: int) -> bool:
        return all(map(is_finite, found))


def _of_derivative(
    evidence: Evidence, leaves: list[int], births: list[Answer], remedies: _Remedies, derivative: str
) -> Iterator[Finding]:
    program = evidence.program
    for leaf in leaves:
        own = [b for b in births if leaf in evidence.leaves_into(program.origin(b.chain))] or births[:1]
        if not own:
            message = f"the {derivative} is not finite, and no operation was found that made it so."
            yield Finding("nan", "error", program.paths[leaf], "", message)
            continue
        first, chain = own[0], program.origin(own[0].chain)
        advice = _advice(remedies, leaf, chain)
        if advice is None and not evidence.value_is_finite:
            yield _of_the_value(evidence, leaf)
            continue
        again = [b.steps for b in own if program.origin(b.chain) == chain]
        what = "NaN" if first.numbers[1] else "infinite"
        place = f"{element(int(first.numbers[0]), first.chain[-1].outvars[0].aval.shape)}{steps_of(again)}"
        by = f"the derivative of {at(chain)}" if chain else "an operation of no line of yours"
        begin = f"the {derivative} is not finite: first {what} in {by}{place}."
        yield Finding("nan", "error", program.paths[leaf], line(chain), f"{begin} {advice or _NO_REMEDY}")


_NO_REMEDY = (
    "The value takes this path: a true singularity, which neither `double_where` nor a `safe` function mends. "
    "Fix: keep the point away from it, or write the function so that it is smooth here."
)


def _advice(remedies: _Remedies, leaf: int, chain: Chain) -> str | None:
    """What was tried and makes the derivative finite."""
    if remedies.double_where_mends(leaf):
        return (
            "The value does not take this path. Fix: differentiate `partgrad.double_where(f)`; tried, and its "
            "derivative is finite."
        )
    name = remedies.safe_function_for(leaf, chain) if chain else None
    if name is None:
        return None
    return (
        f"The value takes this path, and the function has no derivative here. Fix: `partgrad.safe.{name}` has one "
        "by convention; tried, and it makes the derivative finite."
    )


def _of_the_value(evidence: Evidence, leaf: int | None = None) -> Finding:
    """The function is not finite itself."""
    first = next(iter(_value_births(evidence)), None)
    by = f"; it first became so in {at(first.chain)}{steps_of([first.steps])}" if first else ""
    message = f"the value of the function is not finite{by}. Fix: that first, no gradient means anything there."
    path = "" if leaf is None else evidence.program.paths[leaf]
    return Finding("nan", "error", path, line(first.chain) if first else "", message)


def _value_births(evidence: Evidence) -> list[Answer]:
    def question(chain: Chain, operands: Operands, results: Operands) -> Any:
        floating = [1 if hasattr(o, "dtype") and _is_floating(o) else 0 for o in map(jnp.asarray, operands)]
        return _birth(operands, floating, results)

    return probe(evidence.program.jaxpr, evidence.program.leaves, question)
