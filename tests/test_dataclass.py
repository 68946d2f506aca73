"""partgrad dataclasses: construction, marks of fields, structure, equality and hashing."""

import abc
import copy
import dataclasses
import inspect
import pickle
import sys
from typing import Generic, Protocol, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from helpers.models import RBF, Config, Kernel, Periodic, Sum, composite, loss
from partgrad import NonDiff, Static

pytestmark = pytest.mark.core

T = TypeVar("T")


# --- construction ------------------------------------------------------------------------------------------------


@pg.dataclass(kw_only=True)
class Keywords:
    a: float
    b: float = 2.0


@pg.dataclass
class Defaults(Generic[T]):
    a: float
    b: list = pg.field(default_factory=lambda: [1.0, NonDiff(2.0)])
    c: float = NonDiff(3.0)
    _: dataclasses.KW_ONLY
    d: float = 4.0


@pg.dataclass
class Derived(Defaults):
    e: float = pg.field(nondiff=True, default=5.0)

    def total(self):
        return self.a + self.c + self.d + self.e


@pg.dataclass
class PostInit:
    a: float
    scale: dataclasses.InitVar[float]
    total: float = pg.field(init=False)

    def __post_init__(self, scale):
        assert not isinstance(self.a, NonDiff)
        self.total = self.a * scale


@pg.dataclass
class ByHand:
    a: float
    b: float

    def __init__(self, x):
        self.a = x
        object.__setattr__(self, "b", NonDiff(x + 1))


@pg.dataclass
class ByHandChild(ByHand):
    c: float

    def __init__(self, x, c):
        super().__init__(x)
        self.c = c


@pg.dataclass
class CallsGenerated(Keywords):
    c: float

    def __init__(self, a, c):
        super().__init__(a=NonDiff(a))
        self.c = c


def test_arguments_defaults_factories_and_keywords():
    assert Keywords(a=1.0) == Keywords(a=1.0, b=2.0)
    with pytest.raises(TypeError, match="positional"):
        Keywords(1.0)
    first, second = Defaults(1.0), Defaults[int](1.0, d=7.0)
    assert first.b is not second.b
    assert (first.c, second.d) == (3.0, 7.0)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'a'"):
        Defaults()
    with pytest.raises(TypeError, match="unexpected keyword"):
        Defaults(1.0, nowhere=2.0)


def test_signature_and_fields_are_those_of_a_dataclass():
    assert str(inspect.signature(Derived)) == (
        "(a: float, b: list = <factory>, c: float = NonDiff(3.0), e: float = 5.0, *, d: float = 4.0) -> None"
    )
    assert [f.name for f in dataclasses.fields(Derived)] == ["a", "b", "c", "d", "e"]
    assert Derived.__match_args__ == ("a", "b", "c", "e")
    assert dataclasses.is_dataclass(Derived(1.0))
    assert dataclasses.asdict(RBF(NonDiff(1.0), 2.0)) == {"variance": 1.0, "lengthscale": 2.0}


def test_inheritance_methods_and_matching():
    instance = Derived(1.0)
    assert instance.total() == 13.0
    gradient = pg.grad(lambda m: m.total() ** 2)(instance)
    assert (gradient.a, gradient.c, gradient.d, gradient.e) == (26.0, None, 26.0, None)
    match RBF(1.0, 2.0):
        case RBF(variance, lengthscale):
            assert (variance, lengthscale) == (1.0, 2.0)


def test_abstract_and_protocol_bases():
    class Callable(Protocol):
        def __call__(self, x): ...

    class Abstract(abc.ABC):
        @abc.abstractmethod
        def value(self): ...

    @pg.dataclass
    class Concrete(Abstract, Callable):
        a: float

        def value(self):
            return self.a

        def __call__(self, x):
            return self.a * x

    assert pg.grad(lambda m: m(2.0))(Concrete(3.0)).a == 2.0


def test_post_init_sees_plain_values_and_sets_fields():
    instance = PostInit(NonDiff(2.0), 3.0)
    assert (instance.a, instance.total) == (2.0, 6.0)
    assert repr(instance) == "PostInit(a=NonDiff(2.0), total=6.0)"


def test_init_by_hand_assigns_fields_and_marks():
    assert repr(ByHand(1.0)) == "ByHand(a=1.0, b=NonDiff(2.0))"
    assert repr(ByHandChild(1.0, 5.0)) == "ByHandChild(a=1.0, b=NonDiff(2.0), c=5.0)"
    assert repr(CallsGenerated(1.0, 5.0)) == "CallsGenerated(a=NonDiff(1.0), b=2.0, c=5.0)"


def test_replace_of_a_class_with_its_own_init_keeps_marks():
    assert repr(dataclasses.replace(ByHand(1.0), a=7.0)) == "ByHand(a=7.0, b=NonDiff(2.0))"


def test_frozen_by_default_and_mutable_on_request():
    with pytest.raises(
        dataclasses.FrozenInstanceError, match=r"cannot assign to field `RBF.variance`[\s\S]*Fix: build a new"
    ):
        RBF(1.0, 2.0).variance = 3.0

    @pg.dataclass(frozen=False)
    class Mutable:
        a: float
        b: float = pg.field(nondiff=True)

    instance = Mutable(1.0, 2.0)
    instance.b = 5.0
    instance.a = NonDiff(4.0)
    assert repr(instance) == "Mutable(a=NonDiff(4.0), b=NonDiff(5.0))"
    assert (instance.a, instance.b) == (4.0, 5.0)
    with pytest.raises(TypeError, match="mutable .frozen=False., so its instances have no hash"):
        hash(instance)


def test_a_mutable_instance_has_properties_and_attributes_beside_its_fields():
    @pg.dataclass(frozen=False)
    class Mutable:
        a: float = pg.field(nondiff=True)

        @property
        def log(self):
            return np.log(self.a)

        @log.setter
        def log(self, value):
            self.a = np.exp(value)

    instance = Mutable(1.0)
    instance.log = 0.0
    assert repr(instance) == "Mutable(a=NonDiff(np.float64(1.0)))"
    instance.note = "beside"
    del instance.note
    assert not hasattr(instance, "note")
    with pytest.raises(TypeError, match="cannot delete field `Mutable.a`"):
        del instance.a


def test_methods_that_are_not_generated_are_those_of_the_class():
    @pg.dataclass(repr=False, eq=False)
    class Bare:
        a: float

    assert Bare.__repr__ is object.__repr__
    assert Bare.__eq__ is object.__eq__
    assert Bare.__hash__ is object.__hash__

    @pg.dataclass
    class Own:
        a: float

        def __repr__(self):
            return f"own {self.a}"

        def __eq__(self, other):
            return "own"

    assert (repr(Own(1.0)), Own(1.0) == Own(2.0)) == ("own 1.0", "own")
    with pytest.raises(TypeError, match="unhashable"):
        hash(Own(1.0))


def test_a_field_that_init_does_not_take():
    @pg.dataclass
    class Partly:
        a: float
        b: float = pg.field(init=False, nondiff=True, default=2.0)
        c: list = pg.field(init=False, default_factory=lambda: [NonDiff(3.0)])

    assert repr(Partly(1.0)) == "Partly(a=1.0, b=NonDiff(2.0), c=[NonDiff(3.0)])"
    assert jax.tree.leaves(Partly(1.0)) == [1.0, 2.0, 3.0]


def test_annotations_need_not_be_types_and_factories_show_in_the_signature():
    Made = pg.dataclass(
        type("Made", (), {"__annotations__": {"x": (3,), "y": list}, "y": pg.field(default_factory=lambda: [1.0])})
    )
    assert str(inspect.signature(Made)) == "(x: (3,), y: list = <factory>) -> None"
    assert jax.tree.leaves(Made(2.0)) == [2.0, 1.0]


def test_unflatten_runs_no_user_code_and_takes_any_placeholder():
    @pg.dataclass
    class Strict:
        a: float

        def __post_init__(self):
            assert self.a > 0

    structure = jax.tree.structure(Strict(1.0))
    for placeholder in (None, -1.0, object(), "x", jax.ShapeDtypeStruct((2,), jnp.float32)):
        assert jax.tree.unflatten(structure, [placeholder]).a is placeholder


# --- marks -------------------------------------------------------------------------------------------------------


def test_a_marked_field_stores_the_plain_value():
    kernel = RBF(NonDiff(jnp.ones(3)), 2.0)
    assert kernel.variance.shape == (3,)
    assert jax.lax.sin(kernel.variance).shape == (3,)
    assert repr(RBF(NonDiff(1.0), 2.0)) == "RBF(variance=NonDiff(1.0), lengthscale=2.0)"
    assert eqx.tree_pformat([RBF(NonDiff(1.0), 2.0)]) == "[RBF(variance=NonDiff(1.0), lengthscale=2.0)]"
    assert repr(Periodic(1.0, 2.0, 3.0)) == "Periodic(variance=1.0, lengthscale=2.0, period=NonDiff(3.0))"


@pytest.mark.slow
def test_plain_jax_transforms_return_zero_at_marked_fields():
    kernel = Periodic(NonDiff(1.0), 1.3, 1.0)
    for differentiate in (jax.grad, jax.jacfwd, jax.jacrev):
        gradient = differentiate(loss)(kernel)
        assert (gradient.variance, gradient.period) == (0.0, 0.0)
        assert gradient.lengthscale != 0.0
    with pytest.raises(TypeError, match="int"):
        jax.grad(lambda m: m.a * m.n)(Counted(2.0, NonDiff(3)))
    assert pg.grad(lambda m: m.a * m.n)(Counted(2.0, NonDiff(3))).a == 3.0


@pg.dataclass
class Counted:
    a: float
    n: int


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A derivative ends")
def test_building_inside_and_passing_in_behave_alike():
    inside = jax.grad(lambda p: loss(Periodic(1.0, 1.3, p)) + loss(RBF(NonDiff(p), p)))(1.0)
    assert inside == jax.grad(lambda p: loss(RBF(1.0, p)))(1.0)
    nested = jax.grad(lambda p: loss(Sum(NonDiff(RBF(p, p)), RBF(1.0, 2.0))))(1.0)
    assert nested == 0.0


def same_marks(one, other):
    return jax.tree.structure(one) == jax.tree.structure(other)


@pytest.mark.parametrize(
    "model",
    [
        composite(),
        Config(1.0),
        Config(NonDiff(1.0), n=4),
        Sum(NonDiff(RBF(1.0, 2.0)), RBF(1.0, NonDiff(2.0))),
        Counted(1.0, Static(3)),
        Counted(Static((1.0, 2.0)), 3),
        Defaults(1.0),
    ],
    ids=lambda m: type(m).__name__,
)
def test_marks_survive_every_transform_and_copy(model):
    arrays = jax.tree.map(jnp.asarray, model)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), arrays)
    for again in (
        jax.jit(lambda m: m)(model),
        jax.tree.map(lambda x: x, model),
        jax.tree.map(lambda _: True, model),
        jax.vmap(lambda m: m)(stacked),
        jax.lax.scan(lambda m, _: (m, None), arrays, None, length=2)[0],
        jax.checkpoint(lambda m: m)(model),
        copy.copy(model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        dataclasses.replace(model),
    ):
        assert same_marks(again, model)
        assert repr(again).count("NonDiff") == repr(model).count("NonDiff")
    assert copy.deepcopy(model) == model
    assert pickle.loads(pickle.dumps(model)) == model


def test_replace_keeps_marks_and_takes_new_ones():
    kernel = RBF(NonDiff(1.0), 2.0)
    assert repr(dataclasses.replace(kernel, variance=5.0)) == "RBF(variance=NonDiff(5.0), lengthscale=2.0)"
    assert (
        repr(dataclasses.replace(kernel, lengthscale=NonDiff(5.0)))
        == "RBF(variance=NonDiff(1.0), lengthscale=NonDiff(5.0))"
    )
    thawed = pg.thaw(Periodic(1.0, 2.0, 3.0), "period")
    assert repr(dataclasses.replace(thawed, period=4.0)) == "Periodic(variance=1.0, lengthscale=2.0, period=Diff(4.0))"
    if sys.version_info >= (3, 13):
        assert copy.replace(kernel, variance=5.0) == dataclasses.replace(kernel, variance=5.0)


def test_marks_are_structure_for_vmap():
    kernel = RBF(jnp.arange(3.0), NonDiff(2.0))
    out = jax.vmap(lambda k: k.variance * k.lengthscale, in_axes=(RBF(0, NonDiff(None)),))(kernel)
    np.testing.assert_array_equal(out, [0.0, 2.0, 4.0])


def test_key_paths_are_field_names():
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(Config(NonDiff(1.0)))]
    assert paths == [".w", ".held"]


def test_a_new_value_of_a_mark_does_not_recompile():
    traces = []

    @jax.jit
    def f(m):
        traces.append(1)
        return m.w * m.held * len(m.options["grid"]) * jnp.zeros(m.n).size

    assert [f(Config(w, h, 3, {"grid": (1.0, 2.0)})) for w, h in [(1.0, 2.0), (2.0, 3.0)]] == [12.0, 36.0]
    assert len(traces) == 1
    f(Config(1.0, n=4, options={"grid": (1.0, 2.0)}))
    f(Config(1.0, n=3, options={"grid": (1.0, 3.0)}))
    assert len(traces) == 3


def test_inline_static_makes_an_instance_static_there():
    f = jax.jit(lambda m: jnp.zeros(m.n).size * m.a)
    assert f(Counted(2.0, Static(3))) == 6.0
    assert repr(Counted(2.0, Static(3))) == "Counted(a=2.0, n=Static(3))"
    assert Counted(2.0, Static(3)).n == 3


def test_metadata_of_other_libraries_is_understood():
    import equinox as eqx
    import flax.struct

    @pg.dataclass
    class Foreign:
        a: float
        b: int = eqx.field(static=True, default=1)
        c: str = flax.struct.field(pytree_node=False, default="x")

    assert jax.tree.leaves(Foreign(2.0)) == [2.0]


# --- equality and hash -------------------------------------------------------------------------------------------


def test_equality_is_one_bool():
    a = RBF(jnp.ones(2), 2.0)
    assert (a == RBF(jnp.ones(2), 2.0)) is True
    for other in (
        RBF(jnp.zeros(2), 2.0),
        RBF(jnp.ones(3), 2.0),
        RBF(jnp.ones(2, int), 2.0),
        RBF(NonDiff(jnp.ones(2)), 2.0),
        3,
    ):
        assert (a == other) is False
    assert Config(1.0, n=3) != Config(1.0, n=4)
    assert Config(1.0, n=1) != Config(1.0, n=True)
    assert Sum(RBF(jax.random.key(0), len), RBF("x", None)) == Sum(RBF(jax.random.key(0), len), RBF("x", None))
    assert Sum(RBF(jax.random.key(0), len), None) != Sum(RBF(jax.random.key(1), len), None)
    nan = RBF(float("nan"), 1.0)
    assert nan == nan
    assert (jax.jit(lambda x: jnp.array(RBF(x, x) == RBF(x + 1, x)))(1.0)).item() is False


@pytest.mark.slow
def test_a_frozen_instance_hashes_by_structure_so_that_jit_takes_it():
    first, second = Periodic(jnp.ones(()), 1.3, 1.0), Periodic(2 * jnp.ones(()), 1.3, 1.0)
    assert hash(first) == hash(copy.deepcopy(first))
    for kernel in (first, second, first):
        assert jax.jit(kernel)(0.3) == pytest.approx(float(kernel(0.3)), rel=1e-6)
        assert jax.jit(kernel.__call__)(0.3) == pytest.approx(float(kernel(0.3)), rel=1e-6)
    gradients = jax.grad(lambda v: jax.jit(RBF(v, 1.0))(0.3) + jax.jit(RBF(2 * v, 1.0))(0.3))(1.0)
    assert gradients == pytest.approx(float(3 * RBF(1.0, 1.0)(0.3)), rel=1e-6)


# --- errors ------------------------------------------------------------------------------------------------------


def test_an_undecorated_subclass_is_told_when_it_is_built():
    class Forgotten(RBF):
        pass

    class ForgottenInit(RBF):
        def __init__(self, x):
            super().__init__(x, x)

    for build in (lambda: Forgotten(1.0, 2.0), lambda: ForgottenInit(1.0)):
        with pytest.raises(
            pg.errors.DataclassError, match=r"derives from the partgrad dataclass `RBF` but is not decorated"
        ):
            build()
    with pytest.raises(TypeError, match="Fix: write @partgrad.dataclass above `class Forgotten`"):
        Forgotten(1.0, 2.0)


def test_static_and_nondiff_both_set():
    with pytest.raises(
        pg.errors.DataclassError,
        match=r"sets both static=True and nondiff=True[\s\S]*Fix: keep nondiff=True for numbers",
    ):
        pg.field(static=True, nondiff=True)
    both = dataclasses.field(metadata={"static": True, "nondiff": True})
    with pytest.raises(pg.errors.DataclassError, match="field `Both.x` sets both static=True and nondiff=True"):
        pg.dataclass(type("Both", (), {"__annotations__": {"x": float}, "x": both}))


@pytest.mark.parametrize(
    ("wrapper", "option"), [(NonDiff, "nondiff=True"), (Static, "static=True"), (pg.Diff, "nondiff=False")]
)
def test_a_wrapper_as_a_type_says_which_option_marks_the_field(wrapper, option):
    with pytest.raises(pg.errors.DataclassError, match=rf"a type marks nothing[\s\S]*partgrad\.field\({option}\)"):
        pg.dataclass(type("Typed", (), {"__annotations__": {"a": wrapper}}))


def test_an_unhashable_static_value_names_the_field():
    @pg.dataclass
    class Holder:
        x: object = pg.field(static=True)

    with pytest.raises(pg.errors.StaticError, match=r"`Holder.x` holds bytearray .* which cannot be static"):
        Holder(bytearray(b"x"))


def test_slots_are_refused():
    with pytest.raises(pg.errors.DataclassError, match="asks for slots=True"):

        @pg.dataclass(slots=True)
        class Slots:
            a: float


def test_a_field_that_was_never_set():
    @pg.dataclass
    class Missing:
        a: float

        def __init__(self):
            pass

    with pytest.raises(pg.errors.DataclassError, match=r"`Missing.a` has no value[\s\S]*Fix: set self.a there"):
        Missing()


def test_decorating_what_is_no_class():
    with pytest.raises(pg.errors.DataclassError, match="which is not a class"):
        pg.dataclass(3)


def test_an_empty_class_has_no_leaves():
    assert jax.tree.leaves(Kernel()) == []
    assert jax.jit(lambda k: k)(Kernel()) == Kernel()


def test_replace_calls_an_init_that_takes_the_fields():
    @pg.dataclass
    class Positive:
        scale: float

        def __init__(self, scale):
            self.scale = abs(scale)

    assert dataclasses.replace(Positive(1.0), scale=-2.0) == Positive(2.0)


def test_a_mutable_instance_made_without_init_takes_its_fields_one_by_one():
    @pg.dataclass(frozen=False)
    class Mutable:
        a: float
        b: float = pg.field(nondiff=True)

    bare = Mutable.__new__(Mutable)
    bare.a = 1.0
    bare.b = 2.0
    assert bare == Mutable(1.0, 2.0)


def test_a_field_that_an_init_leaves_alone_has_the_default_of_the_class():
    @pg.dataclass
    class Defaults:
        a: float
        b: float = pg.field(nondiff=True, default=2.0)

        def __init__(self, a):
            self.a = a

    assert pg.grad(lambda m: m.a * m.b)(Defaults(3.0)).a == 2.0
    assert pg.is_nondiff(Defaults(3.0), "b")
