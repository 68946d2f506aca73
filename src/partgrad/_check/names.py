"""What an operation is called by those who wrote it, and which rule it is."""

import functools
import itertools
import linecache
import re
import sys
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import jax.scipy.ndimage
import jax.scipy.sparse.linalg
import numpy as np
from jax.extend.core import JaxprEqn

from .. import safe
from .._programs import (
    CALLS,
    LOOPS,
    OF_MAP,
    TRANSPARENT,
    Chain,
    holds_users_function,
    is_custom_root,
    is_custom_rule,
    is_of_jax,
    is_users,
    jaxpr_and_consts,
    line,
    place,
    placed,
    primal_jaxpr,
    written,
)
from .._trees import held_by
from .finding import Finding, Rule

_SPOKEN = {
    "acos": "arccos",
    "asin": "arcsin",
    "atan2": "arctan2",
    "div": "/",
    "gt": ">",
    "ge": ">=",
    "lt": "<",
    "le": "<=",
    "lt_to": "<",
    "le_to": "<=",
    "eq": "==",
    "ne": "!=",
    "select_n": "where",
    "pow": "power",
    "integer_pow": "power",
    "logistic": "sigmoid",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_sum": "sum",
    "dot_general": "matmul",
    "reduce_window_max": "max_pool",
    "reduce_window_min": "min_pool",
    "convert_element_type": "astype",
    "rem": "mod",
    "mul": "*",
    "add": "+",
    "sub": "-",
    "neg": "-",
    "is_finite": "isfinite",
    "max": "maximum",
    "min": "minimum",
}
# Functions that JAX compiles in place, so that no frame tells which of them was called: what the line says.
_IN_PLACE = {
    "dot_general": ("dot", "vdot", "inner", "tensordot", "matmul"),
    "div": ("divide", "true_divide"),
    "pow": ("power", "pow", "float_power"),
    "integer_pow": ("power", "pow", "square", "float_power"),
    "rem": ("mod", "remainder", "fmod"),
    "cond": ("cond", "switch"),
}
_OPERATORS = {"mod": "%", "floordiv": "//", "pow": "**", "div": "/", "truediv": "/", "matmul": "@", "neg": "-"}
_OPERATORS |= {"add": "+", "sub": "-", "mul": "*"}
# These run the user's own functions.
_RUNS = frozenset({"cond", "switch", "scan", "while_loop", "fori_loop", "map", "associative_scan", "custom_root"})
_MODULES = (
    jsp.sparse.linalg,
    jnp,
    jax.lax,
    jax.nn,
    jnp.linalg,
    jnp.fft,
    jsp.special,
    jsp.linalg,
    jsp.stats,
    jsp.ndimage,
    jax.ops,
    safe,
)
# The class of `x.at[i]`, and what `jnp.int32(x)` calls.
_AT, _OF_DTYPE = "_IndexUpdateRef.", "_ScalarMeta.__call__"
_SAFE = safe.__name__.rpartition(".")[2]
_SAFE_FILES = f"{safe.__file__.rpartition('/')[0]}/"
_OWN = f"{_SAFE_FILES.removesuffix('/').rpartition('/')[0]}/"
_MOST_VISITED = 500


def operation_of(chain: Chain) -> str:
    """What is called on the user's line from which an equation comes, as it is written there."""
    if not chain:
        return ""
    begin = placed(chain)[2]
    for equation in chain[begin:]:
        if is_custom_rule(equation):
            is_own = is_users(written(jaxpr_and_consts(primal_jaxpr(equation))[0]).file.rpartition(":")[0])
            return (not is_own and (_called(chain[begin]) or _compiled(chain))) or _of_rule(equation)
        name = str(equation.params.get("name", "")) if equation.primitive.name in CALLS else ""
        if name and name not in TRANSPARENT and not holds_users_function(equation):
            return _called(chain[begin]) or _compiled(chain) or _public(name) or spoken(chain[-1])
    return _called(chain[begin]) or _in_line(chain) or spoken(chain[-1])


def _compiled(chain: Chain) -> str:
    """The compiled function of a library that the user's line calls by its name."""
    name = str(chain[placed(chain)[2]].params.get("name", ""))
    return name if name.isidentifier() and _is_called(name, chain) else ""


def _is_called(name: str, chain: Chain) -> bool:
    return bool(re.search(rf"\b{name}\s*\(", linecache.getline(*place(chain))))


def _in_line(chain: Chain) -> str:
    """The function that is called in the user's line, if only one of those that it may be is written there."""
    names = _IN_PLACE.get(chain[-1].primitive.name, ())
    written_there = [name for name in names if _is_called(name, chain)]
    return written_there[0] if len(written_there) == 1 else ""


def spoken(equation: JaxprEqn) -> str:
    """The name of a primitive as users know it, or that of a function with a custom rule."""
    if is_custom_root(equation):
        return "custom_root"
    if is_custom_rule(equation):
        return _of_rule(equation)
    return _SPOKEN.get(equation.primitive.name, equation.primitive.name)


def _of_rule(equation: JaxprEqn) -> str:
    name, file = written(jaxpr_and_consts(primal_jaxpr(equation))[0])
    if file.startswith(_SAFE_FILES):
        name = f"{_SAFE}.{name.strip('_')}"
    elif is_of_jax(file.rpartition(":")[0]):
        name = _public(name) or name
    return name if name.replace(".", "").isidentifier() else "a custom rule"


def _public(name: str) -> str:
    name = name.strip("_")
    return name if any(hasattr(module, name) for module in _MODULES) or hasattr(jax.random, name) else ""


def is_made_by_branches(equation: JaxprEqn) -> bool:
    """Whether a `cond` or a loop made an equation by itself, and not a function that it runs."""
    return any(name.rpartition(".")[2] in _RUNS for name, _ in _inside(equation))


def _inside(equation: JaxprEqn) -> list[tuple[str, str]]:
    """The functions that the user's innermost line called, and their files, the innermost first; none if unknown."""
    trace = equation.source_info.traceback
    frames = [(f.function_name, f.file_name) for f in trace.frames] if trace is not None else []
    inside = list(itertools.takewhile(lambda frame: not is_users(frame[1]), frames))
    return inside if len(inside) < len(frames) else []


def _called(equation: JaxprEqn) -> str:
    """The function that the user's innermost line called; empty if it is an operator or unknown."""
    for name, file in reversed(_inside(equation)):
        last = name.rpartition(".")[2]
        if last.startswith("_operator_"):
            name = last.removeprefix("_operator_")
            return _OPERATORS.get(name) or _OPERATORS.get(name.removeprefix("r"), "")
        if name == _OF_DTYPE:
            return str(equation.outvars[0].aval.dtype)
        if name.startswith(_AT):
            return f".at[].{last}"
        if file.startswith(_SAFE_FILES) and not last.startswith("_") and hasattr(safe, last):
            return f"{_SAFE}.{last}"
        if is_of_jax(file) and last in ("_astype", "astype"):
            return "astype"
        if (
            "<locals>" in name
            or last.startswith("_")
            or not last.isidentifier()
            or file.startswith(_OWN)
            or last in _RUNS
        ):
            continue
        if not is_of_jax(file) or _public(last) == last:
            return last
    return ""


def known_as(operation: str) -> list[Any]:
    """The public functions of JAX and partgrad that an operation is the name of."""
    name = operation.removeprefix(f"{_SAFE}.")
    modules = (safe,) if name != operation else _MODULES
    return [getattr(module, name) for module in modules if hasattr(module, name)]


def rule_of(chain: Chain) -> Rule | None:
    """The custom rule of an equation; None if it has none."""
    if not chain or not is_custom_rule(chain[-1]):
        return None
    equation = chain[-1]
    name, site = written(jaxpr_and_consts(primal_jaxpr(equation))[0])
    functions = tuple(
        _functions_in([v for k, v in equation.params.items() if not hasattr(jaxpr_and_consts(v)[0], "eqns")])
    )
    file, _, line = site.rpartition(":")
    named = f"{_module_of(file)}.{name}" if name.isidentifier() else f"{_module_of(file)}.{name}:{line}"
    users = [function for function in functions if is_users(function.__code__.co_filename)]
    if is_of_jax(file) and users:
        named = f"{users[0].__module__}.{users[0].__qualname__}"
    return Rule(named, functions)


def _functions_in(values: list[Any]) -> list[FunctionType]:
    """The Python functions that make up a rule: what they themselves close over is not part of it."""
    pending, seen, found = list(values), dict[int, Any](), list[FunctionType]()
    while pending and len(seen) < _MOST_VISITED:
        value = pending.pop(0)
        if id(value) in seen or isinstance(value, str | int | float | type | ModuleType | jax.Array):
            continue
        seen[id(value)] = value
        if isinstance(value, FunctionType) and not is_of_jax(value.__code__.co_filename):
            found.append(value)
        elif isinstance(value, tuple | list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
        else:
            pending += [inner for _, inner in held_by(value)]
    return found


@functools.lru_cache(maxsize=256)
def _module_of(file: str) -> str:
    names = [n for n, module in list(sys.modules.items()) if getattr(module, "__file__", None) == file]
    name = min(names, key=len) if names else file.rpartition("/")[2].removesuffix(".py")
    return name.replace("._src", "")


def element_in(chain: Chain, flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Which element of the user's operation changes, if that has one for each outcome; else nothing."""
    users = chain[placed(chain)[2]]
    return element_of(flat, shape) if users.outvars and users.outvars[0].aval.shape == shape else ()


def all_of(chains: tuple[Chain, ...]) -> dict[str, Any]:
    """What a finding says of several operations that are its cause together: the lines of all, and the others."""
    return {"lines": [where for where in dict.fromkeys(map(line, chains)) if where], "together": chains[1:]}


def finding(kind: str, severity: str, reason: str, leaves: Sequence[str], chain: Chain = (), **more: Any) -> Finding:
    """A finding about an equation: with its line, what is called there, and its rule.

    Args:
        kind: As of `Finding`, like the next ones.
        severity: Its severity.
        reason: Its reason.
        leaves: The paths of the leaves that it concerns.
        chain: The equation, after those that it is inside; none if there is none.
        **more: Figures and a fix; everything else is a detail.
    """
    file, line = place(chain) if chain else ("", 0)
    own = {name: more.pop(name) for name in ("figures", "fix", "rule", "operation", "together") if name in more}
    own = {"operation": operation_of(chain), "rule": rule_of(chain), **own}
    stacks = (str(equation.source_info.name_stack).split(OF_MAP) for equation in chain)
    of_map = next((parts[1] for parts in stacks if len(parts) > 2), "")
    if of_map:
        more["map"] = of_map
    return Finding(kind, severity, reason, tuple(leaves), file, line, **own, details=more, chain=chain)


def steps_of(answers: Sequence[Any]) -> list[tuple[int, ...]]:
    """The steps of loops in which something happened, each once, but not of those inside what the user's line calls."""
    of_user = lambda chain: sum(e.primitive.name in LOOPS for e in chain[: placed(chain)[2] + 1])
    return [steps for steps in sorted({answer.steps[: of_user(answer.chain)] for answer in answers}) if steps]


def element_of(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Which element of an array; an empty tuple for a scalar."""
    return tuple(int(i) for i in np.unravel_index(flat, shape)) if shape else ()
