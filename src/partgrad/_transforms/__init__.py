"""Transforms: derivatives with respect to what is selected."""

from .arguments import Arguments as Arguments
from .call import INSIDE as INSIDE, Call as Call, first_of_pair as first_of_pair
from .gradients import grad as grad, value_and_grad as value_and_grad
from .jacobians import hessian as hessian, hvp as hvp, jacfwd as jacfwd, jacobian as jacobian, jacrev as jacrev
from .kept import Kept as Kept, forget as forget, kept as kept
from .linear import LinearMap as LinearMap, Pullback as Pullback, jvp as jvp, linearize as linearize, vjp as vjp
from .options import refuse_options as refuse_options
from .ring import KeepCalls as KeepCalls, calls_in as calls_in, clear as clear
