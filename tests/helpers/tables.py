"""Tables of cases: which rows run quickly, and which run at all.

A table that is too large is sampled, the same way on every run and on every version. Every kind of row is kept, and
of a table of columns every value of each. The header of a run shows the seed; `--whole-tables` runs every row.
"""

import itertools
import random

import pytest
from hypothesis import settings

SEED = 20261122
# Set by `--whole-tables`, before any test is imported.
whole = False


def table(names, *columns, quick=1, most=None, kind=None, ids=None):
    """Parametrise a test by the rows of a table, of which most are slow.

    Args:
        names: The parameters, as `pytest.mark.parametrize` takes them: "a" or "a, b".
        columns: One column of rows; or a column for each parameter, and every combination is a row.
        quick: How many rows of each kind run in a quick run. The others are slow.
        most: How many rows of each kind run at most, beside those that have the only occurrence of a value of a column;
            None for all.
        kind: From the parameters of a row to its kind. Without it, all rows are of one kind.
        ids: As `pytest.mark.parametrize` takes it.
    """
    is_single = "," not in names
    # By number, since not every value has a hash.
    cells = list(itertools.product(*map(range, map(len, columns)))) if len(columns) > 1 else []
    rows = itertools.product(*columns) if len(columns) > 1 else columns[0]
    rows = [row if not is_single or _is_param(row) else (row,) for row in rows]
    kinds = {}
    for number, row in enumerate(rows):
        kinds.setdefault(kind(*_values(row)) if kind else None, []).append(number)
    runs, is_quick = set(), set()
    for numbers in kinds.values():
        # The first row of a kind is its plainest.
        order = numbers[:1] + random.Random(SEED).sample(numbers[1:], len(numbers) - 1)
        runs.update(order if whole else order[:most])
        is_quick.update(order[:quick])
    runs |= _others(cells, runs)
    # Thousands of rows of which a few run: a parameter is made of those only.
    params = {n: row if _is_param(row) else _param(row) for n, row in enumerate(rows) if n in runs}
    chosen = [row if n in is_quick else _slow(row) for n, row in params.items()]
    return pytest.mark.parametrize(names, chosen, ids=ids)


def in_turn(names, *columns):
    """Each name in one row, with the values of each column in turn; with `--whole-tables`, every combination."""
    if whole:
        return list(itertools.product(names, *columns))
    rows = []
    for number, name in enumerate(names):
        row = [name]
        for column in columns:
            number, value = divmod(number, len(column))
            row.append(column[value])
        rows.append(tuple(row))
    return rows


def _others(cells, runs):
    """Rows beside those that run, by which every value of each column runs."""
    ran = {(column, value) for n in runs for column, value in enumerate(cells[n])} if cells else set()
    others = set()
    for n in random.Random(SEED).sample(range(len(cells)), len(cells)):
        if not ran.issuperset(enumerate(cells[n])):
            others.add(n)
            ran.update(enumerate(cells[n]))
    return others


def examples(number):
    """How many examples a law draws whose examples take long, of a hundred; a profile asks for more or less."""
    return max(1, number * settings.default.max_examples // 100)


def _is_param(row):
    return hasattr(row, "marks") and hasattr(row, "id")


def _values(row):
    return row.values if _is_param(row) else [cell.values[0] if _is_param(cell) else cell for cell in row]


def _param(row):
    """A row, some of whose cells may have an id or marks of their own."""
    cells = [cell if _is_param(cell) else pytest.param(cell) for cell in row]
    marks = [mark for cell in cells for mark in cell.marks]
    ids = [cell.id for cell in cells]
    return pytest.param(*(cell.values[0] for cell in cells), marks=marks, id="-".join(ids) if all(ids) else None)


def _slow(row):
    return pytest.param(*row.values, id=row.id, marks=[*row.marks, pytest.mark.slow])
