"""The house rules that a machine can check: rooms and imports, sizes, names, what may stand where.

A room is a package or a file directly under `src/partgrad`. The rules are explained in CONTRIBUTING.md; cyclomatic
complexity is the linter's.
"""

import ast
import collections
import pathlib
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SOURCE = ROOT / "src" / "partgrad"
FILES = {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
FACE = "__init__"


def assert_none(rule, broken):
    """Nothing breaks a rule; what does is named, with what there is to say of it."""
    assert not broken, f"{rule}:\n" + "\n".join(f"{name} {detail}" for name, detail in sorted(broken.items()))


def room_of(path):
    return path.parts[0].removesuffix(".py")


def type_only(node):
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def runtime_nodes(tree):
    """Every node but those that only a type checker sees."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        if not type_only(node):
            nodes.extend(ast.iter_child_nodes(node))


def is_module(parts):
    place = SOURCE.joinpath(*parts)
    return place.is_dir() or place.with_suffix(".py").is_file()


def imports(path, tree):
    """Of a file, the modules of partgrad that it imports, as tuples of names from the root."""
    package = path.parent.parts
    for node in runtime_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + tuple(
                (node.module or "").split(".") if node.module else ()
            )
            for alias in node.names:
                # Of another room only the door is named, whatever it hands out.
                named = (*base, alias.name)
                yield named if not base or (base[0] == room_of(path) and is_module(named)) else base
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            for name in names:
                if name.split(".")[0] == "partgrad":
                    yield tuple(name.split(".")[1:])


def arrows():
    """Imports from room to room, each once. The public face imports every room and is none."""
    return {
        (room_of(path), target[0])
        for path, tree in FILES.items()
        for target in imports(path, tree)
        if room_of(path) != FACE and target and target[0] != room_of(path)
    }


ROOMS = {room_of(path) for path in FILES} - {FACE}


def test_there_are_few_rooms_and_few_imports_between_them():
    assert len(ROOMS) <= 18, sorted(ROOMS)
    assert len(arrows()) <= 60, sorted(arrows())


def test_imports_go_down():
    """Rooms can be put on floors: no import of a room leads back to it."""
    below = collections.defaultdict(set)
    for room, other in arrows():
        below[room].add(other)
    left = set(ROOMS)
    while ready := {room for room in left if not below[room] & left}:
        left -= ready
    assert not left, "a cycle in " + ", ".join(f"{room} -> {sorted(below[room] & left)}" for room in sorted(left))


def test_rooms_are_entered_by_their_door():
    """Another package is imported from its `__init__`, never from a file inside."""
    assert_none(
        "enter a package by its door",
        {
            f"{path}: {'.'.join(target)}": ""
            for path, tree in FILES.items()
            for target in imports(path, tree)
            if len(target) > 1 and target[0] != room_of(path)
        },
    )


def test_files_inside_a_room_have_no_cycle():
    below = {
        path: {
            other
            for target in imports(path, tree)
            for other in (pathlib.Path(*target).with_suffix(".py"), pathlib.Path(*target, "__init__.py"))
            if other in FILES and other != path and room_of(other) == room_of(path) and other.name != "__init__.py"
        }
        for path, tree in FILES.items()
    }
    left = set(FILES)
    while ready := {path for path in left if not below[path] & left}:
        left -= ready
    assert_none("no cycle inside a room", {str(path): f"-> {sorted(map(str, below[path] & left))}" for path in left})


# --- sizes and names -------------------------------------------------------------------------------------------------


def test_modules_are_short():
    lines = {path: len((SOURCE / path).read_text().splitlines()) for path in FILES}
    assert_none("a module has at most 450 lines", {str(path): count for path, count in lines.items() if count > 450})


def code_lines(path):
    """The numbers of the lines of a file that hold code: neither empty nor a comment alone."""
    idle = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    with (SOURCE / path).open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in idle]
    return {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}


def functions():
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def body_of(node):
    """The statements of a function, without its docstring."""
    return node.body[1:] if ast.get_docstring(node) is not None else node.body


def test_functions_are_short():
    code = {path: code_lines(path) for path in FILES}
    long = {}
    for path, node in functions():
        documented = ast.get_docstring(node) is not None
        docstring = range(node.body[0].lineno, node.body[0].end_lineno + 1) if documented else ()
        lines = code[path] & set(range(node.lineno, node.end_lineno + 1)) - set(docstring)
        if len(lines) > 50:
            long[f"{path}: {node.name}"] = len(lines)
    assert_none("a function has at most 50 lines of code", long)


def test_names_of_classes_are_unique():
    places = collections.defaultdict(set)
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(str(path))
    assert_none(
        "a name is that of one class",
        {name: sorted(paths) for name, paths in places.items() if len(paths) > 1},
    )


def test_nothing_is_written_twice():
    bodies = collections.defaultdict(set)
    for path, node in functions():
        body = "\n".join(map(ast.unparse, body_of(node)))
        if len(body_of(node)) > 1 or len(body) > 60:
            bodies[ast.unparse(node.args), body].add(f"{path}:{node.name}")
    assert_none(
        "no two functions are the same",
        {", ".join(sorted(places)): "" for places in bodies.values() if len(places) > 1},
    )


# --- what depends on JAX's inside ------------------------------------------------------------------------------------


def test_only_compat_knows_the_inside_of_jax():
    named = {
        str(path): node.lineno
        for path, tree in FILES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and "._src" in (node.module or ""))
        or (isinstance(node, ast.Import) and any("._src" in alias.name for alias in node.names))
        or (isinstance(node, ast.Attribute) and node.attr == "_src")
    }
    assert_none("`jax._src` only in _compat.py", {path: line for path, line in named.items() if path != "_compat.py"})


def reads_text_of_an_error(handler):
    """Whether an except clause compares with the text of the error that it caught."""
    if handler.name is None:
        return False
    texts = {f"str({handler.name})", f"{handler.name}.args[0]", f"repr({handler.name})"}
    return any(
        isinstance(node, ast.Compare) and any(text in ast.unparse(node) for text in texts)
        for statement in handler.body
        for node in ast.walk(statement)
    )


def test_only_compat_reads_the_text_of_errors():
    read = {
        str(path): node.lineno
        for path, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and reads_text_of_an_error(node)
    }
    read |= {
        str(path): node.lineno
        for path, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and any(isinstance(op, ast.In) for op in node.ops)
        and any(f"str({name})" in ast.unparse(node) for name in ("error", "exception", "caught"))
    }
    assert_none(
        "the text of JAX's errors is read in _compat.py",
        {path: line for path, line in read.items() if path != "_compat.py"},
    )


# The same in JAX 0.10.2 and 0.12. All others are read in `_programs`, by a function that says what they mean.
SETTLED = {
    *("axes", "axis", "broadcast_dimensions", "dimension", "dimension_numbers", "fft_lengths", "mode", "name"),
    *("num_keys", "permutation", "reverse", "slice_sizes", "unique_indices", "update_jaxpr"),
}


def parameters_read(tree):
    """The names of the parameters of equations that are read in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            owner, key = node.value, node.slice
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("params.get"):
            owner, key = node.func.value, node.args[0]
        else:
            continue
        is_read = ast.unparse(owner) in {"p", "params"} or ast.unparse(owner).endswith("equation.params")
        if is_read and isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def test_parameters_of_equations_that_move_are_read_in_programs():
    read = {
        str(path): sorted(set(parameters_read(tree)) - SETTLED)
        for path, tree in FILES.items()
        if room_of(path) not in ("_programs", "_compat")
    }
    assert_none("read by a function of _programs", {path: names for path, names in read.items() if names})


# --- the tests -------------------------------------------------------------------------------------------------------

TESTS = sorted(pathlib.Path(__file__).parent.rglob("*.py"))


def imports_of_private_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "partgrad":
            parts = (node.module or "").split(".")[1:] + [alias.name for alias in node.names]
            if any(part.startswith("_") and not part.startswith("__") for part in parts):
                yield node
        elif isinstance(node, ast.Import) and any(
            ".".join(a.name.split(".")[:2]).startswith("partgrad._") for a in node.names
        ):
            yield node


def is_internal(node):
    marks = ast.unparse(node.value) if isinstance(node, ast.Assign) else "".join(map(ast.unparse, node.decorator_list))
    return "pytest.mark.internal" in marks


def marked_ranges(tree):
    """The lines that are under `pytest.mark.internal`: the whole file, or functions."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and is_internal(node):
            yield range(0, 10**6)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and is_internal(node):
            yield range(node.lineno, node.end_lineno + 1)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_tests_of_private_modules_are_marked_internal(path):
    tree = ast.parse(path.read_text())
    ranges = list(marked_ranges(tree))
    unmarked = [
        node.lineno for node in imports_of_private_modules(tree) if not any(node.lineno in lines for lines in ranges)
    ]
    assert not unmarked, f"{path.name} imports private modules at lines {unmarked}: mark it `pytest.mark.internal`"
