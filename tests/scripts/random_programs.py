"""Random programs for the laws of `double_where`, and a way to run them that compiles no loop.

    python tests/scripts/random_programs.py --seed 0 --count 1000

draws programs of the operations below, in every wrapper and several deep, and says for which a number that is finite
in JAX is another one under `double_where`, in reverse and forward mode, twice over, and under `vmap`.
"""

import argparse
import functools
import itertools
import random
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

import partgrad as pg
from partgrad._programs import OWN, bind, branches_of, primal_jaxpr, scan_of, shown, while_of

SIZE = 4
MATRIX = np.array([[1.0, 0.0, -2.0, 0.5], [0.0, 0.0, 1.0, 0.0], [3.0, -1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0]])
WEIGHTS = np.array([1.0, -2.0, 0.0, 0.5])
INDICES = np.array([2, 0, 2, 3])
BEYOND = np.array([2, 0, 7, 1])


def spread(number):
    return jnp.broadcast_to(number, (SIZE,))


# Each maps a vector to a vector, lane by lane.
LANES = {
    "sin": jnp.sin,
    "exp": jnp.exp,
    "tanh": jnp.tanh,
    "neg": lambda a: -a,
    "add one": lambda a: a + 1.0,
    "times zero": lambda a: a * 0.0,
    "times": lambda a: a * WEIGHTS,
    "square": lambda a: a * a,
    "abs": jnp.abs,
    "sqrt": jnp.sqrt,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "reciprocal": lambda a: 1.0 / a,
    "power": lambda a: a**0.5,
    "cbrt": jnp.cbrt,
    "arccos": jnp.arccos,
    "arctanh": jnp.arctanh,
    "xlogy": lambda a: jax.scipy.special.xlogy(a, a),
    "relu": jax.nn.relu,
    "softplus": jax.nn.softplus,
    "positive log": lambda a: jnp.where(a > 0, jnp.log(a), 0.0),
    "sqrt of positive": lambda a: jnp.where(a > 0.5, jnp.sqrt(a), a),
    "sinc": lambda a: jnp.where(a == 0, 1.0, jnp.sin(a) / a),
    "three cases": lambda a: lax.select_n((a > 0).astype(int) + (a > 0.5), a, jnp.sqrt(a), 1.0 / a),
    "clip": lambda a: jnp.clip(a, -0.5, 0.5),
    "integer": lambda a: jnp.floor(a).astype(int) * a,
    "stop": lax.stop_gradient,
}
MOVES = {
    "flip": lambda a: jnp.flip(a),
    "roll": lambda a: jnp.roll(a, 1),
    "slice": lambda a: jnp.concatenate([a[2:], a[:2] * 2.0]),
    "drop": lambda a: jnp.concatenate([a[1:3], a[1:3]]),
    "pad": lambda a: jnp.pad(a[1:3], (1, 1)),
    "pad within": lambda a: lax.pad(a[:2], a.dtype.type(0.5), [(0, 1, 1)]),
    "gather": lambda a: a[INDICES],
    "gather from order": lambda a: a[jnp.argsort(-a)],
    "fill": lambda a: a.at[jnp.array([0, 5, 1, 2])].get(mode="fill", fill_value=1.0),
    "dynamic": lambda a: lax.dynamic_update_slice(a, a[2:3], (jnp.argmax(a),)),
    "set constant": lambda a: a.at[1].set(0.5),
    "set": lambda a: a.at[INDICES[1:]].set(jnp.log(a[:3])),
    "add at": lambda a: a.at[INDICES].add(a),
    "drop out of bounds": lambda a: a.at[jnp.array([1, 9])].set(a[:2], mode="drop"),
    "matmul": lambda a: jnp.asarray(MATRIX, a.dtype) @ a,
    "grid": lambda a: (a.reshape(2, 2) @ a.reshape(2, 2).T).ravel(),
    "transpose": lambda a: a.reshape(2, 2).T.ravel(),
    "cumsum": lambda a: jnp.cumsum(a),
    "sum": lambda a: spread(a.sum()),
    "mean": lambda a: a - a.mean(),
    "norm": lambda a: spread(jnp.linalg.norm(a)),
    "deviation": lambda a: spread(jnp.std(a)),
    "masked sum": lambda a: spread(jnp.sum(a, where=a > 0)),
    "convolve": lambda a: jnp.convolve(a, a[1:], mode="same"),
    "triangular": lambda a: jnp.tril(a.reshape(2, 2)).ravel(),
    "window": lambda a: lax.reduce_window(a, a.dtype.type(0), lax.add, (2,), (1,), "SAME"),
    "tile": lambda a: jnp.tile(a[:2], 2),
    "clipped read": lambda a: a.at[BEYOND].get(mode="clip"),
    "clipped set": lambda a: a.at[BEYOND[1:]].set(2.0 * a[:3], mode="clip"),
    "promised read": lambda a: a.at[BEYOND].get(mode="promise_in_bounds", wrap_negative_indices=False),
    "promised add": lambda a: a.at[BEYOND].add(jnp.log(a), mode="promise_in_bounds"),
    "promised set": lambda a: a.at[BEYOND].set(jnp.sqrt(a), mode="promise_in_bounds", unique_indices=True),
}
COMPETITIONS = {
    "sort": lambda a: jnp.sort(a),
    "top k": lambda a: jnp.pad(lax.top_k(a, 2)[0], (1, 1)),
    "cummax": lambda a: lax.cummax(a, axis=0),
    "max": lambda a: spread(a.max()),
    "min of two": lambda a: a.reshape(2, 2).min(0)[jnp.array([0, 1, 0, 1])],
    "prod": lambda a: spread(jnp.prod(a)),
    "cumprod": lambda a: jnp.cumprod(a),
    "logsumexp": lambda a: a - jax.scipy.special.logsumexp(a),
    "softmax": lambda a: jax.nn.softmax(a),
    "median": lambda a: spread(jnp.median(a)),
    "max window": lambda a: lax.reduce_window(a, a.dtype.type(-jnp.inf), lax.max, (2,), (1,), "SAME"),
}
PAIRS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "arctan2": jnp.arctan2,
    "hypot": jnp.hypot,
    "pow": lambda a, b: jnp.abs(a) ** b,
    "where": lambda a, b: jnp.where(a > b, a, b * 2.0),
    "where positive": lambda a, b: jnp.where(a > 0, b, a),
    "safe division": lambda a, b: jnp.where(b == 0, 0.0, a / b),
    "dot": lambda a, b: spread(a @ b),
    "outer": lambda a, b: jnp.outer(a, b).sum(0),
    "set from": lambda a, b: a.at[1:3].set(b[:2]),
    "multiply at": lambda a, b: a.at[jnp.array([0, 2])].multiply(b[:2], unique_indices=True),
    "promised multiply": lambda a, b: a.at[BEYOND].multiply(b, mode="promise_in_bounds", unique_indices=True),
    "concatenate": lambda a, b: jnp.concatenate([a[:2], b[2:]]),
    "choose": lambda a, b: lax.cond(a[0] > b[1], lambda: jnp.sqrt(a), lambda: jnp.log(b)),
}
COMPETING_PAIRS = {
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "max at": lambda a, b: a.at[INDICES].max(b),
    "dropped min at": lambda a, b: a.at[BEYOND].min(b, mode="drop"),
    "clamp": lambda a, b: lax.clamp(a.dtype.type(-0.5), a, b),
    "fmax": jnp.fmax,
}

# Reads and writes in every mode. What is promised to be in bounds, and is not, has another derivative in each of JAX's
# modes; JAX differentiates a product only where it may take its places for different ones.
PLACES = {"in": [2, 0, 1, 3], "twice": [2, 0, 2, 3], "beyond": [2, 0, 7, 1], "before": [1, -9, 3, -1]}
MODES = ("promise_in_bounds", "clip", "drop")


def read_at(mode, places):
    return lambda a: a.at[np.array(PLACES[places])].get(mode=mode, fill_value=1.0 if mode == "drop" else None)


def write_at(name, mode, places, unique):
    return lambda a, b: getattr(a.at[np.array(PLACES[places])], name)(b, mode=mode, unique_indices=unique)


def batched_write(name, mode, places):
    """A write with a batch of indices, of rows."""
    rows = np.array([PLACES[places][:2], PLACES[places][2:]]) % 3

    def function(a, b):
        at = lambda x, i, u: getattr(x.at[i], name)(u, mode=mode, unique_indices=name == "multiply")
        return jax.vmap(at)(a.reshape(2, 2), rows[:, :1], b.reshape(2, 2)[:, :1]).ravel()

    return function


# JAX 0.10 divides by a count of zero where an extremal write is clamped.
WRONG_IN_JAX = {
    f"{batch}{name} clip {places}"
    for batch, name, places in itertools.product(("", "batched "), ("min", "max"), PLACES)
    if jax.__version_info__ < (0, 11) and (batch or places in ("beyond", "before"))
}
READS = {f"read {mode} {places}": read_at(mode, places) for mode in MODES for places in PLACES}
ACCESSES = {
    f"{name} {mode} {places}{' unique' * unique}": write_at(name, mode, places, unique)
    for name in ("set", "add", "multiply", "min", "max", "subtract")
    for mode in MODES
    for places in PLACES
    for unique in (False, True)
    # At equal places nothing is unique, nor where clamping makes them equal.
    if (places == "in" or not unique or (mode == "drop" and places == "beyond")) and (unique or name != "multiply")
}
ACCESSES |= {
    f"batched {name} {mode} {places}": batched_write(name, mode, places)
    for name in ("set", "add", "multiply", "min")
    for mode in MODES
    for places in ("in", "beyond")
}


def looped(f):
    """A scan that carries, stacks and reads what is scanned."""
    return lambda a: sum(lax.scan(lambda c, x: (f(c) + x, f(c * x)[0]), a, a))


def carried(f):
    """A scan that overwrites what it carries at some steps."""
    step = lambda c, x: (jnp.where(x > 0, f(c), x), None)
    return lambda a: lax.scan(step, a, a)[0]


def backwards(f):
    """A scan in the other direction, over rows, that stacks vectors."""
    step = lambda c, x: (f(c) * 0.5 + x, f(x * c))
    return lambda a: lax.scan(step, a, jnp.stack([a, 2.0 * a]), reverse=True, unroll=2)[1].sum(0)


def counted(f):
    return lambda a: lax.fori_loop(0, 2, lambda i, c: jnp.where(i == 0, f(c), c), a)


def while_loop(f):
    """A loop of which only forward mode knows a derivative."""
    step = lambda carry: (carry[0] + 1, jnp.where(carry[0] == 1, f(carry[1]), carry[1] * 0.5))
    return lambda a: lax.while_loop(lambda carry: carry[0] < 2 + (a[0] > 0), step, (0, a))[1]


def custom_jvp(f):
    """The derivative of a custom rule is the user's: that of the same function."""
    function = jax.custom_jvp(f)
    function.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return lambda *operands: function(*operands)


def custom_vjp(f):
    function = jax.custom_vjp(f)
    function.defvjp(lambda *operands: jax.vjp(f, *operands), lambda pull, cotangent: pull(cotangent))
    return lambda *operands: function(*operands)


def clipped_vjp(f):
    """A backward pass that is not linear."""
    function = jax.custom_vjp(f)
    backward = lambda pull, cotangent: tuple(jnp.clip(c, -1.0, 1.0) for c in pull(cotangent))
    function.defvjp(lambda *operands: jax.vjp(f, *operands), backward)
    return lambda *operands: function(*operands)


def looped_vjp(f):
    """A backward pass that loops."""
    function = jax.custom_vjp(f)

    def backward(pull, cotangent):
        return lax.fori_loop(0, 2, lambda i, c: jnp.where(i == 0, pull(c)[0], 0.5 * c), cotangent), None

    function.defvjp(lambda a, _: jax.vjp(lambda a: f(a), a), backward)
    return lambda a: function(a, 0)


def beside_an_integer(f):
    """A custom rule with a result that has no derivative, in a loop that carries it."""
    count = jax.custom_vjp(lambda i, a: (f(a), i + 1))
    forward = lambda i, a: ((f(a), i + 1), a)
    count.defvjp(forward, lambda a, cotangents: (None, *jax.vjp(f, a)[1](cotangents[0])))
    return lambda a: lax.fori_loop(0, 1, lambda _, carry: count(carry[1], carry[0]), (a, 0))[0]


def sharded(f):
    whole = jax.sharding.PartitionSpec()
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=whole, out_specs=whole)


def across(f):
    """Halves on two devices, where there are so many, which exchange them."""
    halves, devices = jax.sharding.PartitionSpec("i"), min(2, jax.device_count())
    mesh = jax.make_mesh((devices,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(half):
        whole = lax.all_gather(half, "i", tiled=True)
        moved = lax.ppermute(f(whole)[: len(half)], "i", [(n, (n + 1) % devices) for n in range(devices)])
        return jnp.where(half > 0, moved, lax.psum(half, "i"))

    return jax.shard_map(body, mesh=mesh, in_specs=halves, out_specs=halves)


WRAPPERS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda a: jax.vmap(f)(jnp.stack([a, a[::-1]])).sum(0),
    "batched cond": lambda f: lambda a: jax.vmap(lambda x: lax.cond(x > 0, lambda: f(spread(x))[0], lambda: x))(a),
    "cond": lambda f: lambda a: lax.cond(a[0] > 0, f, lambda b: b * 2.0, a),
    "switch": lambda f: lambda a: lax.switch((a[1] > 0).astype(int) + (a[2] > 0), [f, jnp.sqrt, jnp.sin], a),
    "scan": looped,
    "carried": carried,
    "counted": counted,
    "custom jvp": custom_jvp,
    "custom vjp": custom_vjp,
    "integer": beside_an_integer,
    "shard map": sharded,
}
# What the laws that hypothesis draws leave to the random programs.
MORE = {
    "backwards": backwards,
    "while": while_loop,
    "clipped vjp": clipped_vjp,
    "looped vjp": looped_vjp,
    "across": across,
    "selected": lambda f: lambda a: jnp.where(a > 0, f(a), a),
    "wrapped": lambda f: pg.double_where(f),
}
# They may not close over what is differentiated.
CUSTOM = {"custom jvp", "custom vjp", "clipped vjp"}
# Custom backward passes have no forward mode, and `while` has no other.
REVERSE_ONLY = {"custom vjp", "integer", "clipped vjp", "looped vjp"}
FORWARD_ONLY = {"while"}
COMPILED = {"across", "shard map"}
ONE = {**LANES, **MOVES, **COMPETITIONS}
TWO = {**PAIRS, **COMPETING_PAIRS}
ALL_ONE = {**ONE, **READS}
ACCESSES = {name: access for name, access in ACCESSES.items() if name not in WRONG_IN_JAX}
ALL_TWO = {**TWO, **ACCESSES}
ALL_WRAPPERS = {**WRAPPERS, **MORE}
COMPETING = {*COMPETITIONS, *COMPETING_PAIRS, "clip", "relu", "dynamic"}
ENDS = {
    "sum": jnp.sum,
    "first": lambda a: a[0],
    "weights": lambda a: a @ jnp.asarray(WEIGHTS, a.dtype),
    "positive": lambda a: jnp.sum(a, where=a > 0),
    "finite": lambda a: jnp.sum(jnp.where(jnp.isfinite(a), a, 0.0)),
}


def _with_second(operation, second, first):
    return operation(first, second)


def program(steps, end):
    """A function of a vector from its steps, each of which reads results of earlier ones.

    A step is an operation, the wrappers round it from the inside out, and which of the results it reads.
    """

    def function(x):
        values = [x]
        for name, wrappers, first, second in steps:
            read = lambda number: values[-1 - number % len(values)]
            wrappers = (wrappers,) if isinstance(wrappers, str) else wrappers
            operation, operands = {**ALL_ONE, **ALL_TWO}[name], [read(first)]
            if name in ALL_TWO and CUSTOM.issuperset(wrappers):
                operands.append(read(second))
            elif name in ALL_TWO:
                # These may not close over what is differentiated.
                wrappers = [wrapper for wrapper in wrappers if wrapper not in CUSTOM | REVERSE_ONLY]
                operation = functools.partial(_with_second, operation, read(second))
            for wrapper in wrappers:
                operation = ALL_WRAPPERS[wrapper](operation)
            values.append(operation(*operands))
        return ENDS[end](values[-1])

    return function


# --- running without compiling ----------------------------------------------------------------------------------------


def evaluated(function):
    """A function whose trace is run operation by operation, loops and branches too, so that none is compiled."""

    def run(*operands):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*operands)
        outputs = _outputs(closed, jax.tree.leaves(operands))
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return run


def _outputs(jaxpr, operands):
    consts, jaxpr = (jaxpr.consts, jaxpr.jaxpr) if hasattr(jaxpr, "consts") else ([], jaxpr)
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
    read = lambda atom: np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else values[atom]
    for equation in jaxpr.eqns:
        results = _results(equation, list(map(read, equation.invars)))
        values.update(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _results(equation, operands):
    name, out = equation.primitive.name, equation.outvars[0].aval if equation.outvars else None
    if name in IN_NUMPY:
        with np.errstate(all="ignore"):
            result = IN_NUMPY[name](equation.params, *map(np.asarray, operands))
        return [np.asarray(result, out.dtype).reshape(out.shape)]
    if name in {"jit", "pjit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}:
        return _outputs(primal_jaxpr(equation), operands)
    if name in OWN:
        return _outputs(shown(equation), operands)
    if name == "cond":
        branches = branches_of(equation)
        return _outputs(branches[int(np.clip(operands[0], 0, len(branches) - 1))], operands[1:])
    if name == "scan":
        return _scanned(scan_of(equation), operands)
    if name == "while" and not while_of(equation).test.jaxpr.outvars[0].aval.shape:
        parts = while_of(equation)
        rest = operands[parts.test_consts :]
        consts, carry = rest[: parts.body_consts], rest[parts.body_consts :]
        while _outputs(parts.test, [*operands[: parts.test_consts], *carry])[0]:
            carry = _outputs(parts.body, [*consts, *carry])
        return carry
    # Step by step, each operation in there would be compiled for itself.
    compiled = jax.jit if name in {"shard_map", "while"} else lambda function: function
    return compiled(lambda *operands: bind(equation, list(operands)))(*map(jnp.asarray, operands))


def _scanned(parts, operands):
    consts, rest = operands[: parts.consts], operands[parts.consts :]
    carry, xs = rest[: parts.carried], rest[parts.carried :]
    order = range(parts.length)
    steps = []
    for number in reversed(order) if parts.is_reversed else order:
        outputs = _outputs(parts.body, [*consts, *carry, *(np.asarray(x)[number] for x in xs)])
        carry = outputs[: parts.carried]
        steps.append(outputs[parts.carried :])
    steps = steps[::-1] if parts.is_reversed else steps
    return [*carry, *(np.stack(column) for column in zip(*steps, strict=True))]


def _broadcast(params, x, *_):
    sizes = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), params["shape"])


def _padded(params, x, value):
    config = params["padding_config"]
    if any(low < 0 or high < 0 for low, high, _ in config):
        return lax.pad(x, value, config)
    sizes = [low + high + n + max(n - 1, 0) * inside for n, (low, high, inside) in zip(x.shape, config, strict=True)]
    result = np.full(sizes, value)
    where = zip(x.shape, config, strict=True)
    result[tuple(slice(low, low + n + max(n - 1, 0) * inside, inside + 1) for n, (low, _, inside) in where)] = x
    return result


def _sliced(params, x):
    strides = params["strides"] or [1] * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _chosen(params, which, *cases):
    return np.choose(which.astype(int), cases) if which.shape else cases[int(which)]


def _iota(params):
    along = [-1 if axis == params["dimension"] else 1 for axis in range(len(params["shape"]))]
    count = params["shape"][params["dimension"]]
    return np.broadcast_to(np.arange(count).reshape(along), params["shape"])


def _dotted(params, a, b):
    (of_a, of_b), (batch_a, batch_b) = params["dimension_numbers"]
    free_a = [axis for axis in range(a.ndim) if axis not in (*of_a, *batch_a)]
    free_b = [axis for axis in range(b.ndim) if axis not in (*of_b, *batch_b)]
    names_a, names_b = [0] * a.ndim, [0] * b.ndim
    for name, (one, other) in enumerate(zip((*batch_a, *of_a), (*batch_b, *of_b), strict=True)):
        names_a[one] = names_b[other] = name
    for name, axis in enumerate(free_a, 10):
        names_a[axis] = name
    for name, axis in enumerate(free_b, 20):
        names_b[axis] = name
    result = [*(names_a[axis] for axis in batch_a), *(names_a[axis] for axis in free_a), *(names_b[b] for b in free_b)]
    return np.einsum(a, names_a, b, names_b, result)


def _cumulated(ufunc):
    def run(params, x):
        order = slice(None, None, -1 if params["reverse"] else 1)
        x = np.moveaxis(x, params["axis"], 0)[order]
        return np.moveaxis(ufunc.accumulate(x)[order], 0, params["axis"])

    return run


def _each(function):
    return lambda params, *operands: function(*operands)


def _along(ufunc):
    return lambda params, x: ufunc.reduce(x, tuple(params["axes"]))


# What NumPy computes as XLA does, but for last bits; nothing has to be compiled for it.
IN_NUMPY = {
    **{name: _each(getattr(np, name)) for name in ("abs", "sin", "cos", "tan", "exp", "exp2", "log", "log1p", "expm1")},
    **{name: _each(getattr(np, name)) for name in ("tanh", "sinh", "cosh", "sqrt", "cbrt", "sign", "floor", "ceil")},
    **{f"a{name}": _each(getattr(np, f"arc{name}")) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    **{name: _each(function) for name, function in (("max", np.maximum), ("min", np.minimum), ("mul", np.multiply))},
    **{name: _each(function) for name, function in (("add", np.add), ("sub", np.subtract), ("add_any", np.add))},
    **{name: _each(function) for name, function in (("eq", np.equal), ("ne", np.not_equal), ("lt", np.less))},
    **{name: _each(function) for name, function in (("le", np.less_equal), ("gt", np.greater), ("atan2", np.arctan2))},
    **{name: _each(function) for name, function in (("ge", np.greater_equal), ("neg", np.negative))},
    **{name: _each(function) for name, function in (("and", np.bitwise_and), ("or", np.bitwise_or))},
    **{name: _each(function) for name, function in (("xor", np.bitwise_xor), ("is_finite", np.isfinite))},
    **{name: _each(lambda x: x) for name in ("copy", "copy_p", "optimization_barrier", "reduce_precision", "pvary")},
    "not": _each(np.invert),
    "pow": _each(np.power),
    "square": _each(np.square),
    "rsqrt": _each(lambda x: 1 / np.sqrt(x)),
    "logistic": _each(lambda x: 1 / (1 + np.exp(-x))),
    "div": lambda p, a, b: np.divide(a, b) if a.dtype.kind in "fc" else np.asarray(lax.div(a, b)),
    "integer_pow": lambda p, x: x ** float(p["y"]) if p["y"] < 0 else x ** p["y"],
    "clamp": _each(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    "convert_element_type": lambda p, x: x.astype(p["new_dtype"]),
    "select_n": _chosen,
    "broadcast_in_dim": _broadcast,
    **{name: _each(lambda x, *_: x) for name in ("squeeze", "expand_dims")},
    "reshape": lambda p, x, *_: x if p["dimensions"] is None else x.transpose(p["dimensions"]),
    "transpose": lambda p, x: x.transpose(p["permutation"]),
    "concatenate": lambda p, *xs: np.concatenate(xs, p["dimension"]),
    "slice": _sliced,
    "rev": lambda p, x: np.flip(x, p["dimensions"]),
    "pad": _padded,
    "iota": _iota,
    "dot_general": _dotted,
    "reduce_sum": _along(np.add),
    "reduce_max": _along(np.maximum),
    "reduce_min": _along(np.minimum),
    "reduce_prod": _along(np.multiply),
    "reduce_and": _along(np.logical_and),
    "reduce_or": _along(np.logical_or),
    "cumsum": _cumulated(np.add),
    "cumprod": _cumulated(np.multiply),
    "cummax": _cumulated(np.maximum),
    "cummin": _cumulated(np.minimum),
}


# --- what has to hold -------------------------------------------------------------------------------------------------

NUMBERS = [0.0, 0.0, 1.0, 1.0, -1.0, 0.5, 0.5, -0.5, 2.0, 1e-9, 0.3, -1.7]


def all_wrappers(steps):
    for _, wrappers, _, _ in steps:
        yield from (wrappers,) if isinstance(wrappers, str) else wrappers


def has_forward_mode(steps):
    return REVERSE_ONLY.isdisjoint(all_wrappers(steps))


def has_reverse_mode(steps):
    return FORWARD_ONLY.isdisjoint(all_wrappers(steps))


def has_one_derivative(steps):
    """Whether JAX's two modes agree: out of bounds they do not."""
    return not any("promise" in name for name, _, _, _ in steps)


def assert_unchanged(found, expected, relative=1e-9, absolute=1e-13):
    """What is finite in JAX's is the same; what is rounded differs by no more than a part of the largest."""
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    found, expected = np.asarray(found), np.asarray(expected)
    finite = np.isfinite(expected)
    scale = np.abs(expected[finite]).max(initial=0.0)
    # A sum that cancels leaves rounding of its summands.
    np.testing.assert_allclose(found[finite], expected[finite], rtol=relative, atol=relative * scale + absolute)


def assert_agree(found, expected):
    """Equal where both are finite."""
    found = np.asarray(found)
    assert_unchanged(np.where(np.isfinite(found), found, expected), expected, 1e-7, 1e-6)


def is_tame(steps, x):
    """Whether no intermediate number is so large that rounding decides what is left of it."""
    values = []
    for length in range(1, len(steps) + 1):
        whole = program(steps[:length], "sum")
        derivative = jax.jacfwd(whole) if has_forward_mode(steps[:length]) else jax.grad(whole)
        values += [evaluated(derivative)(x), evaluated(whole)(x)]
    return all(np.all(~np.isfinite(v) | (np.abs(v) < 1e6)) for v in values)


DERIVATIVES = {
    "reverse": jax.grad,
    "forward": jax.jacfwd,
    "forward over reverse": lambda f: jax.jacfwd(jax.grad(f)),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "batched reverse": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x[::-1]])),
    "batched forward": lambda f: lambda x: jax.vmap(jax.jacfwd(f))(jnp.stack([x, x[::-1]])),
}
OF_FORWARD = {name for name in DERIVATIVES if "forward" in name}
OF_REVERSE = {name for name in DERIVATIVES if "reverse" in name}


class Outcome(str):
    """What became of a program: "same", "skipped" where JAX has no derivative, "rounding", or "wrong"."""


def compared(derivative, steps, end, x):
    """What became of a program, and why."""
    f, transform = program(steps, end), DERIVATIVES[derivative]
    try:
        value, expected = evaluated(f)(x), evaluated(transform(f))(x)
    except Exception:
        return "skipped", ""
    try:
        found_value, found = evaluated(pg.double_where(f))(x), evaluated(transform(pg.double_where(f)))(x)
    except Exception:
        return "raised", traceback.format_exc()
    double = x.dtype == np.float64
    try:
        assert np.asarray(found_value).tobytes() == np.asarray(value).tobytes(), (found_value, value)
        assert_unchanged(found, expected, *((1e-7, 1e-6) if double else (1e-3, 1e-3)))
    except AssertionError as error:
        largest = np.abs(expected, where=np.isfinite(expected), out=np.zeros(expected.shape)).max(initial=0)
        if largest > 1e6 or not is_tame(steps, x) or not is_tame(steps, x[::-1]):
            return "rounding", ""
        return "wrong", str(error)
    nans = np.isnan(found).sum(), np.isnan(expected).sum()
    return ("same", "") if nans[0] <= nans[1] else ("more NaN", f"{found} for {expected}")


def drawn(seed):
    """A random case: a derivative, the steps and end of a program, and a point."""
    r = random.Random(seed)
    derivative = r.choice(list(DERIVATIVES))
    unfit = (REVERSE_ONLY if derivative in OF_FORWARD else set()) | (
        FORWARD_ONLY if derivative in OF_REVERSE else set()
    )
    # Those that have to be compiled are drawn less often.
    wrappers = [name for name in ALL_WRAPPERS if name not in unfit and (name not in COMPILED or r.random() < 0.2)]

    def operation():
        return r.choice(list(r.choice([LANES, LANES, MOVES, COMPETITIONS, PAIRS, COMPETING_PAIRS, READS, ACCESSES])))

    def around():
        deep = r.choice([0, 0, 0, 0, 1, 1, 2, 3])
        return tuple(r.choice(wrappers) for _ in range(deep))

    steps = [(operation(), around(), r.randrange(4), r.randrange(4)) for _ in range(r.randint(1, 5))]
    x = np.array([r.choice(NUMBERS) for _ in range(SIZE)], r.choice([np.float64] * 5 + [np.float32]))
    return derivative, steps, r.choice(list(ENDS)), x


def tried(seed):
    """The case of a seed, and what became of it."""
    with jax.enable_x64(True):
        derivative, steps, end, x = drawn(seed)
        return (derivative, steps, end, x), compared(derivative, steps, end, jnp.asarray(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    counts, start = {}, time.time()
    for number in range(options.count):
        seed = options.seed + number
        case, (outcome, why) = tried(seed)
        counts[outcome] = counts.get(outcome, 0) + 1
        if outcome in {"wrong", "raised", "more NaN"}:
            print(f"--- {seed}: {outcome}: {case}\n{why if options.show else why[-300:]}", flush=True)
        if number % 100 == 99:
            print(f"{number + 1} in {time.time() - start:.0f} s: {counts}", flush=True)
        if number % 500 == 499:
            jax.clear_caches()
    print(counts)
    sys.exit(any(counts.get(outcome) for outcome in ("wrong", "raised")))


if __name__ == "__main__":
    main()
