"""The pages that compare partgrad with a library which is installed only here: their blocks of `py` run too."""

import pathlib

import jax
import pytest

from pages import run_page

PAGES = pathlib.Path(__file__).parent.parent.parent / "docs" / "compare"


@pytest.mark.parametrize(
    "library",
    [pytest.param(name, marks=pytest.mark.library(name)) for name in ("gpjax", "sepes", "zodiax")],
)
def test_the_code_of_its_page(library):
    """the code of its page in this comparison"""
    pytest.importorskip(library)
    # A page prints what its reader sees.
    with jax.enable_x64(False):
        run_page(PAGES / f"{library}.md", ["py", "python"])
