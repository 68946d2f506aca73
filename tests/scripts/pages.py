"""Run the code of a page; or write the Python of every page into a file each, for type checkers.

    python tests/scripts/pages.py FOLDER

The lines of a file are those of its page, so that what a checker says about one is found on the other.
"""

import contextlib
import io
import pathlib
import re
import sys
import types

# The rules that a page cannot keep, since the types of another library do not allow what its users write: compilations are
# counted by a private method of JAX, optax and JAX have no type for trees of any class, axes are where arrays are.
FOREIGN = {
    "docs/compare/paramax.md": "reportAttributeAccessIssue, reportIndexIssue",
    "docs/explain/traced.md": "reportAttributeAccessIssue",
    "docs/guide/marks.md": "reportAttributeAccessIssue",
    "docs/howto/ensembles.md": "reportArgumentType",
    "docs/howto/fit.md": "reportArgumentType",
    "docs/howto/jit.md": "reportAttributeAccessIssue",
    "docs/howto/sample.md": "reportAttributeAccessIssue, reportCallIssue",
    "docs/howto/schedules.md": "reportAttributeAccessIssue",
    "docs/howto/solvers.md": "reportOptionalSubscript",
    "docs/sharp_bits.md": "reportAttributeAccessIssue",
    "docs/start.md": "reportAttributeAccessIssue",
}

ROOT = pathlib.Path(__file__).parents[2]


def python_of(page: str) -> str:
    """The Python blocks of a page, all other lines empty."""
    lines, inside = [], False
    for line in page.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        lines.append(line if inside else "")
    return "\n".join(lines) + "\n"


NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d*(?:e[-+]\d+)?")


def assert_printed(printed: str, expected: str) -> None:
    """Equal but for blanks and the last digits of floats, which differ from processor to processor."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", expected).split()
    for one, other in zip(NUMBER.findall(printed), NUMBER.findall(expected), strict=True):
        assert abs(float(one) - float(other)) <= max(1e-4 * abs(float(other)), 1e-12), (one, other)


def run_page(page: pathlib.Path, languages: list[str]) -> None:
    """Run the blocks of a page that are in these languages, in one scope; a `text` block after one is what it prints."""
    # In a module of its own, as some decorators look theirs up.
    module, printed = types.ModuleType("page"), None
    sys.modules["page"] = module
    try:
        for language, block in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            if language in languages:
                output = io.StringIO()
                with contextlib.redirect_stdout(output):
                    exec(compile(block, page.name, "exec"), vars(module))
                printed = output.getvalue()
            elif language == "text" and printed is not None:
                assert_printed(printed, block)
                printed = None
    finally:
        del sys.modules["page"]


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.py"):
        old.unlink()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        page = path.read_text()
        if "```python" in page:
            name = str(path.relative_to(ROOT))
            off = ", ".join(f"{rule}=false" for rule in FOREIGN[name].split(", ")) if name in FOREIGN else ""
            # A page begins with its title, where there is no Python.
            source = f"# pyright: {off}" * bool(off) + python_of(page)
            (folder / f"{re.sub(r'[^A-Za-z0-9]', '_', name.removesuffix('.md'))}.py").write_text(source)
