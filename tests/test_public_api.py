"""What importing the package gives and costs."""

import inspect
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest

import partgrad as pg

pytestmark = pytest.mark.core


def test_public_names():
    public = set(pg.__all__)
    assert public == {
        *("Diff", "NonDiff", "Static", "unwrap", "dataclass", "field", "register_nondiff"),
        *("Selection", "each", "path", "of_type", "matching", "exclude", "held", "types"),
        *("partition", "combine", "apply_updates", "ravel", "unconstrain", "coordinates"),
        *("items", "label", "select", "replace", "mask", "freeze", "thaw", "is_nondiff", "stop_gradient", "carry_over"),
        *("grad", "value_and_grad", "jacfwd", "jacrev", "jacobian", "hessian", "hvp", "jvp", "vjp", "linearize"),
        *("intermediate", "capture_intermediates", "intervene", "last_nonfinite", "KeepCalls"),
        *("double_where", "consistent_indexing", "surrogate", "draw", "expectation", "safe"),
        *("show", "summary", "errors", "check", "GradientReport", "Finding", "survey", "SurveyReport", "testing"),
    }
    for name in public - {"errors"}:
        assert getattr(pg, name).__doc__
    for module in (pg, pg.coordinates, pg.errors, pg.testing, pg.safe, pg.types):
        assert dir(module) == sorted(module.__all__)
        assert not [name for name in dir(module) if name.startswith("_")]
    with pytest.raises(AttributeError, match="module 'partgrad' has no attribute 'gard'"):
        _ = pg.gard


TRANSFORMS = ("grad", "value_and_grad", "jacfwd", "jacrev", "hessian", "hvp", "jvp", "vjp", "linearize")


@pytest.mark.parametrize("name", TRANSFORMS)
def test_help_on_a_transform_reads_alone(name):
    transform = getattr(pg, name)
    text = inspect.getdoc(transform)
    for parameter in inspect.signature(transform).parameters.values():
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        assert re.search(rf"^    {re.escape(stars)}{parameter.name}: \S", text, re.M), parameter.name
    assert not re.search(r"As (in|for|of) `(?!jax)", text)
    assert "a callable on the argument" in " ".join(text.split())
    headings = ["Args", "Returns", "Raises", "Example", "See [Aa]lso"]
    found = [re.search(rf"^{heading}:$", text, re.M) for heading in headings]
    assert all(found)
    assert [match.start() for match in found] == sorted(match.start() for match in found)
    for error in ("SelectionError", "ArgumentError", "HeldError"):
        assert f"    {error}: " in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_classes_for_annotations_are_those_of_what_functions_return():
    x = {"a": jnp.float32(2.0)}
    square = lambda tree: tree["a"] ** 2
    returned = {
        "Selection": pg.path("a"),
        "Intermediate": pg.intermediate("h"),
        "Constrain": pg.unconstrain(x)[1],
        "Unravel": pg.ravel(x)[1],
        "Summary": pg.summary(x),
        "Row": pg.summary(x).rows[0],
        "Picture": pg.show(x),
        "Pullback": pg.vjp(square, x)[1],
        "LinearMap": pg.linearize(square, x)[1],
        "GradientReport": pg.check(square)(x),
        "SurveyReport": pg.survey(square)({"a": jnp.ones(3)}),
    }
    assert set(pg.types.__all__) == {*returned, "Finding", "Selector"}
    for name, value in returned.items():
        assert type(value) is getattr(pg.types, name) or isinstance(value, pg.types.Selection)


def test_type_checkers_see_the_same_names():
    block = pathlib.Path(pg.__file__).read_text().partition("__version__")[0]
    assert sorted(re.findall(r"(\w+) as \1", block)) == sorted(pg.__all__)


def test_every_error_derives_from_a_builtin_too():
    classes = [c for c in vars(pg.errors).values() if isinstance(c, type) and issubclass(c, pg.errors.PartgradError)]
    assert len(classes) >= 9
    for cls in classes:
        if cls is not pg.errors.PartgradError:
            assert issubclass(cls, ValueError | TypeError | LookupError | AssertionError | ImportError)


def run(code):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.slow
def test_importing_starts_no_backend_and_imports_nothing_heavy():
    """What not every program needs is imported when it is first used."""
    code = """
import sys, jax
before = set(sys.modules)
import partgrad
jax.eval_shape(partgrad.grad(lambda p: p["a"] ** 2, wrt="a"), {"a": 3.0})
heavy = ("_check", "_consistent_indexing", "_display", "_double_where", "_programs", "_random", "safe", "testing", "types")
print([name for name in heavy if f"partgrad.{name}" in sys.modules])
from partgrad import *
print(partgrad.check is check, "check" in vars(partgrad))
print(sorted({"equinox", "flax", "optax", "matplotlib", "scipy", "hypothesis"} & (set(sys.modules) - before)))
jax.config.update("jax_platforms", "nowhere")
try:
    jax.devices()
except RuntimeError:
    print("no backend was started")
"""
    assert run(code) == "[]\nTrue True\n[]\nno backend was started\n"


@pytest.mark.slow
def test_selection_marks_and_transforms_need_no_private_module_of_jax():
    """With `jax._src` out of reach of partgrad, the rest of it included, all of this works."""
    code = """
import builtins, importlib, sys
import jax, jax.numpy as jnp

original = builtins.__import__
def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    asks = (globals or {}).get("__name__") or ""
    if asks.split(".")[0] == "partgrad" and (name.startswith("jax._src") or (name == "jax" and "_src" in (fromlist or ()))):
        raise ImportError(f"{asks} imports {name}")
    return original(name, globals, locals, fromlist, level)
builtins.__import__ = guarded

import partgrad as pg

@pg.dataclass
class Model:
    w: float
    p: float = pg.field(nondiff=True, default=2.0)

model = Model(jnp.float32(3.0))
loss = lambda m: m.w**2 * m.p**3
print(float(pg.grad(loss)(model).w), float(pg.grad(loss, wrt="p")(model)), float(pg.hessian(loss)(model).w.w))
print(pg.freeze(model, "w"), pg.partition(model)[0], pg.combine(*pg.partition(model)), pg.items(model, "p"))
print(str(pg.summary(model)).splitlines()[2].split(), len(str(pg.show(model))) > 0)
for f in (pg.jacfwd(loss), pg.jacrev(loss), lambda m: pg.vjp(loss, m)[1](1.0)[0], pg.grad(loss, unused="error")):
    print(float(f(model).w), end=" ")
print(float(pg.jvp(loss, (model,), (1.0,), wrt="p")[1]), float(pg.hvp(loss, wrt="w")(model, 1.0)))
print(pg.check(loss)(model).ok)
"""
    assert run(code).splitlines() == [
        "48.0 108.0 16.0",
        "Model(w=NonDiff(3.0), p=NonDiff(2.0)) Model(w=3.0, p=NonDiff(None)) Model(w=3.0, p=NonDiff(2.0)) [('p', 2.0)]",
        "['w', 'f32[]', 'differentiated', '3'] True",
        "48.0 48.0 48.0 48.0 108.0 16.0",
        "True",
    ]
