"""Key paths as text.

A path reads as Python does, starting at the tree itself: `kernels[0].variance`, `['w'].scale`.
"""

from collections.abc import Iterable
from typing import Any

from jax.tree_util import GetAttrKey, SequenceKey

from .leaf import written


def write_step(step: Any) -> str:
    """Write one key entry: `.name`, `['key']` or `[0]`."""
    kind = type(step)
    if kind is GetAttrKey:
        return f".{step.name}"
    if kind is SequenceKey:
        return f"[{step.idx}]"
    # A class may have keys of its own.
    return f"[{written(getattr(step, 'key', step))}]"


def write(steps: Iterable[Any]) -> str:
    """Write a key path; the path of the tree itself is empty."""
    return "".join(map(write_step, steps)).removeprefix(".")
