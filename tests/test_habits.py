"""What people type who know other libraries: it selects what they mean, or the remedy of its error, pasted, does."""

import re
from typing import Any, NamedTuple

import equinox as eqx
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

import partgrad as pg
from partgrad import errors


class Net(eqx.Module):
    layers: list[eqx.nn.Linear]
    temperature: Any

    def __init__(self):
        self.layers = [eqx.nn.Linear(2, 2, key=jax.random.key(i)) for i in range(3)]
        self.temperature = jnp.ones(())

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x / self.temperature


class Head(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.body = nnx.Linear(2, 2, rngs=rngs)
        self.bn = nnx.BatchNorm(2, rngs=rngs)
        self.head = nnx.Linear(2, 1, rngs=rngs)


@pg.dataclass
class Kernel:
    variance: Any
    scale: Any


net = Net()
module = Head()
linen = {
    "params": {f"Dense_{i}": {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)} for i in range(2)},
    "batch_stats": {"bn": {"mean": jnp.zeros(2)}},
}
haiku = {f"mlp/~/linear_{i}": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)} for i in range(2)} | {
    "linear": {"w": jnp.ones(3)}
}
flat = {f"layers.{i}.{name}": jnp.ones(2) for i in range(2) for name in ("weight", "bias")}
kernels = {"kernels": [Kernel(1.0, 2.0), Kernel(3.0, 4.0)], "x": {"weight": 1.0, "bias": 2.0, "n": 3}, "noise": 0.5}

TREES = {"net": net, "module": module, "linen": linen, "haiku": haiku, "flat": flat, "kernels": kernels}


def is_matrix(leaf):
    return leaf.ndim == 2


def decay_mask(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def kernels_only(params):
    return jax.tree_util.tree_map_with_path(lambda path, leaf: path[-1].key == "kernel", params)


def in_second(path, value):
    return "Dense_1" in path


ALL = object()


class Row(NamedTuple):
    tree: str
    typed: Any
    # The names at the ends of the paths of the leaves that are meant, with what distinguishes them; ALL; or words of
    # the explanation where there is no remedy to paste.
    meant: Any


W = {f"layers[{i}].weight" for i in range(3)}
B = {f"layers[{i}].bias" for i in range(3)}
K = {f"['params']['Dense_{i}']['kernel']" for i in range(2)}
DENSE = lambda i: {f"['params']['Dense_{i}']['{name}']" for name in ("kernel", "bias")}
FLAT = lambda i: {f"['layers.{i}.{name}']" for name in ("weight", "bias")}
LAYER = lambda i: {f"layers[{i}].{name}" for name in ("weight", "bias")}
HEAD = {"head.kernel.value", "head.bias.value"}

# fmt: off
ROWS = {
    # equinox
    "a layer": Row("net", lambda m: m.layers[-1], LAYER(2)),
    "a leaf of a layer": Row("net", lambda m: m.layers[-1].weight, {"layers[2].weight"}),
    "a tuple of parts": Row("net", lambda m: (m.layers[0], m.temperature), LAYER(0) | {"temperature"}),
    "a comprehension": Row("net", lambda m: [layer.weight for layer in m.layers], W),
    "the leaves of a layer": Row("net", lambda m: jax.tree.leaves(m.layers[0]), LAYER(0)),
    "a class": Row("net", eqx.nn.Linear, W | B),
    "a tree of bools": Row("net", jax.tree.map(lambda leaf: leaf.ndim == 2, net), W),
    "matching of a predicate": Row("net", pg.matching(lambda p, leaf: eqx.is_inexact_array(leaf)), ALL),
    "a misspelled attribute": Row("net", lambda m: m.layer[-1], "write `layers` for `layer`"),
    "an index too far": Row("net", lambda m: m.layers[5], "write an index that the sequence has"),
    "a computed part": Row("net", lambda m: m.layers[-1].weight * 2, "compute in the function"),
    "the array itself": Row("net", net.layers[1].weight, {"layers[1].weight"}),
    "eqx.is_array": Row("net", eqx.is_array, ALL),
    "eqx.is_inexact_array": Row("net", eqx.is_inexact_array, ALL),
    "a question of ndim": Row("net", lambda x: x.ndim == 2, W),
    "a question of shape": Row("net", lambda leaf: leaf.shape == (2, 2), W),
    "a named question": Row("net", is_matrix, W),
    "a question of size": Row("net", lambda x: x.size > 2, W),
    "a question of nodes": Row("net", lambda x: isinstance(x, eqx.nn.Linear), W | B),
    "a question of nodes about a base": Row("net", lambda x: isinstance(x, eqx.Module), ALL),
    "a question of nodes by identity of type": Row("net", lambda x: type(x) is eqx.nn.Linear, W | B),
    "is_leaf of tree_map": Row("net", lambda node: type(node).__name__ == "Linear", W | B),
    "a question of nodes about a field": Row("kernels", lambda x: isinstance(x, Kernel), {f"['kernels'][{i}].{n}" for i in range(2) for n in ("variance", "scale")}),
    "each with a question": Row("net", pg.each(lambda x: isinstance(x, eqx.nn.Linear)), W | B),
    "the module itself": Row("net", net.layers[0], LAYER(0)),
    "the whole model": Row("net", net, ALL),
    "the list of layers": Row("net", net.layers, W | B),
    "a filter of a filter": Row("net", lambda m: eqx.filter(m, eqx.is_array), ALL),
    # PyTorch
    "a name": Row("net", "layers", W | B),
    "a star": Row("net", "layers.*.weight", W),
    "a key with dots, in brackets": Row("flat", "['layers.0.weight']", {"['layers.0.weight']"}),
    "a name of named_parameters": Row("net", "layers.0.weight", {"layers[0].weight"}),
    "a prefix of one": Row("net", "layers.0", LAYER(0)),
    "a last name": Row("net", "weight", {"layers[0].weight"}),
    "a star and a last name": Row("net", "*.weight", {"layers[0].weight"}),
    "a regular expression of a last name": Row("net", ".*weight", W),
    "the name of the variable": Row("net", "model.layers[0]", LAYER(0)),
    "self": Row("net", "self.layers[0]", LAYER(0)),
    "DataParallel": Row("net", "module.layers.0.weight", {"layers[0].weight"}),
    "state_dict data": Row("net", "layers.0.weight.data", {"layers[0].weight"}),
    "a list of paths": Row("net", [pg.path("layers[0]"), pg.path("temperature")], LAYER(0) | {"temperature"}),
    "a tuple of paths": Row("net", (pg.path("layers[0]"), pg.path("temperature")), LAYER(0) | {"temperature"}),
    "a list of names": Row("net", ["layers.0.weight", "layers.1.bias"], {"layers[0].weight", "layers[1].bias"}),
    "a set of names": Row("net", {"layers[0].weight", "temperature"}, {"layers[0].weight", "temperature"}),
    "a frozenset of names": Row("net", frozenset({"layers.0.weight"}), {"layers[0].weight"}),
    "a negative index": Row("net", "layers.-1.weight", {"layers[2].weight"}),
    "a test of the name": Row("net", lambda n: "weight" in n, W),
    "the end of the name": Row("net", lambda n: n.endswith("weight"), W),
    "the beginning of the name": Row("net", lambda name: name.startswith("layers.0"), LAYER(0)),
    "name and parameter": Row("net", lambda n, p: "weight" in n, W),
    "name and parameter, by ndim": Row("net", lambda name, p: p.ndim >= 2, W),
    "a name in a flat dict": Row("flat", "layers.0.weight", {"['layers.0.weight']"}),
    "a star in a flat dict": Row("flat", "layers.0.*", FLAT(0)),
    "a prefix in a flat dict": Row("flat", "layers.1", FLAT(1)),
    "a last name in a flat dict": Row("flat", "layers.*.weight", {f"['layers.{i}.weight']" for i in range(2)}),
    "brackets in a flat dict": Row("flat", "layers[0].weight", {"['layers.0.weight']"}),
    "names of a flat dict": Row("flat", ["layers.0.weight", "layers.1.weight"], {f"['layers.{i}.weight']" for i in range(2)}),
    "a typo in a name of PyTorch": Row("net", "layers.0.wieght", {"layers[0].weight"}),
    # flax
    "nnx.Param": Row("module", nnx.Param, HEAD | {"body.kernel.value", "body.bias.value", "bn.scale.value", "bn.bias.value"}),
    "True": Row("module", True, HEAD | {"body.kernel.value", "body.bias.value", "bn.scale.value", "bn.bias.value"}),
    "a path in nnx": Row("module", "head.kernel", {"head.kernel.value"}),
    "a callable in nnx": Row("module", lambda m: m.head.kernel, {"head.kernel.value"}),
    "dots in linen": Row("linen", "params.Dense_0.kernel", {"['params']['Dense_0']['kernel']"}),
    "a glob in linen": Row("linen", "**.kernel", K),
    "a glob of layers": Row("linen", "params.Dense_*.kernel", K),
    "brackets in linen": Row("linen", "['params']['Dense_0']", DENSE(0)),
    "a callable in linen": Row("linen", lambda p: p["params"]["Dense_1"], DENSE(1)),
    "matching in linen": Row("linen", pg.matching(lambda path, _: "kernel" in path), K),
    "a regular expression in linen": Row("linen", pg.path(re.compile(".*Dense_0.*")), DENSE(0)),
    "a layer by its name": Row("linen", "Dense_0", DENSE(0)),
    "a compiled expression in part": Row("linen", pg.path(re.compile("kernel")), K),
    "a compiled expression": Row("linen", re.compile(".*kernel"), K),
    "a compiled expression with slashes": Row("linen", re.compile(".*/kernel"), K),
    "slashes": Row("linen", "params/Dense_0/kernel", {"['params']['Dense_0']['kernel']"}),
    "slashes without params": Row("linen", "Dense_0/kernel", {"['params']['Dense_0']['kernel']"}),
    "a leading slash": Row("linen", "/params/Dense_0", DENSE(0)),
    "slashes and stars": Row("linen", "params/*/kernel", K),
    "slashes and two stars": Row("linen", "**/kernel", K),
    "a regular expression with slashes": Row("linen", ".*/kernel", K),
    "a regular expression of numbers": Row("linen", r"params/Dense_\d+/kernel", K),
    "an anchored expression": Row("linen", r"^params\.Dense_1\..*$", DENSE(1)),
    "an ellipsis": Row("module", ..., HEAD | {"body.kernel.value", "body.bias.value", "bn.scale.value", "bn.bias.value"}),
    "nnx.DiffState": Row("module", nnx.DiffState(0, nnx.Param), HEAD | {"body.kernel.value", "body.bias.value", "bn.scale.value", "bn.bias.value"}),
    "nnx.DiffState of a filter": Row("module", nnx.DiffState(0, nnx.PathContains("head")), HEAD),
    "nnx.PathContains": Row("module", nnx.PathContains("head"), HEAD),
    "nnx.All": Row("module", nnx.All(nnx.Param, nnx.PathContains("head")), HEAD),
    "nnx.Any": Row("module", nnx.Any(nnx.PathContains("head"), nnx.PathContains("bn")), HEAD | {"bn.scale.value", "bn.bias.value"}),
    "nnx.Not": Row("module", nnx.Not(nnx.PathContains("head")), {"body.kernel.value", "body.bias.value", "bn.scale.value", "bn.bias.value"}),
    "nnx.OfType": Row("module", nnx.OfType(nnx.Param), HEAD | {"body.kernel.value", "body.bias.value", "bn.scale.value", "bn.bias.value"}),
    "a filter of path and value": Row("module", lambda path, v: "head" in path, HEAD),
    "a filter of a last name": Row("linen", lambda path, v: path[-1] == "kernel", K),
    "a named filter": Row("linen", in_second, DENSE(1)),
    "traverse_util": Row("linen", lambda path, _: path[-1] != "bias" and path[0] == "params", K),
    "a path as a tuple": Row("linen", ("params", "Dense_0", "kernel"), {"['params']['Dense_0']['kernel']"}),
    "a path as a tuple in nnx": Row("module", ("head", "kernel"), {"head.kernel.value"}),
    "a path as a tuple with an index": Row("net", ("layers", 0, "weight"), {"layers[0].weight"}),
    "matching of a tuple": Row("linen", pg.matching(lambda path, _: path[-1] == "kernel"), K),
    "matching of JAX's keys": Row("linen", pg.matching(lambda path, _: path[-1].key == "kernel"), K),
    "the value of a variable": Row("module", "head/kernel/value", {"head.kernel.value"}),
    "its raw value": Row("module", "head.kernel.raw_value", {"head.kernel.value"}),
    # optax
    "a prefix of bools": Row("linen", {"params": True, "batch_stats": False}, DENSE(0) | DENSE(1)),
    "labels": Row("linen", {"params": "train", "batch_stats": "freeze"}, "partgrad.label(tree, {'freeze': 'batch_stats', 'train': 'params'})"),
    "a function that makes a mask": Row("linen", decay_mask, K),
    "a lambda that makes a mask": Row("linen", lambda p: jax.tree.map(lambda x: x.ndim != 1, p), K),
    "a mask by path": Row("linen", kernels_only, K),
    # haiku
    "haiku's keys": Row("haiku", "['mlp/~/linear_0']['w']", {"['mlp/~/linear_0']['w']"}),
    "a glob of haiku's keys": Row("haiku", "mlp*.w", {f"['mlp/~/linear_{i}']['w']" for i in range(2)}),
    "a module and a name": Row("haiku", "linear/w", {"['linear']['w']"}),
    "a module with a tilde": Row("haiku", "linear/~/w", {"['linear']['w']"}),
    "a module of haiku": Row("haiku", "mlp/~/linear_0", {f"['mlp/~/linear_0']['{n}']" for n in "wb"}),
    "a module without the tilde": Row("haiku", "mlp/linear_0", {f"['mlp/~/linear_0']['{n}']" for n in "wb"}),
    "a parameter of a module": Row("haiku", "mlp/~/linear_0.w", {"['mlp/~/linear_0']['w']"}),
    "a parameter by slashes": Row("haiku", "mlp/~/linear_1/b", {"['mlp/~/linear_1']['b']"}),
    "a star in a module": Row("haiku", "mlp/~/*", {f"['mlp/~/linear_{i}']['{n}']" for n in "wb" for i in range(2)}),
    "the outer module": Row("haiku", "mlp", {f"['mlp/~/linear_{i}']['{n}']" for n in "wb" for i in range(2)}),
    "partition of haiku": Row("haiku", lambda module, name, v: name == "w", {"['mlp/~/linear_0']['w']", "['mlp/~/linear_1']['w']", "['linear']['w']"}),
    "partition by module": Row("haiku", lambda m, n, v: m.startswith("mlp"), {f"['mlp/~/linear_{i}']['{n}']" for n in "wb" for i in range(2)}),
    # JAX and the shell
    "keystr": Row("net", jax.tree_util.keystr((GetAttrKey("layers"), SequenceKey(0))), LAYER(0)),
    "one star": Row("kernels", "*", ALL),
    "two stars": Row("net", "**", ALL),
    "a slice": Row("net", "layers[0:2].weight", {"layers[0].weight", "layers[1].weight"}),
    "exclude a callable": Row("net", pg.exclude(lambda m: m.layers), {"temperature"}),
    "a key path": Row("net", (GetAttrKey("layers"), SequenceKey(1), GetAttrKey("bias")), {"layers[1].bias"}),
    "a key path of keys": Row("linen", (DictKey("params"), DictKey("Dense_0")), DENSE(0)),
    "an empty text": Row("net", "", ALL),
    "commas": Row("kernels", "noise, x.weight", {"['noise']", "['x']['weight']"}),
    "bars": Row("kernels", "noise|x", {"['noise']", "['x']['weight']", "['x']['bias']"}),
    "spaces": Row("kernels", "noise x.bias", {"['noise']", "['x']['bias']"}),
    "braces": Row("kernels", "x.{weight,bias}", {"['x']['weight']", "['x']['bias']"}),
    "braces before": Row("net", "layers.{0,2}.weight", {"layers[0].weight", "layers[2].weight"}),
    "alternatives of an expression": Row("net", "layers.(0|2).weight", {"layers[0].weight", "layers[2].weight"}),
    "two indices": Row("net", "layers[0,1].weight", {"layers[0].weight", "layers[1].weight"}),
    "two indices, one from the end": Row("net", "layers[0, -1].bias", {"layers[0].bias", "layers[2].bias"}),
    "an exclamation mark": Row("net", "!layers[0]", LAYER(1) | LAYER(2) | {"temperature"}),
    "a tilde": Row("net", "~layers", {"temperature"}),
    "not": Row("net", "not layers.0", LAYER(1) | LAYER(2) | {"temperature"}),
    "a minus": Row("linen", "-params/Dense_0", DENSE(1) | {"['batch_stats']['bn']['mean']"}),
    "jax.Array": Row("net", jax.Array, ALL),
    "jnp.ndarray": Row("net", jnp.ndarray, ALL),
    "jnp.float32": Row("net", jnp.float32, ALL),
    "np.float32": Row("net", np.float32, ALL),
    "a dtype": Row("net", jnp.dtype("float32"), ALL),
    "float": Row("kernels", float, ALL),
    "params of a model": Row("net", "params", ALL),
    "parameters of a model": Row("net", "parameters", ALL),
    "all": Row("net", "all", ALL),
    "a name that is doubled": Row("kernels", "x..weight", {"['x']['weight']"}),
    "a trailing dot": Row("kernels", "x.", {"['x']['weight']", "['x']['bias']"}),
    "a trailing slash": Row("kernels", "x/", {"['x']['weight']", "['x']['bias']"}),
    "quotes without brackets": Row("kernels", "'x'.weight", {"['x']['weight']"}),
    "a path of pathlib": Row("kernels", "./x/weight", {"['x']['weight']"}),
    "backslashes": Row("kernels", "x\\weight", {"['x']['weight']"}),
    "several lambdas": Row("net", [lambda m: m.layers[0], lambda m: m.temperature], LAYER(0) | {"temperature"}),
    "a tuple of lambdas": Row("net", (lambda m: m.layers[0].weight, lambda m: m.layers[1].bias), {"layers[0].weight", "layers[1].bias"}),
    "a union of classes": Row("net", eqx.nn.Linear | Net, ALL),
    "a tuple of classes": Row("kernels", (Kernel, list), {f"['kernels'][{i}].{n}" for i in range(2) for n in ("variance", "scale")}),
    "texts and classes": Row("kernels", [Kernel, "noise"], {f"['kernels'][{i}].{n}" for i in range(2) for n in ("variance", "scale")} | {"['noise']"}),
    "a text from a callable": Row("kernels", lambda m: "noise", {"['noise']"}),
    "an index from the end alone": Row("net", "layers/-1", LAYER(2)),
    "labels from a function": Row("linen", lambda p: {"params": "train", "batch_stats": "freeze"}, "partgrad.label(tree, {'freeze': 'batch_stats', 'train': 'params'})"),
    "a static bool": Row("net", lambda m: m.layers[0].use_bias, "static data is not a leaf"),
    "many negations": Row("net", "!" * 3000 + "layers", "cannot be read"),
    "many braces": Row("net", "{a,b}" * 40, "cannot be read"),
    "many names": Row("kernels", ", ".join(["noise"] * 5000), "cannot be read"),
    # numpyro, penzai
    "a site of numpyro": Row("linen", "params/Dense_0.kernel", {"['params']['Dense_0']['kernel']"}),
    "at_instances_of": Row("net", lambda n: isinstance(n, (eqx.nn.Linear, eqx.nn.Conv)), W | B),
}
# fmt: on


def selected(tree, wrt):
    return {path for path, _ in pg.items(tree, wrt)}


def remedies_in(message):
    """What a message says to write: the code of one selector, or of several to choose from."""
    fix = message.partition("\n  Fix: ")[2].splitlines()[0]
    if fix.startswith("leave `wrt` out"):
        return ["None"]
    found = re.match(
        r"(?:write|join the paths:|match the whole path:|return the parts from one callable:) (.*)\.$", fix
    )
    assert found, message
    choices = re.match(r"('[^']*')(?: or ('[^']*'))*(?:, or ('[^']*') for all of them)$", found[1])
    return re.findall("'[^']*'", found[1]) if choices else [found[1].removeprefix("wrt=")]


def outcome(tree, typed):
    """What a selector selects, and the message of the error that it raises, with its notes."""
    try:
        return selected(tree, typed), ""
    except errors.PartgradError as error:
        return None, str(error)
    except AttributeError as error:
        # The user's own function raised it.
        return None, "\n".join([str(error), *error.__notes__])


@pytest.mark.parametrize("name", ROWS)
def test_what_is_typed_or_its_remedy_selects_what_is_meant(name):
    tree, typed, meant = ROWS[name]
    tree = TREES[tree]
    meant = selected(tree, None) if meant is ALL else meant
    found, message = outcome(tree, typed)
    if not message:
        assert found == meant
        return
    if isinstance(meant, str):
        assert meant in message
        return
    codes = remedies_in(message)
    try:
        found = [selected(tree, eval(code, {**globals(), "partgrad": pg})) for code in codes]
    except Exception as error:
        raise AssertionError(message) from error
    assert meant in found, message
    assert len(codes) == 1 or found[-1] == set.union(*found), message


def loss(model):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(model) if eqx.is_inexact_array(leaf))


def message_of(call):
    with pytest.raises(errors.PartgradError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("model", [net, Kernel(1.0, Kernel(2.0, 3.0)), module], ids=["callable", "dataclass", "nnx"])
def test_a_model_in_place_of_a_selector(model):
    """`pg.grad(f, model)`: a model is never called with a tree."""
    message = message_of(lambda: pg.grad(loss, model)(model))
    assert "It is the tree itself" in message
    assert message.endswith("Fix: leave `wrt` out, for every floating or complex leaf.")
    for function in (pg.freeze, pg.thaw, pg.select, pg.is_nondiff):
        message = message_of(lambda function=function: function("layers[0]", model))
        assert message.endswith("Fix: write the tree first and 'layers[0]' second.")
    part = jax.tree.leaves(model)[0]
    if hasattr(part, "shape"):
        (code,) = remedies_in(message_of(lambda: pg.grad(loss, wrt=part)(model)))
        assert selected(model, eval(code)) == {pg.items(model)[0][0]}


def test_a_part_is_recognised_in_every_function():
    for call in (
        lambda wrt: pg.grad(loss, wrt=wrt)(net),
        lambda wrt: pg.partition(net, wrt),
        lambda wrt: pg.freeze(net, wrt),
        lambda wrt: pg.label(net, {"a": wrt}, default="b"),
        lambda wrt: pg.summary(net, wrt),
        lambda wrt: pg.partition(net, pg.path("temperature") | wrt),
        lambda wrt: jax.jit(lambda model: pg.partition(model, model.layers[0])[0])(net),
    ):
        assert remedies_in(message_of(lambda call=call: call(net.layers[0]))) == ["'layers[0]'"]


def test_a_text_is_no_selection_of_a_tree_that_lacks_it():
    """A remedy is stated only where it is right: nothing is said to be written that selects nothing."""
    for typed in ("q/r/s", ("q", "r"), "zzz, yyy", "!zzz", lambda name, leaf: "zzz" in name, jnp.int8, {"q", "r"}):
        message = message_of(lambda typed=typed: pg.items(kernels, typed))
        assert "partgrad.path(" not in message
        assert "partgrad.matching(" not in message
        assert "partgrad.exclude(" not in message


def test_a_question_that_fails_on_what_it_is_given_says_what_that_is():
    with pytest.raises(AttributeError, match="'str' object has no attribute 'key'") as caught:
        pg.items(linen, pg.matching(lambda path, leaf: path[-1].key == "kernel"))
    assert "partgrad.matching gives it a path as text" in caught.value.__notes__[0]


def test_python_refuses_operators_between_what_is_no_selection():
    """The page on error texts says what to write instead."""
    with pytest.raises(TypeError, match="bad operand type for unary ~: 'function'"):
        _ = ~(lambda m: m.layers)
    assert selected(net, pg.exclude(lambda m: m.layers)) == {"temperature"}
