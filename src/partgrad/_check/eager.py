"""Whether a function may compute something else when it runs eagerly than what was traced.

An eager run compiles each operation by itself, many times what all else takes that a check compiles. It shows what a
trace cannot: Python that looks at its arguments, or that computes something else each time. So the function is traced a
second time, and runs eagerly only if the two traces differ, or if its code asks what is traced.
"""

import dis
import functools
import re
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from .._compat import codes_of
from .._programs import Operands, inner_jaxprs, is_users, jaxpr_and_consts, jaxprs_in

# What code names that asks whether its arguments are traced.
_ASKING = re.compile(r"Tracer|[Cc]oncret|trace_state_clean|ensure_compile_time_eval")
# Two traces of a function hold different objects.
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def may_differ_eagerly(function: Callable[[Operands], Any], traced: ClosedJaxpr, leaves: Operands) -> bool:
    """Whether the function, run eagerly, may compute something else than its trace."""
    # JAX keeps the trace of a function, so this has to be another one.
    again = jax.make_jaxpr(lambda leaves: function(leaves))(leaves)
    return not is_same(traced, again) or any(map(_asks, _code_of(traced.jaxpr)))


def is_same(first: ClosedJaxpr, second: ClosedJaxpr) -> bool:
    """Whether two jaxprs are the same, but for the identity of what they hold."""
    # Not by `keyed_jaxpr`: a custom rule that is defined inside the function would differ from one trace to the next.
    consts = list(_consts(first)), list(_consts(second))
    is_same = len(consts[0]) == len(consts[1]) and all(map(_is_equal, *consts))
    return is_same and _printed(first) == _printed(second)


def _consts(jaxpr: Any) -> Iterator[Any]:
    """The constants of a jaxpr, at any depth."""
    body, consts = jaxpr_and_consts(jaxpr)
    yield from consts
    for equation in body.eqns:
        for inner in jaxprs_in(equation):
            yield from _consts(inner)


def _is_equal(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, jax.core.Tracer) and isinstance(second, jax.core.Tracer):
        # From 0.12 on, rules that equinox makes hold those of what they were traced in.
        return first.aval == second.aval
    if any(not hasattr(x, "dtype") or jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in (first, second)):
        return False
    return np.asarray(first).tobytes() == np.asarray(second).tobytes()


def _printed(jaxpr: ClosedJaxpr) -> str:
    return _ADDRESS.sub("", str(jaxpr))


def _code_of(jaxpr: Jaxpr) -> Iterator[CodeType]:
    """The user's code that ran while a jaxpr was traced, and the functions of the user that it names."""
    pending, seen = list[CodeType](), set[CodeType]()
    for traceback in _tracebacks(jaxpr):
        pending += codes_of(traceback)
    while pending:
        code = pending.pop()
        if code in seen or not is_users(code.co_filename):
            continue
        seen.add(code)
        yield code
        pending += [const for const in code.co_consts if isinstance(const, CodeType)]
        known = _globals_of(code.co_filename)
        pending += [f.__code__ for name in code.co_names if isinstance(f := known.get(name), FunctionType)]


def _tracebacks(jaxpr: Jaxpr) -> set[Any]:
    found = {equation.source_info.traceback for equation in jaxpr.eqns}
    inside = (_tracebacks(inner) for equation in jaxpr.eqns for inner in inner_jaxprs(equation))
    return found.union(*inside)


@functools.lru_cache(maxsize=64)
def _globals_of(file: str) -> dict[str, Any]:
    """What the modules of a file name; what is typed in is part of the main module."""
    modules = [vars(m) for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file]
    return modules[0] if modules else vars(sys.modules["__main__"])


@functools.lru_cache(maxsize=1024)
def _asks(code: CodeType) -> bool:
    """Whether code names something that tells what is traced, or catches the error of what needs a number."""
    names = any(map(_ASKING.search, (*code.co_names, *code.co_freevars)))
    return names or any(instruction.opname == "CHECK_EXC_MATCH" for instruction in dis.get_instructions(code))
