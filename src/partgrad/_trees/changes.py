"""What a function changes in place in modules of `flax.nnx`: statistics, counters of random numbers.

JAX gives a function copies of its arguments, so what it changes in them is lost, unless someone writes it back.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from .._message import at, listed, word
from .paths import write

# For each target the changed leaves, by number.
Changes = tuple[dict[int, Any], ...]

# An attribute of a function that says what it changes.
_TELLS = "_tells_changes"
_warned: set[type] = set()


def has_variables(tree: Any) -> bool:
    """Whether a tree has a Variable of `flax.nnx`."""
    # Nobody can have one who has not imported it.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    is_variable = lambda node: isinstance(node, nnx.Variable)
    return any(map(is_variable, jax.tree.leaves(tree, is_leaf=is_variable)))


def with_changes(f: Callable[..., Any], is_copied: bool = False) -> Callable[..., tuple[Any, Changes]]:
    """The function, given positions and its arguments, with what it changed in the arguments at these positions.

    Args:
        f: The function.
        is_copied: Whether all arguments are copies that are made to trace the function. What it changes at other
            positions is then lost, with a warning.
    """

    @functools.wraps(f, updated=())
    def changing(positions: Sequence[int | str], /, *args: Any, **kwargs: Any) -> tuple[Any, Changes]:
        given: dict[Any, Any] = dict(enumerate(args)) | kwargs
        others = [own for own in given if is_copied and own not in positions and has_variables(given[own])]
        before = {position: _keyed(given[position]) for position in (*positions, *others)}
        output = f(*args, **kwargs)
        changes = {position: _changes_in(old, given[position]) for position, old in before.items()}
        for position in others:
            warn_of_change(position, given[position], (write(before[position][i][0]) for i in changes[position]))
        return output, tuple(changes[position] for position in positions)

    changing.__dict__[_TELLS] = True
    return changing


def without_changes(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function, if it is given copies to be traced: with a warning if it changes one of them."""
    if getattr(f, _TELLS, False):
        return f
    changing = with_changes(f, is_copied=True)

    @functools.wraps(f, updated=())
    def warning(*args: Any, **kwargs: Any) -> Any:
        return changing((), *args, **kwargs)[0]

    warning.__dict__[_TELLS] = True
    return warning


def warn_of_change(position: int | str, tree: Any, changed: Iterable[str]) -> None:
    """Warn, once for each class of arguments, that what a function changed in one is lost."""
    kind, paths = type(tree), list(changed)
    if not paths or kind in _warned:
        return
    _warned.add(kind)
    message = word(
        f"The function changes {listed(map(at, paths))} of its argument {position}, a `{kind.__name__}`, and the "
        "change is lost.",
        "JAX gives the function a copy. Statistics stand still, and every call draws the same random numbers.",
        fix="return the module as auxiliary data, (loss, model) with has_aux=True, and go on with that; partgrad.grad "
        "and partgrad.value_and_grad, also with double_where=True, write changes back to a module that they "
        "differentiate.",
    )
    warnings.warn(message, stacklevel=2)


def _changes_in(before: list[tuple[Any, Any]], tree: Any) -> dict[int, Any]:
    """The leaves that a function replaced, by number; it may also add and remove others."""
    now = dict(_keyed(tree))
    return {number: now[path] for number, (path, old) in enumerate(before) if now.get(path, old) is not old}


def _keyed(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]
