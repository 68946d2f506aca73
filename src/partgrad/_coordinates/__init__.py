"""In which coordinates the leaves of a tree move, which follow others, and all of them as one vector."""

from .bounded import Interval as Interval, interval as interval, positive as positive
from .constrain import Constrain as Constrain
from .unconstrain import unconstrain as unconstrain
from .vector import Unravel as Unravel, ravel as ravel
