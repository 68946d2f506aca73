"""Say what is differentiated, in one place, and trust the gradient you get."""

from . import errors as errors, safe as safe, testing as testing
from ._check import Finding as Finding, GradientReport as GradientReport, check as check
from ._consistent_indexing import consistent_indexing as consistent_indexing
from ._display import summary as summary
from ._double_where import double_where as double_where
from ._marks import NonDiff as NonDiff, Static as Static, dataclass as dataclass, field as field, unwrap as unwrap
from ._random import draw as draw, expectation as expectation
from ._selection import (
    Selection as Selection,
    apply_updates as apply_updates,
    combine as combine,
    each as each,
    exclude as exclude,
    freeze as freeze,
    is_nondiff as is_nondiff,
    mask as mask,
    matching as matching,
    of_type as of_type,
    partition as partition,
    path as path,
    ravel as ravel,
    replace as replace,
    select as select,
    stop_gradient as stop_gradient,
    thaw as thaw,
)
from ._transforms import (
    grad as grad,
    hessian as hessian,
    hvp as hvp,
    jacfwd as jacfwd,
    jacobian as jacobian,
    jacrev as jacrev,
    jvp as jvp,
    linearize as linearize,
    value_and_grad as value_and_grad,
    vjp as vjp,
)

__version__ = "0.1.0"
__all__ = [
    "Finding",
    "GradientReport",
    "NonDiff",
    "Selection",
    "Static",
    "apply_updates",
    "check",
    "combine",
    "consistent_indexing",
    "dataclass",
    "double_where",
    "draw",
    "each",
    "errors",
    "exclude",
    "expectation",
    "field",
    "freeze",
    "grad",
    "hessian",
    "hvp",
    "is_nondiff",
    "jacfwd",
    "jacobian",
    "jacrev",
    "jvp",
    "linearize",
    "mask",
    "matching",
    "of_type",
    "partition",
    "path",
    "ravel",
    "replace",
    "safe",
    "select",
    "stop_gradient",
    "summary",
    "testing",
    "thaw",
    "unwrap",
    "value_and_grad",
    "vjp",
]
