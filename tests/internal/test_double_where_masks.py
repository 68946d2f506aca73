"""What tracing knows of masks never changes them, and spares what it is for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import partgrad as pg
from partgrad._double_where.known import remembering, taken
from partgrad._double_where.masks import any_along, both, either, expanded, full_like, permuted
from partgrad._double_where.moves import _cut_up, _put_in, _reshaped

SHAPES = [(2, 3), (2, 1), (1, 3), (1, 1)]


class Numpy:
    """The same operations on masks that are written out."""

    both, either = staticmethod(np.logical_and), staticmethod(np.logical_or)
    permuted, expanded = staticmethod(np.transpose), staticmethod(np.expand_dims)
    any_along = staticmethod(lambda mask, axes: mask.any(axes))
    cut = staticmethod(lambda mask, window: mask[window])
    reshaped = staticmethod(lambda mask, old, new: mask.reshape(new))

    @staticmethod
    def put(mask, window, shape):
        result = np.zeros(shape, bool)
        result[window] = mask
        return result


class Traced:
    """The operations of `double_where`."""

    both, either, permuted, any_along = map(staticmethod, (both, either, permuted, any_along))
    expanded = staticmethod(lambda mask, axis: expanded(mask, [axis]))
    cut = staticmethod(lambda mask, window: _cut_up(mask, [window])[0])
    put = staticmethod(_put_in)
    reshaped = staticmethod(lambda mask, old, new: mask if isinstance(mask, bool) else _reshaped(mask, old, new))


def run(operations, library, masks):
    """All masks that a list of operations makes of given ones of shape (2, 3), with their shapes."""
    found = [(mask, (2, 3)) for mask in masks]
    for name, first, second, number in operations:
        mask, shape = found[first % len(found)]
        axis = number % len(shape) if shape else 0
        if name in ("both", "either"):
            alike = [other for other, its in found if its == shape]
            found.append((getattr(library, name)(mask, alike[second % len(alike)]), shape))
        elif name == "expanded" and len(shape) < 4:
            axis = number % (len(shape) + 1)
            found.append((library.expanded(mask, axis), (*shape[:axis], 1, *shape[axis:])))
        elif name == "permuted" and shape:
            order = np.roll(range(len(shape)), number).tolist()
            found.append((library.permuted(mask, order), tuple(shape[n] for n in order)))
        elif name == "any_along" and shape:
            found.append((library.any_along(mask, (axis,)), (*shape[:axis], *shape[axis + 1 :])))
        elif name == "cut" and shape:
            window = tuple(slice(min(number // 4, size - 1) if n == axis else 0, size) for n, size in enumerate(shape))
            found.append((library.cut(mask, window), tuple(w.stop - w.start for w in window)))
        elif name == "put" and shape and shape[axis] < 6:
            start, step = second % 3, 1 + number % 2
            sizes = [start + size * step if n == axis else size for n, size in enumerate(shape)]
            window = tuple(slice(start, size, step) if n == axis else slice(None) for n, size in enumerate(sizes))
            found.append((library.put(mask, window, tuple(sizes)), tuple(sizes)))
        elif name == "reshaped" and len(shape) > 1:
            at = number % (len(shape) - 1)
            pair = shape[at : at + 2]
            new = (*shape[:at], *((pair[0] * pair[1],) if second % 2 else pair[::-1]), *shape[at + 2 :])
            found.append((library.reshaped(mask, shape, new), new))
    return found


NAMES = ("both", "either", "both", "either", "expanded", "permuted", "any_along", "cut", "put", "reshaped")
NUMBER = st.integers(0, 60)
OPERATIONS = st.lists(st.tuples(st.sampled_from(NAMES), NUMBER, NUMBER, NUMBER), max_size=14)


@pytest.mark.slow
@given(OPERATIONS, st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3), st.integers(0, 2**18))
def test_what_is_known_of_masks_does_not_change_them(operations, shapes, bits):
    def traced(*predicates):
        with remembering():
            masks = [taken(predicate, case, 2) for predicate in predicates for case in (0, 1)]
            found = run(operations, Traced, masks)
            return [full_like(mask, jax.ShapeDtypeStruct(shape, bool)) for mask, shape in found]

    closed = jax.make_jaxpr(traced)(*(jax.ShapeDtypeStruct(shape, bool) for shape in shapes))
    rest = iter(format(bits, "018b"))
    predicates = [np.array([next(rest) == "1" for _ in range(np.prod(shape))]).reshape(shape) for shape in shapes]
    wide = [np.broadcast_to(predicate, (2, 3)) for predicate in predicates]
    expected = run(operations, Numpy, [mask for predicate in wide for mask in (~predicate, predicate)])
    for actual, (mask, shape) in zip(
        jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *predicates), expected, strict=True
    ):
        assert mask.shape == shape
        np.testing.assert_array_equal(actual, mask)


def primitives(f, *operands):
    """The names of the primitives in the reverse pass of a gradient."""
    (equation,) = jax.make_jaxpr(jax.grad(pg.double_where(f)))(*operands).eqns[-1:]
    return [inner.primitive.name for inner in equation.params["jaxpr"].eqns]


def piecewise(x):
    return jnp.where(x < 0, jnp.exp(x), jnp.where(x < 1, jnp.sin(x), jnp.where(x < 2, x**3, jnp.log(x))))


def put_together(x):
    """A matrix of slices, of which a predicate of each example selects all or nothing."""
    a, b, c, d = (x[:, n] for n in range(4))
    matrix = jnp.stack([a * b, b * c, c * d, d * a], axis=-1).reshape(-1, 2, 2)
    return jnp.where((a > 0)[:, None, None], jnp.sqrt(matrix), 0.0)


@pytest.mark.parametrize(("f", "shape"), [(piecewise, (5,)), (put_together, (5, 4))], ids=["cases", "parts"])
def test_masks_of_one_predicate_are_not_joined_when_the_program_runs(f, shape):
    # The tangent of what is selected meets another coefficient, for which its mask is needed.
    found = primitives(lambda x: f(jnp.sin(x)).sum(), jnp.ones(shape))
    assert "mul" in found
    assert "or" not in found
