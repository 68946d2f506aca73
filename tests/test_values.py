"""Values as they are shown, compared and refused: whatever a leaf may be."""

import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from partgrad import errors, safe

LONG = 10**5000


@pg.dataclass
class Model:
    a: object
    n: object = 0


def masked(*mask):
    return np.ma.masked_array([1.0, 2.0], mask)


MATRIX = np.ones((2, 2)).view(np.matrix)


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (masked(0, 1), masked(0, 1), True),
        (masked(0, 1), masked(0, 0), False),
        (masked(0, 0), np.array([1.0, 2.0]), False),
        (masked(0, 1), np.array([1.0, 2.0]), False),
        (MATRIX, MATRIX.copy(), True),
        (MATRIX, np.ones((2, 2)), False),
        (np.ones(2, "f4"), jnp.ones(2), True),
        (LONG, 10**5000, True),
    ],
    ids=["masked", "masks", "no mask", "masked and not", "matrices", "matrix and array", "JAX", "long"],
)
def test_arrays_that_a_program_can_tell_apart_are_not_equal(first, second, equal):
    assert (Model(first) == Model(second)) is equal
    assert (Model(second) == Model(first)) is equal


HOSTILE = ["<b>x</b>", "<script>", '"><img src=x>', "<i>&lt;"]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(
    "make", [np.str_, np.bytes_, lambda text: np.array([text]), str], ids=["str_", "bytes_", "array", "str"]
)
def test_no_text_of_a_leaf_or_a_path_is_read_as_html(text, make):
    leaf = make(text.encode()) if make is np.bytes_ else make(text)
    for shown in (pg.summary({text: leaf, "x": 1.0}), pg.show({text: leaf, "x": 1.0})):
        page = shown._repr_html_() if isinstance(shown, type(pg.summary(1.0))) else shown.svg()
        assert text not in page


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_report_is_read_as_html(text):
    def f(tree):
        return jnp.sqrt(tree[text]) ** 2

    f.__name__ = f.__qualname__ = text
    page = pg.check(f)({text: jnp.array([0.0, 1.0])})._repr_html_()
    assert text not in page


# treescope imports numpy.char, which newer versions of numpy deprecate.
@pytest.mark.filterwarnings("ignore:The chararray class")
@pytest.mark.parametrize("mark", [lambda n: n, pg.NonDiff, pg.Static])
def test_a_notebook_shows_integers_of_any_length(mark):
    # What treescope makes is compressed; it raised.
    assert "differentiated" in pg.show({"n": mark(-LONG), "model": Model(1.0, mark(LONG)), "short": 3})._repr_html_()


def test_integers_of_any_length_are_shown():
    tree = {"n": LONG, "m": -LONG, "x": 1.0}
    assert [row.value for row in pg.summary(tree).rows] == ["-1e5000", "1e5000", "1"]
    assert "1e5000" in str(pg.show(tree))
    assert "1e5000" in pg.show(tree).svg()
    for value in (Model(1.0, LONG), pg.NonDiff(LONG), pg.Static(LONG)):
        assert "<int>" in repr(value)
    for call in (
        lambda: pg.grad(lambda t: t["x"], wrt="n")(tree),
        lambda: pg.replace(tree, "x", fn=LONG),
        lambda: pg.show(tree, depth=-LONG),
        lambda: pg.grad(LONG),
    ):
        with pytest.raises(errors.PartgradError):
            call()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4).T,
        np.arange(2 * 2**16 + 5.0, dtype="f4"),
        np.array([1e30, 3e30], "f4"),
        np.array([np.nan, 1.0]),
        np.array([1j, 2.0]),
        jnp.array([0.1, 0.7], jnp.bfloat16),
        np.arange(6.0).astype(">f8")[::2],
    ],
    ids=str,
)
def test_mean_and_spread(array):
    wide = np.asarray(array).astype(complex if np.iscomplexobj(array) else float)
    (row,) = pg.summary([array]).rows
    assert row.value == f"{wide.mean():.3g} ± {wide.std():.2g}"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a page of memory is counted in kilobytes on Linux")
def test_a_summary_copies_no_array():
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    large = np.ones(60_000_000, np.float32)
    pg.summary([large[:1000]])
    before = peak()
    pg.summary([large]), str(pg.show([large]))
    assert peak() - before < 50


def test_picking_a_diagonal_takes_memory_for_its_own_entries():
    import tracemalloc

    n = 2000
    numbers, tree = np.arange(n), {"w": np.ones((n, n), np.float32)}
    pg.select({"w": np.ones((3, 3))}, lambda t: t["w"][[0, 1], [0, 1]])
    tracemalloc.start()
    assert pg.select(tree, lambda t: t["w"][numbers, numbers]).shape == (n,)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < tree["w"].nbytes / 4


NOTHING = {
    "where": lambda: safe.where(True, lambda x: x, lambda x: x, jnp.zeros(0)),
    "where of rows": lambda: safe.where(jnp.ones((3, 1), bool), lambda x: x, lambda x: x, jnp.zeros((3, 0))),
    "where of no choice": lambda: safe.where(jnp.ones(0, bool), lambda x: x, lambda x: x, jnp.zeros((3, 1))),
    "matrix_function": lambda: jax.grad(lambda a: safe.matrix_function(jnp.exp, a).sum())(jnp.zeros((0, 2, 2))),
    "matrix_function of 0x0": lambda: jax.grad(lambda a: safe.matrix_function(jnp.exp, a).sum())(jnp.zeros((0, 0))),
    "its second derivative": lambda: jax.hessian(lambda a: safe.matrix_function(jnp.exp, a).sum())(
        jnp.zeros((0, 2, 2))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", NOTHING)
def test_empty_operands(case):
    assert NOTHING[case]().size == 0


@pytest.mark.parametrize("name", ["norm", "std", "var", "logsumexp", "sqrt", "log", "divide", "eigh", "svd"])
def test_what_is_no_array_is_refused_as_by_jax(name):
    with pytest.raises((TypeError, ValueError)):
        getattr(safe, name)(None, *([1.0] if name == "divide" else []))


REFUSED = {
    "fn of replace": lambda: pg.replace({"a": 1.0}, "a", fn=3),
    "depth": lambda: pg.show({"a": 1.0}, depth="2"),
    "depth True": lambda: pg.show({"a": 1.0}, depth=True),
    "depth -1": lambda: pg.show({"a": 1.0}, depth=-1),
    "sampler": lambda: pg.draw(None, jax.random.key(0), gradient="error"),
    "tie": lambda: pg.ravel({"a": 1.0}, tie="no"),
    "tie 1": lambda: pg.ravel({"a": 1.0}, tie=1),
    "when text": lambda: pg.stop_gradient({"a": 1.0}, when="no"),
    "when number": lambda: pg.stop_gradient({"a": 1.0}, when=2),
    "when array": lambda: pg.stop_gradient({"a": 1.0}, when=jnp.ones(())),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_of_the_wrong_kind(case):
    with pytest.raises(errors.ArgumentError, match="(?s)Expected.*Fix: "):
        REFUSED[case]()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "complex64", "float64"])
def test_the_derivative_of_a_matrix_function_has_its_dtype(dtype, x64):
    a = jnp.array([[2.0, 0.0], [0.0, 2.0]], dtype if x64 or dtype != "float64" else "float32")
    gradient = jax.jit(jax.grad(lambda a: jnp.trace(safe.matrix_function(jnp.exp, a)).real))(a)
    assert gradient.dtype == a.dtype
    np.testing.assert_allclose(gradient, np.exp(2.0) * np.eye(2), rtol=1e-5)


W = {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(2)}
LOSS = lambda t: jnp.sum(t["w"] ** 2) * t["b"][0]
PICKS = ["w[1,0]", "w[1]", lambda t: t["w"][:, 0], lambda t: t["w"][[2, 0], [0, 1]], pg.path("w[0,0]") | "w[2,0]"]


@pytest.mark.slow
@pytest.mark.parametrize("wrt", PICKS, ids=["one", "row", "column", "picked", "joined"])
def test_elements_under_strict_flags(wrt):
    flags = {"jax_numpy_rank_promotion": "raise", "jax_numpy_dtype_promotion": "strict"}
    before = {flag: getattr(jax.config, flag) for flag in flags}
    try:
        for flag, value in flags.items():
            jax.config.update(flag, value)
        gradient = pg.grad(LOSS, wrt=wrt)(W)
        pg.apply_updates(W, gradient, wrt)
        pg.replace(W, wrt, fn=lambda x: 2 * x)
        vector, unravel = pg.ravel(W, wrt)
        unravel(vector)
        pg.jacfwd(LOSS, wrt=wrt)(W)
    finally:
        for flag, value in before.items():
            jax.config.update(flag, value)
