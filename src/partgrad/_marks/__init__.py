"""Marks: what is held, what is static, and the dataclasses that carry both."""

from .change import remark as remark
from .dataclass import dataclass as dataclass, field as field
from .fields import MARKS as MARKS, Marks as Marks, schema_of as schema_of
from .forgotten import refuse_forgotten as refuse_forgotten
from .layout import (
    Layout as Layout,
    Place as Place,
    first_difference as first_difference,
    flatten_one_level as flatten_one_level,
)
from .nondiff import HELD as HELD, NonDiff as NonDiff
from .static import Static as Static, StaticData as StaticData
from .unwrap import unwrap as unwrap
