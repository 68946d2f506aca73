"""A table of a tree: what each leaf is, what is differentiated, and the memory of a gradient."""

import html
import itertools
from typing import Any, NamedTuple

from jax.tree_util import SequenceKey

from .._selection import Target, as_selection
from .._trees import describe, paths
from .markup import cells, styled, symbol
from .status import statuses, tie_in_words, tied_paths
from .table import COLUMNS, GAP, ROOT, shortened, table
from .values import Size, in_bytes, size_of, value_of

# The widest that a type and a status may be; the path gets the rest of the line.
_WIDEST = 24


class Row(NamedTuple):
    """One leaf.

    Attributes:
        path: Its path; empty where the tree is one leaf.
        type: Its shape and dtype, as `f32[3,4]`, or the name of its type.
        status: What it is: `differentiated`, `open`, `held by a mark`, `not selected`,
            `integer`, `bool`, `key`, `string`, `function`, or the name of its type.
        value: Of a number its value, of a floating array its mean and its spread (the standard deviation), as text;
            empty for other leaves, and where the values are not known.
    """

    path: str
    type: str
    status: str
    value: str = ""


class _Indices(NamedTuple):
    """A step in a list or a tuple: one index, or a range of them."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"[{self.first}]" if self.first == self.last else f"[{self.first}..{self.last}]"


class _Folded(NamedTuple):
    """A row of the printed table, which may stand for several leaves."""

    steps: tuple[str | _Indices, ...]
    type: str
    status: str
    value: str = ""

    def cells(self) -> tuple[str, str, str, str]:
        path = "".join(map(str, self.steps)).removeprefix(".")
        return path or ROOT, self.type, self.status, self.value


class Summary:
    """What each leaf of a tree is, as `partgrad.summary` returns it; it prints as a table.

    Repeated layers are folded where it is shown: `layers[0..7].weight` stands for eight leaves that are alike.

    Attributes:
        rows: One row a leaf, in the order of `jax.tree.leaves`; nothing is folded in it.
        tied: The paths of differentiated leaves that are one array, for each such array.
    """

    def __init__(
        self,
        rows: tuple[Row, ...],
        steps: list[list[Any]],
        selected: Size,
        everything: Size,
        tied: tuple[tuple[str, ...], ...] = (),
    ):
        self.rows = rows
        self.tied = tied
        self._steps = steps
        self._selected = selected
        self._everything = everything

    def to_dict(self) -> dict[str, Any]:
        """The rows and the totals in plain Python data; sizes are in bytes.

        Returns:
            Under `rows` a dict for each leaf; under `tied` the paths of leaves that are one array; under `leaves` and
            `entries` how many are `differentiated` and how many there are, `all`; under `gradient_bytes` and
            `adam_bytes` the size for what is `differentiated`, and for `all` floating and complex leaves.
        """
        here, everything = self._selected, self._everything
        return {
            "rows": [row._asdict() for row in self.rows],
            "tied": [list(paths) for paths in self.tied],
            "leaves": {"differentiated": here.leaves, "all": everything.leaves},
            "entries": {"differentiated": here.entries, "all": everything.entries},
            "gradient_bytes": {"differentiated": here.gradient, "all": everything.gradient},
            "adam_bytes": {"differentiated": here.adam, "all": everything.adam},
        }

    def __str__(self) -> str:
        lines = table(Row._fields, self._cells(), (_WIDEST,) * 3)
        label = max(len(name) for name, _ in self._totals())
        lines += ["", *(shortened(f"{name:{label}}{GAP}{total}", COLUMNS) for name, total in self._totals())]
        lines += map(tie_in_words, self.tied)
        return "\n".join(line.rstrip() for line in lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = [
            [html.escape(path), html.escape(type), f"{symbol(status)} {html.escape(status)}", html.escape(value)]
            for path, type, status, value in self._cells()
        ]
        foot = "\n".join(
            f"<tr><th>{html.escape(name)}</th><td colspan='3'>{html.escape(total)}</td></tr>"
            for name, total in [*self._totals(), *(("tied", tie_in_words(paths)) for paths in self.tied)]
        )
        return styled(cells(Row._fields, rows, foot))

    def _cells(self) -> list[tuple[str, str, str, str]]:
        lines = [
            _Folded(tuple(map(_line_step, steps)), *cells)
            for steps, (_, *cells) in zip(self._steps, self.rows, strict=True)
        ]
        return [line.cells() for line in _folded(lines)]

    def _totals(self) -> list[tuple[str, str]]:
        here, everything = self._selected, self._everything
        without = "without marks and selection"
        return [
            (
                "differentiated",
                f"{here.leaves:,} of {everything.leaves:,} leaves, {here.entries:,} of {everything.entries:,} entries",
            ),
            ("gradient", f"{in_bytes(here.gradient)} ({in_bytes(everything.gradient)} {without})"),
            ("Adam state", f"{in_bytes(here.adam)} ({in_bytes(everything.adam)} {without})"),
        ]


def summary(tree: Any, wrt: Any = None) -> Summary:
    """Summarise a tree: what each leaf is, which leaves are differentiated, and how much memory that takes.

    The table has one row per leaf, with the value of a number, or the mean and spread of a floating array. Repeated
    layers are folded into one row, which shows a value if they share it. The totals count the differentiated leaves and
    their entries, and the bytes of a gradient and of Adam's two moments: for what is differentiated, and for every
    floating or complex leaf.

    Args:
        tree: Any pytree; its leaves may be tracers or `jax.ShapeDtypeStruct`.
        wrt: A selector. None selects every floating or complex leaf that no mark holds.

    Returns:
        The summary, which prints as a table, shows as one in a notebook, and has `rows` and `to_dict()`.

    Raises:
        SelectionError: If the selector does not fit the tree.

    Example:
        >>> import jax.numpy as jnp, partgrad as pg
        >>> print(pg.summary({"layers": [{"w": jnp.ones((3, 3))}] * 2, "scale": pg.NonDiff(2.0), "step": 0}))
        path                   type      status          value
        ---------------------  --------  --------------  -----
        ['layers'][0..1]['w']  f32[3,3]  differentiated  1 ± 0
        ['scale']              float     held by a mark  2
        ['step']               int       integer         0
        <BLANKLINE>
        differentiated  2 of 4 leaves, 18 of 20 entries
        gradient        72 B (76 B without marks and selection)
        Adam state      144 B (152 B without marks and selection)
        one array at ['layers'][0]['w'] and ['layers'][1]['w']: updates make it several (partgrad.ravel: tie=True)
    """
    target = Target(tree, as_selection(wrt), purpose="show")
    layout = target.skeleton.layout
    rows = tuple(
        Row(place.path, describe(leaf), status, value_of(leaf))
        for place, leaf, status in zip(
            layout.leaves, target.leaves, statuses(layout, target.leaves, target.plan), strict=True
        )
    )
    ties = tuple(tied_paths(target))
    steps = [place.steps for place in layout.leaves]
    return Summary(rows, steps, size_of(target.selected), size_of(target.leaves), ties)


def _line_step(step: Any) -> str | _Indices:
    return _Indices(step.idx, step.idx) if isinstance(step, SequenceKey) else paths.write_step(step)


def _folded(lines: list[_Folded]) -> list[_Folded]:
    """Show neighbours in a list or tuple once if all their lines are alike, innermost first."""
    depths = {depth for line in lines for depth, step in enumerate(line.steps) if isinstance(step, _Indices)}
    for depth in sorted(depths, reverse=True):
        lines = _folded_at(lines, depth)
    return lines


def _folded_at(lines: list[_Folded], depth: int) -> list[_Folded]:
    folded: list[_Folded] = []
    # The previous block: the steps above it, its index, and its lines.
    above: Any = None
    index, below = _Indices(0, 0), None
    for prefix, block in itertools.groupby(lines, lambda line: line.steps[: depth + 1]):
        own = list(block)
        if len(prefix) <= depth or not isinstance(prefix[depth], _Indices):
            folded, above = folded + own, None
            continue
        step, inner = prefix[depth], [line._replace(steps=line.steps[depth + 1 :]) for line in own]
        kinds = [line._replace(value="") for line in inner]
        if prefix[:depth] == above and step.first == index.last + 1 and kinds == below:
            index = _Indices(index.first, step.last)
            # The value is shown only if it is the same in all folded rows.
            values = [line.value for line in folded[-len(own) :]]
            inner = [
                line if line.value == value else line._replace(value="")
                for line, value in zip(inner, values, strict=True)
            ]
            del folded[-len(own) :]
        else:
            above, index, below = prefix[:depth], step, kinds
        folded += [line._replace(steps=(*above, index, *line.steps)) for line in inner]
    return folded
