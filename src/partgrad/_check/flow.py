"""What flows where in a jaxpr. Moved to `_programs/dependence.py`; this file goes when `_check` imports that."""

from .._programs import (
    FLAT as FLAT,
    Dependence as Flow,
    Sources as Masks,
    arriving as arriving,
    by_value as by_value,
    differentiably as differentiably,
    has_tangent as has_tangent,
    last_of as last_of,
    of_cotangents as of_cotangents,
    of_draws as of_draws,
    reaching as reaching,
    union as union,
)

__all__ = ["Flow", "Masks"]
