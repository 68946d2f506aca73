"""A Python function as a jaxpr of its array arguments, traced once for each structure, shape and dtype."""

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr

Operands = list[Any]
Run = Callable[..., Operands]

# Under equal keys of these types a function does the same; another object may have changed since it was traced.
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), type(...), np.dtype, type)
_PROGRAMS_SIZE = 128

# So that no equation has a line of this file for its source.
source_info_util.register_exclusion(__file__)


def rewritten(function: Callable[..., Any], rewrite: Callable[[ClosedJaxpr], Run]) -> Callable[..., Any]:
    """The function whose traced form is run by what `rewrite` makes of it.

    Arrays, tracers and NumPy arrays are traced; Python numbers and everything else stay as they are. As under
    `jax.jit`, the function runs once for each structure, shape and dtype of its arguments; where nothing is
    transformed, it runs as it is.

    Args:
        function: A function that can be traced, of any arguments and outputs.
        rewrite: From a jaxpr to a function of the jaxpr's operands that returns its outputs.

    Returns:
        A function of the same arguments and outputs.
    """
    staged = functools.partial(jax.jit, static_argnums=0)(functools.partial(_flat, function))
    # A jaxpr is equal to itself only.
    rewrites = functools.lru_cache(maxsize=_PROGRAMS_SIZE)(rewrite)

    def run(treedef: Any, leaves: list[Any], is_traced: Callable[[Any], bool], cached: bool) -> Any:
        call = _Call(treedef, [_TRACED if is_traced(leaf) else leaf for leaf in leaves])
        operands = [leaf for leaf in leaves if is_traced(leaf)]
        if cached and call.key is not None:
            traced = staged.trace(call, *operands)
            # `jit` hands over tracers that the function closes over as further operands, and not to us.
            if len(traced.jaxpr.in_avals) == len(operands):
                return _restored(rewrites(traced.jaxpr)(*operands), traced.out_tree)
        jaxpr, shape = jax.make_jaxpr(functools.partial(_flat, function, call), return_shape=True)(*operands)
        return _restored(rewrite(jaxpr)(*operands), jax.tree.structure(shape))

    @functools.wraps(function, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        inside = _closes_over_tracers(function)
        if not inside and not any(map(_is_tracer, leaves)):
            if any(map(_is_numpy, leaves)):
                # They would read and write by index in NumPy's way.
                leaves = [jnp.asarray(leaf) if _is_numpy(leaf) else leaf for leaf in leaves]
                args, kwargs = treedef.unflatten(leaves)
            result = function(*args, **kwargs)
            # Nothing is transformed, unless the function closes over what is.
            if not any(map(_is_tracer, jax.tree.leaves(result))):
                return result
        try:
            return run(treedef, leaves, _is_traced, not inside)
        except _NEEDS_VALUES:
            if not any(map(_is_numpy, leaves)):
                raise
        # A mask or a size from NumPy, whose values the function needs, stays as it is.
        return run(treedef, leaves, _is_jax, False)

    return wrapper


def _restored(outputs: Operands, treedef: Any) -> Any:
    outcome = treedef.unflatten(outputs)
    return outcome.result.put(outcome.arrays)


def _is_tracer(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer)


def _closes_over_tracers(function: Any) -> bool:
    """Whether a function closes over a tracer, as far as can be told without running it."""
    cells = getattr(function, "__closure__", None) or ()
    try:
        return any(map(_is_tracer, jax.tree.leaves([cell.cell_contents for cell in cells])))
    except ValueError:
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


_TRACED = object()


class _Mixed:
    """Leaves of a tree of which some are arrays, without the arrays."""

    def __init__(self, treedef: Any, constants: list[Any]):
        self.treedef, self.constants = treedef, constants

    def put(self, arrays: Operands) -> Any:
        rest = iter(arrays)
        # A constant array may be written to between two calls.
        constants = [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in self.constants]
        return self.treedef.unflatten([next(rest) if leaf is _TRACED else leaf for leaf in constants])


class _Call(_Mixed):
    """All of a call but its arrays, as a key for the cache of traces.

    Attributes:
        key: What another call must agree in, or None where that cannot be told.
    """

    def __init__(self, treedef: Any, constants: list[Any]):
        super().__init__(treedef, constants)
        try:
            self.key: Hashable | None = (tuple(map(_typed, constants)), treedef)
            self._hash = hash(self.key)
        except TypeError:
            self.key, self._hash = None, 0

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        try:
            return isinstance(other, _Call) and self.key == other.key
        except (TypeError, ValueError):
            # Foreign static data that holds arrays.
            return False


def _typed(constant: Any) -> Hashable:
    if constant is _TRACED:
        return None
    if isinstance(constant, _SIMPLE):
        # `repr` tells -0.0 from 0.0 and takes NaN for itself.
        return type(constant), repr(constant) if isinstance(constant, float | complex) else constant
    if callable(constant) and hasattr(constant, "__code__"):
        return constant
    raise TypeError


class _Outcome:
    """The traced outputs of a call, with the rest of what it returned as static data."""

    def __init__(self, arrays: Operands, result: _Mixed):
        self.arrays, self.result = arrays, result


jax.tree_util.register_pytree_node(
    _Outcome, lambda o: ((o.arrays,), o.result), lambda result, c: _Outcome(c[0], result)
)


def _flat(function: Callable[..., Any], call: _Call, *operands: Any) -> _Outcome:
    args, kwargs = call.put(list(operands))
    leaves, treedef = jax.tree.flatten(function(*args, **kwargs))
    constants = [_TRACED if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
    return _Outcome([leaf for leaf in leaves if isinstance(leaf, jax.Array)], _Mixed(treedef, constants))
