"""The look of a leaf's status: a symbol and a colour, either of which is enough to recognise it."""

from typing import NamedTuple


class Look(NamedTuple):
    """A symbol and a colour.

    Attributes:
        symbol: One character.
        colour: As `#rrggbb`; light enough for a dark page and dark enough for a light one.
        style: The class of the style sheet that draws the symbol, so that fonts do not matter.
    """

    symbol: str
    colour: str
    style: str


LOOKS = {
    "differentiated": Look("●", "#0d7fd1", "disc"),
    "open": Look("◧", "#a05bd0", "half"),
    "not selected": Look("○", "#71829a", "ring"),
    "held": Look("■", "#c8590b", "square"),
    "static": Look("◆", "#0b8a6f", "diamond"),
    "no derivative": Look("·", "#808080", "dot"),
    # The verdicts of a check.
    "info": Look("i", "#71829a", "sign"),
    "ok": Look("✓", "#2d8a2d", "sign"),
    "error": Look("✕", "#dd3333", "sign"),
    "stopped": Look("∥", "#dd3333", "sign"),
    "warning": Look("!", "#a87800", "sign"),
    "inconclusive": Look("?", "#808080", "sign"),
}
