"""Write the Python of every page into a file each, for type checkers: `python tests/pages.py FOLDER`.

The lines of a file are those of its page, so that what a checker says about one is found on the other.
"""

import pathlib
import re
import sys

# The rules that a page cannot keep, since the types of another library do not allow what its users write: compilations are
# counted by a private method of JAX, optax and JAX have no type for trees of any class, axes are where arrays are.
FOREIGN = {
    "docs/compare/paramax.md": "reportAttributeAccessIssue, reportIndexIssue",
    "docs/compare/sepes.md": "reportAttributeAccessIssue",
    "docs/explain/scaling.md": "reportOptionalSubscript",
    "docs/explain/traced.md": "reportAttributeAccessIssue",
    "docs/guide/marks.md": "reportAttributeAccessIssue",
    "docs/howto/ensembles.md": "reportArgumentType",
    "docs/howto/fit.md": "reportArgumentType",
    "docs/howto/jit.md": "reportAttributeAccessIssue",
    "docs/howto/sample.md": "reportAttributeAccessIssue, reportCallIssue",
    "docs/howto/schedules.md": "reportAttributeAccessIssue",
    "docs/howto/solvers.md": "reportOptionalSubscript",
}

ROOT = pathlib.Path(__file__).parent.parent


def python_of(page: str) -> str:
    """The Python blocks of a page, all other lines empty."""
    lines, inside = [], False
    for line in page.splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            line = ""
        lines.append(line if inside else "")
    return "\n".join(lines) + "\n"


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
