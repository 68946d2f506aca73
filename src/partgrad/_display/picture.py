"""Pictures of trees: in a terminal, as HTML that unfolds, and as SVG."""

import html
import pathlib
from collections import Counter
from typing import Any

from .._selection import Selection, Target, as_selection
from .._trees import LOOKS
from ..errors import ArgumentError
from .drawing import drawn
from .markup import counted, page, styled, symbol
from .table import COLUMNS, printable, shortened, table
from .twigs import Grower, Twig
from .values import Size, in_bytes, size_of

# The widest that type, status and value may be in a line of text.
_WIDEST = (24, 36, 24)
# How many rows are shown unfolded in HTML, and how many the text and the SVG have at most.
_OPEN = 40
_LINES = 100


class Picture:
    """A drawing of a tree, as `partgrad.show` returns it.

    In a notebook it is a tree whose nodes fold; in a terminal it is text. The picture keeps only what it shows, not the
    tree.
    """

    def __init__(self, root: Twig, counts: "Counter[str]", wrt: str, selected: Size, everything: Size):
        self._root = root
        self._counts = counts
        self._wrt = wrt
        self._selected = selected
        self._everything = everything

    def __str__(self) -> str:
        rows = [_cells(*line) for line in self._root.lines(_LINES)]
        legend = "   ".join(f"{LOOKS[kind].symbol} {kind} {self._counts[kind]:,}" for kind in self._kinds())
        head = ("tree", "type", "status", "value")
        return "\n".join(
            [*table(head, rows, _WIDEST), "", *([legend] if legend else []), shortened(self._title(), COLUMNS)]
        )

    def __repr__(self) -> str:
        return str(self)

    def html(self) -> str:
        """The picture as HTML that stands anywhere: without scripts, and without anything from elsewhere.

        Returns:
            A `<div>` with its own style. It takes the text's colour from the page, so it may be light or dark.
        """
        opened = {id(twig) for _, twig, is_open in self._root.lines(_OPEN) if is_open}
        parts = [
            f'<div class="pg-head">{html.escape(self._title())}</div>',
            f'<ul class="pg-tree">{_item(self._root, opened)}</ul>',
            f'<div class="pg-legend">{counted(self._counts, words=True)}</div>',
        ]
        return styled("\n".join(parts))

    def svg(self) -> str:
        """The picture as SVG: what fits on a page, unfolded; light or dark as the reader's system is.

        Returns:
            A document, which may also stand in HTML.
        """
        legend = [(kind, f"{kind} {self._counts[kind]:,}") for kind in self._kinds()]
        return drawn(list(self._root.lines(_LINES)), legend, self._title())

    def save(self, path: "str | pathlib.Path") -> None:
        """Write the picture to a file.

        Args:
            path: Where to; it ends in `.svg`, `.html` or `.txt`.

        Raises:
            ArgumentError: If it ends in something else.
        """
        path = pathlib.Path(path)
        title = printable(self._root.name)
        writers = {".svg": self.svg, ".html": lambda: page(title, self.html()), ".txt": lambda: f"{self}\n"}
        if path.suffix not in writers:
            raise ArgumentError(
                f"A picture cannot be saved as `{printable(str(path))}`.",
                "Expected a name that ends in .svg, .html or .txt.",
                fix="write another name; for a PNG, open the SVG in a browser or in Inkscape.",
            )
        path.write_text(writers[path.suffix](), encoding="utf-8")

    # Notebooks prefer HTML; converters to PDF take the SVG.
    def _repr_html_(self) -> str:
        return self.html()

    def _repr_svg_(self) -> str:
        return self.svg()

    def _kinds(self) -> list[str]:
        return [kind for kind in LOOKS if self._counts[kind]]

    def _title(self) -> str:
        here, everything = self._selected, self._everything
        return (
            f"wrt={shortened(self._wrt, _WIDEST[0])} differentiates {here.leaves:,} of {everything.leaves:,} leaves, "
            f"{here.entries:,} of {everything.entries:,} entries, {in_bytes(here.gradient)}"
        )


def show(tree: Any, wrt: Any = None, *, depth: int | None = None) -> Picture:
    """Draw a tree: which leaves are differentiated, and why the others are not.

    Each leaf has a symbol and a colour: differentiated (●), not selected by `wrt` (○), held by a mark (■), held by a
    mark that is open (◧: `wrt`, or an enclosing transform, names the leaf), static (◆), or without a derivative, such
    as an int or a function (·). A node counts how many of each it contains. The picture also shows types, the values of
    numbers, and the mean and spread of floating arrays.

    In a large tree, identical neighbours in a list are drawn once, long nodes are shortened, and what is far from the
    root is left out. Counts always include everything.

    Args:
        tree: Any pytree; its leaves may be tracers or `jax.ShapeDtypeStruct`.
        wrt: A selector. None selects every floating or complex leaf that no mark holds.
        depth: The maximum number of levels drawn below the root.

    Returns:
        The picture, which shows as HTML in a notebook and as text in a terminal; `picture.save("model.svg")` or
        `picture.save("model.html")` writes it to a file.

    Raises:
        SelectionError: If the selector does not fit the tree.

    Example:
        >>> import partgrad as pg
        >>> print(pg.show({"kernel": {"scale": 2.0, "period": pg.NonDiff(1.0)}, "steps": 3}))
        tree                type   status          value
        ------------------  -----  --------------  -----
        dict                       ● 1  ■ 1  · 1
        ├─ ['kernel']       dict   ● 1  ■ 1
        │  ├─ ■ ['period']  float  held by a mark  1
        │  └─ ● ['scale']   float  differentiated  2
        └─ · ['steps']      int    integer         3
        <BLANKLINE>
        ● differentiated 1   ■ held 1   · no derivative 1
        wrt=None differentiates 1 of 3 leaves, 1 of 3 entries, 4 B
    """
    selection = as_selection(wrt)
    target = Target(tree, selection)
    grower = Grower(target, depth)
    return Picture(
        grower.root,
        Counter(grower.kinds),
        _words(wrt, selection),
        size_of(target.selected),
        size_of(target.leaves),
    )


def _words(wrt: Any, selection: Selection) -> str:
    """What to call a selector."""
    if isinstance(wrt, str) or wrt is selection:
        return printable(repr(wrt))
    # A lambda has no name.
    return printable(getattr(wrt, "__name__", repr(selection)).strip("<>`"))


def _cells(last: tuple[bool, ...], twig: Twig, is_open: bool) -> tuple[str, str, str, str]:
    """A row as text."""
    guides = "".join("   " if flag else "│  " for flag in last[:-1])
    branch = "" if not last else "└─ " if last[-1] else "├─ "
    mark = f"{LOOKS[twig.kind].symbol} " if twig.kind else ""
    counts = "  ".join(f"{LOOKS[kind].symbol} {count}" for kind, count in twig.counted)
    return f"{guides}{branch}{mark}{twig.named(is_open)}", twig.type, twig.status or counts, twig.value


def _item(twig: Twig, opened: set[int]) -> str:
    """A row and its contents, as HTML."""
    text = lambda words: html.escape(printable(words))
    mark = f"{symbol(twig.kind)} " if twig.kind else ""
    more = " &hellip;" if twig.is_left_out else ""
    quiet = " pg-quiet" if twig.kind == "no derivative" else ""
    cells = [
        f'<span class="pg-name" title="{text(twig.path)}">{mark}{text(twig.name)}{more}</span>',
        f'<span class="pg-type">{text(twig.type)}</span>',
    ]
    if twig.kind:
        cells.append(f'<span class="pg-status{quiet}">{text(twig.status)}</span>')
        cells.append(f'<span class="pg-value">{text(twig.value)}</span>')
    else:
        cells.append(f'<span class="pg-counts">{counted(twig.counts)}</span>')
    row = " ".join(cells)
    if not twig.below:
        return f'<li><div class="pg-row">{row}</div></li>'
    inside = "\n".join(_item(below, opened) for below in twig.below)
    is_open = " open" if id(twig) in opened else ""
    return f'<li><details{is_open}><summary class="pg-row">{row}</summary>\n<ul>{inside}</ul></details></li>'
