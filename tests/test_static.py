"""Static: data for the compiler; arrays are refused."""

import copy
import dataclasses
import enum
import functools
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from models import RBF
from partgrad import NonDiff, Static, errors

pytestmark = pytest.mark.core


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Size:
    width: float


@dataclasses.dataclass(frozen=True, eq=False)
class Metre:
    length: float

    def __eq__(self, other):
        return self.length == other.length

    def __hash__(self):
        return hash(self.length)


class Yard(Metre):
    pass


def counted(function):
    """A jitted function, and the list that grows by one entry a trace."""
    traces = []

    @jax.jit
    def f(*args):
        traces.append(1)
        return function(*args)

    return f, traces


def test_python_values_are_constants_of_the_compiler():
    f, traces = counted(lambda t: jnp.zeros(t["n"].value))
    assert f({"n": Static(2)}).shape == (2,)
    assert f({"n": Static(2)}).shape == (2,)
    assert f({"n": Static(3)}).shape == (3,)
    assert len(traces) == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, True),
        (1, 1.0),
        (0, False),
        ({"a": 1}, {"a": True}),
        ([1], [1.0]),
        ({1: 2}, {True: 2}),
        ((1, 2), [1, 2]),
        ({1}, {True}),
        (Size(1), Size(True)),
        ({"of": (Size(0.0),)}, {"of": (Size(-0.0),)}),
        (Metre(1), Yard(1)),
        ({1}, frozenset({1})),
    ],
)
def test_it_compares_by_type_and_value_recursively(first, second):
    assert Static(first) == Static(copy.deepcopy(first))
    assert Static(first) != Static(second)
    f, traces = counted(lambda t: 0.0)
    f(Static(first)), f(Static(second)), f(Static(copy.deepcopy(first)))
    assert len(traces) == 2


@pytest.mark.parametrize(
    "value",
    [
        3,
        "name",
        None,
        True,
        2.5,
        Colour.RED,
        jnp.float32,
        np.dtype("int8"),
        np.float64(2.0),
        len,
        (1, 2),
        {"b": 1, "a": [2]},
        {1, 2},
        np.array(["x", "y"]),
        functools.partial(max, 3),
    ],
    ids=repr,
)
def test_it_gives_back_what_it_holds(value):
    for static in (Static(value), jax.jit(lambda t: t)(Static(value)), pickle.loads(pickle.dumps(Static(value)))):
        assert (
            np.array_equal(static.value, value) if isinstance(value, np.ndarray) else repr(static.value) == repr(value)
        )
    assert not jax.tree.leaves(Static(value))


def test_nan_equals_itself_so_that_it_does_not_recompile():
    assert Static(float("nan")) == Static(float("nan"))


ARRAYS = {
    "jax": lambda: jnp.ones(2),
    "numpy": lambda: np.ones(2),
    "deep": lambda: {"n": 2, "grid": [jnp.ones(2)]},
    "model": lambda: RBF(jnp.ones(2), 2.0),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_is_refused_and_its_own_field_works(kind):
    value = ARRAYS[kind]()
    path = {"deep": r".* at `\['grid'\]\[0\]`", "model": ".* at `variance`"}.get(kind, "")
    for build in (Static, Tabulated):
        with pytest.raises(pg.errors.StaticError, match=f"(?s)holds an array{path}.*nondiff=True.*tuple"):
            build(value)
    with pytest.raises(pg.errors.StaticError, match="(?s)holds a traced value.*nondiff=True"):
        jax.jit(lambda value: Static(value).value)(value)


@pg.dataclass
class Tabulated:
    table: object = pg.field(static=True)


@pg.dataclass
class Held:
    table: jax.Array = pg.field(nondiff=True)


def test_the_remedies_for_an_array_work():
    f, traces = counted(lambda m: m.table.sum())
    assert f(Held(jnp.ones(2))) == 2.0
    assert f(Held(2 * jnp.ones(2))) == 4.0
    assert len(traces) == 1
    f, traces = counted(lambda m: jnp.arange(5.0)[np.array(m.table)].sum())
    assert f(Tabulated(tuple(np.array([1, 2]).tolist()))) == 3.0


def test_the_callers_container_may_change_afterwards():
    options = {"n": [1]}
    static = Static(options)
    options["n"].append(2)
    assert static.value == {"n": [1]}


def test_equality_is_one_bool():
    assert Static({"g": (1.0, 2.0), "n": 1}) == Static({"g": (1.0, 2.0), "n": 1})
    assert Static({"g": (1.0, 2.0)}) != Static({"g": (1.0, 3.0)})
    assert Static(Static(3)) == Static(3)
    assert Static(3) != 3
    assert hash(Static({"a": 1})) == hash(Static({"a": 1}))
    assert repr(Static(3)) == "Static(3)"


def test_what_cannot_be_static_is_refused_where_it_is_built():
    class Odd:
        __hash__ = None

    with pytest.raises(
        pg.errors.StaticError, match=r"holds Odd .* at `\['a'\]\[0\]`, which cannot be static"
    ) as caught:
        Static({"a": [Odd()]})
    assert isinstance(caught.value, TypeError)
    for words in ("Expected data that can be hashed and compared", "Fix: give its class __eq__ and __hash__"):
        assert words in str(caught.value)
    with pytest.raises(pg.errors.StaticError, match=r"`Static` holds Odd .* at `\['a'\]`, which cannot be static"):
        Static({"a": np.array(["x", Odd()], object)})
    with pytest.raises(pg.errors.StaticError, match="keys can be sorted"):
        Static({1: 2, "a": 3})


def test_a_slice_is_static():
    f = jax.jit(lambda part: jnp.arange(5.0)[part.value])
    assert f(Static(slice(1, 3))).tolist() == f(Static(slice(1, 3))).tolist() == [1.0, 2.0]
    assert f(Static(slice(1, 4))).size == 3
    assert f._cache_size() == 2


def test_errors_of_jax_about_structures_show_it():
    assert "'x'" in str(jax.tree.structure(Static("x")))


@pg.dataclass
class Configured:
    w: Any
    cfg: Any = pg.field(static=True)


@pg.dataclass
class Pair:
    w: Any
    b: Any


def test_auxiliary_data_in_static_data_is_compared_by_type():
    class Module(eqx.Module):
        w: Any
        n: Any = eqx.field(static=True)

    f = jax.jit(lambda k: k.w * (2.0 if k.cfg.n is True else 3.0))
    assert (f(Configured(1.0, Module(2.0, True))), f(Configured(1.0, Module(2.0, 1)))) == (2.0, 3.0)
    assert Static(Module(2.0, 1)) != Static(Module(2.0, 1.0))
    assert Static({1: 2}) != Static({True: 2})


def test_containers_in_static_data_are_refused_at_any_depth():
    for cfg, path, function in [
        (Pair(1.0, {"g": 2.0, "n": 3}), "cfg.b", lambda k: k.cfg.b["g"]),
        ({"s": NonDiff({"g": 2.0, "n": 3})}, "cfg.s", lambda k: k.cfg["s"].value["g"]),
        ([Pair(1.0, {"g": 2.0, "n": 3})], "cfg[0].b", lambda k: k.cfg[0].b["g"]),
        (Configured(2.0, {"g": 2.0, "n": 3}), "cfg", lambda k: k.cfg.cfg["g"]),
    ]:
        for wrt in (path, function):
            with pytest.raises(errors.SelectionError, match="static[\\s\\S]*make it a field of its own"):
                pg.grad(lambda k: k.w, wrt=wrt)(Configured(3.0, cfg))


def test_a_static_constant_says_so():
    with pytest.raises(
        errors.NoMatchError, match=r"it returned 3 \(int\), which is not a part of the tree; static data is not a leaf"
    ):
        pg.partition(Configured(1.0, 3), lambda m: m.cfg)


@pg.dataclass
class Ratio:
    a: Any

    def __call__(self, x):
        return x / self.a


def test_signed_zeros_of_a_model_that_is_the_function():
    models = [Ratio(0.0), Ratio(-0.0)]
    assert [float(jax.jit(model)(1.0)) for model in models] == [np.inf, -np.inf]


@pytest.mark.parametrize(("values", "dtypes"), [((1.0, jnp.ones(())), ("float16", "float32"))])
def test_dtypes_of_a_static_argument(values, dtypes):
    f = jax.jit(lambda m, x: m.a * x, static_argnums=0)
    models = [Ratio(value) for value in values]
    assert [f(model, jnp.float16(1)).dtype for model in models] == list(dtypes)


@pytest.mark.parametrize("around", [lambda x: x, lambda x: (x,), lambda x: {"k": [x]}], ids=["plain", "tuple", "dict"])
def test_signed_zeros_in_static(around):
    f = jax.jit(lambda s, x: x / jax.tree.leaves(s.value)[0])
    assert [float(f(pg.Static(around(zero)), 1.0)) for zero in (0.0, -0.0)] == [np.inf, -np.inf]


class Mute(float):
    def __repr__(self):
        raise RuntimeError("hostile")


class Alike(float):
    def __repr__(self):
        return "?"


def test_static_numbers_are_told_apart_by_value_whatever_they_print():
    assert repr(pg.Diff(Mute(1.0))) == "Diff(<Mute>)"
    for kind in (Mute, Alike):
        assert pg.Static(kind(1.0)) == pg.Static(kind(1.0)) != pg.Static(kind(2.0))
        assert pg.Static(kind(0.0)) != pg.Static(kind(-0.0))
        assert pg.Static(kind("nan")) == pg.Static(kind("nan"))
    scaled = jax.jit(lambda static, x: x * static.value)
    assert [scaled(pg.Static(Alike(number)), 1.0) for number in (1.0, 2.0)] == [1.0, 2.0]
