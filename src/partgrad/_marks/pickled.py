"""The modules where pickles of earlier versions look for their classes."""

import sys
import types
from typing import Any

from .fields import Marks
from .nondiff import NonDiff
from .static import StaticData, unflatten_static


def _static_data(value: Any, _: Any) -> StaticData:
    return StaticData(value)


_MOVED: dict[str, dict[str, Any]] = {
    "partgrad._schema": {"Marks": Marks},
    "partgrad._nondiff": {"NonDiff": NonDiff},
    "partgrad._static": {"_static_data": _static_data, "unflatten_static": unflatten_static},
}


def leave_old_names() -> None:
    """Make the modules of earlier versions importable."""
    for name, held in _MOVED.items():
        module = types.ModuleType(name, "A module of an earlier version, for its pickles.")
        vars(module).update(held)
        sys.modules[name] = module
