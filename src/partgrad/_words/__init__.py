"""The words of every error: what went wrong, where, what was expected and found, and how to mend it, in that order."""

from ._check import (
    check_failed as check_failed,
    check_of_tracers as check_of_tracers,
    not_a_number_of_directions as not_a_number_of_directions,
    not_a_progress as not_a_progress,
    nothing_differentiable_returned as nothing_differentiable_returned,
)
from ._draws import (
    draw_differentiated as draw_differentiated,
    draw_word as draw_word,
    no_mean as no_mean,
    not_a_count as not_a_count,
    not_a_log_probability as not_a_log_probability,
    score_hidden as score_hidden,
    score_independent as score_independent,
    score_outside as score_outside,
    score_shared_key as score_shared_key,
    score_without_log_prob as score_without_log_prob,
)
from ._safe import (
    at_singular_dtype as at_singular_dtype,
    at_singular_shape as at_singular_shape,
    safe_where_not_callable as safe_where_not_callable,
    safe_where_trees as safe_where_trees,
)
from ._transforms import not_a_callable as not_a_callable
