"""Pictures of trees: as text, as SVG, and in notebooks."""

import pathlib
from collections import Counter
from typing import Any

import jax

from .._selection import Selection, Target, as_selection
from .._trees import written
from ..errors import ArgumentError
from . import notebook
from .drawing import drawn
from .look import LOOKS
from .status import tie_in_words, tied_paths
from .table import COLUMNS, printable, shortened, table
from .twigs import Grower, Twig
from .values import Size, in_bytes, size_of

# The widest that type, status and value may be in a line of text.
_WIDEST = (24, 36, 24)
# How many rows the text and the SVG have at most.
_LINES = 100


class Picture:
    """A drawing of a tree, as `partgrad.show` returns it: text, SVG, and in a notebook what treescope makes of it."""

    def __init__(
        self, tree: Any, root: Twig, kinds: list[str], wrt: str, selected: Size, everything: Size, ties: list[str]
    ):
        # A tracer must not be kept.
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
        self._tree = None if is_traced else tree
        self._kinds_by_path = {} if is_traced else notebook.kinds_by_path(tree, kinds)
        self._root = root
        self._counts = Counter(kinds)
        self._wrt = wrt
        self._selected = selected
        self._everything = everything
        self._ties = ties

    def __str__(self) -> str:
        rows = [_cells(*line) for line in self._root.lines(_LINES)]
        head = ("tree", "type", "status", "value")
        legend = [self._legend()] if self._counts else []
        return "\n".join([*table(head, rows, _WIDEST), "", *legend, shortened(self._title(), COLUMNS), *self._ties])

    def __repr__(self) -> str:
        return str(self)

    def svg(self) -> str:
        """The picture as SVG: what fits on a page, unfolded; light or dark as the reader's system is.

        Returns:
            A document, which may also stand in HTML.
        """
        legend = [(kind, f"{kind} {self._counts[kind]:,}") for kind in self._kinds()]
        return drawn(list(self._root.lines(_LINES)), legend, "; ".join([self._title(), *self._ties]))

    def save(self, path: "str | pathlib.Path") -> None:
        """Write the picture to a file.

        Args:
            path: Where to; it ends in `.svg` or `.txt`.

        Raises:
            ArgumentError: If it ends in something else.
        """
        path = pathlib.Path(path)
        writers = {".svg": self.svg, ".txt": lambda: f"{self}\n"}
        if path.suffix not in writers:
            raise ArgumentError(
                f"A picture cannot be saved as `{printable(str(path))}`.",
                "Expected a name that ends in .svg or .txt.",
                fix="write another name; for a PNG, open the SVG in a browser or in Inkscape.",
            )
        path.write_text(writers[path.suffix](), encoding="utf-8")

    # A notebook prefers HTML, and shows the SVG if there is none.
    def _repr_html_(self) -> str | None:
        if not self._kinds_by_path or not notebook.is_available():
            return None
        return notebook.rendered(
            self._tree, self._kinds_by_path, "\n".join([self._legend(), self._title(), *self._ties])
        )

    def _repr_svg_(self) -> str:
        return self.svg()

    def _legend(self) -> str:
        return "   ".join(f"{LOOKS[kind].symbol} {kind} {self._counts[kind]:,}" for kind in self._kinds())

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
        depth: The maximum number of levels drawn below the root; None draws all that there is room for.

    Returns:
        The picture: text in a terminal; in a notebook an SVG or, if treescope is installed, treescope's view with
        these symbols and colours. `picture.save("model.svg")` writes it to a file.

    Raises:
        SelectionError: If the selector does not fit the tree.
        ArgumentError: If `depth` is not a number of levels.

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
    if depth is not None and (type(depth) is not int or depth < 0):
        raise ArgumentError(
            f"`depth` of `partgrad.show` is {type(depth).__name__} {written(depth):.60}.",
            "Expected the number of levels below the root, an int of at least 0, or None.",
            fix="write depth=2, or omit it.",
        )
    selection = as_selection(wrt)
    target = Target(tree, selection, purpose="show")
    grower = Grower(target, depth)
    sizes, ties = (size_of(target.selected), size_of(target.leaves)), list(map(tie_in_words, tied_paths(target)))
    return Picture(tree, grower.root, grower.kinds, _words(wrt, selection), *sizes, ties)


def _words(wrt: Any, selection: Selection) -> str:
    """What to call a selector."""
    if isinstance(wrt, str) or wrt is selection:
        return printable(selection.words)
    # A lambda has no name.
    return printable(getattr(wrt, "__name__", selection.words).strip("<>`"))


def _cells(last: tuple[bool, ...], twig: Twig, is_open: bool) -> tuple[str, str, str, str]:
    """A row as text."""
    guides = "".join("   " if flag else "│  " for flag in last[:-1])
    branch = "" if not last else "└─ " if last[-1] else "├─ "
    mark = f"{LOOKS[twig.kind].symbol} " if twig.kind else ""
    counts = "  ".join(f"{LOOKS[kind].symbol} {count}" for kind, count in twig.counted)
    return f"{guides}{branch}{mark}{twig.named(is_open)}", twig.type, twig.status or counts, twig.value
