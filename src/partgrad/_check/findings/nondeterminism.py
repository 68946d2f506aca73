"""Two runs at one point that give different numbers."""

from collections.abc import Iterator

import numpy as np

from ..._programs import FOREIGN, Operands, line
from ..evidence import Evidence, at
from ..finding import Finding
from ..noise import apart, distance, widened


def nondeterminism(evidence: Evidence, again: Operands) -> Iterator[Finding]:
    """One finding if two runs differ; an error if they differ by more than rounding."""
    foreign = [chain for chain in evidence.smooth.chains if chain[-1].primitive.name in FOREIGN]
    # A change made by a callback could pass for rounding.
    noise = None if foreign else evidence.noise
    count = len(evidence.plain)
    first, second = evidence.runs
    pairs = {
        "the function": (evidence.plain, again, noise),
        "the function under `jit`": (first[:count], second[:count], noise),
        "the gradient": (first[count:], second[count:], None),
    }
    unlike = {way: runs for way, runs in pairs.items() if not _is_bitwise_equal(*runs[:2])}
    if not unlike:
        return
    worst = max(((found.absolute, way) for way, runs in unlike.items() for found in apart(*runs)), default=None)
    if worst is None:
        largest = max(_largest_difference(*runs[:2]) for runs in unlike.values())
        order = "sums do not always run in the same order"
        message = f"two runs at the same point differ by {largest:.1e}, within rounding: {order}."
        yield Finding("nondeterminism", "info", "", "", message)
        return
    lines = list(dict.fromkeys(filter(None, map(line, foreign))))
    by = f" It leaves JAX in {', '.join(dict.fromkeys(map(at, foreign)))}." if foreign else ""
    message = (
        f"two runs of {worst[1]} at the same point differ by {worst[0]:.2g}, so no derivative can be compared with "
        f"anything.{by} Fix: pass in what changes, such as a key, as an argument."
    )
    yield Finding("nondeterminism", "error", "", lines[0] if lines else "", message)


def _is_bitwise_equal(first: Operands, second: Operands) -> bool:
    return len(first) == len(second) and all(
        np.shape(a) == np.shape(b) and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(first, second, strict=True)
    )


def _largest_difference(first: Operands, second: Operands) -> float:
    gaps = [distance(widened(a), widened(b)) for a, b in zip(first, second, strict=False) if np.shape(a) == np.shape(b)]
    return max((float(np.max(gap[np.isfinite(gap)], initial=0.0)) for gap in gaps), default=0.0)
