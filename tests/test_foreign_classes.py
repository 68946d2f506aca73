"""Classes that check, convert or rebuild what they are given."""

import dataclasses
from typing import Any

import beartype
import equinox as eqx
import flax.core
import jax
import jax.numpy as jnp
import jaxtyping
import pytest

import partgrad as pg
from partgrad import NonDiff, errors


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Converting:
    w: jax.Array
    b: jax.Array

    def __post_init__(self):
        self.w = jnp.asarray(self.w)


def test_a_callable_selects_in_a_class_that_converts_its_arguments():
    assert pg.grad(lambda m: m.w * m.b, wrt=lambda m: m.b)(Converting(2.0, 3.0)) == 2.0
    assert pg.grad(lambda t: t[0].w * t[0].b, wrt=lambda t: (t[0].w, t[0].b))([Converting(2.0, 3.0)]) == (3.0, 2.0)


def test_a_class_that_refuses_none_says_what_partgrad_did():
    with pytest.raises(ValueError, match="None is not a valid value") as caught:
        pg.partition(Converting(2.0, 3.0), "b")
    assert "Fix: let the constructor accept None" in caught.value.__notes__[0]


def test_nodes_that_a_class_builds_anew_on_every_access():
    tree = flax.core.freeze({"params": {"dense": {"w": 1.0, "b": 2.0}, "out": {"w": 3.0}}})
    gradient = pg.grad(lambda p: p["params"]["dense"]["w"] ** 2, wrt=lambda p: p["params"]["dense"])(tree)
    assert list(jax.tree.leaves(gradient)) == [0.0, 2.0]


def honoured(make):
    """What it makes, or None where partgrad refuses it with a reason."""
    try:
        return make()
    except errors.PartgradError:
        return None


def test_a_nondiff_field_of_a_foreign_class():
    def use():
        class Module(eqx.Module):
            a: Any
            p: Any = pg.field(nondiff=True)

        pg.grad(lambda m: m.a * m.p)(Module(1.0, 2.0))

    with pytest.raises(errors.PartgradError):
        use()


def test_a_converter_of_equinox():
    def make():
        @pg.dataclass
        class Converted:
            a: Any = eqx.field(converter=jnp.asarray)

        return Converted([1.0, 2.0]).a

    made = honoured(make)
    assert made is None or isinstance(made, jax.Array)


def test_a_runtime_checker_over_a_dataclass():
    @jaxtyping.jaxtyped(typechecker=beartype.beartype)
    @pg.dataclass
    class Typed:
        x: jaxtyping.Float[jax.Array, "3"]

    assert pg.is_nondiff(Typed(NonDiff(jnp.ones(3))), "x")


def test_a_container_that_jax_cannot_flatten():
    with pytest.raises(errors.SelectionError, match=r"a container that JAX cannot flatten[\s\S]*Fix: use dict keys"):
        pg.partition({"a": 1.0, "b": 2.0}, lambda m: {1: m["a"], "b": m["b"]})
