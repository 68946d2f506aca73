"""Run the tests of `tests/interop`, and write the table of what works with which library.

    python tests/scripts/interop_table.py [--check | --dry | --names]

With `--check` it fails where the page says something else, with `--dry` it prints the table and writes nothing, and with
`--names` it prints the packages of the `interop` extra without their versions, for pip to install the newest.
"""

import importlib.metadata
import pathlib
import re
import sys
import tomllib

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "compare" / "tested_with.md"
FOLDER = pathlib.Path(__file__).parents[1] / "interop"
# Names of packages where they are not those of the modules.
PACKAGES = {"orbax": "orbax-checkpoint", "tensorflow_probability": "tfp-nightly"}
# What pip says of the newest JAX. With that of the extra, all of them install.
UNINSTALLABLE = {"gpjax": "JAX 0.11 or newer, as gpjax 1.0.0 asks for `jax<0.11`"}
HEAD = """# Tested with

Each task is a test, written the way a user of that library would write the code, that converges to a known answer. `python
tests/scripts/interop_table.py` runs the tests and writes this page, with the versions of the `interop` extra. CI checks it.

"As written" means that models with marks go in and come out. Elsewhere you add the line shown, which most often passes
[the selected part](../guide/using.md#pass-it-to-other-libraries) instead of the model.

"""


class Collector:
    """A plugin of pytest that keeps how each test went."""

    def __init__(self):
        self.rows: dict[tuple[str, str], set[str]] = {}
        self.lines: dict[tuple[str, str], str | None] = {}

    def pytest_runtest_logreport(self, report):
        properties = dict(report.user_properties)
        if "library" not in properties or (report.when != "call" and report.passed):
            return
        key = properties["library"], properties["what"]
        self.lines[key] = properties["lines"]
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "the test fails"
        outcome = {"passed": "works", "skipped": reason.removeprefix("Skipped: ")}.get(report.outcome, "fails")
        self.rows.setdefault(key, set()).add(getattr(report, "wasxfail", outcome))


def version(library: str) -> str:
    """The installed version of a library."""
    package = PACKAGES.get(library, library.partition(".")[0])
    try:
        found = importlib.metadata.version(package)
        # Which night it was says nothing: the next installation has another.
        return "nightly" if "nightly" in package else found
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def table(collector: Collector) -> str:
    """The page: a row for each library and what has to be added there."""
    as_written: dict[str, int] = {}
    rows: dict[tuple[str, str], list[str]] = {}
    for (library, what), outcomes in sorted(collector.rows.items(), key=lambda row: (row[0][0].lower(), row[0][1])):
        added = collector.lines[library, what]
        works = f"with `{added}`" if added else "as written"
        others = sorted(outcomes - {"works"})
        says = works if not others else f"does not work: {others[0]}"
        if others and "works" in outcomes:
            says = f"{works}, but: {others[0]}"
        if says == "as written":
            as_written[library] = as_written.get(library, 0) + 1
        else:
            rows.setdefault((library, says), []).append(what)
    counts = ", ".join(f"{library} {version(library)} ({count})" for library, count in as_written.items())
    lines = [f"{HEAD}With JAX {version('jax')}. As written, with the number of tasks: {counts}.", ""]
    lines += ["| library | task | works |", "|---|---|---|"]
    lines += [
        f"| {library} {version(library)} | {'; '.join(tasks)} | {says} |" for (library, says), tasks in rows.items()
    ]
    lines += ["", *(f"{library} does not install with {reason}." for library, reason in UNINSTALLABLE.items())]
    return "\n".join(lines) + "\n"


def names() -> list[str]:
    """The packages of the extra."""
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    return [re.split("[=>]", pin)[0] for pin in project["optional-dependencies"]["interop"] if "=" in pin]


def main(option: str = "") -> int:
    """Run, and write or compare; the status is that of the tests, or 1 where the page is another."""
    if option == "--names":
        newest = sys.version_info >= (3, 12)  # for older ones there is no JAX 0.11
        print(*(name for name in names() if not (newest and name in UNINSTALLABLE)))
        return 0
    collector = Collector()
    status = int(pytest.main([str(FOLDER), "-n0", "-q"], plugins=[collector]))
    page = table(collector)
    if option == "--dry":
        print(page.removeprefix(HEAD))
    elif option != "--check":
        PAGE.write_text(page)
    elif page != PAGE.read_text():
        print(f"{PAGE} says something else. Fix: python tests/scripts/interop_table.py")
        return status or 1
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
