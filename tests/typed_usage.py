"""What a type checker must know of partgrad; each ignored error must be one."""

from typing import assert_type

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

Model()  # type: ignore[call-arg]
Model(1.0, nowhere=2)  # type: ignore[call-arg]
Model("x")  # type: ignore[arg-type]
model.weight = 2.0  # type: ignore[misc]
