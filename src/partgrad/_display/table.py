"""Tables of text: how wide a text is, and how to make it fit a column."""

import itertools
import unicodedata
from collections.abc import Iterable, Sequence

# The width of a line in a terminal, and the gap between two columns.
COLUMNS = 80
GAP = "  "
# Shown as the path of a leaf that is the whole tree.
ROOT = "(the tree itself)"


def printable(text: str) -> str:
    """Escape what a terminal would not show as one character on the same line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def columns(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return len(text) if text.isascii() else sum(map(_character_columns, text))


def _character_columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def shortened(text: str, width: int) -> str:
    """Cut out the middle of a text that is too wide."""
    if columns(text) <= width:
        return text
    kept = width - len("...")
    start = within(text, kept - kept // 2)
    return f"{start}...{within(text[::-1], kept // 2)[::-1]}"


def within(text: str, width: int) -> str:
    """The start of a text that takes no more than a width."""
    taken = itertools.accumulate(map(_character_columns, text))
    return text[: sum(1 for _ in itertools.takewhile(lambda columns: columns <= width, taken))]


def padded(text: str, width: int) -> str:
    """Pad a text with spaces; one that is too wide stays whole."""
    return text + " " * (width - columns(text))


def fitted(text: str, width: int) -> str:
    """Make a text exactly this wide, with spaces or by cutting out its middle."""
    return padded(shortened(text, width), width)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], widest: Sequence[int]) -> list[str]:
    """The lines of a table in a terminal, none wider than 80 columns.

    Each column after the first is at most as wide as `widest` says, and the first gets the rest. A text that is too
    wide for its column has its middle cut out.
    """
    lines = [tuple(map(printable, line)) for line in [head, *rows]]
    natural = [max(columns(line[i]) for line in lines) for i in range(len(head))]
    widths = [min(*pair) for pair in zip(natural[1:], widest, strict=True)]
    room = COLUMNS - sum(widths) - len(GAP) * len(widths)
    widths.insert(0, min(room, natural[0]))
    lines.insert(1, tuple("-" * width for width in widths))
    return [GAP.join(map(fitted, line, widths)).rstrip() for line in lines]
