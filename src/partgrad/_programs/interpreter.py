"""Run a jaxpr with a rule for its equations: the one interpreter.

`run` is the usual entry. `step_through` is the loop beneath it, for values that are not arrays: sets of sources, masks,
future tangents. `reenter` stages a loop, a branch or a call again with other bodies, and `bind` runs one equation.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import NamedSharding, PartitionSpec

from .._compat import expansion_of, foreign_implementation, is_staging, ordinary_checkpoint
from .equations import (
    Chain,
    Operands,
    any_equation,
    branches_of,
    checkpoint_settings,
    explicit_sharding,
    inner_jaxprs,
    jaxpr_and_consts,
    name_of,
    platforms_of,
    primal_jaxpr,
    scan_of,
    shard_map_axes,
    shard_map_specs,
    varying_axes,
    while_of,
)
from .lines import has_line
from .primitives import (
    CALLS,
    CHECKPOINTS,
    CUSTOM_RULES,
    HIGH,
    OWN,
    kind_of,
)

_RULED = CUSTOM_RULES | HIGH
# Takes an equation and the values of its operands; returns the values of its results, or None to run it unchanged.
EquationRule = Callable[[Chain, Operands], Operands | None]


def step_through(
    jaxpr: Jaxpr,
    consts: Operands,
    operands: Operands,
    step: Callable[[JaxprEqn, Operands], Operands],
    literal: Callable[[Literal], Any] = lambda literal: literal.val,
) -> Operands:
    """What stands for the outputs of a jaxpr, equation by equation, of whatever kind its values are.

    Args:
        jaxpr: An open jaxpr.
        consts: What stands for its constants.
        operands: What stands for its inputs.
        step: From an equation and what stands for its operands to what stands for its results.
        literal: What stands for a number that the jaxpr spells out.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(lambda x, y: jnp.sin(x) + y * x)(1.0, 2.0).jaxpr
        >>> deepest = lambda equation, depths: [1 + max(depths)]
        >>> step_through(jaxpr, [], [0, 0], deepest, literal=lambda literal: 0)
        [2]
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
    read = lambda atom: literal(atom) if isinstance(atom, Literal) else values[atom]
    for equation, finished in zip(jaxpr.eqns, _last_used(jaxpr), strict=True):
        results = step(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
        for variable in finished:
            del values[variable]
    return [read(atom) for atom in jaxpr.outvars]


def _last_used(jaxpr: Jaxpr) -> list[list[Any]]:
    """For each equation, the variables that are not needed after it, so that an evaluation can drop them."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    finished = []
    for equation in reversed(jaxpr.eqns):
        used = {atom for atom in (*equation.invars, *equation.outvars) if not isinstance(atom, Literal)}
        finished.append(list(used - needed))
        needed |= used
    return finished[::-1]


def run(
    jaxpr: Jaxpr,
    consts: Operands,
    operands: Operands,
    rule: EquationRule,
    *,
    inside: Chain = (),
    wanted: Callable[[JaxprEqn], bool] | None = None,
    in_place: Container[str] = (),
    context: Callable[[Chain], Any] = lambda chain: contextlib.nullcontext(),
) -> Operands:
    """The outputs of a jaxpr in which a rule stands in for some equations, at any depth.

    The rule is asked about an equation that contains others before it is asked about these. Where it answers None, a
    call, loop, conditional, checkpoint or `shard_map` is entered and staged again, and any other equation is run as it
    was: a custom derivative rule too, unless it is named by `in_place`. A rule that wants more runs an equation itself,
    by `bind`, `reenter` or `run` with `inside=chain`, and returns the results.

    Args:
        jaxpr: An open jaxpr.
        consts: The values of its constants.
        operands: The values of its inputs.
        rule: From an equation, after those that it is inside, and the values of its operands to the values of its
            results, or to None.
        inside: The equations that the jaxpr itself is inside.
        wanted: The rule is asked only about these equations and about what contains them, and all else is left as it
            is. None for every equation.
        in_place: The names of primitives whose body is run in the place of the equation, not staged as a call; the
            derivative rules of custom ones are thereby lost.
        context: From an equation, after those that it is inside, to a context in which it is run: a `jax.named_scope`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> closed = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, lambda _, c: jnp.sin(c), x))(0.5)
        >>> def cosine(chain, operands):
        ...     return [jnp.cos(operands[0])] if chain[-1].primitive.name == "sin" else None
        >>> (value,) = run(closed.jaxpr, closed.consts, [0.5], cosine)
        >>> bool(jnp.allclose(value, jnp.cos(jnp.cos(jnp.cos(0.5)))))
        True
    """

    def within(chain: Chain) -> Callable[..., Operands]:
        return functools.partial(run, rule=rule, inside=chain, wanted=wanted, in_place=in_place, context=context)

    def step(equation: JaxprEqn, given: Operands) -> Operands:
        chain = (*inside, equation)
        contains = wanted is None or any(any_equation(inner, wanted) for inner in inner_jaxprs(equation))
        with context(chain):
            results = rule(chain, given) if contains or (wanted is not None and wanted(equation)) else None
            if results is None and contains and equation.primitive.name in in_place:
                results = within(chain)(*jaxpr_and_consts(primal_jaxpr(equation)), given)
            if results is None and contains:
                results = reenter(equation, given, within(chain))
            return bind(equation, given) if results is None else results

    return step_through(jaxpr, consts, operands, step)


def evaluate(jaxpr: Jaxpr, consts: Operands, operands: Operands) -> Operands:
    """The outputs of a jaxpr, equation by equation."""
    outputs = step_through(jaxpr, consts, operands, bind)
    return [as_array(output, atom.aval) for output, atom in zip(outputs, jaxpr.outvars, strict=True)]


def bind(equation: JaxprEqn, operands: Operands, **changed: Any) -> Operands:
    """Run an equation on other operands, and with other parameters if given, under its own source line."""
    if equation.primitive.name == "pvary":
        # What has been selected by a varying predicate varies already.
        return [varying_like(value, variable.aval) for value, variable in zip(operands, equation.outvars, strict=True)]
    is_foreign = kind_of(equation.primitive.name) is None
    if is_foreign or equation.primitive.name in _RULED:
        # The rule of another library may ask its operands for attributes of arrays, and take anything else for static
        # data. A traced array would not do either: a jaxpr would keep its number.
        with jax.ensure_compile_time_eval() if is_foreign else contextlib.nullcontext():
            operands = [as_array(value, atom.aval) for value, atom in zip(operands, equation.invars, strict=True)]
            operands = [jnp.asarray(v) if is_foreign and isinstance(v, np.ndarray) else v for v in operands]
    parameters = equation.primitive.get_bind_params({**equation.params, **changed})
    functions, parameters = parameters if isinstance(parameters, tuple) else ((), parameters)

    def run(*operands: Any) -> Operands:
        results = equation.primitive.bind(*functions, *operands, **parameters)
        return list(results) if equation.primitive.multiple_results else [results]

    with source_of(equation):
        return (jax.jit(run) if _has_to_be_compiled(equation) else run)(*operands)


def _has_to_be_compiled(equation: JaxprEqn) -> bool:
    """Whether JAX cannot run an equation step by step: a `shard_map` inside of one, on axes that are not manual yet."""
    if equation.primitive.name != "shard_map" or is_staging():
        return False
    return any_equation(jaxpr_and_consts(primal_jaxpr(equation))[0], lambda inner: inner.primitive.name == "shard_map")


def rebind(equation: JaxprEqn, operands: Operands, change: Callable[[Any], Any]) -> Operands:
    """Run an equation with each jaxpr in its parameters changed to one of the same inputs and outputs."""
    changed = {}
    for name, parameter in equation.params.items():
        items = parameter if isinstance(parameter, tuple | list) else (parameter,)
        new = [change(item) if hasattr(jaxpr_and_consts(item)[0], "eqns") else item for item in items]
        if any(map(operator.is_not, new, items)):
            kind = type(parameter)
            changed[name] = new[0] if items[0] is parameter else getattr(kind, "_make", kind)(new)
    return bind(equation, operands, **changed)


class source_of:
    """A context in which what is traced gets the source line and the names of an equation."""

    def __init__(self, equation: JaxprEqn):
        source = equation.source_info
        names = source_info_util.current_name_stack() + source.name_stack
        # A trace begins with the lines inside it. If none of them is the user's, those running now may be.
        traceback = source.traceback if has_line(equation) else None
        self._settings, self._line = equation.ctx.manager, source_info_util.user_context(traceback, name_stack=names)

    def __enter__(self) -> None:
        self._settings.__enter__()
        self._line.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._line.__exit__(*raised)
        self._settings.__exit__(*raised)


def with_constants_as_inputs(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr whose constants are its first inputs, so that it holds none of their values."""
    debug_info = jaxpr.debug_info._replace(arg_names=None, result_paths=None) if jaxpr.debug_info else None
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    return Jaxpr([], inputs, jaxpr.outvars, jaxpr.eqns, jaxpr.effects, debug_info)


def expanded(equation: JaxprEqn) -> ClosedJaxpr | None:
    """What a primitive that is not JAX's own, or that shows only its rules, computes.

    Returns:
        A jaxpr of the operands of the equation; None for JAX's other primitives, and where it cannot be traced.
    """
    function = expansion_of(equation) if equation.primitive.name in HIGH else foreign_implementation(equation)
    if function is None:
        return None
    try:
        with source_of(equation):
            return jax.make_jaxpr(function)(*(atom.aval for atom in equation.invars))
    except (TypeError, AttributeError, NotImplementedError):
        # One that runs code of NumPy or C on numbers refuses tracers (JAX's own errors are TypeErrors), and a mere
        # placeholder has no implementation: there is no jaxpr to show.
        return None


# --- control flow ----------------------------------------------------------------------------------------------------


def reenter(
    equation: JaxprEqn, operands: Operands, run: Callable[..., Operands], *, counted: bool = False
) -> Operands | None:
    """Run an equation that contains jaxprs, with each of them run in another way.

    Args:
        equation: A call, a loop, a conditional, a checkpoint or a `shard_map`.
        operands: The values of its operands.
        run: From an open jaxpr, its constants and its operands to its outputs; it may be staged.
        counted: Whether `run` is given, for the body of a loop, the number of the step as a further argument `step`;
            that of a scan is the place of what it reads and writes in the arrays, in either direction.

    Returns:
        The values of the results, or None for an equation of another kind.
    """
    name = equation.primitive.name
    with source_of(equation):
        if name in _LOOPS:
            return list(_LOOPS[name](equation, operands, run, counted))
        return list(_REENTRIES[name](equation, operands, run)) if name in _REENTRIES else None


def _body(jaxpr: Any, run: Callable[..., Operands], step: Any = None) -> Callable[..., Operands]:
    run = run if step is None else functools.partial(run, step=step)
    return lambda *operands: run(*jaxpr_and_consts(jaxpr), list(operands))


def _call(equation: JaxprEqn, operands: Operands, run: Callable[..., Operands]) -> Operands:
    body = _body(primal_jaxpr(equation), run)
    body.__name__ = name_of(equation)
    return jax.jit(body, inline=equation.params.get("inline", False))(*operands)


def _scan(equation: JaxprEqn, operands: Operands, run: Callable[..., Operands], counted: bool) -> Operands:
    loop = scan_of(equation)
    consts, carry = operands[: loop.consts], operands[loop.consts :][: loop.carried]

    def step(carry: Operands, xs: tuple[Any, Operands]) -> tuple[Operands, Operands]:
        number, own = xs
        outputs = _body(loop.body, run, number)(*consts, *carry, *own)
        return outputs[: loop.carried], outputs[loop.carried :]

    xs = jnp.arange(loop.length) if counted else None, operands[loop.consts + loop.carried :]
    carry, stacked = scan_like(equation, step, carry, xs)
    return [*carry, *stacked]


def scan_like(equation: JaxprEqn, step: Callable[..., Any], carry: Any, xs: Any, *, backwards: bool = False) -> Any:
    """`jax.lax.scan` with the length, direction and unrolling of an equation, or in the other direction."""
    loop = scan_of(equation)
    is_reversed, unroll = loop.is_reversed != backwards, equation.params["unroll"]
    return lax.scan(step, carry, xs, length=loop.length, reverse=is_reversed, unroll=unroll)


def _while(equation: JaxprEqn, operands: Operands, run: Callable[..., Operands], counted: bool) -> Operands:
    loop = while_of(equation)
    tested, rest = operands[: loop.test_consts], operands[loop.test_consts :]
    consts, carry = rest[: loop.body_consts], rest[loop.body_consts :]
    (predicate,) = jaxpr_and_consts(loop.test)[0].outvars
    first: tuple[Any, Operands] = (jnp.zeros((), int), carry)

    def going(number: Any, carry: Operands) -> Any:
        return _body(loop.test, run, number if counted else None)(*tested, *carry)[0]

    def step(numbered: tuple[Any, Operands]) -> tuple[Any, Operands]:
        number, carry = numbered
        new = _body(loop.body, run, number if counted else None)(*consts, *carry)
        if predicate.aval.shape:
            # Under `jax.vmap`, each element of the batch (the leading axes of every carry) stops on its own.
            mask = going(number, carry)
            spread = lambda value: lax.broadcast_in_dim(mask, value.shape, range(mask.ndim))
            new = [lax.select(spread(after), after, before) for after, before in zip(new, carry, strict=True)]
        return number + 1, new

    return lax.while_loop(lambda numbered: going(*numbered).any(), step, first)[1]


def _cond(equation: JaxprEqn, operands: Operands, run: Callable[..., Operands]) -> Operands:
    return switch_like(equation, operands[0], [_body(branch, run) for branch in branches_of(equation)], *operands[1:])


def switch_like(equation: JaxprEqn, index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """`jax.lax.switch`, or `jax.lax.platform_dependent` if that made the equation: a platform compiles its branch."""
    platforms = platforms_of(equation)
    if platforms is None:
        return lax.switch(index, branches, *operands)
    of_platforms = {name: branch for names, branch in zip(platforms, branches, strict=True) for name in names or ()}
    default = next((b for names, b in zip(platforms, branches, strict=True) if names is None), None)
    return lax.platform_dependent(*operands, default=default, **of_platforms)


def _checkpoint(equation: JaxprEqn, operands: Operands, run: Callable[..., Operands]) -> Operands:
    policy, prevent_cse = checkpoint_settings(equation)
    return ordinary_checkpoint(_body(primal_jaxpr(equation), run), prevent_cse=prevent_cse, policy=policy)(*operands)


def checkpoint_like(equation: JaxprEqn, function: Callable[..., Any], prevented: Any = None) -> Callable[..., Any]:
    """`jax.checkpoint` with the policy of an equation, for a function of any arguments.

    Args:
        equation: A checkpoint.
        function: The function.
        prevented: A tree like the arguments of flags for `prevent_cse`, if the equation has one for each operand.
    """
    policy, prevent_cse = checkpoint_settings(equation)
    return ordinary_checkpoint(
        function, prevent_cse=prevented if isinstance(prevent_cse, tuple) else prevent_cse, policy=policy
    )


def _shard_map(equation: JaxprEqn, operands: Operands, run: Callable[..., Operands]) -> Operands:
    body = lambda *operands: tuple(_body(primal_jaxpr(equation), run)(*operands))
    return shard_map_like(equation, body, *shard_map_specs(equation))(*operands)


def shard_map_like(equation: JaxprEqn, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """`jax.shard_map` over the mesh axes of an equation."""
    p = equation.params
    specs = {"in_specs": in_specs, "out_specs": out_specs, "axis_names": shard_map_axes(equation)}
    return jax.shard_map(function, mesh=p["mesh"], check_vma=p["check_vma"], **specs)


def _own(equation: JaxprEqn, operands: Operands, run: Callable[..., Operands]) -> Operands:
    if equation.params["hints"]:
        # The value of a derivative, which is differentiated no further.
        return run(*jaxpr_and_consts(primal_jaxpr(equation)), operands)
    return list(equation.params["program"].changed(run, operands).run(operands))


_LOOPS = {"scan": _scan, "while": _while}
_REENTRIES: dict[str, Callable[[JaxprEqn, Operands, Callable[..., Operands]], Operands]] = {
    **dict.fromkeys(CALLS, _call),
    **dict.fromkeys(CHECKPOINTS, _checkpoint),
    "cond": _cond,
    "shard_map": _shard_map,
    OWN[0]: _own,
}


# --- values of a shape and dtype -------------------------------------------------------------------------------------


def as_array(value: Any, aval: Any) -> Any:
    """A number in a jaxpr as an array, weakly typed if the number is."""
    # JAX's class for such numbers has a dtype but no shape.
    if hasattr(value, "shape") or not hasattr(aval, "dtype"):
        return value
    weak = jnp.asarray(value)
    return weak if aval.weak_type and weak.dtype == aval.dtype else jnp.asarray(value, aval.dtype)


def zeros_like_aval(aval: Any) -> Any:
    """Zeros of a shape, dtype, weak type, sharding and, inside `shard_map`, the mesh axes over which they vary."""
    if aval.weak_type and jnp.issubdtype(aval.dtype, jnp.inexact):
        zeros = lax.full(aval.shape, 0j if jnp.issubdtype(aval.dtype, jnp.complexfloating) else 0.0)
        zeros = zeros if zeros.dtype == aval.dtype else jnp.zeros(aval.shape, aval.dtype)
    else:
        zeros = lax.full(aval.shape, 0, aval.dtype)
    return varying_like(zeros, aval)


def varying_like(value: Any, aval: Any) -> Any:
    """A value that varies over the same mesh axes as another inside `shard_map`, or is sharded like it.

    It may be of size one along axes where the other is not: these are not sharded.
    """
    missing = varying_axes(aval) - varying_axes(jax.typeof(value))
    if missing:
        return lax.pcast(value, tuple(sorted(missing)), to="varying")
    sharding = explicit_sharding(aval)
    if sharding is None:
        return value
    axes = zip(sharding.spec, value.shape, aval.shape, strict=True)
    spec = PartitionSpec(*(name if size == whole else None for name, size, whole in axes))
    is_placed = jax.typeof(value).sharding.spec == spec
    return value if is_placed else jax.sharding.reshard(value, NamedSharding(sharding.mesh, spec))


def float0_zeros(value: Any) -> np.ndarray[Any, Any]:
    """The tangent of a value whose dtype has no tangents."""
    return np.zeros(value.shape, jax.dtypes.float0)
