"""How what is known of a leaf looks wherever it is drawn: a symbol and a colour, each of which tells it alone."""

from typing import NamedTuple


class Look(NamedTuple):
    """A symbol and a colour.

    Attributes:
        symbol: One character.
        colour: As `#rrggbb`; of a lightness that is legible on a light and on a dark page.
        style: What draws the symbol where fonts differ: a name of a class of the style sheet.
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
    # What a check says of a leaf.
    "info": Look("i", "#71829a", "sign"),
    "ok": Look("✓", "#2d8a2d", "sign"),
    "error": Look("✕", "#dd3333", "sign"),
    "warning": Look("!", "#a87800", "sign"),
    "inconclusive": Look("?", "#808080", "sign"),
}
