"""What a type checker must know of partgrad; each ignored error must be one. Run by mypy and by pyright."""

# pyright: strict

from typing import Any, assert_type

import jax

import partgrad as pg
from partgrad import NonDiff, Static


@pg.dataclass
class Model:
    weight: float
    count: int = pg.field(static=True, default=3)
    period: float = pg.field(nondiff=True, default=1.0)


model = Model(NonDiff(1.0), count=Static(2))
assert_type(model.weight, float)
assert_type(pg.freeze(model, "weight"), Model)
assert_type(pg.partition(model), tuple[Model, Model])
assert_type(pg.combine(model, model), Model)
assert_type(pg.unwrap(model), Model)
assert_type(pg.replace(model, "weight", 2.0), Model)
assert_type(pg.items(model), list[tuple[str, Any]])

Model()  # type: ignore[call-arg]
Model(1.0, nowhere=2)  # type: ignore[call-arg]
Model("x")  # type: ignore[arg-type]
model.weight = 2.0  # type: ignore[misc]


# --- transforms --------------------------------------------------------------------------------------------------


def loss(m: Model, x: float) -> float:
    return m.weight * x


def loss_and_aux(m: Model, x: float) -> tuple[float, str]:
    return m.weight * x, "aux"


assert_type(pg.value_and_grad(loss)(model, 2.0), tuple[float, Any])
assert_type(pg.value_and_grad(loss_and_aux, has_aux=True)(model, 2.0), tuple[tuple[float, str], Any])
assert_type(pg.jvp(loss, (model, 1.0), (model, 1.0)), tuple[float, float])
assert_type(pg.jvp(loss_and_aux, (model, 1.0), (model, 1.0), has_aux=True), tuple[float, float, str])
assert_type(pg.vjp(loss, model, 1.0)[0], float)
assert_type(pg.linearize(loss_and_aux, model, 1.0, has_aux=True)[2], str)
pg.grad(loss, wrt=lambda m: m.weight, unused="error")(model, x=2.0)
pg.hvp(loss, "weight")(model, 1.0, 2.0)


@pg.grad(wrt="weight")
def gradient(m: Model, x: float) -> float:
    return m.weight * x


gradient(model, 1.0)
pg.hessian(loss)(model, 1.0)

pg.grad(loss)(model)  # type: ignore[call-arg]
pg.value_and_grad(loss)(model, "x")  # type: ignore[arg-type]
pg.jacfwd(loss)(model, 1.0, 2.0)  # type: ignore[call-arg]
pg.hvp(loss)(model, 1.0)  # type: ignore[call-arg]
pg.vjp(loss, model)  # type: ignore[arg-type]
pg.grad(loss, unused="errors")  # type: ignore[call-overload]
gradient(model)  # type: ignore[call-arg]


# --- selections, and what is done with them ----------------------------------------------------------------------

chosen = pg.each(lambda m: m.weight) | "period" | pg.path("weight") - pg.of_type(Model)
assert_type(chosen, pg.Selection)
assert_type(~pg.exclude(Model) & pg.matching(lambda path, leaf: leaf.ndim == 0), pg.Selection)
assert_type(pg.mask(model, chosen), Model)
assert_type(pg.select(model, "weight"), Any)
assert_type(pg.label(model, {"slow": "weight"}, default="fast"), Any)
assert_type(pg.is_nondiff(model, "period"), bool)
assert_type(pg.thaw(model, "period"), Model)
assert_type(pg.stop_gradient(model, "weight", when=True), Model)
assert_type(pg.apply_updates(model, None), Model)
assert_type(pg.apply_updates(model, 0.1, wrt="weight"), Model)
assert_type(pg.replace(model, "weight", 2.0), Model)
assert_type(pg.replace(model, "weight", fn=abs), Model)
assert_type(pg.register_nondiff(Model), type[Model])
assert_type(pg.jvp(loss, (model, 1.0), (1.0,), wrt="weight", argnums=0), tuple[float, float])
assert_type(pg.vjp(loss, model, 1.0, argnames="x")[0], float)
vector, unravel = pg.ravel(model)
assert_type(vector, jax.Array)
assert_type(unravel.names, tuple[str, ...])
assert_type(str(pg.summary(model)), str)
assert_type(Model(pg.Diff(1.0)), Model)


# --- trust -------------------------------------------------------------------------------------------------------


def drawn(key: jax.Array, x: float) -> float:
    return pg.draw(jax.random.normal, key) + x


assert_type(pg.double_where(loss)(model, 1.0), float)
assert_type(pg.consistent_indexing(loss)(model, 1.0), float)
assert_type(pg.check(loss)(model, 1.0), pg.GradientReport)
assert_type(pg.check(loss)(model, 1.0).findings, tuple[pg.Finding, ...])
assert_type(pg.draw(jax.random.normal, jax.random.key(0), (3,), gradient="pathwise"), Any)
assert_type(pg.expectation(drawn, samples=3)(jax.random.key(0), 1.0), Any)
assert_type(pg.safe.sqrt(1.0), jax.Array)
assert_type(pg.safe.where(True, float, float, 1.0), Any)
pg.testing.assert_gradients(loss, model, 1.0)

pg.double_where(loss)(model)  # type: ignore[call-arg]
pg.consistent_indexing(loss)(model)  # type: ignore[call-arg]
pg.check(loss)(model, "x")  # type: ignore[arg-type]
pg.expectation(drawn, samples=3)(jax.random.key(0))  # type: ignore[call-arg]
