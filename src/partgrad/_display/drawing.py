"""Pictures of trees as SVG."""

import html

from .look import LOOKS
from .table import columns, printable, shortened
from .twigs import Twig

_LINE = 22
_STEP = 20
_MARGIN = 16
# The width of a character in a monospaced font of 13 pixels.
_CHARACTER = 7.85
_NAMES, _TYPES, _STATUSES, _VALUES = 44, 24, 28, 24
_STYLE = """\
.pgv{--paper:#fff;--ink:#1c1e21;--line:#c6cad0;font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",\
monospace}
@media (prefers-color-scheme:dark){.pgv{--paper:#16181c;--ink:#e3e6ea;--line:#4a4f57}}
.pgv text{fill:var(--ink);white-space:pre}
.pgv .node{font-weight:600}
.pgv .quiet{opacity:.72}
.pgv .guide{stroke:var(--line);fill:none}
.pgv .paper{fill:var(--paper);stroke:var(--line)}
"""

Line = tuple[tuple[bool, ...], Twig, bool]


def drawn(lines: list[Line], legend: list[tuple[str, str]], title: str) -> str:
    """An SVG document: the rows, as `Twig.lines` gives them, the kinds with what is said of them, and a title below."""
    texts = [_texts(twig, is_open) for _, twig, is_open in lines]
    names = max(len(last) * _STEP + _width(name) for (last, _, _), (name, *_) in zip(lines, texts, strict=True))
    rest = [max(_width(row[i]) for row in texts) for i in (1, 2, 3)]
    lefts = [_MARGIN + 20 + names + 24]
    for width in rest[:2]:
        lefts.append(lefts[-1] + width + (24 if width else 0))
    wide = max(lefts[-1] + rest[2], _MARGIN + _width(title), _MARGIN + _legend(legend, 0)[1]) + _MARGIN
    drawn = [_row(number, line, row, lefts) for number, (line, row) in enumerate(zip(lines, texts, strict=True))]
    below = _MARGIN + len(lines) * _LINE + 12
    drawn += [f'<path class="guide" d="M{_MARGIN} {below - 6}H{wide - _MARGIN:.0f}"/>', _legend(legend, below + 12)[0]]
    drawn.append(_text(_MARGIN, below + 12 + _LINE, title, "quiet"))
    high = below + 2 * _LINE + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pgv" width="{wide:.0f}" height="{high}" '
        f'viewBox="0 0 {wide:.0f} {high}" role="img">\n<title>{html.escape(printable(title))}</title>\n'
        f"<style>\n{_STYLE}</style>\n"
        f'<rect class="paper" x=".5" y=".5" width="{wide - 1:.0f}" height="{high - 1}" rx="8"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def _texts(twig: Twig, is_open: bool) -> tuple[str, str, str, str]:
    cut = lambda text, width: shortened(printable(text), width)
    status = cut(twig.status, _STATUSES) or "  ".join(f"  {count}" for _, count in twig.counted)
    return cut(twig.named(is_open), _NAMES), cut(twig.type, _TYPES), status, cut(twig.value, _VALUES)


def _row(number: int, line: Line, texts: tuple[str, ...], lefts: list[float]) -> str:
    (last, twig, _), middle = line, _MARGIN + number * _LINE + _LINE / 2
    drawn = []
    for level, flag in enumerate(last):
        x = _MARGIN + level * _STEP + 5
        top, low = middle - _LINE / 2, middle + _LINE / 2
        if level == len(last) - 1:
            drawn.append(f'<path class="guide" d="M{x} {top}V{middle if flag else low}M{x} {middle}h{_STEP - 10}"/>')
        elif not flag:
            drawn.append(f'<path class="guide" d="M{x} {top}V{low}"/>')
    x = _MARGIN + len(last) * _STEP
    if twig.kind:
        drawn.append(_symbol(twig.kind, x + 5, middle))
        x += 18
    name, kind, status, value = texts
    drawn.append(_text(x, middle, name, "" if twig.kind else "node", twig.path))
    drawn.append(_text(lefts[0], middle, kind, "quiet"))
    if twig.status:
        drawn.append(_text(lefts[1], middle, status, "quiet" if twig.kind == "no derivative" else ""))
    else:
        drawn.append(_counts(twig, lefts[1], middle))
    drawn.append(_text(lefts[2], middle, value, ""))
    return "".join(drawn)


def _counts(twig: Twig, x: float, middle: float) -> str:
    drawn = []
    for kind, count in twig.counted:
        drawn += [_symbol(kind, x + 5, middle), _text(x + 14, middle, count, "quiet")]
        x += _width(count) + 30
    return "".join(drawn)


def _legend(legend: list[tuple[str, str]], middle: float) -> tuple[str, float]:
    """The symbols with their meanings, and the width of that."""
    drawn, x = [], float(_MARGIN)
    for kind, text in legend:
        drawn += [_symbol(kind, x + 5, middle), _text(x + 18, middle, text, "")]
        x += 18 + _width(text) + 24
    return "".join(drawn), x


def _symbol(kind: str, x: float, y: float) -> str:
    look = LOOKS[kind]
    square = f'x="{x - 4}" y="{y - 4}" width="8" height="8"'
    shape = {
        "disc": f'<circle cx="{x}" cy="{y}" r="4.5" fill="{look.colour}"/>',
        "ring": f'<circle cx="{x}" cy="{y}" r="3.7" fill="none" stroke="{look.colour}" stroke-width="1.8"/>',
        "square": f'<rect {square} fill="{look.colour}"/>',
        "half": f'<rect {square} fill="none" stroke="{look.colour}" stroke-width="1.4"/>'
        f'<rect x="{x - 4}" y="{y - 4}" width="4" height="8" fill="{look.colour}"/>',
        "diamond": f'<path d="M{x} {y - 5.3}l5.3 5.3l-5.3 5.3l-5.3 -5.3z" fill="{look.colour}"/>',
        "dot": f'<circle cx="{x}" cy="{y}" r="2" fill="{look.colour}"/>',
    }
    return shape[look.style]


def _text(x: float, middle: float, text: str, style: str, title: str = "") -> str:
    if not text:
        return ""
    hint = f"<title>{html.escape(printable(title))}</title>" if title else ""
    named = f' class="{style}"' if style else ""
    return f'<text x="{x:.0f}" y="{middle + 4.5:.1f}"{named}>{html.escape(printable(text))}{hint}</text>'


def _width(text: str) -> float:
    return columns(text) * _CHARACTER
