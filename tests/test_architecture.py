"""The architecture page holds against the code: its files exist, and imports go down the floors that it lists."""

import ast
import importlib.util
import pathlib
import re
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "partgrad"
PAGE = (ROOT / "docs" / "develop" / "architecture.md").read_text()
PICTURE = re.search(r"```mermaid\n(.*?)```", PAGE, re.DOTALL).group(1)


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
    # The face names for type checkers what it imports when that is first used.
    is_face = file == PACKAGE / "__init__.py"
    left_out = {id(inner) for block in for_types for inner in ast.walk(block) if not is_face}
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
    assert set(re.findall(r"(?:--> |^ {4})(\w+)", PICTURE, re.MULTILINE)) == ROOMS
    assert set(floors()) == ROOMS


def test_the_site_draws_the_picture():
    """The boxes stand on the floors that the page lists, and each arrow is there."""
    spec = importlib.util.spec_from_file_location("packages", ROOT / "docs" / "packages.py")
    packages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packages)
    svg = ElementTree.fromstring(packages.drawn(PICTURE)).find("svg")
    boxes = {box.find("text").text: int(box.find("rect").get("y")) for box in svg.findall("g")}
    heights = sorted(set(boxes.values()))
    assert {name: heights.index(y) for name, y in boxes.items()} == floors()
    assert len(svg.findall("path")) == PICTURE.count("-->")


def floors():
    """For each room its floor, the topmost being 0."""
    lines = re.findall(r"^\d+\. ((?:`\w+`(?:, )?)+)$", PAGE, re.MULTILINE)
    return {name: floor for floor, line in enumerate(lines) for name in re.findall(r"`(\w+)`", line)}


def test_imports_go_down():
    floor, arrows = floors(), {(room_of(file), other) for file in FILES for other in imported(file)}
    assert [(one, other) for one, other in arrows if floor[one] >= floor[other]] == []


def test_the_arrows_of_the_picture_are_imports():
    """All of them but those that a longer way implies."""
    arrows = {(room_of(file), other) for file in FILES for other in imported(file)}

    def reached(room):
        below = {other for one, other in arrows if one == room}
        return below.union(*map(reached, below))

    implied = {(one, other) for one, via in arrows for other in reached(via)}
    drawn = re.findall(r"^ {4}(\w+)(?:\[[^\]]*\])? --> (\w+)", PICTURE, re.MULTILINE)
    assert sorted(drawn) == sorted(arrows - implied)
