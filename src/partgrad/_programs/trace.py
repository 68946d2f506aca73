"""A Python function as a jaxpr of its array arguments, traced on every call, and rewritten once for each jaxpr."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from .._compat import is_staging
from .._trees import flatten, held_by, reaches, without_changes
from .equations import (
    Operands,
    any_equation,
    jaxpr_and_consts,
)
from .interpreter import as_array
from .lines import has_rule_outside_jax
from .same import Recent, keyed_jaxpr

# Runs the traced function itself, on other inputs.
Again = Callable[..., Operands]
# Takes the values of a jaxpr's constants and inputs, and what runs the function again; returns those of its outputs.
Run = Callable[[Operands, Operands, Again], Operands]

_PROGRAMS_SIZE = 128


def rewritten(function: Callable[..., Any], rewrite: Callable[[Jaxpr], Run]) -> Callable[..., Any]:
    """The function whose traced form is run by what `rewrite` makes of it.

    Arrays, tracers and NumPy arrays are traced; Python numbers and everything else stay as they are. A call that
    nothing transforms is a call of the function (where that cannot take a NumPy array, it gets one of JAX). Any other
    traces it anew, as what it captures may have changed; where the trace is the same as an earlier one but for the
    values of constants, it is not rewritten again.

    Args:
        function: A function that can be traced, of any arguments and outputs.
        rewrite: From an open jaxpr to a function of the values of its constants and of its inputs.

    Returns:
        A function of the same arguments and outputs.
    """
    rewrites: Recent[Run] = Recent(_PROGRAMS_SIZE)
    # The trace has copies of the arguments, in which changes are lost.
    traced = without_changes(function)

    def run(call: TracedCall) -> Any:
        rewriting = rewrites.of(keyed_jaxpr(call.jaxpr, exact=False), lambda: rewrite(call.jaxpr))
        return call.result(rewriting(call.consts, call.operands, call.again))

    @functools.wraps(function, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = flatten((args, kwargs))
        if not (is_staging() or _closes_over_tracers(function) or any(map(_is_tracer, leaves))):
            result = _called(function, args, kwargs, leaves, treedef)
            # Nothing is being transformed, unless the function closes over a tracer.
            if not any(map(_is_tracer, jax.tree.leaves(result))):
                return result
        return run(_traced(traced, leaves, treedef))

    return wrapper


class TracedCall(NamedTuple):
    """A call of a function as a jaxpr.

    Attributes:
        jaxpr: An open jaxpr of the arrays among the arguments.
        consts: The values of its constants.
        operands: These arrays.
        again: The call as a function of these arrays, to be traced once more.
        result: From the outputs of the jaxpr to what the call returns.
    """

    jaxpr: Jaxpr
    consts: Operands
    operands: Operands
    again: Again
    result: Callable[[Operands], Any]


def traced_call(function: Callable[..., Any], args: Any, kwargs: Any) -> TracedCall:
    """A call of a function as a jaxpr; Python numbers and everything else that is no array stay as they are."""
    return _traced(function, *flatten((args, kwargs)))


def _traced(function: Callable[..., Any], leaves: list[Any], treedef: Any) -> TracedCall:
    try:
        return _traced_with(function, leaves, treedef, _is_traced)
    except _NEEDS_VALUES as error:
        if not any(map(_is_numpy, leaves)):
            if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
                error.add_note("Fix: for `x.at[mask].set(y)` write `jnp.where(mask, y, x)`, which needs no count.")
            raise
    # A mask or size from NumPy stays as it is, because the function may need its values.
    return _traced_with(function, leaves, treedef, _is_jax)


def _traced_with(function: Callable[..., Any], leaves: list[Any], treedef: Any, is_traced: Any) -> TracedCall:
    given = _Mixed(treedef, [_TRACED if is_traced(leaf) else leaf for leaf in leaves])
    operands = [leaf for leaf in leaves if is_traced(leaf)]
    results: list[_Mixed] = []

    def traced(*operands: Any) -> Operands:
        arrays, result = _flat(function, given, *operands)
        # Not as the structure of the output, of which JAX keeps the last 4,096.
        results.append(result)
        return arrays

    jaxpr, consts = jaxpr_and_consts(jax.make_jaxpr(traced)(*operands))

    def result(outputs: Operands) -> Any:
        return results[0].put([as_array(out, atom.aval) for out, atom in zip(outputs, jaxpr.outvars, strict=True)])

    again = lambda *operands: _flat(function, given, *operands)[0]
    return TracedCall(jaxpr, consts, operands, again, result)


def _called(function: Callable[..., Any], args: Any, kwargs: Any, leaves: list[Any], treedef: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except (AttributeError, IndexError, TypeError):
        if not any(map(_is_numpy, leaves)):
            raise
    # A traceable function may use what NumPy arrays lack (`x.at`), or read out of bounds.
    args, kwargs = treedef.unflatten([jnp.asarray(leaf) if _is_numpy(leaf) else leaf for leaf in leaves])
    return function(*args, **kwargs)


def _is_tracer(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer)


def _closes_over_tracers(function: Any) -> bool:
    """Whether a function closes over a tracer, as far as can be told without running it."""
    try:
        return any(map(_is_tracer, flatten([held for _, held in held_by(function)])[0]))
    except (TypeError, ValueError):
        # A dict may have keys that cannot be sorted.
        return False


def _is_numpy(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUMm"


def _is_jax(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def _is_traced(leaf: Any) -> bool:
    return _is_jax(leaf) or _is_numpy(leaf)


_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def holds_tracers(jaxpr: Jaxpr) -> bool:
    """Whether a custom rule in a jaxpr holds a traced value that is not one of its operands.

    Such a rule works only while the function is being traced: it has to be run `again`.
    """

    def holds(equation: Any) -> bool:
        if not has_rule_outside_jax(equation):
            return False
        # With the rule of a function that is being transformed, JAX keeps the transformation and its tracers.
        return any(reaches(value, jax.core.Tracer, beyond=jax.core.Trace) for value in equation.params.values())

    return any_equation(jaxpr, holds)


# --- calls and outcomes, with their arrays apart ---------------------------------------------------------------------

_TRACED = object()


class _Mixed:
    """Leaves of a tree of which some are arrays, without the arrays."""

    def __init__(self, treedef: Any, constants: list[Any]):
        self.treedef, self.constants = treedef, constants

    def put(self, arrays: Operands) -> Any:
        rest = iter(arrays)
        return self.treedef.unflatten([next(rest) if leaf is _TRACED else leaf for leaf in self.constants])


def _flat(function: Callable[..., Any], given: _Mixed, *operands: Any) -> tuple[Operands, _Mixed]:
    """The arrays that a call returns, and everything else that it returns."""
    args, kwargs = given.put(list(operands))
    leaves, treedef = jax.tree.flatten(function(*args, **kwargs))
    constants = [_TRACED if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)], _Mixed(treedef, constants)
