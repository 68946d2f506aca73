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
from ._parts import (
    condition_shape as condition_shape,
    elements_shape as elements_shape,
    no_parts as no_parts,
    parts_differ as parts_differ,
    parts_overlap as parts_overlap,
    updates_structure as updates_structure,
    vector_length as vector_length,
)
from ._safe import (
    at_singular_dtype as at_singular_dtype,
    at_singular_shape as at_singular_shape,
    safe_where_not_callable as safe_where_not_callable,
    safe_where_trees as safe_where_trees,
)
from ._selectors import (
    all_marked as all_marked,
    computed_on_slot as computed_on_slot,
    containers_unsortable as containers_unsortable,
    element_out_of_range as element_out_of_range,
    elements_refused as elements_refused,
    fits_nowhere as fits_nowhere,
    mask_structure as mask_structure,
    no_node_of as no_node_of,
    not_a_selector as not_a_selector,
    not_differentiable as not_differentiable,
    nothing_to_differentiate as nothing_to_differentiate,
    path_ambiguous as path_ambiguous,
    path_not_found as path_not_found,
    path_syntax as path_syntax,
    selected_twice as selected_twice,
    selects_nothing as selects_nothing,
)
from ._transforms import (
    argument_missing as argument_missing,
    argument_not_passed as argument_not_passed,
    argument_twice as argument_twice,
    argument_unknown as argument_unknown,
    not_a_callable as not_a_callable,
    not_a_function as not_a_function,
    selectors_and_arguments as selectors_and_arguments,
    unused_leaves as unused_leaves,
    unused_option as unused_option,
    wrong_count as wrong_count,
    wrong_structure as wrong_structure,
)
