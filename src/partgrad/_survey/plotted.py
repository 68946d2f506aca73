"""A survey as a picture: leaves by states."""

from typing import Any, TypeAlias

import numpy as np

from .._display import ROOT, printable, shortened
from ..errors import LibraryError

# That of `report.py`, which is drawn here.
SurveyReport: TypeAlias = Any

# The colours of leaves that are not selected and of errors, which a notebook shows too.
_ZERO, _NOT_FINITE = "#c9ced6", "#dd3333"
_WIDEST = 28
_INCHES, _FEWEST, _MOST = 0.28, 2.2, 12.0


def plotted(report: SurveyReport, ax: Any) -> Any:
    """Draw into axes, or into a new figure, and return the axes."""
    try:
        from matplotlib import colormaps, colors, patches, pyplot
    except ImportError as error:
        raise LibraryError(
            "A survey is drawn by matplotlib, which is not installed.",
            "Expected `import matplotlib` to work.",
            fix="run python -m pip install matplotlib; `report.sizes` has the numbers.",
        ) from error
    if ax is None:
        height = min(_MOST, max(_FEWEST, 1.2 + _INCHES * len(report.paths)))
        _, ax = pyplot.subplots(figsize=(8.0, height), layout="constrained")
    sizes = np.asarray(report.sizes, float)
    is_alive = np.isfinite(sizes) & (sizes > 0)
    logarithms = np.log10(np.where(is_alive, sizes, 1.0))
    image = ax.imshow(
        np.ma.masked_array(logarithms, ~is_alive), aspect="auto", interpolation="nearest", cmap=colormaps["viridis"]
    )
    for what, colour in ((sizes == 0, _ZERO), (~np.isfinite(sizes), _NOT_FINITE)):
        ax.imshow(
            np.ma.masked_array(np.ones_like(sizes), ~what),
            aspect="auto",
            interpolation="nearest",
            cmap=colors.ListedColormap([colour]),
        )
    if is_alive.any():
        ax.figure.colorbar(image, ax=ax, label="size of the gradient, log10")
    names = [shortened(printable(path or ROOT), _WIDEST) for path in report.paths]
    ax.set_yticks(range(len(names)), names, fontsize="small")
    ax.set_xlabel("state")
    ax.set_title(f"{printable(report.function)}: {report.states:,} states", loc="left", fontsize="medium")
    shown = [patches.Patch(color=_ZERO, label="zero"), patches.Patch(color=_NOT_FINITE, label="not finite")]
    present = [(sizes == 0).any(), (~np.isfinite(sizes)).any()]
    legend = [patch for patch, is_there in zip(shown, present, strict=True) if is_there]
    if legend:
        ax.legend(
            handles=legend, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize="small", frameon=False
        )
    return ax
