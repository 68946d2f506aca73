"""Say what is differentiated, in one place, and trust the gradient you get.

Names are imported when they are first used, so that importing the package costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors as errors, safe as safe, testing as testing
    from ._check import check as check
    from ._check._finding import Finding as Finding
    from ._check._report import GradientReport as GradientReport
    from ._dataclass import dataclass as dataclass, field as field
    from ._double_where import double_where as double_where
    from ._draw import draw as draw
    from ._edit import (
        freeze as freeze,
        is_nondiff as is_nondiff,
        mask as mask,
        replace as replace,
        select as select,
        stop_gradient as stop_gradient,
        thaw as thaw,
    )
    from ._expectation import expectation as expectation
    from ._indexing import consistent_indexing as consistent_indexing
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
    from ._summary import summary as summary
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

_NAMES = {
    "_check": "check",
    "_check._finding": "Finding",
    "_check._report": "GradientReport",
    "_dataclass": "dataclass field",
    "_double_where": "double_where",
    "_draw": "draw",
    "_edit": "freeze is_nondiff mask replace select stop_gradient thaw",
    "_expectation": "expectation",
    "_indexing": "consistent_indexing",
    "_linear": "jvp linearize vjp",
    "_nondiff": "NonDiff",
    "_partition": "apply_updates combine partition",
    "_ravel": "ravel",
    "_select": "Selection",
    "_selectors": "each exclude matching of_type path",
    "_static": "Static",
    "_summary": "summary",
    "_transform": "grad hessian hvp jacfwd jacobian jacrev value_and_grad",
    "_unwrap": "unwrap",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = ("errors", "safe", "testing")
__all__ = [*_MODULES, *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=None)
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
