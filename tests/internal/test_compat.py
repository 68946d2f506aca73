"""What partgrad needs of JAX that is not JAX's public interface: each piece of `_compat.py`, asked in a sentence."""

import contextlib
import inspect
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive, jaxpr_as_fun, set_current_trace, take_current_trace
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

import partgrad._compat as compat
from helpers.flags import flag_set
from partgrad._programs import bind, written


def error_of(f, *args):
    with pytest.raises(Exception) as raised:  # noqa: PT011
        f(*args)
    return raised.value


class Unregistered:
    pass


def traced(f, *args):
    return jax.make_jaxpr(f)(*args).jaxpr.eqns


def traced_inside(transform):
    """What `_compat` says of the trace that runs in a function under a transform."""
    said = []

    def f(x):
        said.append(compat.is_staging())
        return x

    transform(f)(jnp.ones(1))
    return said[0]


def seen_inside(transform):
    """Whether `_compat` says that the operand of a function under a transform is batched."""
    said = []
    transform(lambda x: said.append(compat.is_batched(x)) or x)(jnp.ones(1))
    return said[0]


def high_equation():
    """An equation of a primitive that shows only its rules, where this version of JAX makes one."""
    find = lambda f: next((e for e in traced(f, jnp.array(2.0)) if e.primitive.name == "call_hi_primitive"), None)
    found = find(lambda x: jax.lax.custom_root(lambda r: r**2 - x, x, lambda f, r: r, lambda g, y: y / g(1.0)))
    if found is None and getattr(jax.config, "jax_custom_vjp3", True) is False:
        with flag_set("jax_custom_vjp3"):
            f = jax.custom_vjp(jnp.sin)
            f.defvjp(lambda x: (x, None), lambda _, c: (c,))
            found = find(f)
    return found


def finds_a_forward_pass():
    """Whether the derivative of a rule with `optimize_remat` contains one, where JAX may make such an equation."""
    if not hasattr(jax.config, "jax_custom_vjp3"):
        return True
    with flag_set("jax_custom_vjp3"):
        f = jax.custom_vjp(jnp.sin)
        f.defvjp(lambda x: (jnp.sin(x), x), lambda x, c: (c * jnp.cos(x),), optimize_remat=True)
        return any(map(compat.is_forward_pass, traced(lambda x: jax.jvp(f, (x,), (x,)), 1.0)))


def finds_a_root():
    """From 0.12 on; before, `custom_root` is a `custom_jvp`."""
    solve = lambda f, x: x / 2
    root = lambda a: jax.lax.custom_root(lambda x: 2 * x - a, a, solve, lambda g, y: y / g(1.0))
    return jax.__version_info__ < (0, 12) or any(map(compat.is_root_primitive, traced(root, 1.0)))


def expands():
    equation = high_equation()
    return equation is None or len(compat.expansion_of(equation)(*map(_ones, equation.invars))) == len(equation.outvars)


def _ones(atom):
    return jnp.ones(atom.aval.shape, atom.aval.dtype)


def reads_and_writes():
    def f(read, written, added):
        written[...] = read[...]
        jax.ref.addupdate(added, ..., 1.0)

    return jax.make_jaxpr(f)(*(jax.new_ref(1.0) for _ in range(3))).jaxpr


def writes_of(jaxpr):
    return [compat.is_written(jaxpr, variable) for variable in jaxpr.invars]


def references_are_values():
    def f(x):
        reference = jax.new_ref(x)
        reference[...] = 2 * reference[...]
        return reference[...]

    jaxpr = compat.discharged(jax.make_jaxpr(f)(3.0))
    return not jaxpr.effects and float(jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, 3.0)[0]) == 6.0


def vjp_is_ordinary():
    f = compat.ordinary_custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, None), lambda _, c: (3 * c,))
    return float(jax.linearize(jax.grad(f), 1.0)[0]) == 3.0


def names_are_ordinary():
    with flag_set("jax_remat3"):
        (ordinary,) = traced(lambda x: compat.ordinary_name(x, "n"), 1.0)
    return ordinary.primitive.name == "name"


def checkpoints_are_ordinary():
    with flag_set("jax_remat3"):
        (ordinary,) = traced(compat.ordinary_checkpoint(jnp.sin), 1.0)
        high = traced(lambda x: jax.checkpoint(jnp.sin)(checkpoint_name(x, "a")), 1.0)
    run = lambda jaxpr, *operands: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *operands)
    again = [traced(compat.without_remat3(equation, run), 1.0) for equation in high]
    names = [equation.primitive.name for equations in again for equation in equations]
    return "call_hi_primitive" not in (ordinary.primitive.name, *names) and len(names) == len(high) == 2


def effectful():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    total = lambda x: jax.lax.psum(x, "i")
    specs = {"mesh": mesh, "in_specs": PartitionSpec("i"), "out_specs": PartitionSpec()}
    (sharded,) = traced(jax.shard_map(total, **specs), jnp.ones(1))
    return [*sharded.params["jaxpr"].eqns, *traced(lambda x: jax.debug.callback(print, x), 1.0)]


def written_rules():
    by_argument, at_once = jax.custom_jvp(lambda x: x), jax.custom_jvp(lambda x: x)
    by_argument.defjvps(lambda t, out, x: t)
    at_once.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    return [written(traced(f, 1.0)[0].params["jvp_jaxpr_fun"]) for f in (by_argument, at_once)]


def callbacks_are_silent():
    """JAX logs an error that a callback raises, and not inside the context."""

    def fail(x):
        raise ValueError("no")

    def logged(context):
        records = []
        handler = logging.Handler()
        handler.emit = records.append
        logger = logging.getLogger("jax._src.callback")
        logger.addHandler(handler)
        try:
            with context, contextlib.suppress(Exception):
                jax.block_until_ready(jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), 1.0))
        finally:
            logger.removeHandler(handler)
        return len(records)

    return logged(contextlib.nullcontext()) > 0 and logged(compat.silent_callbacks()) == 0


def devices_are_counted():
    """A program for one CPU, and one that is also for another platform."""
    said, asked = [], Primitive("asked")
    asked.def_abstract_eval(lambda x: x)
    mlir.register_lowering(asked, lambda context, x: said.append(compat.runs_on_one_device(context)) or [x])
    traced = jax.jit(asked.bind).trace(jnp.ones(1))
    traced.lower(lowering_platforms=("cpu",))
    traced.lower(lowering_platforms=("cpu", "cuda"))
    return said == [True, False]


def loops_are_parted():
    """The derivative of a loop, as what its operands determine and a linear loop."""
    x = jnp.arange(1.0, 4.0)
    f = lambda x: jax.lax.scan(lambda c, t: (c + jnp.sin(t), None), 0.0, x)[0]
    jaxpr = jax.make_jaxpr(lambda x, t: jax.jvp(f, (x,), (t,)))(x, x).jaxpr
    known, rest, unknown = compat.parted_program(jaxpr, [False, True])
    value, *residuals = jax.core.eval_jaxpr(known.jaxpr, known.consts, x)
    (rate,) = jax.core.eval_jaxpr(rest, [], *residuals, x)
    return unknown == [False, True] and bool(jnp.allclose(value, f(x)) & jnp.allclose(rate, (jnp.cos(x) * x).sum()))


def programs_are_transposed():
    """The transpose of a linear program that knows a coefficient, for the second of two outputs."""
    # As JAX makes them: what is known comes last among the scanned.
    linear = lambda c, t: (t, jax.lax.scan(lambda s, a: (s + a[0] * a[1], None), 0.0, (t, c))[0])
    c = jnp.arange(1.0, 4.0)
    pulled = compat.transposed_program(jax.make_jaxpr(linear)(c, c).jaxpr, 1, (1,))
    (found,) = jax.core.eval_jaxpr(pulled.jaxpr, pulled.consts, c, jnp.float32(2.0))
    return bool(jnp.allclose(found, 2 * c))


def backward_passes_are_replaced():
    """A gradient whose backward pass was doubled, and what that was given."""
    seen = []
    f = jax.custom_vjp(lambda x: x**2)
    f.defvjp(lambda x: (x**2, x), lambda x, ct: (2 * x * ct,))
    (equation,) = jax.make_jaxpr(f)(1.0).jaxpr.eqns

    def changed(function, residuals, given):
        seen.append((residuals, len(given)))
        return jax.tree.map(lambda ct: 2 * ct, function(*given))

    bound = lambda x: bind(equation, [x], **compat.with_backward_pass(equation, changed))[0]
    return float(jax.grad(bound)(3.0)) == 12.0 and seen == [(1, 2)]


def tangents_are_seen(transform):
    """Whether a value has a tangent, and one behind a `stop_gradient` and one under `jit` inside have none to see."""
    seen = []

    def f(x):
        seen.extend(map(compat.is_differentiated, (x, jax.lax.stop_gradient(x))))
        return x**2

    transform(f)(2.0)
    return seen == [True, False]


def eager_inside(transform):
    """Whether `_compat` says that a function under a transform runs operation by operation."""
    said = []

    def f(x):
        with take_current_trace() as trace:
            said.append(compat.is_eager(trace))
        return x

    transform(f)(jnp.ones(1))
    return said[0]


class Doubling(compat.PassingTrace):
    """Doubles each result of a sine, and leaves everything else as it is."""

    def passed(self, value):
        return value

    def run_operation(self, primitive, operands, params):
        found = primitive.bind(*operands, **params)
        return 2 * found if primitive.name == "sin" else found

    def run_function(self, function, operands):
        return jaxpr_as_fun(jax.make_jaxpr(function)(*operands))(*operands)


def passes_everything_on():
    """Whether a trace that passes everything on computes what JAX computes, rules and `shard_map` included."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rules = jax.custom_vjp(lambda x: x**2)
    rules.defvjp(lambda x: (x**2, x), lambda x, ct: (5 * x * ct,))

    def f(x):
        with take_current_trace() as around, set_current_trace(Doubling(around)):
            own = jax.shard_map(jnp.cos, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
            # JAX makes arrays of NumPy's and of Python's numbers by a call of its own.
            zeros = jnp.array(np.zeros(2)) + jnp.array([0.0, 0.0]) + jax.random.normal(jax.random.key(0), (2,)) * 0
            return jnp.sum(jax.lax.sin(jnp.array(x)) + jax.nn.relu(x) + rules(x) + own(x) + zeros)

    # What JAX's class only names.
    asked = {name for name in vars(jax.core.Trace) if name.startswith(("process_", "stage_"))}
    if not asked <= vars(compat.PassingTrace).keys():
        return False
    x = jnp.ones(2)
    expected = 2 * jnp.cos(x) + 1 + 5 * x - jnp.sin(x)
    return all(bool(jnp.allclose(g(x), expected)) for g in (jax.grad(f), jax.jit(jax.grad(f))))


PIECES = {
    "is_eager": (
        "A trace no longer says by `parent_trace` which one is around it, or the last one is not called EvalTrace.",
        lambda: eager_inside(jax.jacfwd) and eager_inside(jax.vmap) and not eager_inside(jax.jit),
    ),
    "PassingTrace": ("JAX asks something else of a trace.", passes_everything_on),
    "runs_on_one_device": (
        "The context of a lowering no longer says for which platforms and how many devices it is.",
        devices_are_counted,
    ),
    "speaks_of_structures": (
        "JAX says in other words that two trees do not match; read the new ones into `_OF_STRUCTURES`.",
        lambda: (
            compat.speaks_of_structures(error_of(jax.tree.map, lambda a, b: a, {"a": 1}, {"b": 1}))
            and compat.speaks_of_structures(error_of(lambda: jax.lax.cond(True, lambda: {"a": 1.0}, lambda: (1.0,))))
            and not compat.speaks_of_structures(error_of(jnp.dot, jnp.ones(2), jnp.ones(3)))
        ),
    ),
    "refuses_argument_of": (
        "JAX no longer names the class of an argument that is no array.",
        lambda: compat.refuses_argument_of(error_of(jax.jit(lambda x: x), Unregistered()), Unregistered),
    ),
    "is_staging": (
        "The trace that `jax.jit` runs is no longer called DynamicJaxprTrace.",
        lambda: traced_inside(jax.jit),
    ),
    "is_differentiated": (
        "The tracers of `jvp` and of `linearize` are no longer called JVPTracer and LinearizeTracer.",
        lambda: all(map(tangents_are_seen, (jax.grad, jax.jacfwd, lambda f: lambda x: jax.linearize(f, x)[0]))),
    ),
    "is_batched": (
        "The tracer that `jax.vmap` makes is no longer called BatchTracer.",
        lambda: seen_inside(jax.vmap) and not seen_inside(jax.jit),
    ),
    "has_side_effects": (
        "The effect of a collective is no longer a NamedAxisEffect.",
        lambda: [compat.has_side_effects(e) for e in effectful()] == [False, True],
    ),
    "adds_up_rules": (
        "A rule that `defjvps` makes is no longer called `jvp`, or elsewhere, or its equation no longer says so.",
        lambda: [compat.adds_up_rules(*rule) for rule in written_rules()] == [True, False],
    ),
    "expansion_of": (
        "An equation of `call_hi_primitive` no longer has its primitive in `params['_prim']`, with `in_tree` and `expand`.",
        expands,
    ),
    "is_forward_pass": (
        "The primitive of a forward pass is no longer an OptRemat in `params['_prim']`.",
        finds_a_forward_pass,
    ),
    "is_root_primitive": (
        "The primitive of `custom_root` is no longer a CustomRoot in `params['_prim']`.",
        finds_a_root,
    ),
    "foreign_implementation": (
        "The `impl` of a primitive of JAX no longer tells that it is JAX's own.",
        lambda: (
            [compat.foreign_implementation(e) for e in traced(lambda x: jnp.sin(x) + jnp.sort(x), jnp.ones(3))]
            == [None] * len(traced(lambda x: jnp.sin(x) + jnp.sort(x), jnp.ones(3)))
        ),
    ),
    "codes_of": (
        "The traceback of an equation no longer has `raw_frames()`, whose first item are the code objects.",
        lambda: (
            __file__ in {c.co_filename for c in compat.codes_of(traced(lambda x: 2 * x, 1.0)[0].source_info.traceback)}
        ),
    ),
    "ordinary_custom_vjp": (
        "`jax._src.config.custom_vjp3` is no longer a context that switches the new `jax.custom_vjp` off.",
        vjp_is_ordinary,
    ),
    "ordinary_checkpoint": (
        "`jax._src.config.remat3` is no longer a context that switches the new `jax.checkpoint` off.",
        checkpoints_are_ordinary,
    ),
    "silent_callbacks": (
        "JAX no longer logs that a callback raised by the logger `jax._src.callback`.",
        callbacks_are_silent,
    ),
    "parted_program": (
        "`partial_eval_jaxpr_nounits` in `jax._src.interpreters.partial_eval` no longer takes a jaxpr apart.",
        loops_are_parted,
    ),
    "transposed_program": (
        "`backward_pass` in `jax._src.interpreters.ad` is no longer the transpose of a jaxpr.",
        programs_are_transposed,
    ),
    "is_written": (
        "The effects of a jaxpr no longer say which references it reads, as a ReadEffect, and which it writes.",
        lambda: writes_of(reads_and_writes()) == [False, True, True],
    ),
    "discharged": (
        "`discharge_state` in `jax._src.state.discharge` no longer takes the references out of a jaxpr.",
        references_are_values,
    ),
    "with_backward_pass": (
        "The parameters `bwd` and `out_trees` of a `custom_vjp` are no longer its backward pass and what this takes.",
        backward_passes_are_replaced,
    ),
    "ordinary_name": (
        "`jax._src.config.remat3` is no longer a context that switches the new `checkpoint_name` off.",
        names_are_ordinary,
    ),
    "without_remat3": (
        "A checkpoint under `jax_remat3` is no longer a RematTraced with `jaxpr` and `policy`, or its name a CheckpointName.",
        checkpoints_are_ordinary,
    ),
}


@pytest.mark.parametrize("name", PIECES)
def test_what_is_not_public_in_jax_is_where_it_was(name):
    sentence, check = PIECES[name]
    try:
        answer = check()
    except Exception as error:
        pytest.fail(f"JAX {jax.__version__} moved what `_compat.{name}` reads. {sentence} ({error!r})")
    assert answer, f"JAX {jax.__version__} moved what `_compat.{name}` reads. {sentence}"


def test_every_piece_of_compat_is_asked():
    functions = dict(inspect.getmembers(compat, inspect.isfunction)) | {"PassingTrace": compat.PassingTrace}
    own = {name for name, f in functions.items() if f.__module__ == compat.__name__ and not name.startswith("_")}
    assert own == set(PIECES)


def test_a_piece_that_moved_is_told_in_a_sentence(monkeypatch):
    monkeypatch.setattr(compat, "_current_trace", lambda: "AnotherTrace")
    with pytest.raises(AssertionError, match=re.escape("The trace that `jax.jit` runs is no longer called")):
        test_what_is_not_public_in_jax_is_where_it_was("is_staging")
