"""Classes for annotations: what a selector may be, and what functions of partgrad return.

They are made by those functions, never called.

Example:
    >>> import partgrad as pg
    >>> def count(model: dict[str, float], wrt: pg.types.Selector) -> int:
    ...     return len(pg.items(model, wrt))
    >>> count({"a": 1.0, "b": 2.0}, "a")
    1
"""

from ._check import Finding as Finding, GradientReport as GradientReport
from ._coordinates import Constrain as Constrain, Unravel as Unravel
from ._display import Picture as Picture, Row as Row, Summary as Summary
from ._selection import Intermediate as Intermediate, Selection as Selection, Selector as Selector
from ._survey import SurveyReport as SurveyReport
from ._transforms import LinearMap as LinearMap, Pullback as Pullback

__all__ = [
    "Constrain",
    "Finding",
    "GradientReport",
    "Intermediate",
    "LinearMap",
    "Picture",
    "Pullback",
    "Row",
    "Selection",
    "Selector",
    "Summary",
    "SurveyReport",
    "Unravel",
]


def __dir__() -> list[str]:
    return __all__
