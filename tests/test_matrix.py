"""The matrix of features: rows in which every feature stands, and pairs; every triple of them with `--whole-tables`."""

import random

import pytest

import matrix
from helpers import tables

PAIRS = random.Random(tables.SEED).sample(matrix.covering_array(2), 30)
ROWS = matrix.covering_array(3) if tables.whole else list(dict.fromkeys([*matrix.covering_array(1), *PAIRS]))


@tables.table("cell", ROWS, quick=2, ids=str)
def test_a_cell_is_right_or_refused_by_jax(cell):
    assert matrix.judge(cell) is None


@pytest.mark.slow
def test_every_triple_is_in_a_row():
    covered = {triple for cell in matrix.covering_array(3) for triple in matrix.subsets(cell, 3)}
    assert all(covered.issuperset(matrix.subsets(cell, 3)) for cell in matrix.cells() if not matrix.refused(cell))
