"""Transforms: derivatives with respect to what is selected."""

from .arguments import Arguments as Arguments, Call as Call
from .linear import jvp as jvp, linearize as linearize, vjp as vjp
from .transform import (
    grad as grad,
    hessian as hessian,
    hvp as hvp,
    jacfwd as jacfwd,
    jacobian as jacobian,
    jacrev as jacrev,
    value_and_grad as value_and_grad,
)
