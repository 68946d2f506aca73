"""Trees: leaves, key paths, elements of leaves, equality; and the signatures of users' functions."""

from .changes import (
    Changes as Changes,
    has_variables as has_variables,
    warn_of_change as warn_of_change,
    with_changes as with_changes,
    without_changes as without_changes,
)
from .elements import (
    Elements as Elements,
    common as common,
    joined as joined,
    overlap as overlap,
    positions as positions,
    put as put,
    take as take,
    without as without,
)
from .equality import trees_equal as trees_equal
from .exact import compared_exactly as compared_exactly, exact_key as exact_key
from .functions import (
    accepts as accepts,
    parameters_of as parameters_of,
    refuse_non_bools as refuse_non_bools,
    refuse_uncallable as refuse_uncallable,
)
from .indexed import Indexed as Indexed
from .leaf import (
    describe as describe,
    dtype_of as dtype_of,
    flatten as flatten,
    function_name as function_name,
    hijax_type as hijax_type,
    is_array as is_array,
    is_differentiable as is_differentiable,
    is_node as is_node,
    is_reference as is_reference,
    number_class as number_class,
    shape_of as shape_of,
    tied as tied,
    too_deep as too_deep,
    written as written,
)
from .paths import write as write
from .reach import (
    data_of as data_of,
    held_by as held_by,
    reaches as reaches,
    reaches_array as reaches_array,
    slots_of as slots_of,
)
from .steps import Steps as Steps, steps_of as steps_of
from .writes import (
    BOOL as BOOL,
    INTEGER as INTEGER,
    convert as convert,
    in_jax as in_jax,
    is_known as is_known,
    kind_of as kind_of,
    overwrite as overwrite,
    stays_numpy as stays_numpy,
)
