"""chex, jaxtyping, orbax and treescope: what checks, saves and shows trees."""

import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decay import Decay, assert_fitted, loss, start

import partgrad as pg


@pytest.mark.library("chex")
def test_chex():
    """assertions on models with marks, and a `chex.dataclass` that is differentiated"""
    chex = pytest.importorskip("chex")
    model = start()
    chex.assert_trees_all_close(model, jax.tree.map(lambda leaf: leaf + 1e-9, model))
    chex.assert_tree_all_finite(pg.grad(loss)(model))
    chex.assert_trees_all_equal_structs(model, jax.jit(lambda m: m)(model))
    with pytest.raises(AssertionError, match="rate"):
        chex.assert_trees_all_close(model, pg.replace(model, "rate", 2.0))

    @chex.dataclass
    class Pair:
        curve: Decay
        scale: float

    gradient = pg.grad(lambda p: p.scale * p.curve(1.0), wrt="scale")(Pair(curve=model, scale=2.0))
    np.testing.assert_allclose(gradient, model(1.0))


@pytest.mark.library("jaxtyping")
@pytest.mark.parametrize("checker", ["beartype", "typeguard"])
def test_jaxtyping(checker):
    """a pg.dataclass whose fields and methods have shapes, checked by beartype or by typeguard 2, as jaxtyping asks"""
    jaxtyping = pytest.importorskip("jaxtyping")
    check = getattr(pytest.importorskip(checker), {"beartype": "beartype", "typeguard": "typechecked"}[checker])
    if checker == "typeguard" and not importlib.metadata.version("typeguard").startswith("2."):
        pytest.skip("jaxtyping needs typeguard 2")

    @jaxtyping.jaxtyped(typechecker=check)
    @pg.dataclass
    class Affine:
        weight: jaxtyping.Float[jax.Array, "m n"]
        bias: jaxtyping.Float[jax.Array, "m "] = pg.field(nondiff=True)

        @jaxtyping.jaxtyped(typechecker=check)
        def __call__(self, x: jaxtyping.Float[jax.Array, "3"]) -> jaxtyping.Float[jax.Array, "2"]:
            return self.weight @ x + self.bias

    model = Affine(jnp.ones((2, 3)), jnp.zeros(2))
    gradient = jax.jit(pg.grad(lambda m: m(jnp.arange(3.0)).sum()))(model)
    np.testing.assert_allclose(gradient.weight, [[0.0, 1.0, 2.0]] * 2)
    assert gradient.bias is None
    with pytest.raises(jaxtyping.TypeCheckError):
        Affine(jnp.ones((2, 3)), jnp.zeros(3))
    with pytest.raises(jaxtyping.TypeCheckError):
        Affine(jnp.ones((2, 4)), jnp.zeros(2))(jnp.zeros(4))


@pytest.mark.library("orbax")
def test_orbax(tmp_path):
    """save a model and restore it into one of the same class"""
    ocp = pytest.importorskip("orbax.checkpoint")
    model = Decay(jnp.array(2.0), jnp.array(3.0), jnp.array(0.5))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", model)
        checkpointer.wait_until_finished()
        again = checkpointer.restore(tmp_path / "model", start())
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert_fitted(again)


@pytest.mark.library("treescope")
# treescope lists the names of numpy, of which the newest numpy deprecates one.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_treescope():
    """a model in a notebook, marks shown"""
    treescope = pytest.importorskip("treescope")
    text = treescope.render_to_text(start(), ignore_exceptions=False)
    assert "Decay" in text
    assert "NonDiff" in text
    assert "NonDiff" in treescope.render_to_text(pg.freeze({"w": jnp.ones(2)}, "w"))
    assert "treescope" in treescope.render_to_html(start())
