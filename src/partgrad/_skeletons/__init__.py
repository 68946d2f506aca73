"""Skeletons: trees with slots in place of leaves, and what paths, masks and callables say of them."""

from .callables import (
    MISFITS as MISFITS,
    Misfit as Misfit,
    code_of as code_of,
    is_static as is_static,
    match_of as match_of,
    parts_of as parts_of,
    refuse_twice as refuse_twice,
)
from .masks import bools_in as bools_in, masked_places as masked_places
from .patterns import (
    PatternStep as PatternStep,
    elements_at as elements_at,
    fits as fits,
    matching_places as matching_places,
    name_of as name_of,
    names_of as names_of,
    parse as parse,
    places_by_step as places_by_step,
)
from .plan import (
    LEAF as LEAF,
    Found as Found,
    Match as Match,
    Node as Node,
    Part as Part,
    Pick as Pick,
    Plan as Plan,
    Purpose as Purpose,
    place_of as place_of,
)
from .skeletons import Bound as Bound, Skeleton as Skeleton, keep as keep, skeleton_of as skeleton_of
from .slots import Seen as Seen
