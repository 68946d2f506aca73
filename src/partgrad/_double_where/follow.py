"""What is known of the results of an equation, given what is known of its operands.

Numbers that depend on no data are computed with NumPy beside the traced value.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .._programs import CALLS, MOVED, is_reshape, jaxpr_and_consts, primal_jaxpr, scan_of, step_through
from .known import LARGEST, Numbers, captured, learn, numbers_of, remember, root_of

_DTYPES = frozenset(
    ("bool", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)
# Sums, differences and products of integers below these are exact in single precision.
_WHOLE = {"add": 1 << 23, "sub": 1 << 23, "mul": 1 << 12}


def stand_ins(jaxpr: Jaxpr, numbers: Sequence[Numbers | None]) -> dict[Var, Any]:
    """For each variable of an open jaxpr what stands for its value, with the facts that tracing it would find.

    Args:
        jaxpr: A jaxpr without constants.
        numbers: What is known of the numbers of its inputs.
    """
    found: dict[Var, Any] = {}

    def stand_in(variable: Var) -> Any:
        aval = variable.aval
        found[variable] = jax.ShapeDtypeStruct(aval.shape, aval.dtype) if hasattr(aval, "dtype") else aval
        return found[variable]

    for variable, known in zip(jaxpr.invars, numbers, strict=True):
        remember(stand_in(variable), known)
    for equation in jaxpr.eqns:
        given = [atom.val if isinstance(atom, Literal) else found[atom] for atom in equation.invars]
        follow(equation, given, list(map(stand_in, equation.outvars)))
    return found


def follow(equation: JaxprEqn, operands: Sequence[Any], results: Sequence[Any]) -> None:
    """Remember facts about the results of an equation that follow from facts about its operands."""
    name, numbers = equation.primitive.name, [numbers_of(operand) for operand in operands]
    if name == "broadcast_in_dim" and hasattr(operands[0], "shape"):
        if results[0].size == operands[0].size:
            learn(results[0], root=root_of(operands[0]))
        else:
            learn(results[0], origin=(operands[0], equation.params["broadcast_dimensions"]))
    elif is_reshape(equation) and hasattr(operands[0], "shape"):
        learn(results[0], root=root_of(operands[0]))
    elif name == "select_n":
        unknown = [case for case, known in enumerate(numbers[1:]) if known is None or not np.all(np.isfinite(known))]
        learn(results[0], risky=(operands[0], unknown[0]) if len(unknown) == 1 else None)
    elif name == "scan":
        for result, origin in zip(results, _origins(equation), strict=True):
            if origin is not None:
                learn(result, origin=(operands[origin[0]], origin[1]))
    for result, known in zip(results, _results(equation, numbers), strict=True):
        remember(result, known)


_Origin: TypeAlias = tuple[int, tuple[int, ...]] | None


def _origins(equation: JaxprEqn) -> list[_Origin]:
    """For each result of a loop, the number of the operand that it is broadcast from, if it is a predicate."""
    loop = scan_of(equation)
    if not any(variable.aval.dtype == bool for variable in equation.outvars[loop.carried :]):
        return [None] * len(equation.outvars)
    body, _ = jaxpr_and_consts(loop.body)

    def step(equation: JaxprEqn, given: list[_Origin]) -> list[_Origin]:
        if equation.primitive.name in CALLS:
            inner, consts = jaxpr_and_consts(primal_jaxpr(equation))
            return step_through(inner, [None] * len(consts), given, step, lambda literal: None)
        if equation.primitive.name == "broadcast_in_dim" and len(given) == 1 and given[0] is not None:
            number, axes = given[0]
            return [(number, tuple(equation.params["broadcast_dimensions"][axis] for axis in axes))]
        return [None] * len(equation.outvars)

    scanned = loop.consts + loop.carried
    given = [None if number < scanned else (number, tuple(range(v.aval.ndim))) for number, v in enumerate(body.invars)]
    outputs = step_through(body, [None] * len(body.constvars), given, step, lambda literal: None)[loop.carried :]
    shifted = [None if found is None else (found[0], (0, *(axis + 1 for axis in found[1]))) for found in outputs]
    return [*[None] * loop.carried, *shifted]


def _results(equation: JaxprEqn, operands: list[Numbers | None]) -> list[Numbers | None]:
    name = equation.primitive.name
    nothing: list[Numbers | None] = [None] * len(equation.outvars)
    if any(known is None for known in operands) or not (name in CALLS or name in MOVED or name in _FOLLOWED):
        return nothing
    avals = [variable.aval for variable in equation.outvars]
    if any(aval.size > LARGEST or str(aval.dtype) not in _DTYPES for aval in avals):
        return nothing
    if name in CALLS:
        inner, consts = jaxpr_and_consts(primal_jaxpr(equation))
        literal = lambda literal: np.asarray(literal.val)
        return step_through(inner, [*map(captured, consts)], operands, _results, literal)
    with np.errstate(all="ignore"):
        moved = MOVED.get(name, lambda _, operands: [_FOLLOWED[name](equation.params, avals[0], *operands)])
        results = moved(equation, operands) or nothing
    filled = lambda result, aval: np.broadcast_to(np.asarray(result, aval.dtype), aval.shape)
    return [None if r is None else filled(r, aval) for r, aval in zip(results, avals, strict=True)]


def _iota(params: Any, aval: Any) -> Numbers:
    along = [-1 if axis == params["dimension"] else 1 for axis in range(len(aval.shape))]
    return np.arange(aval.shape[params["dimension"]]).astype(aval.dtype).reshape(along)


def _is_whole(x: Numbers, most: int) -> bool:
    return x.dtype.kind != "f" or bool(np.all(abs(x) < most) and np.all(x == np.round(x)))


def _by_ufunc(name: str, aval: Any, operands: Sequence[Numbers]) -> Numbers | None:
    # XLA may round a sum of products once, where NumPy rounds twice.
    is_rounded = name in _WHOLE and not all(_is_whole(operand, _WHOLE[name]) for operand in operands)
    of_bits = name in {"and", "or", "not"} and aval.dtype != bool
    return None if is_rounded or of_bits else _UFUNCS[name](*operands)


_UFUNCS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
}
_FOLLOWED: dict[str, Callable[..., Any]] = {
    "iota": _iota,
    "select_n": lambda _, aval, which, *cases: np.where(which, cases[1], cases[0]) if len(cases) == 2 else None,
    "convert_element_type": lambda _, aval, x: x if x.dtype.kind in "bi" or aval.dtype.kind == "f" else None,
    **dict.fromkeys(("copy", "copy_p", "pcast", "pvary"), lambda _, aval, x: x),
    "reduce_or": lambda params, aval, x: x.any(tuple(params["axes"])) if aval.dtype == bool else None,
    "reduce_and": lambda params, aval, x: x.all(tuple(params["axes"])) if aval.dtype == bool else None,
    **{name: lambda _, aval, *xs, name=name: _by_ufunc(name, aval, xs) for name in _UFUNCS},
}
