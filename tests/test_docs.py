"""Every example in the documentation runs and prints what it says."""

import doctest
import importlib
import pathlib
import pkgutil
import re
import tomllib

import jax
import pytest

import partgrad
from pages import run_page

ROOT = pathlib.Path(__file__).parent.parent
MODULES = ["partgrad", *(module.name for module in pkgutil.walk_packages(partgrad.__path__, "partgrad."))]
EVERY_PAGE = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The pages whose examples run with the quick tests: those that a newcomer reads first. Names stand for any folder.
FIRST = {"README", "marks", "selectors", "using"}
# Most of what these take goes into compiling.
COMPILING = (
    "partgrad.safe",
    "partgrad._survey",
    "partgrad._transforms.jacobians",
    "partgrad.testing",
    "partgrad._random",
    "partgrad._audit",
    "partgrad._check",
)
PAGES = [
    pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.slow] * (page.stem not in FIRST))
    for page in EVERY_PAGE
    if "```python" in page.read_text()
]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * n.startswith(COMPILING)) for n in MODULES])
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_every_public_function_has_an_example():
    without = {"errors", "testing", "Selection", "Finding", "GradientReport", "SurveyReport"}
    public = [getattr(partgrad, name) for name in set(partgrad.__all__) - without]
    public += [getattr(partgrad.testing, name) for name in partgrad.testing.__all__]
    for example in (*public, *(getattr(partgrad.safe, name) for name in partgrad.safe.__all__)):
        assert ">>> " in example.__doc__, example


@pytest.mark.parametrize("page", PAGES)
def test_pages(page, tmp_path, monkeypatch):
    """They run in an empty folder, and may switch on 64 bits as a user's script does."""
    monkeypatch.chdir(tmp_path)
    try:
        run_page(page, ["python"])
    finally:
        jax.config.update("jax_enable_x64", False)


def test_the_reference_has_every_public_name():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    named = set(re.findall(r"^\.\. auto\w+:: (partgrad[\w.]*)$", pages, re.MULTILINE))
    documented = {"coordinates", "errors", "safe", "testing"}  # modules, with a page each
    public = {f"partgrad.{name}" for name in set(partgrad.__all__) - documented}
    public |= {f"partgrad.coordinates.{name}" for name in partgrad.coordinates.__all__}
    public |= {f"partgrad.safe.{name}" for name in partgrad.safe.__all__}
    # Classes that functions return are with these, if not all of them are.
    public |= named & {f"partgrad.types.{name}" for name in partgrad.types.__all__}
    public |= {f"partgrad.testing.{name}" for name in partgrad.testing.__all__}
    public |= {f"partgrad.errors.{name}" for name, found in vars(partgrad.errors).items() if isinstance(found, type)}
    assert named - {"partgrad.errors", "partgrad.safe", "partgrad.testing"} == public


def test_the_two_commands_of_the_readme():
    """They run in the project's own checks; here, what they name must be there."""
    first, second = re.findall(r"^(?:python|pip|make|uv|nox).*", (ROOT / "README.md").read_text(), re.MULTILINE)[:2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for command, extra, then in (
        (first, "examples", "python examples/mauna_loa.py"),
        (second, "tests", "python -m pytest"),
    ):
        assert command == f'python -m pip install -e ".[{extra}]" && {then}'
        assert extra in project["optional-dependencies"]
    assert (ROOT / "examples" / "mauna_loa.py").exists()
