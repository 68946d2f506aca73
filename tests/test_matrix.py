"""The matrix of features: every triple of them that is possible. The two lanes of CI take half of the rows each."""

import pytest

import matrix

TRIPLES = matrix.covering_array(3)


@pytest.mark.long
@pytest.mark.share(72, parts=2)
@pytest.mark.parametrize("cell", TRIPLES, ids=str)
def test_a_cell_is_right_or_refused_by_jax(cell):
    assert matrix.judge(cell) is None


def test_every_triple_is_in_a_row():
    covered = {triple for cell in TRIPLES for triple in matrix.subsets(cell, 3)}
    assert all(covered.issuperset(matrix.subsets(cell, 3)) for cell in matrix.cells() if not matrix.refused(cell))
