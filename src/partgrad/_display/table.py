"""Tables of text and of HTML: how wide a text is, and how it is made to fit a column."""

import html
import itertools
import unicodedata
from collections.abc import Iterable

# Stands for the path of a leaf that is the whole tree.
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
    """Cut the middle out of a text that is too wide."""
    if columns(text) <= width:
        return text
    kept = width - len("...")
    start = _within(text, kept - kept // 2)
    return f"{start}...{_within(text[::-1], kept // 2)[::-1]}"


def _within(text: str, width: int) -> str:
    """The start of a text that takes no more than a width."""
    taken = itertools.accumulate(map(_character_columns, text))
    return text[: sum(1 for _ in itertools.takewhile(lambda columns: columns <= width, taken))]


def padded(text: str, width: int) -> str:
    """Fill a text with blanks; one that is too wide stays whole."""
    return text + " " * (width - columns(text))


def fitted(text: str, width: int) -> str:
    """Make a text just as wide, by blanks or by cutting its middle out."""
    return padded(shortened(text, width), width)


def html_row(tag: str, cells: Iterable[str]) -> str:
    """Write a row of texts, escaped."""
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
