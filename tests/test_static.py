"""Static: data for the compiler; an array is held."""

import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pickle
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from helpers.models import RBF
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


@pg.dataclass
class Tabulated:
    table: object = pg.field(static=True)


ARRAYS = {
    "jax": lambda: jnp.ones(2),
    "numpy": lambda: np.ones(2),
    "ints": lambda: jnp.arange(2),
    "bools": lambda: np.array([True, False]),
    "key": lambda: jax.random.key(0),
    "number": lambda: jnp.float32(2.0),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_is_held(kind):
    value = ARRAYS[kind]()
    for wrapper in (Static(value), Static(Static(value)), Static(NonDiff(value)), NonDiff(Static(value))):
        assert isinstance(wrapper, NonDiff)
        assert wrapper.value is value
    for model in (Tabulated(value), Tabulated(Static(value)), Tabulated(NonDiff(value)), Plain(1.0, Static(value))):
        assert model.table is value
        assert "table=NonDiff(" in repr(model)
        assert jax.tree.leaves(model)[-1] is value

    @jax.jit
    def built_inside(value):
        assert isinstance(Static(value), NonDiff)
        return Tabulated(value), Static({"n": 2})

    with jax.checking_leaks():
        model, _ = built_inside(value)
    assert jax.tree.structure(model) == jax.tree.structure(Tabulated(value))


@pg.dataclass
class Plain:
    w: Any
    table: Any = 1.0


@pg.dataclass
class Table:
    w: Any
    table: Any = pg.field(static=True)


@pg.dataclass(frozen=False)
class Mutable:
    w: Any
    table: Any = pg.field(static=True, default="none")


@pg.dataclass
class OwnInit:
    w: Any
    table: Any = pg.field(static=True)

    def __init__(self, w, table):
        self.w, self.table = w, table


@pg.dataclass
class PostInit:
    w: Any
    table: Any = pg.field(static=True)
    copied: Any = pg.field(static=True, init=False)

    def __post_init__(self):
        self.copied = self.table


def total(m):
    return (m.w * m.table).sum()


TABLES = [Table, Mutable, OwnInit, PostInit]


@pytest.mark.parametrize("cls", TABLES, ids=lambda cls: cls.__name__)
def test_an_array_in_a_static_field_is_held_in_that_instance(cls):
    model, other = cls(2.0, jnp.ones(3)), cls(2.0, 2 * jnp.ones(3))
    f, traces = counted(total)
    assert (f(model), f(other), f(model)) == (6.0, 12.0, 6.0)
    assert len(traces) == 1
    gradient = pg.grad(total)(model)
    assert (gradient.w, gradient.table) == (3.0, None)
    assert pg.grad(total, wrt="table")(model).tolist() == [2.0, 2.0, 2.0]
    assert jax.grad(total)(cls(2.0, jnp.ones(3))).table.tolist() == [0.0, 0.0, 0.0]
    assert pg.is_nondiff(model, "table") is True
    assert [path for path, _ in pg.items(model)] == ["w"]
    # Not the field of other instances.
    named = cls(2.0, "name")
    assert [len(jax.tree.leaves(m)) for m in (named, model)] == [1, 2 + (cls is PostInit)]


@pytest.mark.parametrize("cls", TABLES, ids=lambda cls: cls.__name__)
def test_an_array_in_a_static_field_stays_held(cls):
    model = cls(2.0, jnp.ones(3))
    structure = jax.tree.structure(model)
    copies = {
        "pickle": pickle.loads(pickle.dumps(model)),
        "copy": copy.copy(model),
        "deepcopy": copy.deepcopy(model),
        "map": jax.tree.map(lambda leaf: leaf + 1, model),
        "to bools": jax.tree.map(lambda leaf: True, model),
        "jit": jax.jit(lambda m: m)(model),
        "vmap": jax.vmap(lambda m: m)(cls(jnp.ones(2), jnp.ones((2, 3)))),
        "scan": jax.lax.scan(lambda m, _: (m, None), cls(jnp.ones(()), jnp.ones(3)), length=2)[0],
        "replace": dataclasses.replace(model, w=3.0),
        "replace in jit": jax.jit(lambda m: dataclasses.replace(m, w=3.0))(model),
        "replace array": dataclasses.replace(model, table=np.zeros(3)),
        "replace bools": dataclasses.replace(jax.tree.map(lambda leaf: True, model), w=False),
        "freeze and thaw": pg.thaw(pg.freeze(model, "w"), "w"),
        "combine": pg.combine(*pg.partition(model)),
    }
    if cls is PostInit:
        # It decides again, by what it is given.
        del copies["replace bools"]
    assert {name: jax.tree.structure(made) == structure for name, made in copies.items()} == dict.fromkeys(copies, True)
    thawed = pg.thaw(model, "table")
    assert repr(thawed).count("Diff([1., 1., 1.])") == 1 + (cls is PostInit)
    assert pg.grad(total)(dataclasses.replace(thawed, w=1.0)).table.tolist() == [1.0, 1.0, 1.0]
    assert pg.freeze(thawed, "table") == model


def test_replace_makes_a_field_static_again_and_the_other_way_round():
    model = Table(2.0, jnp.ones(3))
    named = dataclasses.replace(model, table="name")
    assert named == Table(2.0, "name")
    assert dataclasses.replace(named, table=jnp.ones(3)) == model
    assert dataclasses.replace(pg.thaw(model, "table"), table="name") == named
    mutable = Mutable(2.0)
    assert jax.tree.leaves(mutable) == [2.0]
    mutable.table = jnp.ones(3)
    assert pg.grad(total)(mutable).table is None
    mutable.table = "name"
    assert jax.tree.leaves(mutable) == [2.0]


def test_diff_of_an_array_in_a_static_field_is_differentiated():
    assert pg.grad(total)(Table(2.0, pg.Diff(jnp.ones(3)))).table.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(errors.DataclassError, match="which is static"):
        Table(2.0, pg.Diff("name"))


@pytest.mark.filterwarnings("ignore:A derivative ends")
def test_an_array_in_a_static_field_of_a_model_that_is_built_inside():
    def loss(m):
        return total(Table(m.w, m.table))

    with pytest.raises(errors.HeldError, match="Table.table"):
        pg.grad(loss, wrt="table")(Table(2.0, jnp.ones(3)))
    assert jax.grad(lambda table: total(Table(2.0, table)))(jnp.ones(3)).tolist() == [0.0, 0.0, 0.0]


class WithStaticArray(eqx.Module):
    x: float
    t: Any = eqx.field(static=True)


@dataclasses.dataclass(frozen=True, eq=True)
class HasArray:
    table: Any


@jax.tree_util.register_pytree_node_class
class Registered:
    def __init__(self, x, aux):
        self.x, self.aux = x, aux

    def tree_flatten(self):
        return (self.x,), self.aux

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children, aux)


def objects(*values):
    array = np.empty(len(values), object)
    for number, value in enumerate(values):
        array[number] = value
    return array


DEEPER = {
    "dict": (lambda x: {"n": 2, "grid": [x]}, r"\['grid'\]\[0\]"),
    "model": (lambda x: RBF(x, 2.0), "variance"),
    "static field of a module": (lambda x: WithStaticArray(3.0, x), "t"),
    "deeper": (lambda x: (1, [WithStaticArray(3.0, {"a": x})]), r"\[1\]\[0\]\.t\['a'\]"),
    "auxiliary data": (lambda x: Registered(1.0, x), "aux"),
    "a dataclass": (lambda x: HasArray(x), "table"),
    "a partial": (lambda x: jax.tree_util.Partial(max, x), None),
    "objects": (lambda x: objects(x, None), None),
    "a model in a module": (lambda x: {"k": Table(1.0, x)}, r"\['k'\].table"),
}


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("name", DEEPER)
def test_an_array_deeper_inside_is_refused_when_the_instance_is_built(name):
    make, path = DEEPER[name]
    at = "" if path is None else f" at `{path}`"
    for build in (Static, Tabulated, functools.partial(Table, 1.0)):
        for array in (jnp.ones(2), np.ones(2)):
            with pytest.raises(errors.StaticError, match=f"(?s)holds an array{at}.*field of its own.*tuple"):
                build(make(array))
        with pytest.raises(errors.StaticError, match=f"(?s)holds a traced value{at}"):
            jax.jit(lambda x, build=build: jax.tree.leaves(build(make(x))))(jnp.ones(2))


def test_the_remedies_for_an_array_inside_static_data_work():
    f, traces = counted(lambda m: m.table.sum())
    assert (f(Held(jnp.ones(2))), f(Held(2 * jnp.ones(2)))) == (2.0, 4.0)
    assert len(traces) == 1
    assert jax.tree.leaves({"n": Static(2), "grid": NonDiff(jnp.ones(2))})[0].tolist() == [1.0, 1.0]
    f, traces = counted(lambda m: jnp.arange(5.0)[np.array(m.table["rows"])].sum())
    assert f(Tabulated({"rows": tuple(np.array([1, 2]).tolist())})) == 3.0


@pg.dataclass
class Held:
    table: jax.Array = pg.field(nondiff=True)


@dataclasses.dataclass(frozen=True)
class Noted:
    n: Any
    note: str = dataclasses.field(default="", compare=False)


class Tag(str):
    pass


def tagged(text, mark):
    tag = Tag(text)
    tag.mark = mark
    return tag


class Text(np.ndarray):
    pass


class Half(fractions.Fraction):
    pass


class Level(enum.IntEnum):
    ONE = 1


class Slotted:
    __slots__ = ("a", "hidden")

    def __init__(self, a, hidden):
        self.a, self.hidden = a, hidden

    def __eq__(self, other):
        return self.a == other.a

    def __hash__(self):
        return hash(self.a)


class Forgets(Slotted):
    __slots__ = ()

    def __reduce__(self):
        return Forgets, (self.a, 0)


def utc(hours):
    zone = datetime.timezone(datetime.timedelta(hours=hours))
    return datetime.datetime(2020, 1, 1, 12, tzinfo=datetime.UTC).astimezone(zone)


def filled(first, second):
    made = set()
    for number in (first, second):
        made.add(number)
    return made


RECORD = [("x", "i4"), ("y", "i4")]
# Pairs that compare equal, or might be taken for equal, and that a function can tell apart.
APART = {
    "order of a dict": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "order of an OrderedDict": (collections.OrderedDict(a=1), collections.OrderedDict(a=True)),
    "classes of dicts": (collections.OrderedDict(a=1), {"a": 1}),
    "order of a set": (filled(0, 8), filled(8, 0)),
    "a bool in a frozenset": (frozenset({1}), frozenset({True})),
    "Decimal": (decimal.Decimal("1.0"), decimal.Decimal("1.000")),
    "zeros of Decimal": (decimal.Decimal("0"), decimal.Decimal("-0")),
    "subclass of Fraction": (fractions.Fraction(1, 2), Half(1, 2)),
    "Fraction and float": (fractions.Fraction(1, 2), 0.5),
    "fields of an array": (np.array([(1, 2)], RECORD), np.array([(1, 2)], RECORD[::-1])),
    "fields of a dtype": (np.dtype(RECORD), np.dtype(RECORD[::-1])),
    "titles of a dtype": (np.dtype([("x", "i4")]), np.dtype([(("title", "x"), "i4")])),
    "byte order": (np.array([(1.5,)], [("x", "f4")]), np.array([(1.5,)], [("x", ">f4")])),
    "strings of other widths": (np.array(["a"]), np.array(["a"], "U2")),
    "subclass of an array": (np.array(["ab"]), np.array(["ab"]).view(Text)),
    "objects in an array": (np.array([1, None], object), np.array([True, None], object)),
    "NumPy and Python": (np.float64(1.0), 1.0),
    "NumPy numbers": (np.int32(1), np.int64(1)),
    "zones": (utc(0), utc(3)),
    "zones of times": (datetime.time(1, tzinfo=datetime.UTC), datetime.time(1)),
    "folds": (datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 1, fold=1)),
    "a date": (datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1)),
    "range": (range(0, 3, 2), range(0, 4, 2)),
    "slice": (slice(1), slice(True)),
    "zeros": (0.0, -0.0),
    "zeros in a complex": (complex(0.0, 0.0), complex(0.0, -0.0)),
    "zeros in a complex, real": (complex(0.0, 0.0), complex(-0.0, 0.0)),
    "compare=False": (Noted(1, "ab"), Noted(1, "abcd")),
    "a bool in a dataclass": (Noted((1,)), Noted((True,))),
    "a zero in a dataclass": (Noted({"a": 0.0}), Noted({"a": -0.0})),
    "str": ("a", Tag("a")),
    "attributes of a str": (tagged("a", 1), tagged("a", 2)),
    "bytes": (b"a", bytearray(b"a").decode()),
    "enum": (Level.ONE, 1),
    "slots": (Slotted(1, 2), Slotted(1, 3)),
    "what pickle leaves out": (Forgets(1, 2), Forgets(1, 3)),
    "order of a union": (int | str, str | int),
    "generic": (list[int], list[bool]),
    "patterns": (re.compile("a"), re.compile("a", re.ASCII)),
    "a default": (collections.defaultdict(int, a=1), collections.defaultdict(float, a=1)),
    "structures": (jax.tree.structure(Static(1)), jax.tree.structure(Static(True))),
    "methods": (Metre(1.0).__eq__, Metre(1.0).__eq__),
}


@pytest.mark.parametrize("name", APART)
def test_a_program_is_not_used_for_data_that_a_function_can_tell_apart(name):
    first, second = APART[name]
    f, traces = counted(lambda t: 0.0)
    f(Static(first)), f(Static(second)), f(Static(first))
    assert len(traces) == 2
    assert Static({"a": [first]}) != Static({"a": [second]})
    assert Table(1.0, first) != Table(1.0, second)
    # As the leaf of a model that is the function itself, too.
    if name not in ("order of a dict", "enum"):
        assert Plain(1.0, {"a": first}) != Plain(1.0, {"a": second})


@pytest.mark.parametrize("name", sorted(APART.keys() - {"methods", "order of a set"}))
def test_a_copy_is_the_same(name):
    for value in (value for value in APART[name] if not isinstance(value, Forgets)):
        f, traces = counted(lambda t: 0.0)
        f(Static(value)), f(Static(copy.deepcopy(value)))
        assert len(traces) == 1
        if name != "structures":
            assert Static(pickle.loads(pickle.dumps(value))) == Static(value)


def test_what_refers_to_itself_is_static():
    first, second = Slotted(1, None), Slotted(1, None)
    for own in (first, second):
        own.hidden = [own]
    assert Static(first) == Static(second)
    second.hidden.append(2)
    assert Static(first) == Static(first) != Static(second)


class Cached(Noted):
    @functools.cached_property
    def square(self):
        return self.n**2


def test_what_an_object_computed_for_itself_does_not_compile_again():
    used = Cached(3)
    assert used.square == 9
    assert Static(used) == Static(Cached(3)) != Static(Cached(4))


def test_what_cannot_be_taken_apart_is_refused():
    class Closed(Metre):
        def __reduce__(self):
            raise TypeError("closed")

    with pytest.raises(errors.StaticError, match="(?s)holds Closed .*`copy` can take apart.*store the data"):
        Static(Closed(1))
    assert Static(Closed(1).length) == Static(1)


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
