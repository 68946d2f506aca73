"""Jacobians computed a few columns or rows at a time, so that memory for all of them at once is not needed."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# From arrays to arrays.
Linear = Callable[[list[Any]], list[Any]]


def jacfwd_in_pieces(f: Callable[[Any], Any], x: list[Any], chunk_size: int, **options: Any) -> Any:
    """What `jax.jacfwd(f, **options)(x)` returns."""
    has_aux = options["has_aux"]
    _refuse_types(jax.jacfwd(f, **options), x)
    outputs, push, *aux = jax.linearize(f, x, has_aux=has_aux)
    leaves, treedef = jax.tree.flatten(outputs)
    # An integer has a derivative, which is zero.
    moving = [number for number, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def flat(tangents: list[Any]) -> list[Any]:
        found = jax.tree.leaves(push(tangents))
        return [found[number] for number in moving]

    rows = dict(zip(moving, _pieces(flat, x, [leaves[number] for number in moving], chunk_size, axis=-1), strict=True))
    still = lambda leaf: [jnp.zeros((*leaf.shape, *jnp.shape(own)), leaf.dtype) for own in x]
    jacobian = treedef.unflatten([rows[n] if n in rows else still(leaf) for n, leaf in enumerate(leaves)])
    return (jacobian, aux[0]) if has_aux else jacobian


def jacrev_in_pieces(f: Callable[[Any], Any], x: list[Any], chunk_size: int, **options: Any) -> Any:
    """What `jax.jacrev(f, **options)(x)` returns."""
    has_aux = options["has_aux"]
    _refuse_types(jax.jacrev(f, **options), x)
    outputs, pull, *aux = jax.vjp(f, x, has_aux=has_aux)
    leaves, treedef = jax.tree.flatten(outputs)
    flat = lambda cotangents: pull(treedef.unflatten(cotangents))[0]
    columns = _pieces(flat, leaves, x, chunk_size, axis=0)
    jacobian = treedef.unflatten([[column[number] for column in columns] for number in range(len(leaves))])
    return (jacobian, aux[0]) if has_aux else jacobian


def hessian_in_pieces(f: Callable[[Any], Any], x: list[Any], chunk_size: int, **options: Any) -> Any:
    """What `jax.hessian(f, **options)(x)` returns: columns in pieces, each of them forward over reverse."""
    return jacfwd_in_pieces(jax.jacrev(f, **options), x, chunk_size, **options)


IN_PIECES = {"jacfwd": jacfwd_in_pieces, "jacrev": jacrev_in_pieces, "hessian": hessian_in_pieces}


def _refuse_types(transformed: Callable[[Any], Any], x: list[Any]) -> None:
    """Raise what JAX's transform raises for inputs or outputs of a type without such a derivative."""
    # A function that branches on its values has none before it runs; JAX's message then comes later.
    with contextlib.suppress(jax.errors.ConcretizationTypeError):
        jax.eval_shape(lambda x: jax.tree.leaves(transformed(x))[:0], x)


def _pieces(
    linear: Linear, inputs: Sequence[Any], outputs: Sequence[Any], chunk_size: int, axis: int
) -> list[list[Any]]:
    """For each output, its derivative with respect to each input.

    An output's derivative has the axes of the output and then those of the input if `axis` is -1, and the other way
    round if it is 0. Neighbours that fit into one piece share it. A larger input has a loop, which writes each piece
    where it belongs, so that nothing is transposed or joined afterwards.
    """
    found: list[list[Any]] = [[] for _ in outputs]
    numbers = list(range(len(inputs)))
    while numbers:
        group, size = [numbers.pop(0)], 0
        size = jnp.size(inputs[group[0]])
        while numbers and size + jnp.size(inputs[numbers[0]]) <= chunk_size:
            size += jnp.size(inputs[numbers[0]])
            group.append(numbers.pop(0))
        columns = _group(linear, inputs, group, outputs, min(chunk_size, size), axis)
        start = 0
        for number in group:
            inner, count = jnp.shape(inputs[number]), jnp.size(inputs[number])
            for own, output, column in zip(found, outputs, columns, strict=True):
                outer = jnp.shape(output)
                part = lax.slice_in_dim(column, start, start + count, axis=axis)
                own.append(part.reshape(*outer, *inner) if axis else part.reshape(*inner, *outer))
            start += count
    return found


def _group(
    linear: Linear, inputs: Sequence[Any], group: list[int], outputs: Sequence[Any], chunk_size: int, axis: int
) -> list[Any]:
    """The derivative of each output with respect to the numbers of some inputs, one after another along an axis."""
    sizes = [jnp.size(inputs[number]) for number in group]
    total = sum(sizes)

    def unit(place: Any) -> list[Any]:
        tangents = [_like(jnp.zeros(jnp.shape(x), jnp.result_type(x)), x) for x in inputs]
        start = 0
        for number, size in zip(group, sizes, strict=True):
            x = inputs[number]
            is_one = (jnp.arange(size) == place - start).reshape(jnp.shape(x))
            tangents[number] = _like(is_one.astype(jnp.result_type(x)), x)
            start += size
        return tangents

    piece = lambda start: jax.vmap(lambda place: linear(unit(place)), out_axes=axis)(start + jnp.arange(chunk_size))
    if total <= chunk_size:
        return piece(0)

    def write(number: Any, columns: list[Any]) -> list[Any]:
        # The last piece begins early enough to be whole.
        start = jnp.minimum(number * chunk_size, total - chunk_size)
        return [
            lax.dynamic_update_slice_in_dim(column, new, start, axis)
            for column, new in zip(columns, piece(start), strict=True)
        ]

    empty = [_empty(column, total, axis) for column in jax.eval_shape(lambda: piece(0))]
    return lax.fori_loop(0, -(-total // chunk_size), write, empty)


def _empty(columns: Any, total: int, axis: int) -> Any:
    """Room for all columns, given how a few of them look."""
    shape = (*columns.shape[:-1], total) if axis else (total, *columns.shape[1:])
    return _like(jnp.zeros(shape, columns.dtype), columns)


def _like(value: Any, other: Any) -> Any:
    """A value that varies over the same mesh axes as another inside `shard_map`, or is sharded like it."""
    # Importing it takes longer than importing everything that `grad` needs.
    from .._programs import varying_like

    return varying_like(value, jax.typeof(other))
