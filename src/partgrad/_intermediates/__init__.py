"""Values inside a function: their derivatives, reading them, replacing them."""

from .program import Shifted as Shifted
from .public import capture_intermediates as capture_intermediates, intervene as intervene
from .sites import name_given as name_given
