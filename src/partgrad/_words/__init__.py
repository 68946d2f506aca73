"""The words of every error: what went wrong, where, what was expected and found, and how to mend it, in that order."""

from ._check import (
    check_failed as check_failed,
    check_of_tracers as check_of_tracers,
    not_a_number_of_directions as not_a_number_of_directions,
    not_a_progress as not_a_progress,
    nothing_differentiable_returned as nothing_differentiable_returned,
)
