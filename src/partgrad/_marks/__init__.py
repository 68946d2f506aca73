"""Marks: what is held, what is static, and the dataclasses that carry both."""

from .change import remarked as remarked
from .cover import Cover as Cover
from .dataclass import dataclass as dataclass, field as field
from .diff import Diff as Diff
from .fields import MARKS as MARKS, Marks as Marks, schema_of as schema_of
from .foreign import register_nondiff as register_nondiff, registrations as registrations
from .forgotten import refuse_forgotten as refuse_forgotten
from .hold import EXPLICIT as EXPLICIT, Watch as Watch, mark_in as mark_in
from .layout import (
    Layout as Layout,
    Place as Place,
    first_difference as first_difference,
    flatten_one_level as flatten_one_level,
)
from .nondiff import NonDiff as NonDiff
from .opening import (
    Inside as Inside,
    alike as alike,
    close as close,
    closed as closed,
    is_open as is_open,
    next_level as next_level,
    open_leaves as open_leaves,
    united as united,
    with_open_marks as with_open_marks,
    without_marks as without_marks,
)
from .static import Static as Static, StaticData as StaticData, typed_treedef as typed_treedef
from .unwrap import unwrap as unwrap
