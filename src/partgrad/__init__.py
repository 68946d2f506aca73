"""Say what is differentiated, in one place, and trust the gradient you get."""

from . import errors as errors
from ._dataclass import dataclass as dataclass, field as field
from ._edit import (
    freeze as freeze,
    is_nondiff as is_nondiff,
    mask as mask,
    replace as replace,
    select as select,
    stop_gradient as stop_gradient,
    thaw as thaw,
)
from ._linear import jvp as jvp, linearize as linearize, vjp as vjp
from ._nondiff import NonDiff as NonDiff
from ._partition import apply_updates as apply_updates, combine as combine, partition as partition
from ._ravel import ravel as ravel
from ._select import Selection as Selection
from ._selectors import (
    each as each,
    exclude as exclude,
    matching as matching,
    of_type as of_type,
    path as path,
)
from ._static import Static as Static
from ._transform import (
    grad as grad,
    hessian as hessian,
    hvp as hvp,
    jacfwd as jacfwd,
    jacobian as jacobian,
    jacrev as jacrev,
    value_and_grad as value_and_grad,
)
from ._unwrap import unwrap as unwrap

__version__ = "0.1.0"
