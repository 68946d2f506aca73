"""The page that a run writes: tables in Markdown, and a picture."""

import html
import math
from collections.abc import Iterable
from pathlib import Path

from .timing import Row

_COLOURS = ("#0d7fd1", "#c8590b", "#0b8a6f", "#a05bd0", "#a87800", "#c2509a", "#71829a", "#808080")
_STYLE = """\
.pgb{--paper:#fff;--ink:#1c1e21;--line:#c6cad0;font:13px system-ui,sans-serif}
@media (prefers-color-scheme:dark){.pgb{--paper:#16181c;--ink:#e3e6ea;--line:#4a4f57}}
.pgb text{fill:var(--ink)}.pgb .quiet{opacity:.75;font-size:12px}
.pgb .line{stroke:var(--line);fill:none}.pgb .paper{fill:var(--paper);stroke:var(--line)}
"""
_LEFT, _WIDTH, _LINE = 350, 520, 24


def page(groups: dict[str, list[Row]], environment: str, picture: str, command: str) -> str:
    """The page, with a table for each group."""
    parts = [
        "# Benchmarks",
        f"Written by `{command}`. {environment}.",
        "Everything is timed in one process, interleaved, with the garbage collector off; figures are medians. A "
        "ratio is partgrad's time divided by the peer's: below one, partgrad is faster. In brackets is the highest "
        "ratio that the project allows itself; ratios above it are bold.",
        f"![Time of each peer as a multiple of partgrad's]({picture})",
    ]
    for title, rows in groups.items():
        parts.append(f"## {title}")
        lines = ["| | partgrad | ratio to each peer |", "|---|---|---|"]
        for row in rows:
            lines.append(f"| {row.title} | {row.cost()} | {'; '.join(_ratio(*peer) for peer in row.ratios())} |")
        parts.append("\n".join(lines))
        parts += [f"{row.title}: {row.notes}." for row in rows if row.notes]
    return "\n\n".join(parts) + "\n"


def _ratio(peer: str, ratio: float, limit: float | None) -> str:
    """The ratio to a peer, and its bound."""
    shown = f"{ratio:.3g}" if limit is None or ratio <= limit else f"**{ratio:.3g}**"
    return f"{peer} {shown}" + (f" ({limit:g})" if limit is not None else "")


def picture(rows: Iterable[Row]) -> str:
    """A dot for each peer, at its time as a multiple of partgrad's, on a logarithmic axis."""
    rows = [row for row in rows if row.unit == "s"]
    peers = list(dict.fromkeys(peer for row in rows for peer, _, _ in row.ratios()))
    multiples = [1 / ratio for row in rows for _, ratio, _ in row.ratios()]
    low, high = math.floor(math.log10(min([*multiples, 0.5]))), math.ceil(math.log10(max([*multiples, 2])))
    at = lambda multiple: _LEFT + _WIDTH * (math.log10(multiple) - low) / (high - low)
    legend, top = _legend(peers)
    tall, wide = top + _LINE * len(rows) + 40, _LEFT + _WIDTH + 40
    bottom = tall - 34
    parts = [legend]
    for power in range(low, high + 1):
        x = at(10**power)
        parts.append(f'<path class="line" d="M{x:.0f} {top - 8}V{bottom}" stroke-width="{2 if power == 0 else 0.6}"/>')
        label = f"{10**power:g}x" if power else "partgrad"
        parts.append(f'<text class="quiet" x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    for number, row in enumerate(rows):
        y = top + _LINE * number + 10
        parts.append(f'<text x="{_LEFT - 14}" y="{y + 4}" text-anchor="end">{html.escape(row.title)}</text>')
        for peer, ratio, _ in row.ratios():
            said = html.escape(f"{row.title}: {peer} takes {1 / ratio:.3g} times as long as partgrad")
            parts.append(_dot(peers.index(peer), at(1 / ratio), y, f"<title>{said}</title>"))
    frame = f'<rect class="paper" x=".5" y=".5" width="{wide - 1}" height="{tall - 1}" rx="8"/>'
    size = f'width="{wide}" height="{tall}" viewBox="0 0 {wide} {tall}" role="img"'
    head = f"<title>Times of peers as multiples of partgrad's</title>\n<style>\n{_STYLE}</style>\n{frame}"
    inside = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" class="pgb" {size}>\n{head}\n{inside}\n</svg>\n'


def _dot(number: int, x: float, y: float, inside: str = "") -> str:
    """The dot of a peer: a colour, and for each eight of them another shape."""
    turn, colour = divmod(number, len(_COLOURS))
    paint = f'fill="{_COLOURS[colour]}" fill-opacity=".85"'
    if turn == 0:
        return f'<circle cx="{x:.1f}" cy="{y}" r="5" {paint}>{inside}</circle>'
    corners = "l5 9h-10z" if turn == 1 else "l5 5l-5 5l-5 -5z"
    return f'<path d="M{x:.1f} {y - 5}{corners}" {paint}>{inside}</path>'


def _legend(peers: list[str]) -> tuple[str, int]:
    """Which dot is which peer, and where the rows begin."""
    parts = [
        '<text x="20" y="28">Time of a peer as a multiple of partgrad\'s; right of the line partgrad is faster.</text>'
    ]
    x, y = 20, 52
    for number, peer in enumerate(peers):
        if x + 26 + 7.5 * len(peer) > _LEFT + _WIDTH:
            x, y = 20, y + 22
        parts.append(_dot(number, x + 5, y - 4))
        parts.append(f'<text x="{x + 16}" y="{y}">{html.escape(peer)}</text>')
        x += int(34 + 7.5 * len(peer))
    return "\n".join(parts), y + 30


def write(groups: dict[str, list[Row]], environment: str, path: Path, command: str) -> None:
    """Write the page, and the picture beside it."""
    drawn = path.with_suffix(".svg")
    drawn.write_text(picture(row for rows in groups.values() for row in rows), encoding="utf-8")
    path.write_text(page(groups, environment, drawn.name, command), encoding="utf-8")
