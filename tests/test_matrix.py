"""The matrix of features: a sample of the rows in which every possible triple of them stands."""

import pytest

import matrix
from helpers.tables import table

TRIPLES = matrix.covering_array(3)


@table("cell", TRIPLES, quick=4, most=200, ids=str)
def test_a_cell_is_right_or_refused_by_jax(cell):
    assert matrix.judge(cell) is None


@pytest.mark.slow
def test_every_triple_is_in_a_row():
    covered = {triple for cell in TRIPLES for triple in matrix.subsets(cell, 3)}
    assert all(covered.issuperset(matrix.subsets(cell, 3)) for cell in matrix.cells() if not matrix.refused(cell))
