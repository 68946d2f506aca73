"""Random functions: draws with a stated gradient, and expectations."""

from .draw import draw as draw
from .expectation import expectation as expectation
