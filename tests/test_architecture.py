"""Imports go down the floors of the architecture page, files of a package form no circle, and one file knows JAX inside."""

import ast
import collections
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "partgrad"
PAGE = (ROOT / "docs" / "develop" / "architecture.md").read_text()
FACE = "partgrad"


def module_of(file):
    """The dotted name of a file, without `partgrad`: () for the public face."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


FILES = {module_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def tree_of(module):
    return ast.parse(FILES[module].read_text())


def room_of(module):
    """The package or file directly below `partgrad`."""
    return module[0] if module else FACE


def imported_by(module):
    """The modules of partgrad that a module imports, at any place in it, and for type checkers too."""
    package = module if FILES[module].name == "__init__.py" else module[:-1]
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + tuple((node.module or "").split(".") * bool(node.module))
            for name in (alias.name for alias in node.names):
                # Of another package only what its `__init__` hands out counts, which may be a module.
                is_own = not base or room_of(base) == room_of(module)
                yield (*base, name) if is_own and (*base, name) in FILES else base


@functools.cache
def imports():
    """By module, those that it imports."""
    return {module: set(imported_by(module)) - {module} for module in FILES}


def floors():
    """The floor of each package, as the page lists them, the topmost being 0."""
    lines = re.findall(r"^\d+\. ((?:`\w+`(?:, )?)+)$", PAGE, re.MULTILINE)
    return {name: floor for floor, line in enumerate(lines) for name in re.findall(r"`(\w+)`", line)}


def circles(below):
    """What is left of a graph when everything that imports nothing that is left has been taken out."""
    left = set(below)
    while ready := {one for one in left if not below[one] & left}:
        left -= ready
    return {one: sorted(below[one] & left) for one in left}


def test_every_file_that_the_page_names_exists():
    named = re.findall(r"`([\w/]+\.py)`", PAGE)
    assert named
    assert [name for name in named if not any((at / name).is_file() for at in (PACKAGE, ROOT))] == []


def test_imports_go_down():
    floor = floors()
    assert set(floor) == {room_of(module) for module in FILES}
    arrows = {(room_of(one), room_of(other)) for one, others in imports().items() for other in others}
    assert {(one, other) for one, other in arrows if one != other and floor[one] >= floor[other]} == set()


def test_packages_are_entered_by_their_init():
    entered = {
        (".".join(one), ".".join(other))
        for one, others in imports().items()
        for other in others
        if room_of(one) != room_of(other) and len(other) > 1
    }
    assert entered == set()


def test_files_of_a_package_form_no_circle():
    inside = collections.defaultdict(set)
    for one, others in imports().items():
        inside[one] = {other for other in others if room_of(other) == room_of(one) and len(other) > 1}
    assert circles(inside) == {}


def test_one_file_knows_jax_inside():
    named = {
        ".".join(module)
        for module, tree in ((module, tree_of(module)) for module in FILES)
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and "._src" in (node.module or ""))
        or (isinstance(node, ast.Import) and any("._src" in alias.name for alias in node.names))
        or (isinstance(node, ast.Attribute) and node.attr == "_src")
    }
    assert named == {"_compat"}


def test_commands_for_contributors_name_what_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text() + (ROOT / ".ci" / "quick").read_text()
    paths = set(re.findall(r"(?<![\w/.-])(?:tests|benchmarks|examples|docs|src|\.ci)/[\w./]*\w", text))
    generated = {"docs/_build", "docs/_build/index.html"}
    assert paths - generated
    assert [path for path in paths - generated if not (ROOT / path).exists()] == []
    # What `.ci/quick` runs is not empty.
    assert [path for path in (ROOT / "tests").glob("test_*.py") if "pytest.mark.core" in path.read_text()]
