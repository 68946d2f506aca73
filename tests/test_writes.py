"""Writes into leaves: what is selected changes, everything else keeps its bits, and a dtype that loses more is refused."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from helpers.tables import table
from partgrad import errors

BASE = np.arange(1.0, 13.0).reshape(3, 4)


def read_only(array):
    array.flags.writeable = False
    return array


LAYOUTS = {
    "C": BASE.copy,
    "Fortran": lambda: np.asfortranarray(BASE),
    "transposed": lambda: BASE.T,
    "moved axes": lambda: np.moveaxis(np.arange(24.0).reshape(2, 3, 4), 0, 2)[0],
    "strided": lambda: np.arange(48.0).reshape(6, 8)[::2, ::2],
    "reversed": lambda: BASE[::-1, ::-1],
    "broadcast": lambda: np.broadcast_to(np.arange(4.0), (3, 4)),
    "broadcast columns": lambda: np.broadcast_to(np.arange(3.0)[:, None], (3, 4)),
    "read-only": lambda: read_only(BASE.copy()),
    "big-endian": lambda: BASE.astype(">f8"),
    "little-endian Fortran": lambda: np.asfortranarray(BASE.astype("<f4")),
    "big-endian float32": lambda: BASE.astype(">f4"),
    "record": lambda: np.zeros(3, [("a", "f8"), ("b", "i4")])["a"].reshape(3, 1),
    "matrix": lambda: BASE.copy().view(np.matrix),
    "masked": lambda: np.ma.masked_array(BASE, BASE % 3 == 0),
    "masked Fortran": lambda: np.ma.masked_array(np.asfortranarray(BASE), BASE % 5 == 0),
    "recarray": lambda: BASE.view(np.recarray),
    "bfloat16": lambda: BASE.astype(jnp.bfloat16).T,
    "JAX": lambda: jnp.asarray(BASE),
}
SELECTORS = {
    "path": "w[1,0]",
    "row": "w[1]",
    "callable": lambda t: t["w"][1, 0],
    "column": lambda t: t["w"][:, 0],
    "corner": lambda t: t["w"][:2, :1],
    "last": lambda t: t["w"][-1, -1],
    "picked": lambda t: t["w"][[2, 0], [0, 0]],
    "each": pg.each(lambda t: t["w"][1]),
    "joined": pg.path("w[0,0]") | "w[2,0]",
    "nothing": lambda t: (t["w"][:0], t["b"]),
    "several": lambda t: (t["w"][0], t["w"][2, 0]),
}
# The values are small integers, so that every dtype holds them.
WAYS = {
    "value": lambda t, wrt: pg.replace(t, wrt, jax.tree.map(lambda x: np.asarray(x) + 1, plain(pg.select(t, wrt)))),
    "JAX value": lambda t, wrt: pg.replace(
        t, wrt, jax.tree.map(lambda x: jnp.asarray(x, "float32") + 1, plain(pg.select(t, wrt)))
    ),
    "fn": lambda t, wrt: pg.replace(t, wrt, fn=lambda x: x + 1),
    "apply_updates": lambda t, wrt: pg.apply_updates(
        t, jax.tree.map(lambda x: np.ones_like(x), plain(pg.select(t, wrt))), wrt
    ),
    "JAX updates": lambda t, wrt: pg.apply_updates(
        t, jax.tree.map(lambda x: jnp.ones(x.shape), plain(pg.select(t, wrt))), wrt
    ),
    "unravel": lambda t, wrt: (lambda vector, unravel: unravel(vector + 1))(*pg.ravel(t, wrt)),
    "unravel of NumPy": lambda t, wrt: (lambda vector, unravel: unravel(np.asarray(vector) + 1.0))(*pg.ravel(t, wrt)),
}


def plain(part):
    """A part of a tree with arrays of NumPy's own byte order and class, which JAX takes."""
    return jax.tree.map(lambda x: np.asarray(x).astype(x.dtype.newbyteorder("=")), part)


def tree_of(layout):
    return {"w": LAYOUTS[layout](), "b": np.ones(2)}


def positions(layout, wrt):
    """Which entries a selector takes, asked of an array of numbers."""
    shape = LAYOUTS[layout]().shape
    numbers = {"w": jnp.arange(np.prod(shape), dtype="float32").reshape(shape), "b": np.full(2, -1.0)}
    taken = [np.ravel(leaf) for leaf in jax.tree.leaves(pg.select(numbers, wrt))]
    chosen = np.zeros(int(np.prod(shape)), bool)
    chosen[[int(n) for n in np.concatenate(taken) if n >= 0]] = True
    return chosen.reshape(shape)


@table("layout, way, wrt", list(LAYOUTS), list(WAYS), list(SELECTORS), most=2, kind=lambda *row: row[:2])
def test_what_is_selected_changes_and_nothing_else(layout, way, wrt):
    if "masked" in layout and "ravel" in way:
        pytest.skip("JAX has no masked arrays")
    tree, selector = tree_of(layout), SELECTORS[wrt]
    before = tree["w"]
    data = np.array(np.asarray(before))
    new = WAYS[way](tree, selector)["w"]
    want = np.where(positions(layout, selector), data + 1, data)
    if "masked" in layout and way != "value" and way != "JAX value":
        # What NumPy computes of a masked number is masked.
        want = np.where(before.mask, data, want)
        np.testing.assert_array_equal(new.mask, before.mask)
    np.testing.assert_array_equal(np.asarray(new), want)
    np.testing.assert_array_equal(np.asarray(before), data)
    assert (new.dtype, new.shape) == (before.dtype, before.shape)
    # JAX has float32 and bfloat16 of NumPy, so that a value of JAX may make such a leaf one.
    assert type(new) is type(before) or isinstance(new, jax.Array)
    assert isinstance(new, jax.Array) <= (before.dtype in (np.float32, jnp.bfloat16) or isinstance(before, jax.Array))


def test_a_write_unmasks_what_it_changes_and_leaves_the_other_masks():
    masked = np.ma.masked_array(np.zeros(3), [1, 1, 0])
    new = pg.replace({"v": masked}, "v[0]", 9.0)["v"]
    assert (new.mask.tolist(), new.data.tolist()) == ([False, True, False], [9.0, 0.0, 0.0])
    assert masked.mask.tolist() == [True, True, False]


def test_whole_arrays_without_dimensions_and_without_elements():
    matrix = np.array([[2.0]]).view(np.matrix)
    for leaf in (np.array(2.0), np.float64(2.0), np.zeros((0, 3)), np.array(2, ">i8"), np.int64(2), matrix):
        new = pg.apply_updates({"v": leaf}, {"v": np.ones_like(np.asarray(leaf))})["v"]
        assert (type(new), new.dtype, new.shape) == (type(leaf), leaf.dtype, leaf.shape)
        np.testing.assert_array_equal(new, np.asarray(leaf) + 1)
    empty = {"v": np.zeros((0, 3))}
    assert pg.apply_updates(empty, np.zeros((0, 3)), "v")["v"].shape == (0, 3)


# --- the rule of dtypes ------------------------------------------------------------------------------------------

IDS = np.array([2**40, 5])
PRECISE = np.array([1e-300, 16777217.0, 0.1])
BY_ELEMENT = {
    "value": lambda leaf, value: pg.replace({"v": leaf}, "v[1]", value)["v"],
    "fn": lambda leaf, value: pg.replace({"v": leaf}, "v[1]", fn=lambda _: value)["v"],
    "callable": lambda leaf, value: pg.replace([leaf], lambda t: t[0][1], value)[0],
    "several": lambda leaf, value: pg.replace([leaf], lambda t: t[0][1:2], np.reshape(value, (1,)))[0],
}
# A leaf, a value, and what becomes of its element 1; None if it is refused.
WRITES = {
    "int32 of JAX into int64": (IDS, jnp.int32(7), 7),
    "int64 into int64": (IDS, 2**50, 2**50),
    "float32 of JAX into float64": (PRECISE, jnp.float32(7), 7.0),
    "bfloat16 into float64": (PRECISE, jnp.bfloat16(0.5), 0.5),
    "float64 into float64": (PRECISE, 1e-200, 1e-200),
    "int into float": (PRECISE, 3, 3.0),
    "bool into int": (np.array([3, 5]), True, 1),
    "bool into bool": (np.array([True, True]), False, False),
    "rounding": (jnp.ones(2), 0.1, np.float32(0.1)),
    "rounding a large integer": (jnp.ones(2), 16777217, np.float32(16777216)),
    "towards zero": (jnp.ones(2), 1e-300, 0.0),
    "bfloat16": (jnp.ones(2, jnp.bfloat16), 1.01, jnp.bfloat16(1.01)),
    "infinity": (jnp.ones(2), np.inf, np.inf),
    "nan": (jnp.ones(2), np.nan, np.nan),
    "real into complex": (jnp.ones(2, "complex64"), 2.0, 2.0),
    "complex": (np.ones(2, complex), 1e-300j, 1e-300j),
    "the last uint8": (jnp.ones(2, "uint8"), 255, 255),
    "int8 of another class": (np.ones(2, "int8"), np.uint64(127), 127),
    "int4": (jnp.ones(2, "int4"), -8, -8),
    "the last uint64": (np.ones(2, "uint64"), 2**64 - 1, 2**64 - 1),
    "a large integer into bfloat16": (jnp.ones(2, jnp.bfloat16), 10**30, jnp.bfloat16(1e30)),
    "text": (np.array(["ab", "cd"]), "x", "x"),
    "object": (np.array(["ab", None]), 2.5, 2.5),
    "date": (np.array(["2020-01-01", "2020-01-02"], "M8[s]"), np.datetime64("2021-01-01"), np.datetime64("2021-01-01")),
    "1.5 into int": (jnp.array([1, 2]), 1.5, None),
    "1.5 into int64": (np.array([1, 2]), 1.5, None),
    "2.0 into int": (np.array([1, 2]), 2.0, None),
    "nan into int": (np.array([1, 2]), np.nan, None),
    "2 into bool": (jnp.array([True, False]), 2, None),
    "1 into bool": (np.array([True, False]), 1, None),
    "300 into uint8": (jnp.ones(2, "uint8"), 300, None),
    "300 of JAX into uint8": (jnp.ones(2, "uint8"), jnp.int32(300), None),
    "-1 into uint64": (np.ones(2, "uint64"), -1, None),
    "8 into int4": (jnp.ones(2, "int4"), 8, None),
    "2**31 into int32": (jnp.ones(2, "int32"), 2**31, None),
    "10**30 into int64": (np.ones(2, int), 10**30, None),
    "10**5000 into int64": (np.ones(2, int), 10**5000, None),
    "10**5000 into float64": (np.ones(2), 10**5000, None),
    "1e300 into float32": (jnp.ones(2), 1e300, None),
    "float64 of 1e300 into float32": (np.ones(2, "float32"), np.float64(1e300), None),
    "70000 into float16": (jnp.ones(2, "float16"), 70000.0, None),
    "int 70000 into float16": (jnp.ones(2, "float16"), 70000, None),
    "1e39 into bfloat16": (jnp.ones(2, jnp.bfloat16), 1e39, None),
    "infinity into float8": (jnp.ones(2, "float8_e4m3fn"), np.inf, None),
    "complex into float": (jnp.ones(2), 1j, None),
    "complex without imaginary part": (np.ones(2), 1 + 0j, None),
    "complex of 1e300": (jnp.ones(2, "complex64"), 1e300j, None),
    "long text": (np.array(["ab", "cd"]), "xyz", None),
    "number into text": (np.array(["ab", "cd"]), 1.0, None),
    "text into number": (np.ones(2), "x", None),
    "seconds into days": (np.array(["2020-01-01", "2020-01-02"], "M8[D]"), np.datetime64("2021-01-01T01:02:03"), None),
    "number into date": (np.array(["2020-01-01", "2020-01-02"], "M8[D]"), 3, None),
    "float into key": (jax.random.split(jax.random.key(0)), 1.0, None),
    "key into float": (jnp.ones(2), jax.random.key(0), None),
}


@table("case, way", WRITES, BY_ELEMENT, most=2, kind=lambda case, way: case)
def test_a_value_is_written_in_the_dtype_of_the_leaf_or_refused(case, way):
    leaf, value, want = WRITES[case]
    if want is None:
        if way == "several" and isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            pytest.skip("NumPy does not reshape a key")
        with pytest.raises(errors.ArgumentError, match=re.escape(str(leaf.dtype))) as found:
            BY_ELEMENT[way](leaf, value)
        given = np.reshape(value, (1,)) if way == "several" else value
        assert str(getattr(given, "dtype", type(given).__name__)) in str(found.value)
        assert "`['v']`" in str(found.value) or "`[0]`" in str(found.value)
        return
    new = BY_ELEMENT[way](leaf, value)
    assert new.dtype == leaf.dtype
    np.testing.assert_array_equal(np.asarray(new)[1], want)
    assert np.asarray(new)[[0, *range(2, len(leaf))]].tobytes() == np.asarray(leaf)[[0, *range(2, len(leaf))]].tobytes()


@pytest.mark.parametrize("case", [case for case, (*_, want) in WRITES.items() if want is None])
def test_the_remedy_works_where_it_names_a_conversion(case):
    leaf, value, _ = WRITES[case]
    with pytest.raises(errors.ArgumentError) as found:
        BY_ELEMENT["value"](leaf, value)
    remedy = re.search(r"convert the leaf first: (.*)\.$", str(found.value))
    if remedy is not None:
        tree = eval(remedy.group(1), {"partgrad": pg, "tree": {"v": leaf}})
        np.testing.assert_array_equal(np.asarray(pg.replace(tree, "v[1]", value)["v"])[1], value)


def test_the_remedy_at_the_root():
    with pytest.raises(errors.ArgumentError, match="the tree itself") as found:
        pg.replace(jnp.array([1, 2]), "[1]", 1.5)
    tree = eval(re.search(r"first: (.*)\.$", str(found.value)).group(1), {"tree": jnp.array([1, 2])})
    assert pg.replace(tree, "[1]", 1.5).tolist() == [1.0, 1.5]


UPDATES = {
    "float64": (PRECISE, np.zeros(3), PRECISE),
    "float64, float32 of JAX": (PRECISE, jnp.zeros(3), PRECISE),
    "int64": (IDS, np.array([1, 1]), IDS + 1),
    "int64, int32 of JAX": (IDS, jnp.array([1, -1]), IDS + np.array([1, -1])),
    "bfloat16": (jnp.ones(2, jnp.bfloat16), jnp.full(2, 1e-3), np.ones(2)),
    "down in uint8": (jnp.full(2, 250, "uint8"), jnp.array([-10, 5]), np.array([240, 255])),
    "int into float": (jnp.ones(2), np.array([1, 2]), np.array([2.0, 3.0])),
    "up in uint64": (np.array([2**63]), np.array([2**62], "uint64"), np.array([2**63 + 2**62])),
    "0.5 into int": (jnp.array([1, 2]), np.array([0.5, 0.5]), None),
    "0.5 into a Python int": (3, 0.5, None),
    "complex into float": (1.0, 1j, None),
    "1e300 into float32": (jnp.ones(1), np.array([1e300]), None),
    "beyond uint8": (jnp.array([250], "uint8"), jnp.array([10], "uint8"), None),
    "below uint8": (np.array([1], "uint8"), np.array([-2]), None),
    "beyond int4": (jnp.array([7], "int4"), jnp.array([1], "int4"), None),
    "int into bool": (np.array([True]), np.array([1]), None),
}


@pytest.mark.parametrize("case", UPDATES)
def test_updates_follow_the_same_rule(case):
    leaf, change, want = UPDATES[case]
    if want is None:
        with pytest.raises(errors.ArgumentError, match=r"`\['v'\]` cannot hold"):
            pg.apply_updates({"v": leaf}, {"v": change})
        return
    several = [pg.apply_updates({"v": leaf}, {"v": change})["v"]]
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        several.append(pg.apply_updates([leaf], change, "[0]")[0])
    for new in several:
        assert new.dtype == leaf.dtype
        np.testing.assert_array_equal(np.asarray(new), want)


@pytest.mark.slow
def test_a_vector_follows_the_same_rule():
    vector, unravel = pg.ravel({"v": PRECISE}, "v[2]")
    assert unravel(vector)["v"][:2].tobytes() == PRECISE[:2].tobytes()
    # What SciPy gives keeps its digits in a leaf that has them.
    assert unravel(np.array([1 + 1e-12]))["v"][2] == 1 + 1e-12
    _, unravel = pg.ravel({"v": jnp.ones(2, "float16"), "w": 1.0})
    with pytest.raises(errors.ArgumentError, match=r"`\['v'\]` cannot hold"):
        unravel(jnp.full(3, 1e5))
    _, unravel = pg.ravel([1.0, 1j])
    assert unravel(jnp.array([2.0, 3j])) == [2.0, 3j]
    with pytest.raises(errors.ArgumentError, match=r"`\[0\]` cannot hold"):
        unravel(jnp.array([2j, 3j]))
    with pytest.raises(errors.ArgumentError, match=r"`\['v'\]` cannot hold"):
        pg.ravel({"v": np.array([1e300])})


# A leaf, a traced value, and the dtype of what comes out; None if it is refused.
TRACED = {
    "float into int": (jnp.array([1, 2]), 1.5, None),
    "complex into float": (jnp.ones(2), 1j, None),
    "int into float": (jnp.ones(2), 3, "float32"),
    "float32 into bfloat16": (jnp.ones(2, jnp.bfloat16), jnp.float32(3), "bfloat16"),
    "int32 into uint8": (jnp.ones(2, "uint8"), jnp.int32(3), None),
    "int32 into uint32": (jnp.ones(2, "uint32"), jnp.int32(3), None),
    "a Python int into uint8": (jnp.ones(2, "uint8"), 3, "uint8"),
    "uint8 into int32": (jnp.ones(2, "int32"), jnp.uint8(3), "int32"),
    "bool into int": (jnp.ones(2, "int32"), True, "int32"),
    "into small int64 of NumPy": (np.array([1, 2]), 3, "int32"),
    "into large int64 of NumPy": (np.array([2**40, 2]), 3, None),
    "into exact float64 of NumPy": (np.array([0.5, 0.1]), 3.0, "float32"),
    "into float64 of NumPy": (np.array([0.1, 0.1]), 3.0, None),
    "into another byte order": (np.array([0.5, 1.0], ">f8"), 3.0, "float32"),
    "into Fortran order": (np.asfortranarray(np.ones((2, 2))).T[0], 3.0, "float32"),
    "into text": (np.array(["a", "b"]), 3.0, None),
    "into objects": (np.array([None, 2], object), 3.0, None),
}


@pytest.mark.parametrize("case", TRACED)
def test_a_traced_value_counts_by_its_dtype(case):
    leaf, value, dtype = TRACED[case]
    write = jax.jit(lambda value: pg.replace({"v": leaf}, "v[1]", value)["v"])
    if dtype is None:
        with pytest.raises(errors.ArgumentError, match=rf"(?s)`\['v'\]`.*{re.escape(str(leaf.dtype))}"):
            write(value)
        return
    new = write(value)
    assert (str(new.dtype), new.tolist()) == (dtype, [leaf.tolist()[0], 3 if value is not True else 1])


def test_traced_updates_and_vectors():
    for leaf, fits in ((IDS, False), (np.array([1, 2]), True)):
        update = jax.jit(lambda change, leaf=leaf: pg.apply_updates({"v": leaf}, {"v": change})["v"])
        if fits:
            assert update(jnp.array([1, 1])).tolist() == [2, 3]
        else:
            with pytest.raises(errors.ArgumentError, match=r"`\['v'\]` cannot hold"):
                update(jnp.array([1, 1]))
    _, unravel = pg.ravel({"v": PRECISE}, "v[2]")
    with pytest.raises(errors.ArgumentError, match="jax.numpy.asarray"):
        jax.jit(unravel)(jnp.ones(1))
    _, unravel = pg.ravel(jax.tree.map(jnp.asarray, {"v": PRECISE}), "v[2]")
    assert jax.jit(unravel)(jnp.ones(1))["v"][2] == 1.0


@pytest.mark.slow
def test_with_64_bits_everything_keeps_its_bits(x64):
    if not x64:
        pytest.skip("about 64 bits")
    for write in (
        lambda leaf, value: pg.replace({"v": leaf}, "v[1]", value)["v"],
        jax.jit(lambda leaf, value: pg.replace({"v": leaf}, "v[1]", value)["v"]),
    ):
        assert write(IDS, jnp.int32(7)).tolist() == [2**40, 7]
        assert write(PRECISE, jnp.float32(7)).tolist() == [1e-300, 7.0, 0.1]
    with pytest.raises(errors.ArgumentError, match="cannot hold"):
        pg.replace({"v": jnp.ones(2, "float32")}, "v[1]", jnp.float64(1e300))
    with pytest.raises(errors.ArgumentError, match="cannot hold"):
        pg.replace({"v": jnp.ones(2, "int32")}, "v[1]", jnp.int64(2**40))
    assert pg.replace({"v": jnp.ones(2, "int32")}, "v[1]", jnp.int64(2**20))["v"].tolist() == [1, 2**20]


@pytest.mark.slow
def test_derivatives_of_elements_follow_jax():
    loss = lambda t: jnp.sum(t["v"] ** 2)
    assert pg.grad(loss, wrt="v[2]")({"v": PRECISE}) == np.float32(0.2)
    assert pg.jacfwd(loss, wrt=lambda t: t["v"][1:])({"v": PRECISE.astype("f4")}).shape == (2,)


def test_no_warning_is_given():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pg.replace({"v": jnp.ones(2, jnp.bfloat16)}, "v[0]", np.float64(0.3))
        pg.replace({"v": IDS}, "v[0]", jnp.int32(1))
