"""Models whose leaves are spread over eight devices: what partgrad does to them, beside the split written by hand.

`python tests/scripts/sharded.py automatic` (or `explicit`, for the axes of the mesh; then names of cases, or none for all)
compiles both, compares what they compute, where the results are, and what the devices tell each other, and prints a
line of JSON for each case. `tests/test_scale.py` runs it.
"""

import contextlib
import dataclasses
import functools
import json
import re
import sys
import tempfile
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import partgrad as pg

_COLLECTIVE = re.compile(r" = (\S.*?) (all-reduce|all-gather|all-to-all|collective-\w+|reduce-scatter)(?:-start)?\(")
_ARRAY = re.compile(r"\w+\[[\d,]*\]")
AXES = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}


@pg.dataclass
class Layer:
    w: jax.Array
    b: jax.Array
    gain: jax.Array = pg.field(nondiff=True)

    def __call__(self, x, out=None):
        h = jnp.einsum("ni,io->no", x, self.w, **({} if out is None else {"out_sharding": out}))
        return self.gain * h + self.b


@pg.dataclass
class Net:
    up: Layer
    down: Layer
    steps: int = 3
    name: str = pg.field(static=True, default="net")

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)), _out(x))


def _out(x):
    """Explicit axes need to be told where a sum over a split axis goes."""
    sharding = jax.typeof(x).sharding
    return sharding if any(kind == AxisType.Explicit for kind in sharding.mesh.axis_types) else None


def loss(net, x):
    return jnp.mean(net(x) ** 2)


def net_of(mesh):
    random = np.random.default_rng(0)

    def put(*shape, spec):
        return jax.device_put(random.normal(size=shape).astype(np.float32), NamedSharding(mesh, spec))

    up = Layer(put(8, 16, spec=P(None, "model")), put(16, spec=P("model")), put(16, spec=P("model")))
    down = Layer(put(16, 8, spec=P("model", None)), put(8, spec=P()), put(8, spec=P()))
    return Net(up, down), put(16, 8, spec=P("data", None))


# --- what partgrad does, and the same by hand: each a pair of functions of (net, x) ----------------------------------


def by_hand(transform, names=("up", "down"), fields=("w", "b"), loss=loss):
    """JAX's transform of a function of the differentiated arrays alone, without any mark."""

    def run(net, x):
        def of_free(free):
            return loss(_bare(net, free), x)

        return transform(of_free, {name: {f: getattr(getattr(net, name), f) for f in fields} for name in names})

    return run


def _bare(net, free):
    """The net without its marks, and with some arrays of its layers in the place of its own."""
    layer = lambda name: _BareLayer(**{**vars(getattr(net, name)), **free.get(name, {})})
    return _BareNet(layer("up"), layer("down"))


class _BareLayer:
    def __init__(self, w, b, gain):
        self.w, self.b, self.gain = w, b, gain

    __call__ = Layer.__call__


class _BareNet:
    def __init__(self, up, down):
        self.up, self.down = up, down

    __call__ = Net.__call__


def _grad(f, free):
    return jax.grad(f)(free)


def _value_and_grad(f, free):
    return jax.value_and_grad(f)(free)


def _ones(tree):
    return jax.tree.map(jnp.ones_like, tree)


def _sgd(net, x):
    selected, rest = pg.partition(net, lambda n: n.up)
    gradient = jax.grad(lambda selected: loss(pg.combine(selected, rest), x))(selected)
    return pg.apply_updates(net, jax.tree.map(lambda g: -0.1 * g, gradient))


def _sgd_by_hand(net, x):
    gradient = by_hand(_grad, names=("up",))(net, x)["up"]
    up = dataclasses.replace(net.up, **{k: getattr(net.up, k) - 0.1 * g for k, g in gradient.items()})
    return dataclasses.replace(net, up=up)


def _looked_up(net, x, read):
    # The rows are whole on every device, the columns are not.
    rows = jnp.array([0, 7, 9])
    return jnp.sum(read(net.up.w, rows) ** 2)


def _noisy(net, x, draw):
    key = jax.random.key(0)
    return jnp.mean((net(x) + draw(key, net.down.b)) ** 2)


def _sample(key, b):
    return b * jax.random.normal(key, b.shape)


def _unravelled(net, x):
    vector, unravel = pg.ravel(net, "**.b")
    return unravel(2 * vector)


def _unravelled_by_hand(net, x):
    biases = {"down": net.down.b, "up": net.up.b}
    is_explicit = _out(x) is not None
    vector, unravel = ravel_pytree(jax.reshard(biases, P()) if is_explicit else biases)
    free = unravel(2 * vector)
    if is_explicit:
        free = jax.tree.map(lambda new, old: jax.reshard(new, jax.typeof(old).sharding), free, biases)
    return dataclasses.replace(
        net,
        up=dataclasses.replace(net.up, b=free["up"]),
        down=dataclasses.replace(net.down, b=free["down"]),
    )


def _shard_mapped(grad):
    """Data parallel by hand: each device has the gradient of its own rows, and the mean of them all."""

    def run(net, x):
        own = lambda net, x: jax.tree.map(lambda g: jax.lax.pmean(g, "data"), grad(net, x))
        whole = net if _out(x) is None else jax.tree.map(lambda leaf: jax.reshard(leaf, P()), net)
        specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
        return jax.shard_map(own, mesh=jax.typeof(x).sharding.mesh, **specs)(whole, x)

    return run


CASES = {
    "grad": (pg.grad(loss), by_hand(_grad)),
    "value_and_grad": (pg.value_and_grad(loss), by_hand(_value_and_grad)),
    "grad, a part": (pg.grad(loss, wrt=lambda n: n.up), by_hand(_grad, ("up",))),
    "grad, a leaf": (pg.grad(loss, wrt="down.w"), by_hand(_grad, ("down",), ("w",))),
    "grad, a glob": (pg.grad(loss, wrt="**.w"), by_hand(_grad, fields=("w",))),
    "grad, unused='error'": (pg.grad(loss, unused="error"), by_hand(_grad)),
    "grad, a leaf named that is held": (
        pg.grad(loss, wrt=lambda n: n.up.gain),
        by_hand(_grad, ("up",), ("gain",)),
    ),
    "jvp": (
        lambda net, x: pg.jvp(lambda n: loss(n, x), (net,), (_ones(pg.partition(net)[0]),)),
        by_hand(lambda f, free: jax.jvp(f, (free,), (_ones(free),))),
    ),
    "vjp": (
        lambda net, x: pg.vjp(lambda n: n(x), net)[1](jnp.ones_like(x)),
        lambda net, x: by_hand(lambda f, free: jax.vjp(f, free)[1](jnp.ones_like(x)), loss=lambda n, x: n(x))(net, x),
    ),
    "hvp": (
        lambda net, x: pg.hvp(loss)(net, _ones(pg.partition(net)[0]), x),
        by_hand(lambda f, free: jax.jvp(jax.grad(f), (free,), (_ones(free),))[1]),
    ),
    "jacrev": (
        pg.jacrev(lambda net, x: net(x).mean(0), wrt="down.b"),
        by_hand(lambda f, free: jax.jacrev(f)(free), ("down",), ("b",), loss=lambda net, x: net(x).mean(0)),
    ),
    "grad of a frozen model": (
        lambda net, x: pg.grad(loss)(pg.freeze(net, lambda n: n.down), x),
        by_hand(_grad, ("up",)),
    ),
    "jax.grad with pg.stop_gradient": (
        lambda net, x: jax.grad(lambda n: loss(pg.stop_gradient(n, "down"), x), allow_int=True)(net).up,
        lambda net, x: jax.grad(lambda up: loss(Net(up, net.down), x))(net.up),
    ),
    "partition, combine, apply_updates": (_sgd, _sgd_by_hand),
    "replace": (
        lambda net, x: pg.replace(net, "**.b", fn=lambda b: b + 1),
        lambda net, x: dataclasses.replace(
            net,
            up=dataclasses.replace(net.up, b=net.up.b + 1),
            down=dataclasses.replace(net.down, b=net.down.b + 1),
        ),
    ),
    "ravel": (_unravelled, _unravelled_by_hand),
    "wrappers in a dict": (
        lambda net, x: pg.grad(lambda d: loss(Net(d["up"], d["down"].value), x))(
            {"up": net.up, "down": pg.NonDiff(net.down)}
        ),
        by_hand(_grad, ("up",)),
    ),
    "elements": (
        pg.grad(loss, wrt=lambda n: n.down.w[:, 0]),
        lambda net, x: jax.grad(lambda c: loss(_bare(net, {"down": {"w": net.down.w.at[:, 0].set(c)}}), x))(
            net.down.w[:, 0]
        ),
    ),
    "consistent_indexing": (
        pg.grad(pg.consistent_indexing(functools.partial(_looked_up, read=lambda w, rows: w[rows])), wrt="up.w"),
        by_hand(
            _grad,
            ("up",),
            ("w",),
            loss=functools.partial(_looked_up, read=lambda w, rows: w.at[rows].get(mode="clip")),
        ),
    ),
    "consistent_indexing of what needs none": (pg.grad(pg.consistent_indexing(loss)), by_hand(_grad)),
    "draw, pathwise": (
        pg.grad(functools.partial(_noisy, draw=functools.partial(pg.draw, _sample, gradient="pathwise"))),
        by_hand(_grad, loss=functools.partial(_noisy, draw=_sample)),
    ),
    "draw, fixed": (
        pg.grad(functools.partial(_noisy, draw=functools.partial(pg.draw, _sample, gradient="fixed"))),
        by_hand(_grad, loss=functools.partial(_noisy, draw=lambda key, b: jax.lax.stop_gradient(_sample(key, b)))),
    ),
    "draw, error": (
        lambda net, x: _noisy(net, x, functools.partial(pg.draw, _sample, gradient="error")),
        lambda net, x: _noisy(net, x, _sample),
    ),
    "a gradient inside shard_map": (
        _shard_mapped(pg.grad(loss)),
        _shard_mapped(by_hand(_grad)),
    ),
}


# --- what stays as it is: functions of a mesh, a net with a frozen layer and inputs -----------------------------------


def same_places(one, other):
    ones, others = leaves_of(one), leaves_of(other)
    assert len(ones) == len(others)
    for a, b in zip(ones, others, strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)


def eager_gradients_are_where_their_leaves_are(mesh, net, x):
    same_places(pg.grad(loss)(net, x), pg.partition(net)[0])
    same_places(pg.grad(loss, wrt=lambda n: n.down.w)(net, x), net.down.w)
    same_places(pg.grad(pg.consistent_indexing(loss))(net, x), pg.partition(net)[0])


def edits_move_nothing(mesh, net, x):
    same_places(pg.combine(*pg.partition(net)), net)
    same_places(pg.thaw(pg.freeze(net, "up"), "up"), net)
    same_places(pg.replace(net, lambda n: n.up.w[1:3], fn=lambda rows: 2 * rows), net)
    same_places(pg.select(net, lambda n: n.down.w[:, 0]), net.down.w[:, 0])
    vector, unravel = pg.ravel(net, "**.b")
    if _out(x) is not None:
        same_places(unravel(vector), net)
    drawn = pg.draw(_sample, jax.random.key(0), net.up.b, gradient="error")
    same_places(drawn, net.up.b)


def trees_of_shardings(mesh, net, x):
    whole = NamedSharding(mesh, P())
    where = jax.tree.map(lambda leaf: getattr(leaf, "sharding", whole), net)
    same_places(jax.device_put(jax.tree.map(np.asarray, net), where), jax.device_put(net, where))
    same_places(jax.jit(lambda n: n, in_shardings=(where,), out_shardings=where)(net), jax.device_put(net, where))


def donated_models(mesh, net, x):
    selected, rest = pg.partition(net)
    before = jax.tree.map(lambda leaf: leaf.sharding, selected)
    state = optax.adam(0.1).init(selected)

    @functools.partial(jax.jit, donate_argnums=(0, 2))
    def step(selected, rest, state, x):
        gradient = pg.grad(lambda part: loss(pg.combine(part, rest), x))(selected)
        updates, state = optax.adam(0.1).update(gradient, state)
        return pg.apply_updates(selected, updates), state

    given = jax.tree.leaves((selected, state))
    for _ in range(2):
        selected, state = step(selected, rest, state, x)
    assert all(leaf.is_deleted() for leaf in given)
    assert jax.tree.map(lambda leaf, old: leaf.sharding.is_equivalent_to(old, leaf.ndim), selected, before)
    same_places(state[0].mu, selected)
    pg.grad(loss)(pg.combine(selected, rest), x)


def abstract_models(mesh, net, x):
    abstract = jax.tree.map(_abstract, (net, x))
    program = jax.jit(pg.grad(loss)).lower(*abstract).compile()
    same_places(program(net, x), pg.partition(net)[0])
    selected, _ = pg.partition(abstract[0])
    assert jax.tree.map(lambda leaf: leaf.sharding, selected) == jax.tree.map(
        lambda leaf: leaf.sharding, pg.partition(net)[0]
    )
    assert str(pg.summary(abstract[0])).count("f32[") == 6


def _abstract(leaf):
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def checkpoints(mesh, net, x):
    import orbax.checkpoint

    with tempfile.TemporaryDirectory() as directory, orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(directory) / "net", net)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(Path(directory) / "net", jax.tree.map(_abstract, net))
    same_places(restored, net)
    assert jax.tree.structure(restored) == jax.tree.structure(net)
    assert all(map(np.array_equal, jax.tree.leaves(restored), jax.tree.leaves(net)))


def mapped_by_pmap(mesh, net, x):
    if _out(x) is not None:
        # JAX refuses `pmap` where another mesh is set.
        return
    own = lambda net, x: jax.lax.pmean(pg.grad(loss)(net, x), "i")
    model, rows = jax.tree.map(np.asarray, (net, x))
    gradient = jax.pmap(own, axis_name="i", in_axes=(None, 0))(model, rows.reshape(8, 2, 8))
    np.testing.assert_allclose(gradient.up.w[0], pg.grad(loss)(net, x).up.w, rtol=1e-4, atol=1e-5)


def checked(mesh, net, x):
    assert pg.check(loss)(net, x).ok


def what_devices_share_is_live_if_any_of_them_needs_it(mesh, net, x):
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
    body = lambda scale, x: jnp.where(x > 0, scale * x, 0.0)
    for checked in (True, False):
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"), check_vma=checked)
        f = lambda scale, mapped=mapped: mapped(scale**2, jnp.arange(8.0)).sum()
        with jax.set_mesh(mesh):
            assert jax.jit(jax.grad(pg.double_where(f)))(3.0) == 168.0


FACTS = [
    eager_gradients_are_where_their_leaves_are,
    edits_move_nothing,
    trees_of_shardings,
    donated_models,
    abstract_models,
    checkpoints,
    mapped_by_pmap,
    checked,
    what_devices_share_is_live_if_any_of_them_needs_it,
]
NAMES = [*CASES, *(fact.__name__ for fact in FACTS)]


def compiled(f, *arguments):
    return jax.jit(f).lower(*arguments).compile()


def collectives(program):
    """What the devices tell each other: each collective with the arrays that it returns."""
    found = _COLLECTIVE.findall(program.as_text())
    return sorted((name, sorted(_ARRAY.findall(shapes))) for shapes, name in found)


def leaves_of(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def compare(name, net, x):
    """Raise if the devices tell each other more than by hand, or if results or their places differ."""
    programs = [compiled(f, net, x) for f in CASES[name]]
    told, expected = map(collectives, programs)
    assert told == expected, f"the devices tell each other {told}, by hand {expected}"
    order = lambda leaf: (leaf.shape, str(leaf.sharding), np.asarray(leaf).round(3).tolist())
    got, wanted = (sorted(leaves_of(program(net, x)), key=order) for program in programs)
    same_places(got, wanted)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def wrong_with(axes, name):
    """What is wrong with a case on a mesh with such axes; None if nothing is."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AXES[axes],) * 2)
    try:
        with jax.set_mesh(mesh) if axes == "explicit" else contextlib.nullcontext():
            net, x = net_of(mesh)
            if name in CASES:
                compare(name, net, x)
            else:
                {fact.__name__: fact for fact in FACTS}[name](mesh, pg.freeze(net, "down"), x)
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    axes, *names = sys.argv[1:]
    for name in names or NAMES:
        print(json.dumps([name, wrong_with(axes, name)]), flush=True)
