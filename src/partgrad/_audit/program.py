"""A function at the place where it is differentiated, kept as a program that can be run again later."""

import contextlib
import inspect
import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._programs import Operands, evaluate, opened
from .._trees import is_differentiable


class Program(NamedTuple):
    """A function as a jaxpr of the arrays that reach it.

    Attributes:
        run: From the values of its operands to the function of the leaves that are differentiated.
        names: The paths of these leaves.
        places: The number of the operand that each leaf is.
    """

    run: Callable[[Operands], Callable[[list[Any]], Any]]
    names: tuple[str, ...]
    places: tuple[int, ...]


def recorded(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], argnums: Sequence[int], has_aux: bool
) -> tuple[Program, Operands]:
    """The program of a call, and its operands: concrete, or the tracers of an enclosing transformation.

    Python numbers that are not differentiated stay what they are, as the function may branch on them.
    """
    keyed, treedef = jax.tree_util.tree_flatten_with_path((tuple(args), kwargs))
    numbers = {argnum % len(args) for argnum in argnums}
    is_chosen = [path[0].idx == 0 and path[1].idx in numbers and is_differentiable(leaf) for path, leaf in keyed]
    leaves = [leaf for _, leaf in keyed]
    is_operand = [
        chosen or isinstance(leaf, jax.Array | np.ndarray | np.generic)
        for chosen, leaf in zip(is_chosen, leaves, strict=True)
    ]
    operands = [_array(leaf) for leaf, given in zip(leaves, is_operand, strict=True) if given]

    def flat(*values: Any) -> Any:
        rest = iter(values)
        filled = [next(rest) if given else leaf for leaf, given in zip(leaves, is_operand, strict=True)]
        positional, named = treedef.unflatten(filled)
        output = function(*positional, **named)
        return output[0] if has_aux else output

    # What it prints, it has printed already.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        closed, shape = jax.make_jaxpr(flat, return_shape=True)(*operands)
    jaxpr, consts = opened(closed)
    count, output = len(consts), jax.tree.structure(shape)
    positions = [number for number, given in enumerate(is_operand) if given]
    chosen = [number for number, is_one in enumerate(is_chosen) if is_one]
    places = tuple(count + positions.index(number) for number in chosen)

    def run(values: Operands) -> Callable[[list[Any]], Any]:
        def replayed(differentiated: list[Any]) -> Any:
            given = list(values)
            for place, value in zip(places, differentiated, strict=True):
                given[place] = value
            return output.unflatten(evaluate(jaxpr, given[:count], given[count:]))

        replayed.__name__ = replayed.__qualname__ = getattr(function, "__name__", type(function).__name__)
        return replayed

    names = tuple(_name(function, keyed[number][0]) for number in chosen)
    return Program(run, names, places), [*consts, *operands]


def _array(leaf: Any) -> Any:
    # A weak type is part of the program.
    return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)


def _name(function: Any, path: Any) -> str:
    """The path of a leaf, with the name of its argument."""
    targets = getattr(function, "_targets", None)
    if targets is not None:
        # A function of the list of selected leaves, as partgrad's own transforms differentiate.
        paths = [target.structure.path(i) for target in targets for i in target.plan.indices]
        return paths[path[-1].idx]
    parameters = _parameters(function)
    argument, rest = path[1], path[2:]
    number = getattr(argument, "idx", None)
    name = (
        parameters[number]
        if number is not None and number < len(parameters)
        else str(argument.key if number is None else number)
    )
    return name + jax.tree_util.keystr(rest)


def _parameters(function: Any) -> list[str]:
    with contextlib.suppress(TypeError, ValueError):
        return list(inspect.signature(function).parameters)
    return []


def host_copies(operands: Sequence[Any]) -> Operands:
    """Copies that stay as they are: a buffer may be donated to the next step."""
    return [_copy(operand) for operand in operands]


def _copy(operand: Any) -> Any:
    if jax.dtypes.issubdtype(getattr(operand, "dtype", None), jax.dtypes.prng_key):
        return jax.random.wrap_key_data(np.array(jax.random.key_data(operand)), impl=jax.random.key_impl(operand))
    return np.array(operand) if isinstance(operand, jax.Array | np.ndarray) else operand


def distance(one: Sequence[Any], other: Sequence[Any]) -> float:
    """How far two points are apart, relative to their size."""
    total = 0.0
    for a, b in zip(one, other, strict=False):
        if isinstance(a, np.ndarray) and np.issubdtype(a.dtype, np.floating) and a.shape == np.shape(b):
            first, second = (np.ravel(x)[:4096].astype(float) for x in (a, b))
            with np.errstate(all="ignore"):
                scale = np.abs(first).max(initial=0) + np.abs(second).max(initial=0)
                total += float(np.nan_to_num(np.abs(first - second).max(initial=0) / (scale or 1.0), nan=1.0))
    return total


class Conditions(NamedTuple):
    """The settings of JAX under which a function ran."""

    x64: bool
    precision: Any
    mesh: Any

    @classmethod
    def now(cls) -> "Conditions":
        """Those that hold here."""
        mesh = None
        # Inside a trace there is none to be had.
        with contextlib.suppress(ValueError):
            mesh = jax.sharding.get_mesh()
        return cls(jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision, mesh)

    @contextlib.contextmanager
    def again(self) -> Any:
        """A context in which they hold."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.x64))
            stack.enter_context(jax.default_matmul_precision(self.precision))
            if self.mesh is not None and not self.mesh.empty:
                stack.enter_context(jax.set_mesh(self.mesh))
            yield
