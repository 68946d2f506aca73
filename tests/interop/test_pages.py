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
    # A page begins as its reader does, and may switch on 64 bits.
    jax.config.update("jax_enable_x64", False)
    try:
        run_page(PAGES / f"{library}.md", ["py", "python"])
    finally:
        jax.config.update("jax_enable_x64", True)
