"""Keys and field names of any kind: their paths are selectors, or a clear error."""

import collections
import enum
import functools
import typing

import jax
import pytest

import partgrad as pg
from helpers.models import RBF
from partgrad import errors


@functools.total_ordering
class Key:
    def __init__(self, number, text="weird[key].*"):
        self.number, self.text = number, text

    def __eq__(self, other):
        if not isinstance(other, Key):
            raise TypeError("hostile")
        return self.number == other.number

    def __lt__(self, other):
        return self.number < other.number

    def __hash__(self):
        return hash(self.number)

    def __repr__(self):
        if self.text is None:
            raise RuntimeError("hostile")
        return self.text


class Text(str):
    """A string of another class."""


STRINGS = ["", " ", "é", "e\u0301", "a\nb", "'", '"', "\\", "*", "**", "a.b", "[0]", "]", "\ud800", "\u202e", "None"]


STRINGS += ["self", "__class__", "lambda", "value", "class"]


class Kind(enum.Enum):
    ONE = 1


KEYS = {
    "strings": STRINGS,
    "tuples": [(1, 2), (1, 3)],
    "floats": [0.5, 1.5, float("inf")],
    "ints": [-1, 0, 7],
    "bools": [False, True],
    "bytes": [b"a", b"b"],
    "other strings": [Text("w"), Text("x")],
    "enums": [Kind.ONE],
    "None": [None],
    "NaN": [float("nan")],
    "objects": [Key(1, "Key(1)"), Key(2, "Key(2)")],
    "reprs that raise": [Key(1, None), Key(2, None)],
    "reprs that are patterns": [Key(1), Key(2)],
}


@pytest.mark.parametrize("kind", KEYS)
def test_keys_of_dicts(kind):
    tree = collections.OrderedDict((key, float(number)) for number, key in enumerate(KEYS[kind], 1))
    squares = lambda t: sum(x**2 for x in jax.tree.leaves(t))
    assert list(pg.grad(squares)(tree).values()) == [2.0 * x for x in tree.values()]
    for key in tree:
        assert pg.grad(squares, wrt=lambda t, key=key: t[key])(tree) == 2.0 * tree[key]
    if "repr" not in kind:
        for path, value in pg.items(tree):
            assert pg.select(tree, path) == value, path
    assert str(pg.summary(tree))
    assert repr(RBF(dict(tree), 1.0))
    with pytest.raises(errors.NoMatchError):
        pg.select(tree, "nowhere")


def test_fields_of_unusual_names():
    names = [
        "value",
        "é",
        "ñandú",
        "self",
        "_x",
        "__dunder__",
        "marks",
        "tree",
        "leaves",
        "cls",
        "object",
        "hold",
    ]
    cls = pg.dataclass(type("Names", (), {"__annotations__": dict.fromkeys(names, typing.Any)}))
    model = cls(*map(float, range(1, len(names) + 1)))
    assert [path for path, _ in pg.items(model)] == names
    for name in names:
        assert pg.grad(lambda m: sum(x**2 for x in jax.tree.leaves(m)), wrt=name)(model) == 2 * getattr(model, name)
        assert pg.thaw(pg.freeze(model, name), name) == model


@pytest.mark.parametrize("name", ["class", "a b", "__dict__", "__class__"])
def test_names_that_no_field_can_have(name):
    cls = type("Reserved", (), {"__annotations__": {name: typing.Any}})
    with pytest.raises(errors.DataclassError, match="cannot be a partgrad dataclass|is a field"):
        pg.dataclass(cls)
