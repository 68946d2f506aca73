"""What belongs to a recorded call: its program, how far two points are apart, the settings of JAX."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from .._programs import Recorded
from .._transforms import Call
from .._trees import is_differentiable
from .tap import passed_on


def recorded(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], argnums: Sequence[int], has_aux: bool
) -> Recorded:
    """The program of a call of which some arguments are differentiated."""
    keyed, _ = jax.tree_util.tree_flatten_with_path((tuple(args), kwargs))
    numbers = {argnum % len(args) for argnum in argnums}
    chosen = [path[0].idx == 0 and path[1].idx in numbers and is_differentiable(leaf) for path, leaf in keyed]
    paths = [_name(function, path) for (path, _), is_one in zip(keyed, chosen, strict=True) if is_one]
    return Recorded(function, args, kwargs, chosen, paths, has_aux, passed_on)


def _name(function: Any, path: Any) -> str:
    """The path of a leaf, with the name of its argument."""
    if isinstance(function, Call):
        return function.paths[path[-1].idx]
    parameters = _parameters(function)
    argument, rest = path[1], path[2:]
    number = getattr(argument, "idx", None)
    if number is None:
        return named_leaf((argument, *rest))
    name = parameters[number] if number < len(parameters) else str(number)
    return name + jax.tree_util.keystr(rest)


def named_leaf(path: Any) -> str:
    """The path of a leaf of arguments by name."""
    return str(path[0].key) + jax.tree_util.keystr(path[1:])


def _parameters(function: Any) -> list[str]:
    with contextlib.suppress(TypeError, ValueError):
        return list(inspect.signature(function).parameters)
    return []


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
