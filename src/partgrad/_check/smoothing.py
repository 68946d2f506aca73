"""A surrogate in the place of a comparison or a rounding, tried: what follows is followed as numbers too.

The result of a comparison is a bool, and what counts such results is an integer. So each of these gets a smooth number
beside it, until something floating is made of the two: there they meet in a surrogate, as the user's would.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from .._programs import (
    CALLS,
    MOVES,
    Chain,
    Operands,
    any_equation,
    bind,
    inner_jaxprs,
    is_custom_rule,
    is_floating,
    jaxpr_and_consts,
    primal_jaxpr,
    reenter,
    step_through,
)
from .._surrogate import surrogate
from .exact import Exact
from .finding import Finding, Fix
from .float64 import UNSUPPORTED
from .names import operation_of
from .outcomes import Outcomes
from .own import Own, is_finite, pulled, tried
from .point import Point
from .program import Program
from .questions import Search
from .remedies import fix_of, is_confirmed

# The reasons of zeros that a surrogate mends.
MENDED = frozenset({"compared", "rounded", "cast", "integers"})
# So many operations are tried: each takes the compilations of a small check.
_MOST = 3
_GREATER, _LESS = {"gt": ">", "ge": ">="}, {"lt": "<", "le": "<="}
_COMPARED_BY = frozenset({">", ">=", "<", "<=", "greater", "greater_equal", "less", "less_equal"})
_ROUNDED = frozenset({"floor", "ceil", "round", "rint", "around", "sign"})
# What is done to the smooth numbers as it is to the others.
_ALIKE = MOVES | {"reduce_sum", "cumsum", "add", "sub", "mul", "neg", "max", "min"}
_LOGIC: dict[str, Callable[..., Any]] = {
    "and": lambda a, b: a * b,
    "or": lambda a, b: a + b - a * b,
    "xor": lambda a, b: a + b - 2 * a * b,
    "not": lambda a: 1 - a,
}
_REWRITTEN = {
    "and": "write `c * d` for `c & d`",
    "or": "write `c + d - c * d` for `c | d`",
    "xor": "write `c + d - 2 * c * d` for `c ^ d`",
    "not": "write `1 - c` for `~c`",
    "select_n": "write `b + (a - b) * c` for `jnp.where(c, a, b)`",
    "convert_element_type": "leave out the cast to integers",
}


class _Both(NamedTuple):
    """A number that goes by steps, and the smooth one beside it."""

    value: Any
    smooth: Any


class _Refused(Exception):
    """Nobody knows what an operation makes of a smooth number."""


class Smoothing:
    """Surrogates in the place of operations, each tried once.

    Args:
        own: The function, after it ran.
        point: The point, for the weights of the outputs.
    """

    def __init__(self, own: Own, point: Point):
        self._own, self._point = own, point
        self._tried: dict[int, tuple[Point, Operands, tuple[str, ...]] | None] = {}

    def fix(self, found: Finding, leaf: int) -> Fix | None:
        """What makes the derivative of a leaf something else than zero, if differences agree with it then."""
        if not found.chain or (words := _words(found.chain)) is None:
            return None
        key = id(found.chain[-1])
        if key not in self._tried and len(self._tried) < _MOST:
            self._tried[key] = self._smoothed(found.chain[-1])
        if (found_there := self._tried.get(key)) is None:
            return None
        point, gradient, beside = found_there
        if not gradient[leaf].any() or not is_finite(gradient[leaf]):
            return None
        search = Search(point, np.random.default_rng(0), [leaf])
        search.look_around(1, False, lambda done, of: None)
        answer = search.answer(leaf)
        return fix_of(*words, answer, beside) if is_confirmed(answer) and answer.row.name == "agrees" else None

    def _smoothed(self, equation: JaxprEqn) -> tuple[Point, Operands, tuple[str, ...]] | None:
        """The point of the program with a surrogate, its gradient, and what has to be rewritten beside it."""
        own = self._own
        followed = _Followed(equation)
        function = lambda leaves: followed.run(*jaxpr_and_consts(own.program.jaxpr), list(leaves))
        try:
            program = Program(function, own.program.leaves, own.program.paths)
        except (_Refused, *UNSUPPORTED):
            return None
        gradient = tried(pulled(program.outputs), program.leaves, own.cotangents)
        if gradient is None:
            return None
        point = Point(Exact(program), self._point.leaves, self._point.weights, Outcomes(program))
        return point, gradient, tuple(_REWRITTEN[name] for name in sorted(followed.rewritten))


def _words(chain: Chain) -> tuple[str, str] | None:
    """What is replaced, and by which surrogate; None if none is known."""
    name, operation = chain[-1].primitive.name, operation_of(chain)
    if name in _GREATER | _LESS and operation in _COMPARED_BY:
        sign, difference = (_GREATER | _LESS)[name], "x - y" if name in _GREATER else "y - x"
        exact, smooth = f"lambda x, y: jnp.where(x {sign} y, 1.0, 0.0)", f"jnp.arctan({difference}) / jnp.pi + 0.5"
        return f"the comparison `x {sign} y`", f"partgrad.surrogate({exact}, smooth=lambda x, y: {smooth})(x, y)"
    if name in _ROUNDED and (operation in _ROUNDED or operation == name):
        smooth = "2 * jnp.arctan(x) / jnp.pi" if name == "sign" else "x"
        return operation, f"partgrad.surrogate(jnp.{operation}, smooth=lambda x: {smooth})"
    if name == "convert_element_type" and jnp.issubdtype(chain[-1].outvars[0].aval.dtype, jnp.integer):
        return "the cast to integers", "partgrad.surrogate(jnp.trunc, smooth=lambda x: x)(x)"
    return None


class _Followed:
    """A jaxpr in which one operation is smooth; `rewritten` are the operations that a user has to write otherwise."""

    def __init__(self, target: JaxprEqn):
        self._target = target
        self.rewritten: set[str] = set()

    def run(self, jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
        """The outputs; `_Refused` if some are integers made of the smooth operation."""
        results = self._through(jaxpr, consts, operands)
        if any(isinstance(result, _Both) for result in results):
            raise _Refused
        return results

    def _through(self, jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
        return step_through(jaxpr, consts, operands, self._step)

    def _step(self, equation: JaxprEqn, given: Operands) -> Operands:
        if equation is self._target:
            return [self._made(equation, bind(equation, given)[0], _smooth(equation, given))]
        is_met = any(isinstance(operand, _Both) for operand in given)
        contains = any(any_equation(inner, lambda e: e is self._target) for inner in inner_jaxprs(equation))
        if (is_met or contains) and equation.primitive.name in CALLS:
            return self._through(*jaxpr_and_consts(primal_jaxpr(equation)), given)
        if is_met:
            return [self._followed(equation, given)]
        if not contains:
            return bind(equation, given)
        results = None if is_custom_rule(equation) else reenter(equation, given, self.run)
        if results is None:
            raise _Refused
        return results

    def _followed(self, equation: JaxprEqn, given: Operands) -> Any:
        name = equation.primitive.name
        values = [operand.value if isinstance(operand, _Both) else operand for operand in given]
        smooth = [operand.smooth if isinstance(operand, _Both) else operand for operand in given]
        (result,) = bind(equation, values) if len(equation.outvars) == 1 else [None]
        if result is None:
            raise _Refused
        is_cast = name == "convert_element_type"
        if is_cast and operation_of((equation,)) in ("astype", "asarray", "int32", "int64") and not is_floating(result):
            self.rewritten.add(name)
        if is_cast:
            return self._made(equation, result, smooth[0])
        if name == "select_n" and len(given) == 3:
            return self._made(equation, result, self._selected(equation, given, smooth))
        if name in _LOGIC and result.dtype == bool:
            self.rewritten.add(name)
            return self._made(equation, result, _LOGIC[name](*map(jnp.asarray, smooth)))
        if name in _ALIKE:
            floating = [jnp.asarray(one, _dtype_in(smooth)) for one in smooth]
            return self._made(equation, result, bind(equation, floating)[0])
        raise _Refused

    def _selected(self, equation: JaxprEqn, given: Operands, smooth: Operands) -> Any:
        if not isinstance(given[0], _Both):
            return bind(equation, [given[0], *(jnp.asarray(one, _dtype_in(smooth[1:])) for one in smooth[1:])])[0]
        self.rewritten.add("select_n")
        which, off, on = smooth
        return off + (on - off) * which

    def _made(self, equation: JaxprEqn, value: Any, smooth: Any) -> Any:
        """The two numbers, or where they are floating a surrogate."""
        if not is_floating(equation.outvars[0].aval):
            return _Both(value, smooth)
        smooth = jnp.broadcast_to(jnp.asarray(smooth, value.dtype), value.shape)
        return surrogate(lambda value, smooth: value, smooth=lambda value, smooth: smooth)(value, smooth)


def _dtype_in(operands: Sequence[Any]) -> Any:
    """The floating dtype among some operands."""
    return next(jnp.result_type(one) for one in operands if is_floating(jnp.asarray(one)))


def _smooth(equation: JaxprEqn, given: Operands) -> Any:
    """What is smooth in the place of an operation."""
    name = equation.primitive.name
    if name in _GREATER | _LESS:
        one, other = given if name in _GREATER else given[::-1]
        return jnp.arctan(one - other) / jnp.pi + 0.5
    return 2 * jnp.arctan(given[0]) / jnp.pi if name == "sign" else given[0]
