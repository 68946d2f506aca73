"""A gradient that cannot be traced, as of a rule that closes over a traced value, compared with differences."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from .agreement import COARSE
from .exact import Leaves, Vector
from .finding import Figures, Finding
from .float64 import widened
from .names import finding
from .own import Own
from .point import Point
from .rules import Rules
from .slopes import JUMP, UNSURE, Slope, slope

# How far a gradient that exists in its own precision only may be off.
_OF_OWN = 1e-3


def compared_eagerly(own: Own, point: Point, rules: Rules, generator: np.random.Generator) -> Iterator[Finding]:
    """Findings for a gradient that cannot be traced, as of a rule that closes over a traced value."""
    program = own.program
    for leaf, path in enumerate(program.paths):
        direction = [np.zeros_like(x) for x in point.leaves]
        direction[leaf] = generator.uniform(0.5, 1.5, point.leaves[leaf].shape) * (np.abs(point.leaves[leaf]) + 1)
        found = point.slope(direction) if np.isfinite(point.start).all() else _slope_of_own(own, direction)
        got = float((widened(own.gradients[leaf]) * direction[leaf]).real.sum())
        if np.isin(found.kind, (JUMP, UNSURE)).any():
            yield finding("noise", "info", "noise", [path])
            continue
        sides = [(own.weights * side).real for side in (found.left, found.right)]
        meant = float(np.clip(got, np.minimum(*sides).sum(), np.maximum(*sides).sum()))
        if abs(got - meant) <= _OF_OWN * max(abs(got), abs(meant)) + float((np.abs(own.weights) * found.error).sum()):
            continue
        relative = abs(got - meant) / max(abs(got), abs(meant))
        figures = Figures(path, None, got, None, meant, meant, float(found.error.sum()), found.steps, relative)
        unknown = rules.ruled_for(leaf)
        chain = unknown[0] if unknown else ()
        yield finding("mismatch", "error", "closed over" if chain else "unexplained", [path], chain, figures=figures)


def _slope_of_own(own: Own, direction: Leaves) -> Slope:
    """The slopes of a function that cannot run in float64, such as one of a type of the user's own."""

    def value(step: float) -> Vector:
        moved = [(x + step * v).astype(x.dtype) for x, v in zip(own.program.leaves, direction, strict=True)]
        return np.concatenate([widened(output).ravel() for output in own.program.outputs(moved)])

    unit = max(float(jnp.finfo(leaf.dtype).eps) for leaf in own.program.leaves)
    start = value(0.0)
    return slope(value, start, noise=lambda step: 4 * unit * np.abs(start), worst=COARSE)
