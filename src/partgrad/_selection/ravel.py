"""The selected leaves as one vector."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .._trees import dtype_of, shape_of
from ..errors import PartsError
from .selectors import Selector, as_selection
from .target import Target, entry_names


class Unravel:
    """Puts a vector back into the tree that it was taken from.

    Args:
        target: The tree, and what of it is selected.

    Attributes:
        size: The length of the vector.
    """

    def __init__(self, target: Target):
        self._target = target
        self._shapes = [shape_of(leaf) for leaf in target.selected]
        self._dtypes = [dtype_of(leaf) for leaf in target.selected]
        self._shardings = [_explicit(leaf) for leaf in target.selected]
        self.size = sum(map(math.prod, self._shapes))

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each entry: the path of its leaf and its index there, as in `kernel.lengthscale[0]`."""
        plan, structure = self._target.plan, self._target.structure
        names: list[str] = []
        for i, elements in zip(plan.indices, plan.elements, strict=True):
            names += entry_names(structure.path(i), shape_of(self._target.leaves[i]), elements)
        return tuple(names)

    def __call__(self, vector: Any) -> Any:
        """The tree with the entries of a vector in its selected leaves, in their shapes and dtypes.

        Raises:
            PartsError: If the vector has another length.
        """
        vector = jnp.asarray(vector)
        if vector.shape != (self.size,):
            raise PartsError(
                "The vector does not fit the selected entries.",
                f"Expected shape ({self.size},), got {vector.shape}.",
                fix="give one entry for each of `unravel.names`.",
            )
        values, start = [], 0
        for shape, dtype, sharding in zip(self._shapes, self._dtypes, self._shardings, strict=True):
            piece = vector[start : start + math.prod(shape)]
            if jnp.iscomplexobj(piece) and not jnp.issubdtype(dtype, jnp.complexfloating):
                piece = piece.real
            # A leaf of NumPy may have a precision that JAX does not have.
            value = piece.astype(jax.dtypes.canonicalize_dtype(dtype)).reshape(shape)
            values.append(value if sharding is None else jax.reshard(value, sharding))
            start += math.prod(shape)
        return self._target.with_selected(values)


def ravel(tree: Any, wrt: Selector = None) -> tuple[jax.Array, Unravel]:
    """Flatten the selected leaves into one vector, as `scipy.optimize` and many samplers expect.

    Args:
        tree: Any pytree.
        wrt: A selector. None selects every floating or complex leaf that no mark holds.

    Returns:
        The pair `(vector, unravel)`. The vector has shape (n,) and the dtype to which the leaves promote.
        `unravel(vector)` is the tree with these entries, thawed where a held leaf was named; it works under `jit` and
        `grad`. `unravel.names` has a path for each of the n entries, which is also its selector. On a mesh with
        explicit axes the vector is replicated on every device, and `unravel` puts each leaf back where it was.

    Raises:
        SelectionError: If the selector does not fit the tree.

    Example:
        >>> import jax.numpy as jnp, partgrad as pg
        >>> vector, unravel = pg.ravel({"a": jnp.array([1.0, 2.0]), "b": 3.0, "n": 4})
        >>> print(vector, unravel.names)
        [1. 2. 3.] ("['a'][0]", "['a'][1]", "['b']")
        >>> print(unravel(10 * vector)["a"])
        [10. 20.]
    """
    target = Target(tree, as_selection(wrt))
    selected = [_whole(jnp.asarray(leaf)) for leaf in target.selected]
    if not selected:
        return jnp.zeros(0), Unravel(target)
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(*selected)
    return jnp.concatenate([leaf.ravel().astype(dtype) for leaf in selected]), Unravel(target)


def _explicit(leaf: Any) -> Any:
    """The sharding of an array that is split over explicit axes of a mesh, or None."""
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return sharding if mesh is not None and mesh.explicit_axes else None


def _whole(leaf: jax.Array) -> jax.Array:
    # JAX cannot flatten and concatenate arrays that are split over explicit axes.
    sharding = _explicit(leaf)
    return leaf if sharding is None else jax.reshard(leaf, NamedSharding(sharding.mesh, PartitionSpec()))
