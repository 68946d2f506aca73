"""What a type checker must know of partgrad; each ignored error must be one. Run by mypy and by pyright."""

from typing import Any, assert_type

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
