"""The selected leaves as one vector."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._selection import Selector, Target, as_selection, entry_names
from .._trees import convert, dtype_of, in_jax, is_known, refuse_non_bools, shape_of, tied
from ..errors import ArgumentError, PartsError
from .constrain import Constrain
from .unconstrain import unconstrain


class Unravel:
    """Puts a vector back into the tree that it was taken from.

    Args:
        target: The tree, and what of it is selected.
        tie: Whether leaves that are one array are one in the vector too.
        constrain: If the tree is one of coordinates, what takes it to the values.

    Attributes:
        size: The length of the vector.
    """

    def __init__(self, target: Target, tie: bool = False, constrain: "Constrain[Any] | None" = None):
        self._target = target
        self._constrain = constrain
        # For each selected leaf, the first one that is the same array; only that one is in the vector.
        self._first = _firsts(target) if tie else list(range(len(target.plan.indices)))
        self._own = [number for number, first in enumerate(self._first) if number == first]
        leaves = target.selected
        self._shapes = [shape_of(leaves[number]) for number in self._own]
        self._dtypes = {number: dtype_of(leaves[number]) for number in self._own}
        self._shardings = [_explicit(leaves[number]) for number in self._own]
        self.size = sum(map(math.prod, self._shapes))

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each entry, which is the path of its leaf with its index there, as in `kernel.lengthscale[0]`."""
        plan, skeleton = self._target.plan, self._target.skeleton
        names: list[str] = []
        for number in self._own:
            i, elements = plan.indices[number], plan.elements[number]
            names += entry_names(skeleton.path(i), shape_of(self._target.leaves[i]), elements)
        return tuple(names)

    @property
    def bounds(self) -> Any:
        """The bounds of the values of the entries, a `scipy.optimize.Bounds`; of entries without a map, infinities.

        They are for an optimiser that takes bounds instead of coordinates, for the vector of the same call of `ravel`
        without `coordinates=`.

        Raises:
            ArgumentError: If a map does not take each element by itself, or has no value at infinity.
        """
        from scipy.optimize import Bounds

        if self._constrain is None:
            return Bounds(np.full(self.size, -np.inf), np.full(self.size, np.inf))
        return Bounds(*(np.asarray(Unravel(Target(own, as_selection(None))).vector) for own in self._constrain.bounds))

    def log_det(self, vector: Any) -> jax.Array:
        """The logarithm of the absolute determinant of the derivative of the values by their coordinates, a scalar.

        Args:
            vector: The coordinates, as one vector.
        """
        return jnp.zeros(()) if self._constrain is None else self._constrain.log_det(self._tree(vector))

    def __repr__(self) -> str:
        kind = type(self._target.tree).__name__
        return f"<partgrad.ravel: from a vector of {self.size} entries back to {kind}, {len(self._own)} leaves>"

    @property
    def vector(self) -> jax.Array:
        """The vector of the tree that it was made for."""
        leaves = self._target.selected
        selected = [_whole(in_jax(leaves[number], functools.partial(self._path, number))) for number in self._own]
        if not selected:
            return jnp.zeros(0)
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(*selected)
        return jnp.concatenate([leaf.ravel().astype(dtype) for leaf in selected])

    def __call__(self, vector: Any) -> Any:
        """The tree with the entries of a vector in its selected leaves, in their shapes and dtypes.

        Raises:
            PartsError: If the vector has another length.
            ArgumentError: If a leaf does not hold an entry, as `partgrad.replace` says.
        """
        tree = self._tree(vector)
        return tree if self._constrain is None else self._constrain(tree)

    def _tree(self, vector: Any) -> Any:
        """The tree that it was made for, with other entries."""
        # What SciPy gives has digits that JAX may lack, and a leaf of NumPy may have.
        vector = vector if isinstance(vector, np.ndarray) else jnp.asarray(vector)
        if vector.shape != (self.size,):
            raise PartsError(
                "The vector does not fit the selected entries.",
                f"Expected shape ({self.size},), got {vector.shape}.",
                fix="give one entry for each of `unravel.names`.",
            )
        values, start = {}, 0
        for number, shape, sharding in zip(self._own, self._shapes, self._shardings, strict=True):
            value = self._value(number, vector[start : start + math.prod(shape)]).reshape(shape)
            values[number] = value if sharding is None else jax.reshard(value, sharding)
            start += math.prod(shape)
        return self._target.with_selected([values[first] for first in self._first], checked=True)

    def _value(self, number: int, piece: Any) -> Any:
        """A piece of a vector as the value of a selected leaf."""
        dtype = self._dtypes[number]
        is_real = not jnp.issubdtype(dtype, jnp.complexfloating)
        if np.iscomplexobj(piece) and is_real and not (is_known(piece) and np.any(np.imag(piece))):
            # The vector is complex because of another leaf.
            piece = piece.real
        if self._target.plan.elements[number] is not None:
            return piece
        # An array of NumPy may have a precision that JAX does not have.
        like = np.empty((), jax.dtypes.canonicalize_dtype(dtype).newbyteorder("="))
        return jnp.asarray(convert(piece, like, functools.partial(self._path, number)))

    def _path(self, number: int) -> str:
        return self._target.path(self._target.plan.indices[number])


def _firsts(target: Target) -> list[int]:
    indices, first = target.plan.indices, list(range(len(target.plan.indices)))
    if target.plan.is_whole:
        number_of = {i: number for number, i in enumerate(indices)}
        for several in tied(target.leaves):
            numbers = sorted(number_of[i] for i in several if i in number_of)
            for number in numbers:
                first[number] = numbers[0]
    return first


def ravel(
    tree: Any,
    wrt: Selector = None,
    *,
    tie: bool = False,
    coordinates: Mapping[Any, Any] | None = None,
    ties: Mapping[Any, Any] | None = None,
) -> tuple[jax.Array, Unravel]:
    """Flatten the selected leaves into one vector, as `scipy.optimize` and many samplers expect.

    Args:
        tree: Any pytree.
        wrt: A selector. None selects every floating or complex leaf that no mark holds.
        tie: Whether selected leaves that are one object, a floating or complex array of JAX or NumPy (tied weights),
            have one set of entries, under the name of the first, so that they stay equal. Leaves that are not selected
            or that a mark holds, equal arrays that are two objects, Python numbers, and elements of leaves are not
            tied; nor are the arguments of a function under `jit`, which are objects of their own.
        coordinates: A dict from selectors to maps, as for `partgrad.unconstrain`: the vector has the coordinates.
        ties: A dict from what follows to what it follows, as for `partgrad.unconstrain`: what follows has no entries.

    Returns:
        The pair `(vector, unravel)`. The vector has shape (n,) and the dtype to which the leaves promote.
        `unravel(vector)` is the tree with these entries, thawed where a held leaf was named; it works under `jit` and
        `grad`. `unravel.names` has a path for each of the n entries, which is also its selector. On a mesh with
        explicit axes the vector is replicated on every device, and `unravel` puts each leaf back where it was.
        With coordinates, the names are those of the coordinates, `unravel.log_det(vector)` is the logarithm of the
        determinant for samplers, and `unravel.bounds` has the bounds of the values.

    Raises:
        SelectionError: If the selector does not fit the tree.
        ArgumentError: If `tie` is not a bool, or is given beside `coordinates` or `ties`; if a number of an array of
            NumPy is too large for the dtype that JAX has for it; or for coordinates, as `partgrad.unconstrain` says.

    Example:
        >>> import jax.numpy as jnp, partgrad as pg
        >>> vector, unravel = pg.ravel({"a": jnp.array([1.0, 2.0]), "b": 3.0, "n": 4})
        >>> print(vector, unravel.names)
        [1. 2. 3.] ("['a'][0]", "['a'][1]", "['b']")
        >>> print(unravel(10 * vector)["a"])
        [10. 20.]
        >>> weight = jnp.array([1.0, 2.0])
        >>> pg.ravel({"encode": weight, "decode": weight}, tie=True)[1].names
        ("['decode'][0]", "['decode'][1]")
    """
    refuse_non_bools(tie=tie)
    constrain = None
    if coordinates is not None or ties is not None:
        if tie:
            raise ArgumentError(
                "`partgrad.ravel` got `tie=True` beside coordinates or ties.",
                "Expected one way to say what is tied.",
                fix="write the ties: ties={'decode': 'encode'}.",
            )
        tree, constrain = unconstrain(tree, coordinates, ties, wrt=wrt)
        wrt = None
    unravel = Unravel(Target(tree, as_selection(wrt)), tie, constrain)
    return unravel.vector, unravel


def _explicit(leaf: Any) -> Any:
    """The sharding of an array that is split over explicit axes of a mesh, or None."""
    # JAX has no type for every array of NumPy.
    sharding = getattr(jax.typeof(leaf), "sharding", None) if isinstance(leaf, jax.Array) else None
    mesh = getattr(sharding, "mesh", None)
    return sharding if mesh is not None and mesh.explicit_axes else None


def _whole(leaf: jax.Array) -> jax.Array:
    # JAX cannot flatten and concatenate arrays that are split over explicit axes.
    sharding = _explicit(leaf)
    return leaf if sharding is None else jax.reshard(leaf, NamedSharding(sharding.mesh, PartitionSpec()))
