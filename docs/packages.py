"""Draw a Mermaid graph as SVG, so that the site needs neither a browser's script nor a program to lay it out.

It knows what the architecture page uses: `graph TD`, and lines such as `one["one: what it does"] --> other`.
"""

import html
import itertools
import re

NODE, GAP, HEIGHT, FLOOR, THROUGH = 196, 18, 50, 92, 14

Name = str | tuple[str, str, int]  # a node, or the place where an arrow passes a floor


def parsed(source: str) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """The nodes with what is said of each, and the arrows."""
    texts: dict[str, str] = {}
    arrows = []
    for line in source.splitlines()[1:]:
        ends = [re.fullmatch(r'\s*(\w+)(?:\["\w+: (.*)"\])?\s*', end) for end in line.split("-->")]
        for end in ends:
            texts[end[1]] = end[2] or texts.get(end[1], "")
        if len(ends) == 2:
            arrows.append((ends[0][1], ends[1][1]))
    return texts, arrows


def floors(texts: dict[str, str], arrows: list[tuple[str, str]]) -> dict[str, int]:
    """For each node its floor, 0 being the lowest: one above the highest that it points to."""
    found: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in found:
            found[name] = max((1 + floor(to) for of, to in arrows if of == name), default=0)
        return found[name]

    for name in texts:
        floor(name)
    return found


def rows(found: dict[str, int], arrows: list[tuple[str, str]]) -> tuple[list[list[Name]], list[list[Name]]]:
    """The floors from the top, each in an order that keeps arrows short; and what each arrow passes on its way."""
    top = max(found.values())
    lines: list[list[Name]] = [[name for name in found if found[name] == top - row] for row in range(top + 1)]
    paths: list[list[Name]] = []
    for of, to in arrows:
        passed: list[Name] = [(of, to, row) for row in range(top - found[of] + 1, top - found[to])]
        for place in passed:
            lines[place[2]].append(place)
        paths.append([of, *passed, to])
    pairs = [pair for path in paths for pair in itertools.pairwise(path)]
    for turn in range(12):
        at = {name: (i + 0.5) / len(line) for line in lines for i, name in enumerate(line)}
        down = turn % 2 == 0
        for line in lines if down else lines[::-1]:
            mean = {}
            for name in line:
                near = [at[a if down else b] for a, b in pairs if (b if down else a) == name]
                mean[name] = sum(near) / len(near) if near else at[name]
            line.sort(key=mean.__getitem__)
            at |= {name: (i + 0.5) / len(line) for i, name in enumerate(line)}
    return lines, paths


def drawn(source: str) -> str:
    """The graph as SVG, in the colours of the theme."""
    texts, arrows = parsed(source)
    lines, paths = rows(floors(texts, arrows), arrows)
    size = lambda name: NODE if isinstance(name, str) else THROUGH
    wide = max(sum(size(name) + GAP for name in line) for line in lines) + GAP
    places: dict[Name, tuple[float, float]] = {}
    for row, line in enumerate(lines):
        x = (wide - sum(size(name) + GAP for name in line) + GAP) / 2
        for name in line:
            places[name] = x + size(name) / 2, GAP + row * FLOOR
            x += size(name) + GAP
    parts = [f'<path d="{_curve([places[name] for name in path])}" marker-end="url(#tip)"/>' for path in paths]
    for name, text in texts.items():
        parts.append(_box(name, text, *places[name]))
    tall = GAP * 2 + FLOOR * (len(lines) - 1) + HEIGHT
    head = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker>'
    )
    title = "<title>The packages, each above those that it imports</title>"
    box = f'viewBox="0 0 {wide:.0f} {tall}" style="min-width: {wide * 0.72:.0f}px; max-width: {wide:.0f}px"'
    return f'<div class="packages"><svg role="img" {box}>{title}<defs>{head}</defs>{"".join(parts)}</svg></div>'


def _curve(points: list[tuple[float, float]]) -> str:
    """From the bottom of the first box to the top of the last, upright past the floors between."""
    (x, y), *rest = points
    y += HEIGHT
    parts = [f"M{x:.0f} {y}"]
    for number, (to, top) in enumerate(rest, 1):
        middle = (y + top) / 2
        parts.append(f"C{x:.0f} {middle:.0f} {to:.0f} {middle:.0f} {to:.0f} {top}")
        if number < len(rest):
            parts.append(f"V{top + HEIGHT}")
        x, y = to, top + HEIGHT
    return "".join(parts)


def _box(name: str, text: str, x: float, y: float) -> str:
    """A box with a name, and below it what the package does, in up to two lines."""
    words, lines = text.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > 32:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    rect = f'<rect x="{x - NODE / 2:.0f}" y="{y}" width="{NODE}" height="{HEIGHT}" rx="6"/>'
    said = "".join(
        f'<text x="{x:.0f}" y="{y + 31 + 13 * number}" class="quiet">{html.escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    return f'<g>{rect}<text x="{x:.0f}" y="{y + 17}" class="name">{name}</text>{said}</g>'
