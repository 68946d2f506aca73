"""The line of an equation. Moved to `_programs/lines.py`; this file goes when `_check` imports that."""

from .._programs import (
    is_in_library as is_in_library,
    is_of_jax_random as is_of_jax_random,
    line as line,
    sampler_of as sampler_of,
)
