"""What a class declares is honoured or refused: fields, constructors, descriptors, inheritance."""

import copy
import dataclasses
import functools
import inspect
import pickle
import typing
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from partgrad import NonDiff, errors


def test_factories_of_marked_fields():
    @pg.dataclass
    class Model:
        p: Any = pg.field(nondiff=True, default_factory=lambda: jnp.ones(3))
        q: Any = pg.field(default_factory=lambda: NonDiff(3.0))
        r: Any = pg.field(default_factory=list)

    model = Model()
    assert (model.p.shape, model.q, model.r) == ((3,), 3.0, [])
    assert repr(model) == "Model(p=NonDiff([1., 1., 1.]), q=NonDiff(3.0), r=[])"
    assert Model(q=1.0).q == 1.0


@pytest.mark.filterwarnings("ignore:A derivative ends")
def test_post_init_under_an_init_by_hand_sees_held_plain_values():
    @pg.dataclass
    class Base:
        p: Any = pg.field(nondiff=True)
        s: Any = pg.field(init=False, default=None)

        def __post_init__(self):
            self.s = jax.lax.mul(self.p, 2.0)

    @pg.dataclass
    class Child(Base):
        def __init__(self, p):
            super().__init__(p)

    for cls in (Base, Child):
        assert jax.grad(lambda x, cls=cls: cls(x).s)(3.0) == 0.0


def test_replace_with_a_typo_on_a_class_with_its_own_init():
    @pg.dataclass
    class Model:
        period: Any
        c: Any

        def __init__(self, x):
            self.period, self.c = x, 2 * x

    with pytest.raises(errors.DataclassError, match=r"has no field `perido`[\s\S]*write `period`"):
        dataclasses.replace(Model(1.0), perido=9.0)
    assert dataclasses.replace(Model(1.0), period=9.0).period == 9.0


def test_an_undecorated_subclass_of_a_class_with_its_own_init_subclass():
    seen = []

    @pg.dataclass
    class Base:
        a: Any

        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append(cls.__name__)

    class Child(Base):
        def __init__(self):
            self.a = 1.0

    assert seen == ["Child"]
    with pytest.raises(errors.DataclassError, match="`Child` derives .* not decorated"):
        Child()


def test_a_copy_made_while_building_is_frozen():
    copies = []

    @pg.dataclass
    class Model:
        a: Any

        def __post_init__(self):
            copies.append(copy.copy(self))

    Model(1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        copies[0].a = 5.0


def test_fields_of_mutable_instances_cannot_be_deleted():
    @pg.dataclass(frozen=False)
    class Model:
        a: Any

    model = Model(1.0)
    with pytest.raises(errors.DataclassError, match=r"cannot delete field `Model.a`[\s\S]*instance.a = None"):
        del model.a


@pg.dataclass
class K:
    a: Any
    p: Any = pg.field(nondiff=True)


@dataclasses.dataclass
class Forgotten:
    a: Any


def honoured(make):
    """What it makes, or None where partgrad refuses it with a reason."""
    try:
        return make()
    except errors.PartgradError:
        return None


def test_a_forgotten_decorator_is_an_error():
    with pytest.raises(errors.PartgradError, match="Forgotten"):
        pg.grad(lambda t: t["m"].a ** 2 * t["s"])({"m": Forgotten(jnp.ones(())), "s": 2.0})


def test_a_field_that_is_not_compared():
    def make():
        @pg.dataclass
        class Uncompared:
            a: Any
            name: str = dataclasses.field(default="", compare=False, metadata=pg.field(static=True).metadata)

        return Uncompared(1.0, "a") == Uncompared(1.0, "b")

    assert honoured(make) in (None, True)


def test_an_undeclared_attribute():
    @pg.dataclass
    class Undeclared:
        a: Any

        def __post_init__(self):
            self.b = 2

    with pytest.raises(errors.PartgradError, match="b"):
        Undeclared(1.0)


def test_a_subclass_that_changes_a_default_inherits_the_mark():
    @pg.dataclass
    class Sub(K):
        p: Any = 1.0

    assert pg.is_nondiff(Sub(1.0, 2.0), "p")
    assert pg.grad(lambda m: m.a * m.p)(Sub(2.0, 3.0)).p is None


def test_init_variables_keep_the_order_of_declaration():
    seen = []

    @pg.dataclass
    class Model:
        w: float
        a: dataclasses.InitVar[str] = pg.field(kw_only=True)
        b: dataclasses.InitVar[str]

        def __post_init__(self, a, b):
            seen.append((a, b))

    Model(1.0, "B", a="A")
    assert seen == [("A", "B")]


def test_every_undecorated_subclass_is_told():
    @pg.dataclass
    class Base:
        a: float = 1.0

    class Silent(Base):
        def __init__(self):
            pass

    @dataclasses.dataclass(frozen=True)
    class Standard(Base):
        b: float = 1.0

    class Plain(Base):
        pass

    @pg.dataclass
    class Below(Plain):
        c: float = 2.0

    @pg.dataclass
    class Further(Below):
        d: float = 3.0

    with pytest.raises(errors.DataclassError, match="is not decorated itself"):
        Plain()
    for cls in (Silent, Standard):
        with pytest.warns(
            UserWarning, match=rf"is a `{cls.__name__}`[\s\S]*dataclass `Base`[\s\S]*@partgrad.dataclass above"
        ):
            pg.mask({cls.__name__: cls(), "y": 1.0}, None)
    assert jax.tree.leaves(Below()) == [1.0, 2.0]
    assert jax.tree.leaves(Further(5.0)) == [5.0, 2.0, 3.0]


def test_a_dataclass_that_jax_does_not_know_is_an_error_where_it_holds_arrays():
    @dataclasses.dataclass
    class Kernel:
        a: Any

    for model in (Kernel(jnp.ones(2)), {"b": [Kernel({"c": np.ones(2)})]}, {"b": Kernel(Kernel(jnp.ones(())))}):
        with pytest.raises(
            errors.ForgottenDecoratorError, match=r"(?s)is a `Kernel`.*Fix: write @partgrad.dataclass above"
        ):
            pg.grad(lambda t: 0.0)(model)
    around = Kernel(None)
    around.a = around
    assert pg.mask({"b": Kernel(around), "x": 1.0}, None) == {"b": False, "x": True}
    assert pg.mask({"b": Kernel(3), "x": 1.0}, None) == {"b": False, "x": True}
    # The plan for this structure is kept.
    with pytest.raises(errors.ForgottenDecoratorError, match=r"`\['b'\]` is a `Kernel`"):
        pg.mask({"b": Kernel(jnp.ones(2)), "x": 1.0}, None)
    assert pg.grad(lambda t: t["x"])({"b": pg.Static(3), "x": 1.0})["x"] == 1.0


def test_generated_code_is_shown_by_debuggers():
    @pg.dataclass
    class Model:
        a: float
        b: float = 2.0

    assert inspect.getsource(Model.__init__).startswith("def __init__(self, a, b=")


def test_other_decorators_are_refused():
    def decorated(*decorators):
        class Model:
            a: float

        return functools.reduce(lambda cls, decorate: decorate(cls), decorators, Model)

    plain = dataclasses.dataclass(frozen=True)

    def registered(cls):
        jax.tree_util.register_pytree_node(cls, lambda node: ((node.a,), None), lambda _, children: cls(*children))
        return cls

    for decorators in [(pg.dataclass, pg.dataclass), (plain, pg.dataclass), (registered, pg.dataclass)]:
        with pytest.raises(errors.DataclassError, match=r"or registered with JAX, already[\s\S]*only decorator"):
            decorated(*decorators)

    @dataclasses.dataclass(slots=True, frozen=True)
    class Slotted:
        a: float

    with pytest.raises(errors.DataclassError, match="slots"):
        pg.dataclass(type("Child", (Slotted,), {"__annotations__": {"b": float}}))
    with pytest.raises(errors.DataclassError, match="cannot be a partgrad dataclass: cannot inherit frozen"):
        pg.dataclass(type("Child", (decorated(dataclasses.dataclass),), {}))


def first(tree):
    return tree["w"] ** 2


def test_a_class_whose_getattr_answers_everything():
    @pg.dataclass
    class Model:
        a: Any
        p: Any = pg.field(nondiff=True, default=3.0)

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return 42.0

    model = Model(2.0)
    f = lambda m: m.a**2 * m.p * m.other
    assert (pg.grad(f)(model).a, pg.grad(f)(model).p) == (504.0, None)
    assert pg.grad(f, wrt="p")(model) == 168.0
    for copied in (
        copy.copy(model),
        copy.deepcopy(model),
        dataclasses.replace(model),
        pg.combine(*pg.partition(model)),
    ):
        assert copied == model


@pytest.mark.slow
def test_a_class_whose_getattr_raises():
    @pg.dataclass
    class Model:
        a: Any

        def __getattr__(self, name):
            raise RuntimeError(f"no {name}")

    assert pg.grad(lambda m: m.a**2)(Model(2.0)).a == 4.0
    assert "Model(a=2.0)" in repr(Model(2.0))
    assert pg.grad(lambda t: t[0].a ** 2, wrt="[0].a")([Model(2.0)]) == 4.0


class Doubling:
    """A descriptor that hides what an instance stores."""

    def __get__(self, instance, owner=None):
        return 2.0

    def __set__(self, instance, value):
        pass


@pytest.mark.parametrize("descriptor", [property(lambda self: 7.0), Doubling()])
def test_descriptors_with_the_names_of_fields_are_refused(descriptor):
    with pytest.raises(errors.DataclassError, match=r"(?s)`Model.a` is a field.*another name"):
        pg.dataclass(type("Model", (), {"__annotations__": {"a": Any}, "a": descriptor}))
    base = pg.dataclass(type("Base", (), {"__annotations__": {"a": Any}}))
    with pytest.raises(errors.DataclassError, match=r"`Model.a` is a field"):
        pg.dataclass(type("Model", (base,), {"a": descriptor}))


def test_a_cached_property_and_a_function_may_be_defaults():
    @pg.dataclass
    class Model:
        a: Any
        activation: typing.Callable = jnp.tanh

        @functools.cached_property
        def square(self):
            return self.a**2

    assert pg.grad(lambda m: m.activation(0.0) + m.square)(Model(2.0)).a == 4.0


def test_multiple_inheritance():
    @pg.dataclass
    class Left:
        a: Any = 1.0
        p: Any = pg.field(nondiff=True, default=2.0)

    @pg.dataclass
    class Right:
        p: Any = 5.0
        q: Any = pg.field(nondiff=True, default=3.0)

    @pg.dataclass
    class Mixin:
        def total(self):
            return sum(x**2 for x in jax.tree.leaves(self))

    @pg.dataclass
    class One(Left, Right, Mixin):
        r: Any = 4.0

    @pg.dataclass
    class Other(Right, Left, Mixin):
        r: Any = 4.0

    for cls in (One, Other):
        model = cls()
        declared = {field.name: field.metadata.get("nondiff", False) for field in dataclasses.fields(cls)}
        assert declared == {"a": False, "p": cls is One, "q": True, "r": False}
        gradient = pg.grad(cls.total)(model)
        for name, held in declared.items():
            assert getattr(gradient, name) == (None if held else 2 * getattr(model, name))
        assert pickle.loads(cloudpickle.dumps(model)) is not None


def test_classes_of_one_name():
    def define(power):
        @pg.dataclass
        class Model:
            a: Any
            p: Any = pg.field(nondiff=power == 2, default=1.0)

            def __call__(self):
                return self.a**power * self.p

        return Model

    first, second = define(2)(3.0), define(3)(3.0)
    f = pg.grad(lambda m: m(), wrt=lambda m: m.a)
    assert [f(first), f(second), f(first)] == [6.0, 27.0, 6.0]
    assert (pg.grad(lambda m: m())(first).p, pg.grad(lambda m: m())(second).p) == (None, 27.0)
    assert first != second
    with pytest.raises(errors.PartsError, match="a different structure"):
        pg.combine(pg.partition(first)[0], pg.partition(second)[1])


@pytest.mark.parametrize("text", ["radius of the sphere", "1 +", "", "in metres (m)", "Array | NonDiff, held"])
def test_an_annotation_may_be_a_sentence(text):
    cls = pg.dataclass(type("Sphere", (), {"__annotations__": {"radius": text}}))
    assert pg.grad(lambda s: s.radius**2)(cls(2.0)).radius == 4.0
    assert repr(cls(pg.NonDiff(2.0))) == "Sphere(radius=NonDiff(2.0))"


@pytest.mark.parametrize(
    "options", [{"compare": False}, {"hash": False}, {"hash": True}, {"compare": False, "hash": True}]
)
@pytest.mark.parametrize("field", [pg.field, dataclasses.field])
def test_options_that_would_leave_a_field_out_of_comparisons_are_refused(field, options):
    words = " and ".join(f"{name}={value}" for name, value in options.items())
    with pytest.raises(errors.DataclassError, match=f"(?s)sets {words}.*Fix: leave {words} out"):
        pg.dataclass(type("Named", (), {"__annotations__": {"a": float}, "a": field(**options)}))
    pg.dataclass(type("Named", (), {"__annotations__": {"a": float}, "a": field()}))
