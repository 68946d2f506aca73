"""The table of a check: one row for each leaf, with its path."""

from typing import Any

import jax
import numpy as np

from .._display import status_of, tie_in_words, tied_paths
from .._marks import Layout
from .._selection import Target
from .._transforms import INSIDE, Call
from .._trees import describe
from .finding import Finding
from .float64 import widened
from .report import GradientReport, LeafRow
from .verdict import INCONCLUSIVE


def paths_of(call: Call) -> list[str]:
    """The paths of the differentiated leaves; with several arguments, each begins with the argument."""
    return [_begun(call, target, i) for target in call.targets for i in target.plan.indices]


def _begun(call: Call, target: Target, number: int) -> str:
    path = call.path(target, number)
    if target.position == INSIDE or sum(one.position != INSIDE for one in call.targets) == 1:
        return path
    position = target.position if isinstance(target.position, str) else f"args[{target.position}]"
    return f"{position}{'' if not path or path.startswith('[') else '.'}{path}"


def report_of(
    name: str,
    call: Call,
    gradient: list[Any],
    findings: list[Finding],
    verdicts: list[str],
    cost: dict[str, int],
) -> GradientReport:
    rows, number = [], 0
    for target in call.targets:
        chosen = frozenset(target.plan.indices)
        for index, (place, leaf) in enumerate(zip(Layout(target.tree).leaves, target.leaves, strict=True)):
            path = _begun(call, target, index)
            if index not in chosen:
                rows.append(LeafRow(path, describe(leaf), status_of(place, leaf), None))
                continue
            own, verdict = gradient[number] if gradient else None, verdicts[number]
            size, dead = (None, None) if own is None else (_rms(own), int(np.sum(np.asarray(own) == 0)))
            status = "inconclusive" if verdict == INCONCLUSIVE else "checked"
            rows.append(LeafRow(path, describe(leaf), status, size, dead, verdict))
            number += 1
    ties = (tie_in_words(paths) for target in call.targets for paths in tied_paths(target))
    notes = (*["matrix products at the highest precision"] * is_rounding_products(), *ties)
    return GradientReport(name, tuple(rows), tuple(findings), cost, notes)


def is_rounding_products() -> bool:
    """Whether matrix products have fewer digits than their dtype by default."""
    return jax.default_backend() != "cpu"


def _rms(gradient: Any) -> float:
    return float(np.sqrt(np.mean(np.abs(widened(gradient)) ** 2))) if np.size(gradient) else 0.0
