"""Say what is differentiated, in one place, and trust the gradient you get."""

import importlib
from typing import TYPE_CHECKING, Any

from . import errors as errors
from ._marks import (
    Diff as Diff,
    NonDiff as NonDiff,
    Static as Static,
    dataclass as dataclass,
    field as field,
    register_nondiff as register_nondiff,
    unwrap as unwrap,
)
from ._selection import (
    Selection as Selection,
    apply_updates as apply_updates,
    carry_over as carry_over,
    combine as combine,
    each as each,
    exclude as exclude,
    freeze as freeze,
    held as held,
    intermediate as intermediate,
    is_nondiff as is_nondiff,
    items as items,
    label as label,
    mask as mask,
    matching as matching,
    of_type as of_type,
    partition as partition,
    path as path,
    replace as replace,
    select as select,
    stop_gradient as stop_gradient,
    thaw as thaw,
)
from ._transforms import (
    KeepCalls as KeepCalls,
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

if TYPE_CHECKING:
    from . import coordinates as coordinates, safe as safe, testing as testing, types as types
    from ._audit import last_nonfinite as last_nonfinite
    from ._check import Finding as Finding, GradientReport as GradientReport, check as check
    from ._consistent_indexing import consistent_indexing as consistent_indexing
    from ._coordinates import ravel as ravel, unconstrain as unconstrain
    from ._display import show as show, summary as summary
    from ._double_where import double_where as double_where
    from ._intermediates import capture_intermediates as capture_intermediates, intervene as intervene
    from ._random import draw as draw, expectation as expectation
    from ._surrogate import surrogate as surrogate
    from ._survey import SurveyReport as SurveyReport, survey as survey

__version__ = "0.3.0"
__all__ = [
    "Diff",
    "Finding",
    "GradientReport",
    "KeepCalls",
    "NonDiff",
    "Selection",
    "Static",
    "SurveyReport",
    "apply_updates",
    "capture_intermediates",
    "carry_over",
    "check",
    "combine",
    "consistent_indexing",
    "coordinates",
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
    "held",
    "hessian",
    "hvp",
    "intermediate",
    "intervene",
    "is_nondiff",
    "items",
    "jacfwd",
    "jacobian",
    "jacrev",
    "jvp",
    "label",
    "last_nonfinite",
    "linearize",
    "mask",
    "matching",
    "of_type",
    "partition",
    "path",
    "ravel",
    "register_nondiff",
    "replace",
    "safe",
    "select",
    "show",
    "stop_gradient",
    "summary",
    "surrogate",
    "survey",
    "testing",
    "thaw",
    "types",
    "unconstrain",
    "unwrap",
    "value_and_grad",
    "vjp",
]

# Imported on first use, since not every program needs them and they take seven times as long as the rest.
_LATER = {
    "coordinates": "coordinates",
    "safe": "safe",
    "testing": "testing",
    "types": "types",
    **dict.fromkeys(("Finding", "GradientReport", "check"), "_check"),
    "last_nonfinite": "_audit",
    "consistent_indexing": "_consistent_indexing",
    **dict.fromkeys(("ravel", "unconstrain"), "_coordinates"),
    **dict.fromkeys(("show", "summary"), "_display"),
    "double_where": "_double_where",
    **dict.fromkeys(("capture_intermediates", "intervene"), "_intermediates"),
    **dict.fromkeys(("draw", "expectation"), "_random"),
    "surrogate": "_surrogate",
    **dict.fromkeys(("SurveyReport", "survey"), "_survey"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_LATER[name]}", __name__)
    globals()[name] = found = module if _LATER[name] == name else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
