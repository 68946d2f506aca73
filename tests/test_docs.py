"""Every example in the documentation runs and prints what it says."""

import contextlib
import doctest
import importlib
import io
import pathlib
import pkgutil
import re
import tomllib

import pytest

import partgrad

ROOT = pathlib.Path(__file__).parent.parent
MODULES = ["partgrad", *(module.name for module in pkgutil.walk_packages(partgrad.__path__, "partgrad."))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_every_public_function_has_an_example():
    without = {"errors", "testing", "Selection", "Finding", "GradientReport"}
    public = [getattr(partgrad, name) for name in set(partgrad.__all__) - without]
    public.append(partgrad.testing.assert_gradients)
    for example in (*public, *(getattr(partgrad.safe, name) for name in partgrad.safe.__all__)):
        assert ">>> " in example.__doc__, example


NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d*(?:e[-+]\d+)?")


def assert_printed(printed, expected):
    """Equal but for blanks and the last digits of floats, which differ from processor to processor."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", expected).split()
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (printed, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page):
    """Python blocks of a page run in turn, in one scope; a `text` block right after one is what it prints."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    scope, printed = {"__name__": "page"}, None
    for language, block in blocks:
        if language == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(block, page.name, "exec"), scope)
            printed = output.getvalue()
        elif language == "text" and printed is not None:
            assert_printed(printed, block)
            printed = None
    assert any(language == "python" for language, _ in blocks)


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
