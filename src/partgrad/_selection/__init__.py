"""Selectors: what `wrt=` names or describes, and what is done with it."""

from .carry_over import carry_over as carry_over
from .edit import (
    freeze as freeze,
    is_nondiff as is_nondiff,
    items as items,
    mask as mask,
    replace as replace,
    select as select,
    stop_gradient as stop_gradient,
    thaw as thaw,
)
from .intermediate import Intermediate as Intermediate, intermediate as intermediate
from .kinds import held as held
from .label import label as label, owners as owners
from .partition import (
    apply_updates as apply_updates,
    combine as combine,
    filled as filled,
    is_none as is_none,
    partition as partition,
)
from .public import each as each, exclude as exclude, matching as matching, of_type as of_type, path as path
from .selection import Selection as Selection
from .selectors import Selector as Selector, as_selection as as_selection
from .target import Form as Form, Target as Target, entry_names as entry_names, unflatten_part as unflatten_part
