"""Functions with one fault each, as data: what is wrong, in which leaf and at which line."""

from . import draws, everyday, indices, nonfinite, numbers, rules, zeros
from ._fault import Fault

GALLERY = [
    *rules.FAULTS,
    *nonfinite.FAULTS,
    *zeros.FAULTS,
    *indices.FAULTS,
    *draws.FAULTS,
    *numbers.FAULTS,
    *everyday.FAULTS,
]

__all__ = ["GALLERY", "Fault"]
