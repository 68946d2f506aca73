"""What belongs to a recorded call: its program, how far two points are apart, the settings of JAX."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._programs import Recorded
from .._transforms import Call
from .._trees import is_differentiable


def recorded(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], argnums: Sequence[int], has_aux: bool
) -> Recorded:
    """The program of a call of which some arguments are differentiated."""
    keyed, _ = jax.tree_util.tree_flatten_with_path((tuple(args), kwargs))
    numbers = {argnum % len(args) for argnum in argnums}
    chosen = [path[0].idx == 0 and path[1].idx in numbers and is_differentiable(leaf) for path, leaf in keyed]
    paths = [_name(function, path) for (path, _), is_one in zip(keyed, chosen, strict=True) if is_one]
    return Recorded(function, args, kwargs, chosen, paths, has_aux)


def _name(function: Any, path: Any) -> str:
    """The path of a leaf, with the name of its argument."""
    if isinstance(function, Call):
        return function.paths[path[-1].idx]
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
    def again(self) -> Iterator[None]:
        """A context in which they hold."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(self.x64))
            stack.enter_context(jax.default_matmul_precision(self.precision))
            if self.mesh is not None and not self.mesh.empty:
                stack.enter_context(jax.set_mesh(self.mesh))
            yield
