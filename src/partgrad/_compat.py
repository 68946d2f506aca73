"""Everything that depends on JAX's internals or on the texts of its errors, with reasons and versions.

Marks, selection and transforms need no private module of JAX: what is private is imported where it is used.
"""

import contextlib
import functools
import logging
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from types import CodeType

    from jax.extend.core import Jaxpr, JaxprEqn

# Python 3.11 has one lock for a cached property of all instances, and holds it while the property runs: a node of a
# user that takes a lock of its own while it is flattened would stop all threads. From 3.12 on there is none.
if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property):
        """Threads that ask at once all compute the value, and get the first."""

        def __get__(self, instance, owner=None):
            return self if instance is None else vars(instance).setdefault(self.attrname, self.func(instance))


# JAX has no class of its own for trees that do not match. Read on 0.10.2 and 0.12.
_OF_STRUCTURES = ("structure", "pytree", "PyTree", "tree prefix", "custom node", "treedef")


def speaks_of_structures(error: BaseException) -> bool:
    """Whether an error of JAX says that two trees do not match, so that a note on structures helps."""
    text = str(error)
    # A wrapper where only an array will do is another matter, though JAX speaks of pytrees there too.
    return "__jax_array__" not in text and any(words in text for words in _OF_STRUCTURES)


def refuses_argument_of(error: BaseException, cls: type) -> bool:
    """Whether an error of JAX says that an instance of a class is not an array; it has no class of its own either."""
    return f"{cls.__module__}.{cls.__qualname__}" in str(error)


# JAX exports no class of traces. Read on 0.10.2 and 0.12.


def is_staging() -> bool:
    """Whether operations are being recorded, as under `jax.jit`, whatever their operands are."""
    return _current_trace() == "DynamicJaxprTrace"


def is_differentiated(value: Any) -> bool:
    """Whether a value has a tangent right now, in `jvp`, `linearize` or `grad`, outside of `jit`."""
    name = type(value).__name__
    return name in ("JVPTracer", "LinearizeTracer") or (
        # An array of which steps are selected.
        name == "StackedTracer" and any(map(is_differentiated, value.values))
    )


def is_eager(trace: Any) -> bool:
    """Whether operations are run in the end, operation by operation, and not recorded, whatever transforms them."""
    while type(trace).__name__ != "DynamicJaxprTrace" and hasattr(trace, "parent_trace"):
        trace = trace.parent_trace
    return type(trace).__name__ == "EvalTrace"


def is_batched(value: Any) -> bool:
    """Whether `vmap` has an axis for a value."""
    return type(value).__name__ == "BatchTracer"


# What JAX asks of a trace is documented nowhere. Read on 0.10.2 and 0.12. A test compares it with what JAX's own class
# leaves to others, as a version may ask for more.


class PassingTrace(jax.core.Trace):
    """A trace that passes what a function does on to the trace around it; subclasses say how.

    Args:
        around: The trace around it.

    Attributes:
        parent_trace: The same.
    """

    def __init__(self, around: Any):
        super().__init__()
        self.parent_trace, self.requires_low = around, around.requires_low

    def passed(self, value: Any) -> Any:
        """A value as the trace around this one has it."""
        raise NotImplementedError

    def run_operation(self, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        """The results of an operation; called where the trace around this one is current."""
        raise NotImplementedError

    def run_function(self, function: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
        """The results of a function that JAX has not traced; called where the trace around this one is current."""
        raise NotImplementedError

    def stage_value(self, value: Any, /) -> Any:
        """JAX's name for making a value an array of this trace."""
        with _current(self.parent_trace):
            return self.parent_trace.stage_value(self.passed(value))

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        """JAX's name for it."""
        with _current(self.parent_trace):
            return self.run_operation(primitive, tracers, params)

    def process_shard_map(self, primitive: Any, function: Any, tracers: Sequence[Any], **params: Any) -> Any:
        """JAX's name for a `shard_map`, whose results have a structure of JAX's own."""
        return self._process_function("process_shard_map", tracers, (primitive, function), (), params)

    def process_call(self, primitive: Any, function: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        """JAX's name for a call, on 0.10."""
        return self._process_function("process_call", tracers, (primitive, function), (params,), {})

    def _process_function(self, name: str, tracers: Sequence[Any], before: Any, after: Any, params: Any) -> Any:
        from jax.extend.core import take_current_trace

        results: list[Any] = []

        def function(*operands: Any) -> list[Any]:
            with take_current_trace() as trace:
                results[:] = [getattr(trace, name)(*before, operands, *after, **params)]
            return list(results[0])

        with _current(self.parent_trace):
            outputs = self.run_function(function, tracers)
        return results[0].update(outputs) if hasattr(results[0], "update") else outputs

    def process_custom_jvp_call(
        self, primitive: Any, function: Any, jvp: Any, tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        """JAX's name for a function with a rule."""
        with _current(self.parent_trace):
            operands = list(map(self.passed, tracers))
            return self.parent_trace.process_custom_jvp_call(primitive, function, jvp, operands, **params)

    def process_custom_vjp_call(
        self, primitive: Any, function: Any, fwd: Any, bwd: Any, tracers: Sequence[Any], /, **params: Any
    ) -> Any:
        """JAX's name for a function with a rule for the backward pass."""
        with _current(self.parent_trace):
            operands = list(map(self.passed, tracers))
            return self.parent_trace.process_custom_vjp_call(primitive, function, fwd, bwd, operands, **params)


def _current(trace: Any) -> contextlib.AbstractContextManager[Any]:
    # Imports Pallas, which `partgrad.grad` does not need.
    from jax.extend.core import set_current_trace

    return set_current_trace(trace)


# JAX exports no class of effects. Read on 0.10.2 and 0.12.


def has_side_effects(equation: "JaxprEqn") -> bool:
    """Whether an equation does more than compute its results: the effect of a collective only names its mesh axis."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)


def is_written(jaxpr: "Jaxpr", variable: Any) -> bool:
    """Whether a jaxpr writes to an input that is a mutable reference."""
    effects = (effect for effect in jaxpr.effects if getattr(effect, "input", None) is variable)
    return any(type(effect).__name__ != "ReadEffect" for effect in effects)


# JAX exports no name for what `defjvps` makes. Read on 0.10.2 and 0.12.
_CUSTOM_DERIVATIVES = pathlib.Path(jax.__file__).parent / "_src" / "custom_derivatives.py"


def adds_up_rules(name: str, file: str) -> bool:
    """Whether a function of this name and file is JAX's own that adds up the rules for single arguments."""
    return name == "jvp" and file.startswith(f"{_CUSTOM_DERIVATIVES}:")


# There is no public access to what a primitive computes. Read on 0.10.2 and 0.12.


def expansion_of(equation: "JaxprEqn") -> Callable[..., Any]:
    """What a `call_hi_primitive` computes, as a function of its operands."""
    primitive = equation.params["_prim"]
    unflattened = lambda operands: jax.tree.unflatten(primitive.in_tree, operands)
    return lambda *operands: jax.tree.leaves(primitive.expand(*unflattened(operands)))


def is_forward_pass(equation: "JaxprEqn") -> bool:
    """Whether an equation is the forward pass of a rule with `optimize_remat`, differentiated already.

    JAX 0.12 gives it neither a derivative nor a batching rule.
    """
    return type(equation.params.get("_prim")).__name__ == "OptRemat"


def is_root_primitive(equation: "JaxprEqn") -> bool:
    """Whether an equation is a call of `jax.lax.custom_root`, from JAX 0.12 on."""
    return type(equation.params.get("_prim")).__name__ == "CustomRoot"


def foreign_implementation(equation: "JaxprEqn") -> Callable[..., Any] | None:
    """What a primitive of another library computes, as a function of its operands; None for JAX's own."""
    implementation = equation.primitive.impl
    home = getattr(getattr(implementation, "func", implementation), "__module__", None) or "jax"
    if home.split(".")[0] in ("jax", "jaxlib"):
        return None
    return lambda *operands: implementation(*operands, **equation.params)


def codes_of(traceback: Any) -> Iterable["CodeType"]:
    """The code of the running functions in a traceback of JAX; its `frames` cost ten times more."""
    return traceback.raw_frames()[0] if traceback is not None else ()


def _current_trace() -> str:
    # Imports Pallas, which `partgrad.grad` does not need.
    from jax.extend.core import take_current_trace

    with take_current_trace() as trace:
        return type(trace).__name__


def _without(flag: str) -> contextlib.AbstractContextManager[Any]:
    """A block of code in which a flag of JAX is off, where it is there: no public context can set one.

    Read on 0.10.2 and 0.12. In a version without the flag, or that keeps it elsewhere, the flag stays as the user set
    it, and JAX's default is off.
    """
    try:
        from jax._src import config
    except ImportError:
        return contextlib.nullcontext()
    state = getattr(config, flag, None)
    return contextlib.nullcontext() if state is None else state(False)


def ordinary_custom_vjp(function: Callable[..., Any]) -> Any:
    """`jax.custom_vjp`, as a primitive that can be linearized.

    With the flag `jax_custom_vjp3`, JAX 0.10 makes one that has a backward pass only.
    """
    with _without("custom_vjp3"):
        return jax.custom_vjp(function)


def ordinary_checkpoint(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.checkpoint`, as a primitive with a transpose: with the flag `jax_remat3`, JAX makes one without."""

    # 0.10.2 reads the flag when it wraps the function, 0.12 when the function is called.
    def ordinary(*operands: Any) -> Any:
        with _without("remat3"):
            return jax.checkpoint(function, **options)(*operands)

    return ordinary


def without_remat3(equation: "JaxprEqn", run: Callable[..., Any]) -> Callable[..., Any] | None:
    """A checkpoint, or a name for one, that was made with the flag `jax_remat3`, as it is without; None for all else.

    Its own linearization, on 0.10.2 and 0.12, forgets in a second one what is to be computed again.

    Args:
        equation: A `call_hi_primitive`.
        run: From a jaxpr and operands to its outputs.
    """
    primitive = equation.params["_prim"]
    kind = type(primitive).__name__
    if kind == "RematTraced":
        # 0.10.2 does not state what it prevents.
        options = {"policy": primitive.policy, "prevent_cse": getattr(primitive, "prevent_cse", True)}
        return ordinary_checkpoint(functools.partial(run, primitive.jaxpr), **options)

    return (lambda value: [ordinary_name(value, primitive.name)]) if kind == "CheckpointName" else None


def ordinary_name(value: Any, name: str) -> Any:
    """`checkpoint_name`, as a primitive that can be batched: with the flag `jax_remat3`, JAX makes one that cannot."""
    from jax.ad_checkpoint import checkpoint_name

    with _without("remat3"):
        return checkpoint_name(value, name)


# JAX logs the traceback of a callback that raises, and has no switch for that. Read on 0.10.2 and 0.12.


@contextlib.contextmanager
def silent_callbacks() -> Iterator[None]:
    """A context in which JAX does not log that a callback raised: for trials, of which the user knows nothing."""
    logger = logging.getLogger("jax._src.callback")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


# What is lowered does not say in public for how many devices it is. Read on 0.10.2 and 0.12.


def runs_on_one_device(context: Any) -> bool:
    """Whether a primitive is lowered for a program that runs on one CPU, so that a callback needs no sharding."""
    around = context.module_context
    is_plain = type(around.axis_context).__name__ == "ShardingContext"
    return is_plain and around.axis_context.num_devices == 1 and tuple(around.platforms) == ("cpu",)


# JAX exports neither how it takes a jaxpr apart nor its transpose. Read on 0.10.2 and 0.12.


def parted_program(jaxpr: "Jaxpr", unknown: Sequence[bool]) -> tuple[Any, "Jaxpr", list[bool]]:
    """A jaxpr as what its known inputs determine, and the rest.

    Args:
        jaxpr: An open jaxpr without constants.
        unknown: Which inputs are not known.

    Returns:
        A closed jaxpr from the known inputs to the known outputs and residuals, an open one from the residuals and the
        other inputs to the other outputs, and which outputs these are.
    """
    from jax._src.interpreters import partial_eval as _pe
    from jax.extend.core import ClosedJaxpr

    known, rest, flags, _ = _pe.partial_eval_jaxpr_nounits(ClosedJaxpr(jaxpr, []), list(unknown), False)
    return known, getattr(rest, "jaxpr", rest), list(flags)


def transposed_program(jaxpr: "Jaxpr", fixed: int, live: Sequence[int]) -> Any:
    """The transpose of a linear program: a closed jaxpr of its first inputs, which are fixed, and of cotangents.

    `jax.linear_transpose` would split it once more into what it knows and what it does not, and copy what it knows.

    Args:
        jaxpr: An open jaxpr without constants, linear in all inputs but the first ones.
        fixed: How many these are.
        live: The numbers of the outputs whose cotangents are given.
    """
    from jax._src.interpreters import ad as _ad, partial_eval as _pe

    jaxpr, _ = _pe.dce_jaxpr(jaxpr, [number in live for number in range(len(jaxpr.outvars))], True)
    avals = [variable.aval for variable in jaxpr.invars]

    def transposed(residuals: list[Any], cotangents: list[Any]) -> list[Any]:
        linear = [_ad.UndefinedPrimal(aval.to_ct_aval()) for aval in avals[fixed:]]
        found = _ad.backward_pass(jaxpr, True, [], [*residuals, *linear], cotangents)
        return list(map(_ad.instantiate_zeros, found[fixed:]))

    return jax.make_jaxpr(transposed)(avals[:fixed], [variable.aval for variable in jaxpr.outvars])


def discharged(jaxpr: Any) -> Any:
    """A closed jaxpr with values in place of its mutable references: what is left in those that it gets comes last.

    JAX does this to every program that it compiles, and has no public function for it (0.12).
    """
    from jax._src.state.discharge import discharge_state

    return discharge_state(jaxpr, lower=False)


def with_backward_pass(equation: "JaxprEqn", change: Callable[..., Any]) -> dict[str, Any]:
    """The parameter of a `custom_vjp` that holds its backward pass, with another one there.

    Args:
        equation: The `custom_vjp`.
        change: From the backward pass, how many residuals it takes, and residuals and cotangents, to what it returns.
    """
    from jax._src import linear_util as _lu

    backward = equation.params["bwd"]

    def run(*given: Any) -> Any:
        return change(backward.call_wrapped, equation.params["out_trees"]()[1].num_leaves, given)

    return {"bwd": _lu.wrap_init(run, debug_info=backward.debug_info)}
