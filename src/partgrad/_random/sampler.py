"""A sampler and its arguments: which one takes the key, and how errors name them."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten_with_path

from .._programs import running_line
from .._trees import held_by, parameters_of, paths

_KEY_NAMES = ("key", "rng_key", "rng", "seed")
# These say how many numbers are drawn and in which form, not from which distribution.
_NOT_OF_THE_DISTRIBUTION = ("shape", "sample_shape", "dtype")
_DEPTH = 3


def is_parameter(leaf: Any) -> bool:
    """Whether a leaf can carry a derivative into a draw: only tracers do."""
    # Not `hasattr(leaf, "dtype")`, which is also true of `jnp.float32` passed as `dtype=`.
    return isinstance(leaf, jax.core.Tracer) and jnp.issubdtype(leaf.dtype, jnp.inexact)


class Drawing:
    """One call of a sampler: its name, as the user would write it, and the file and line of the call."""

    def __init__(self, sampler: Callable[..., Any], key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.sampler, self.key, self.args, self.kwargs = sampler, key, args, kwargs
        self.name, self.site = _name(sampler), running_line()
        self._parameters = parameters_of(sampler) or {}
        self._key_keyword = _key_keyword(self._parameters)

    def run(self) -> Any:
        """Draw."""
        if self._key_keyword:
            return self.sampler(*self.args, **{self._key_keyword: self.key}, **self.kwargs)
        return self.sampler(self.key, *self.args, **self.kwargs)

    def isolated(self) -> "Drawing":
        """The same drawing from a copy of the object whose method the sampler is, for a trace of it.

        An object that caches what it computes would otherwise keep tracers of a trace that has ended.
        """
        sampler = self.sampler
        if inspect.ismethod(sampler) and not inspect.isclass(sampler.__self__):
            sampler = sampler.__func__.__get__(copy.copy(sampler.__self__))
        return self._like(sampler, self.args, self.kwargs)

    def changed(self, change: Callable[[Any, str], Any]) -> "Drawing":
        """The same drawing with each parameter among its arguments changed by a function of it and its name."""
        names = iter([name for name, _ in self._arguments()])
        leaves, structure = jax.tree.flatten((self.args, self.kwargs))
        changed = [change(leaf, name) if is_parameter(leaf) else leaf for leaf, name in zip(leaves, names, strict=True)]
        return self._like(self.sampler, *structure.unflatten(changed))

    def parameters(self) -> list[Any]:
        """The parameters among the arguments."""
        return list(filter(is_parameter, jax.tree.leaves((self.args, self.kwargs))))

    def parameter_name(self, parameter: Any) -> str:
        """The name of a parameter of the sampler, whether an argument or closed over."""
        for argument, held in self._arguments():
            for name, leaf in _inside(held, argument, _DEPTH):
                if leaf is parameter:
                    return f"`{name}`"
        closed_over = "a value that the sampler closes over"
        names = [name for name, leaf in _inside(self.sampler, "", _DEPTH) if leaf is parameter]
        return f"`{names[0]}`, {closed_over}" if names else closed_over

    def log_prob_of(self, log_prob: Callable[..., Any], draw: Any) -> Any:
        """The log-probability of a draw, for the same arguments as the sampler's."""
        names = self._positional_names()
        args = [arg for arg, name in zip(self.args, names, strict=True) if name not in _NOT_OF_THE_DISTRIBUTION]
        kwargs = {name: value for name, value in self.kwargs.items() if name not in _NOT_OF_THE_DISTRIBUTION}
        return log_prob(draw, *args, **kwargs)

    def _like(self, sampler: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Drawing":
        other = copy.copy(self)
        other.sampler, other.args, other.kwargs = sampler, args, kwargs
        return other

    def _positional_names(self) -> list[str]:
        """The sampler's own names for its positional arguments, with `args[0]` and so on where it has none."""
        names = [f"args[{i}]" for i in range(len(self.args))]
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        own = [name for name, parameter in self._parameters.items() if parameter.kind in kinds]
        own = [name for name in own if name != self._key_keyword] if self._key_keyword else own[1:]
        return [*own[: len(names)], *names[len(own) :]]

    def _arguments(self) -> Iterator[tuple[str, Any]]:
        """The leaves of the arguments with their names, in the order of `jax.tree.flatten`."""
        names = self._positional_names()
        for path, leaf in tree_flatten_with_path((self.args, self.kwargs))[0]:
            part, argument, *rest = path
            head = names[argument.idx] if part.idx == 0 else argument.key
            yield paths.write([jax.tree_util.GetAttrKey(head), *rest]), leaf


def _key_keyword(parameters: dict[str, inspect.Parameter]) -> str | None:
    """The keyword that takes the key, or None if the first argument does."""
    for position, parameter in enumerate(parameters.values()):
        if parameter.name in _KEY_NAMES and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY:
            is_first = position == 0 and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            return None if is_first else parameter.name
    return None


def _name(sampler: Any) -> str:
    if isinstance(sampler, functools.partial):
        return _name(sampler.func)
    name = getattr(sampler, "__qualname__", None)
    if name is None:
        return type(sampler).__qualname__.rpartition("<locals>.")[-1]
    if getattr(jax.random, name, None) is sampler:
        return f"jax.random.{name}"
    if inspect.ismethod(sampler) and not inspect.isclass(sampler.__self__):
        return f"{type(sampler.__self__).__name__}.{sampler.__name__}"
    return str(name).rpartition("<locals>.")[-1]


def _inside(thing: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """The tracers that a function, a method, an object or a tree holds, with their names."""
    try:
        # An object is named by its attributes rather than by its key paths, which may be numbers.
        leaves, _ = tree_flatten_with_path(thing, is_leaf=lambda node: hasattr(node, "__dict__"))
    except (TypeError, ValueError):
        return  # Dicts may have keys that cannot be sorted; the names are only a courtesy.
    for path, leaf in leaves:
        where = paths.write([jax.tree_util.GetAttrKey(name), *path]) if name else paths.write(path)
        if isinstance(leaf, jax.core.Tracer):
            yield where, leaf
        elif depth:
            for label, held in held_by(leaf):
                yield from _inside(held, f"{where}.{label}" if where else label, depth - 1)
