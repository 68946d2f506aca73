"""The architecture page holds against the code: its files exist, and imports go down the floors that it lists."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "partgrad"
PAGE = (ROOT / "docs" / "develop" / "architecture.md").read_text()


def room_of(file):
    first = file.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py").replace("__init__", "partgrad")


FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = set(map(room_of, FILES))


def imported(file):
    """The rooms that a file imports, types apart."""
    depth = len(file.relative_to(PACKAGE).parts)
    tree = ast.parse(file.read_text())
    for_types = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    left_out = {id(inner) for block in for_types for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == depth and id(node) not in left_out:
            yield from [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]


def test_every_file_that_the_page_names_exists():
    named = re.findall(r"`([\w/]+\.py)`", PAGE)
    assert named
    assert [name for name in named if not any((at / name).is_file() for at in (PACKAGE, ROOT))] == []
    for page in re.findall(r"\]\(([\w./]+\.md)\)", PAGE):
        assert (ROOT / "docs" / "develop" / page).is_file()


def test_every_room_is_in_the_picture_and_on_a_floor():
    picture = re.search(r"```mermaid\n(.*?)```", PAGE, re.DOTALL).group(1)
    assert set(re.findall(r"(?:--> |^ {4})(\w+)", picture, re.MULTILINE)) == ROOMS
    assert set(floors()) == ROOMS


def floors():
    """For each room its floor, the topmost being 0."""
    lines = re.findall(r"^\d+\. ((?:`\w+`(?:, )?)+)$", PAGE, re.MULTILINE)
    return {name: floor for floor, line in enumerate(lines) for name in re.findall(r"`(\w+)`", line)}


def test_imports_go_down():
    floor, arrows = floors(), {(room_of(file), other) for file in FILES for other in imported(file)}
    assert [(one, other) for one, other in arrows if floor[one] >= floor[other]] == []


def test_the_arrows_of_the_picture_are_imports():
    arrows = {(room_of(file), other) for file in FILES for other in imported(file)}
    drawn = re.findall(r"^ {4}(\w+)(?:\[[^\]]*\])? --> (\w+)", PAGE, re.MULTILINE)
    assert drawn
    assert [arrow for arrow in drawn if arrow not in arrows] == []
