"""The matrix of features: every pair of them, and some of the triples; `ALL_CASES=1` runs the array of all triples."""

import os

import pytest

import matrix

TRIPLES = matrix.covering_array(3)
ROWS = TRIPLES if os.environ.get("ALL_CASES") else list(dict.fromkeys([*matrix.covering_array(2), *TRIPLES[::12]]))


@pytest.mark.share
@pytest.mark.parametrize("cell", ROWS, ids=str)
def test_a_cell_is_right_or_refused_by_jax(cell):
    assert matrix.judge(cell) is None


def test_every_triple_is_in_a_row():
    covered = {triple for cell in TRIPLES for triple in matrix.subsets(cell, 3)}
    assert all(covered.issuperset(matrix.subsets(cell, 3)) for cell in matrix.cells() if not matrix.refused(cell))
