"""Say what is differentiated, in one place, and trust the gradient you get."""

from . import errors as errors
from ._dataclass import dataclass as dataclass, field as field
from ._mark import NonDiff as NonDiff, Static as Static, unwrap as unwrap
from ._partition import combine as combine, freeze as freeze, partition as partition, thaw as thaw
from ._select import Selection as Selection, each as each, path as path
from ._transform import grad as grad, value_and_grad as value_and_grad

__version__ = "0.1.0"
