"""Rows of a table that integers of JAX select, traced or not: gradients, values, updates."""

import gc
import weakref

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings

import partgrad as pg

SIZE = 12
TABLE = jax.random.normal(jax.random.key(0), (SIZE, 3))
TOKENS = jnp.array([3, 5, 3, 7])


class Model(eqx.Module):
    embedding: jax.Array
    head: jax.Array


def loss(model, tokens):
    return jnp.sum(jnp.tanh(model.embedding[tokens] @ model.head) ** 2)


MODEL = Model(TABLE, jnp.array([0.5, -0.3, 0.2]))
FULL = jax.grad(loss)(MODEL, TOKENS).embedding


def of(rows):
    return lambda m: m.embedding[rows]


def padded(gradient, rows):
    """Rows of the gradient of the whole table, zero where the table has none."""
    rows = np.asarray(rows)
    beyond = (rows >= SIZE) | (rows < -SIZE)
    return np.where(beyond[..., None], 0, np.asarray(gradient)[np.where(beyond, 0, rows)])


@pytest.mark.slow
@settings(deadline=None, max_examples=6)
@given(rows=st.lists(st.integers(-SIZE, SIZE + 2), min_size=1, max_size=5), is_jitted=st.booleans())
def test_each_position_has_the_gradient_of_its_row(rows, is_jitted):
    rows = jnp.array(rows)
    gradient = lambda rows: pg.grad(loss, wrt=of(rows))(MODEL, TOKENS)
    found = (jax.jit(gradient) if is_jitted else gradient)(rows)
    np.testing.assert_allclose(found, padded(FULL, rows), rtol=1e-5)


@pytest.mark.slow
@settings(deadline=None, max_examples=6)
@given(rows=st.lists(st.integers(-SIZE, SIZE + 2), min_size=1, max_size=5), is_jitted=st.booleans())
def test_an_update_moves_each_row_once(rows, is_jitted):
    def step(model, rows):
        value, gradient = pg.value_and_grad(loss, wrt=of(rows))(model, TOKENS)
        return pg.apply_updates(model, -0.1 * gradient, wrt=of(rows)), pg.replace(model, of(rows), 0 * gradient), value

    updated, replaced, value = (jax.jit(step) if is_jitted else step)(MODEL, jnp.array(rows))
    np.testing.assert_allclose(value, loss(MODEL, TOKENS), rtol=1e-5)
    whole = np.asarray(TABLE - 0.1 * FULL)
    is_chosen = np.isin(np.arange(SIZE), [row % SIZE for row in rows if row < SIZE])
    np.testing.assert_allclose(updated.embedding, np.where(is_chosen[:, None], whole, TABLE), rtol=1e-5)
    np.testing.assert_array_equal(replaced.embedding, np.where(is_chosen[:, None], 0, TABLE))
    np.testing.assert_array_equal(updated.head, MODEL.head)


ROWS = jnp.array([3, 5, 3])
NARROW = lambda c: loss(Model(TABLE.at[:, 0].set(c), MODEL.head), TOKENS)


@pytest.mark.slow
def test_every_transform_takes_them():
    direction = jnp.array([1.0, 2.0, 4.0])
    column = lambda rows: lambda m: m.embedding[rows, 0]
    second = jax.hessian(NARROW)(TABLE[:, 0])[jnp.ix_(ROWS, ROWS)]
    run = lambda use: jax.jit(use)(ROWS)
    np.testing.assert_allclose(run(lambda r: pg.hessian(loss, wrt=column(r))(MODEL, TOKENS)), second, rtol=1e-5)
    product = run(lambda r: pg.hvp(loss, wrt=column(r))(MODEL, direction, TOKENS))
    np.testing.assert_allclose(product, second @ direction, rtol=1e-5)
    along = run(lambda r: pg.jvp(loss, (MODEL, TOKENS), (direction,), wrt=column(r)))[1]
    np.testing.assert_allclose(along, FULL[ROWS, 0] @ direction, rtol=1e-5)
    _, pull = run(lambda r: pg.vjp(loss, MODEL, TOKENS, wrt=of(r)))
    np.testing.assert_allclose(pull(2.0)[0], 2 * FULL[ROWS], rtol=1e-5)
    _, linear = run(lambda r: pg.linearize(loss, MODEL, TOKENS, wrt=column(r)))
    np.testing.assert_allclose(linear(direction), along, rtol=1e-5)
    several = lambda m, tokens: loss(m, tokens) * jnp.array([1.0, 2.0])
    found = run(lambda r: pg.jacrev(several, wrt=column(r))(MODEL, TOKENS))
    np.testing.assert_allclose(found[1], 2 * FULL[ROWS, 0], rtol=1e-5)
    np.testing.assert_allclose(
        run(lambda r: pg.jacfwd(several, wrt=column(r), chunk_size=2)(MODEL, TOKENS)), found, rtol=1e-5
    )


def test_other_selectors_and_options():
    compiled = lambda wrt, **options: jax.jit(lambda r: pg.grad(loss, wrt=wrt(r), **options)(MODEL, TOKENS))(ROWS)
    dictionary = compiled(lambda r: {"rows": of(r), "head": "head"})
    np.testing.assert_allclose(dictionary["rows"], FULL[ROWS], rtol=1e-5)
    np.testing.assert_allclose(dictionary["head"], jax.grad(loss)(MODEL, TOKENS).head, rtol=1e-5)
    described = compiled(lambda r: pg.each(of(r)))
    assert described.head is None
    np.testing.assert_allclose(described.embedding, FULL[ROWS], rtol=1e-5)
    options = {"double_where": True, "unused": "error", "nonfinite": "report"}
    np.testing.assert_allclose(compiled(of, **options), FULL[ROWS], rtol=1e-5)
    one = compiled(lambda r: lambda m: (m.embedding[r[0]], m.head))
    np.testing.assert_allclose(one[0], FULL[3], rtol=1e-5)
    lanes = jax.vmap(lambda r: pg.grad(loss, wrt=of(r))(MODEL, TOKENS))(ROWS[:, None])
    np.testing.assert_allclose(lanes[:, 0], FULL[ROWS], rtol=1e-5)
    outer = jax.grad(lambda s: pg.grad(lambda m: loss(m, TOKENS) * s**2, wrt=of(ROWS))(MODEL).sum())(3.0)
    np.testing.assert_allclose(outer, 6 * FULL[ROWS].sum(), rtol=1e-5)
    half = pg.replace(MODEL, "embedding", TABLE.astype(jnp.bfloat16))
    assert jax.jit(lambda r: pg.grad(loss, wrt=of(r), dtype=jnp.float32)(half, TOKENS))(ROWS).dtype == jnp.float32


@pytest.mark.slow
def test_other_models():
    class Network(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(SIZE, 3, rngs=nnx.Rngs(0))

    graph, state = nnx.split(Network())
    f = lambda state: jnp.sum(nnx.merge(graph, state).embed(TOKENS) ** 2)
    found = jax.jit(lambda r: pg.grad(f, wrt=lambda s: s["embed"]["embedding"].get_value()[r])(state))(ROWS)
    np.testing.assert_allclose(found, jax.grad(f)(state)["embed"]["embedding"].get_value()[ROWS], rtol=1e-5)

    @pg.dataclass
    class Table:
        rows: jax.Array = pg.field(nondiff=True)

    f = lambda t: jnp.sum(t.rows[TOKENS] ** 2)
    found = jax.jit(lambda r: pg.grad(f, wrt=lambda t: t.rows[r])(Table(TABLE)))(ROWS)
    np.testing.assert_allclose(found, jax.grad(lambda rows: jnp.sum(rows[TOKENS] ** 2))(TABLE)[ROWS], rtol=1e-5)
    numpy = {"table": np.asarray(TABLE)}
    selected = lambda m: m["table"][ROWS]
    written = pg.apply_updates(numpy, jnp.ones((3, 3)), wrt=selected)
    np.testing.assert_allclose(written["table"][3], TABLE[3] + 1, rtol=1e-5)


@pytest.mark.slow
def test_the_result_is_small_and_nothing_is_kept():
    model = {"table": jnp.ones((100_000, 16))}
    f = lambda m: jnp.sum(m["table"][TOKENS] ** 2)
    step = lambda rows: pg.grad(f, wrt=lambda m: m["table"][rows])(model)
    compiled = jax.jit(step).lower(TOKENS).compile()
    assert compiled.memory_analysis().output_size_in_bytes == 256
    _, pull = jax.jit(lambda rows: pg.vjp(f, model, wrt=lambda m: m["table"][rows]))(TOKENS)
    assert pull(1.0)[0].shape == (4, 16)
    rows = jnp.array([1, 1, 200_000])
    step(rows)
    kept = weakref.ref(rows)
    del rows
    gc.collect()
    assert kept() is None


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrt", "said"),
    [
        (lambda r: of(r > 3), "traced array of bools.*Expected integers.*nonzero.*whole leaf"),
        (lambda r: lambda m: (m.embedding[r], m.embedding[r + 1]), "array of JAX.*join the indices.*concatenate"),
        (lambda r: lambda m: m.embedding[r][:, 0], "elements of elements.*one pair of brackets"),
        (lambda r: lambda m: m.embedding[0][r], "elements of elements.*one pair of brackets"),
        (lambda r: lambda m: m.embedding[r * 1.0], "does not fit.*integers"),
        (lambda r: lambda m: m.embedding[r, r, r], r"does not fit.*\(12, 3\)"),
        (lambda r: pg.each(of(r)) - pg.path("embedding[0]"), "array of JAX.*join the indices"),
    ],
)
def test_what_cannot_be_right_is_refused(wrt, said):
    with pytest.raises(pg.errors.ElementError, match=f"(?s){said}"):
        jax.jit(lambda rows: pg.grad(loss, wrt=wrt(rows))(MODEL, TOKENS))(ROWS)


@pytest.mark.parametrize("use", [pg.items, lambda m, w: pg.ravel(m, w)[1].names])
def test_what_names_each_element_refuses_them(use):
    with pytest.raises(pg.errors.ElementError, match="(?s)array of JAX.*Python or NumPy"):
        jax.jit(lambda rows: [use(MODEL, of(rows)), 0][1])(ROWS)


def test_the_remedies_run():
    mask = jnp.arange(SIZE) < 4
    by_mask = jax.jit(
        lambda mask: pg.grad(loss, wrt=of(jnp.nonzero(mask, size=8, fill_value=mask.size)[0]))(MODEL, TOKENS)
    )(mask)
    np.testing.assert_allclose(by_mask[:4], FULL[:4], rtol=1e-5)
    assert not by_mask[4:].any()
    joined = jax.jit(lambda r: pg.grad(loss, wrt=lambda m: m.embedding[jnp.concatenate([r, r + 1])])(MODEL, TOKENS))
    np.testing.assert_allclose(joined(ROWS), FULL[jnp.concatenate([ROWS, ROWS + 1])], rtol=1e-5)
    both = jax.jit(lambda r: pg.grad(loss, wrt=lambda m: m.embedding[r, 0])(MODEL, TOKENS))(ROWS)
    np.testing.assert_allclose(both, FULL[ROWS, 0], rtol=1e-5)
    known = pg.items(MODEL, of(np.array([3, 5])))
    assert len(known) == 6


def test_check_says_that_rows_are_selected_twice():
    with pytest.raises(pg.errors.ArgumentError, match=r"(?s)check.*`embedding`.*twice.*jax.numpy.unique\(rows\)"):
        pg.check(loss, wrt=of(ROWS))(MODEL, TOKENS)
    assert pg.check(loss, wrt=of(jnp.unique(ROWS)))(MODEL, TOKENS).ok
