"""How much work calls are, counted: runs of the function, and Python calls in partgrad."""

import collections
import functools
import gc
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partgrad as pg

pytestmark = pytest.mark.core


@pg.dataclass
class Held:
    w: jax.Array
    p: jax.Array = pg.field(nondiff=True)


@pg.dataclass
class Kernel:
    variance: jax.Array
    lengthscale: jax.Array


MODEL = Held(jnp.array(2.0), jnp.array(3.0))


def calls_of(function):
    """How many Python functions of partgrad a call runs, by name."""
    found = collections.Counter()

    def profile(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and ("/partgrad/" in file or file.startswith("<partgrad")):
            found[frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    # A collection calls what waits for models of other tests to go.
    gc.disable()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found


def total(function):
    # What is dropped to make room for a new structure depends on what ran before.
    return sum(count for name, count in calls_of(function).items() if "_drop_oldest" not in name)


@pytest.fixture
def kernel():
    return Kernel(jnp.array(2.0), jnp.array(3.0))


def test_a_gradient_by_a_callable_runs_few_functions(kernel):
    gradient = pg.grad(lambda k: k.variance * k.lengthscale, wrt=lambda k: k.variance)
    assert total(lambda: gradient(kernel)) <= 150
    assert total(lambda: gradient(kernel)) <= 40


def test_a_named_mark_of_a_class_costs_little_after_the_first_call():
    gradient = pg.grad(lambda m: m.w * m.p**2, wrt="p")
    gradient(MODEL)
    assert total(lambda: gradient(MODEL)) <= 80


def test_naming_a_mark_does_not_depend_on_the_size_of_the_function():
    def long(m):
        x = m.w
        for _ in range(100):
            x = jnp.sin(x) * m.p
        return x

    counts = []
    for f in (lambda m: m.w * m.p, long):
        gradient = pg.grad(f, wrt="p")
        gradient(MODEL)
        counts.append(total(lambda gradient=gradient: gradient(MODEL)))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: pg.grad(f, wrt="p"),
        lambda f: pg.value_and_grad(f, wrt=lambda m: m.p),
        lambda f: lambda m: pg.vjp(f, m, wrt="p")[1](1.0),
        lambda f: lambda m: pg.jvp(f, (m,), (1.0,), wrt="p"),
        lambda f: pg.grad(f, wrt={"a": "p", "b": "w"}),
        # A new transform on every call.
        lambda f: lambda m: pg.grad(f, wrt="p")(m),
    ],
)
def test_the_function_runs_once_after_the_first_call(derivative):
    runs = []
    d = derivative(lambda m: runs.append(1) or m.w * m.p**2)
    d(MODEL)
    runs.clear()
    for _ in range(3):
        d(MODEL)
    assert len(runs) == 3


def test_each_structure_and_each_flag_is_asked():
    def f(m, plainly):
        return (Held(m.w, m.p) if plainly else m).p ** 2

    gradient = pg.grad(f, wrt="p")
    assert gradient(MODEL, False) == 6.0
    for _ in range(2):
        with pytest.raises(pg.errors.HeldError):
            gradient(MODEL, True)
    assert gradient(MODEL, False) == 6.0
    nested = pg.grad(lambda t: f(t[0], True) if len(t) > 1 else t[0].p, wrt="[0].p")
    assert nested((MODEL,)) == 1.0
    with pytest.raises(pg.errors.HeldError):
        nested((MODEL, MODEL))


@jax.tree_util.register_pytree_with_keys_class
class Net:
    """A node with an array in its structure, so that nothing of it is kept for the next call."""

    def __init__(self, layers, table):
        self.layers, self.table = layers, table

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("layers"), self.layers),), self.table

    @classmethod
    def tree_unflatten(cls, table, children):
        return cls(*children, table)


TREES = {
    "a structure that is not kept": lambda n: Net([jnp.array(float(i)) for i in range(n)], np.arange(2.0)),
    "marked fields": lambda n: Net([Held(jnp.array(1.0), jnp.array(float(i))) for i in range(n)], np.arange(2.0)),
    "a frozen node": lambda n: pg.freeze({"layers": [jnp.array(float(i)) for i in range(n)], "rest": 1.0}, "layers"),
    "a plain dict": lambda n: {"layers": {f"w{i}": jnp.array(float(i)) for i in range(n)}, "rest": 1.0},
    "a chain": lambda n: functools.reduce(lambda inner, i: {"w": float(i), "layers": inner}, range(n), 0.0),
}
NODE = lambda m: m["layers"] if isinstance(m, dict) else m.layers
REQUESTS = {
    "is_nondiff": lambda tree: pg.is_nondiff(tree, "layers.**"),
    "items": lambda tree: pg.items(tree),
    "mask": lambda tree: pg.mask(tree),
    "partition, named": lambda tree: pg.partition(tree, NODE),
    "partition and combine": lambda tree: pg.combine(*pg.partition(tree)),
    "select": lambda tree: pg.select(tree, NODE),
    "replace": lambda tree: pg.replace(tree, NODE, fn=lambda x: x),
    "apply_updates": lambda tree: pg.apply_updates(tree, pg.partition(tree)[0]),
    "ravel": lambda tree: pg.ravel(tree)[1].names,
    "unconstrain": lambda tree: pg.unconstrain(tree, {"**": (jnp.exp, jnp.log)}),
    "constrain": lambda tree: (lambda free, constrain: constrain(free))(
        *pg.unconstrain(tree, {"**": (jnp.exp, jnp.log)})
    ),
    "label": lambda tree: pg.label(tree, {"all": None}, default=0),
    "freeze": lambda tree: pg.freeze(tree, "layers.**"),
    "freeze a node": lambda tree: pg.freeze(tree, NODE),
    "thaw": pg.thaw,
    "stop_gradient": pg.stop_gradient,
    "summary": lambda tree: str(pg.summary(tree)),
    "show": lambda tree: str(pg.show(tree)),
    "grad": lambda tree: pg.grad(total_of)(tree),
    "grad, named": lambda tree: pg.grad(total_of, wrt=NODE)(tree),
    "grad, a dict": lambda tree: pg.grad(total_of, wrt={"a": NODE})(tree),
    "jvp": lambda tree: pg.jvp(total_of, (tree,), (pg.partition(tree)[0],)),
    "unwrap": pg.unwrap,
}


def total_of(tree):
    return jnp.asarray(jax.tree.leaves(NODE(tree))[0], float) ** 2


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("build", TREES.values(), ids=TREES)
def test_work_grows_no_faster_than_the_tree(build, request_):
    if build is TREES["a chain"] and request_ in (REQUESTS["summary"], REQUESTS["show"]):
        pytest.skip("the paths of a chain, which they print, are together as long as the square of its depth")
    few, many = build(15), build(60)
    for tree in (few, many):
        request_(tree)
    assert total(lambda: request_(many)) <= 4.4 * total(lambda: request_(few))
