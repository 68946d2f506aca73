"""Leaves of any type: what is not differentiated may be anything, and what JAX does not take is refused by name."""

import enum
import types
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg
from helpers.models import RBF
from partgrad import errors


def raises(*names):
    """An object whose methods of these names raise."""

    def method(self, *args, **kwargs):
        raise RuntimeError("hostile")

    return type("Hostile", (), {"__hash__": object.__hash__} | dict.fromkeys(names, method))()


class Everything:
    """Has every attribute."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args):
        return self

    def __getitem__(self, index):
        return self

    def __len__(self):
        return 3


class Nothing:
    """Has no attribute at all, except what `isinstance` asks for."""

    def __getattribute__(self, name):
        if name == "__class__":
            return Nothing
        raise RuntimeError("hostile")


class Liar:
    __class__ = property(lambda self: float)


class Typed:
    dtype, shape = "float32", (2,)


class Float(float):
    """A float of another class."""


class Kind(enum.Enum):
    ONE = 1


LEAVES = {
    "repr": raises("__repr__", "__str__"),
    "eq": raises("__eq__", "__ne__"),
    "bool": raises("__bool__", "__len__"),
    "array": raises("__array__"),
    "jax array": raises("__jax_array__"),
    "getattr": raises("__getattr__"),
    "getattribute": Nothing(),
    "hash": raises("__hash__"),
    "everything": Everything(),
    "mock": unittest.mock.MagicMock(),
    "liar": Liar(),
    "a dtype that is text": Typed(),
    "enum": Kind.ONE,
    "class": RBF,
    "module": types,
    "strings": np.array(["a"]),
    "objects": np.array([object()]),
    "record": np.zeros(2, [("x", "f4")]),
    "date": np.datetime64("2020-01-01"),
    "ellipsis": ...,
    "NotImplemented": NotImplemented,
    "a large int": 10**400,
    "bytes": b"x",
    "key": jax.random.key(0),
    "float0": np.zeros(2, jax.dtypes.float0),
}


def first(tree):
    return tree["w"] ** 2


OPERATIONS = {
    "grad": lambda t: pg.grad(first)(t)["w"] == 4.0,
    "named": lambda t: pg.grad(first, wrt=lambda t: t["w"])(t) == 4.0,
    "path": lambda t: pg.value_and_grad(first, wrt="w")(t) == (4.0, 4.0),
    "partition": lambda t: pg.combine(*pg.partition(t))["h"] is t["h"],
    "mask": lambda t: pg.mask(t, None) == {"h": False, "w": True},
    "ravel": lambda t: pg.ravel(t)[1](pg.ravel(t)[0])["h"] is t["h"],
    "freeze": lambda t: pg.thaw(pg.freeze(t, "w"), "w")["h"] is t["h"],
    "items": lambda t: pg.items(t) == [("['w']", 2.0)],
    "replace": lambda t: pg.replace(t, "w", 3.0)["w"] == 3.0,
    "label": lambda t: pg.label(t, {"slow": "w"}, default="other")["w"] == "slow",
    "summary": lambda t: "'w'" in str(pg.summary(t)),
    "wrapper": lambda t: "NonDiff" in repr(pg.NonDiff([t["h"]])),
    "model": lambda t: "RBF(" in repr(RBF(t["h"], 2.0)),
    "static": lambda t: "Static" in repr(pg.Static([t["h"]])),
    "diff": lambda t: "Diff([" in repr(pg.Diff([t["h"]])),
}


NOT_STATIC = ("key", "eq", "hash", "objects", "record", "date", "float0", "strings", "getattribute")


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_that_is_not_differentiated_may_be_anything(name):
    tree = {"h": LEAVES[name], "w": 2.0}
    for operation, holds in OPERATIONS.items():
        try:
            assert holds(tree), operation
        except errors.StaticError:
            assert (operation, name in NOT_STATIC) == ("static", True)
    with pytest.raises(errors.NotDifferentiableError, match="cannot be differentiated"):
        pg.grad(first, wrt="h")(tree)
    with pytest.raises(errors.NoMatchError, match="matches nothing"):
        pg.select(tree, "nowhere")


def test_a_subclass_of_float_is_a_number():
    tree = {"h": Float(3.0), "w": 2.0}
    vector, unravel = pg.ravel(tree)
    assert vector.tolist() == [3.0, 2.0]
    assert unravel(vector)["h"] == 3.0
    assert pg.grad(lambda t: t["h"] ** 2)(tree)["h"] == 6.0


def test_a_donated_array_is_shown():
    gone = jnp.ones(2) + 1
    gone.delete()
    model = RBF(gone, pg.NonDiff(2.0))
    assert repr(model) == "RBF(variance=deleted f32[2], lengthscale=NonDiff(2.0))"
    assert "deleted" in str(pg.summary(model))
    with pytest.raises(RuntimeError, match="deleted"):
        pg.grad(lambda k: k.variance.sum())(model)


@pytest.mark.parametrize(
    ("leaf", "word"), [(np.ma.array([1.0, 2.0], mask=[0, 1]), "masked"), (np.longdouble(1.5), "float128")]
)
def test_floats_that_jax_does_not_take(leaf, word):
    with pytest.raises((TypeError, ValueError), match=word):
        pg.grad(lambda t: t["w"])({"h": leaf, "w": 2.0})
