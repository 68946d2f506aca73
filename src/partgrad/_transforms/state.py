"""State that a function changes in place in modules of `flax.nnx`: statistics, counters of random numbers.

JAX gives a function a copy of its arguments, so what it changes there is lost. `nnx.grad` writes it back to the module
that was passed; so do `grad` and `value_and_grad`. The other transforms warn.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from .._message import at, listed, word
from .._selection import Target
from .._trees import write

# For each target the changed leaves, by number.
Changes = tuple[dict[int, Any], ...]

_warned: set[type] = set()


def may_change(target: Target) -> bool:
    """Whether an argument has a Variable of `flax.nnx`."""
    # Nobody can have one who has not imported it.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and any(isinstance(place.value, nnx.Variable) for place in target.skeleton.nodes)


def has_variables(tree: Any) -> bool:
    """The same of a tree that is no target."""
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
            _warn(position, given[position], (write(before[position][i][0]) for i in changes[position]))
        return output, tuple(changes[position] for position in positions)

    return changing


def without_changes(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function, if it is given copies to be traced: with a warning if it changes one of them."""
    changing = with_changes(f, is_copied=True)
    return functools.wraps(f, updated=())(lambda *args, **kwargs: changing((), *args, **kwargs)[0])


def _changes_in(before: list[tuple[Any, Any]], tree: Any) -> dict[int, Any]:
    """The leaves that a function replaced, by number; it may also add and remove others."""
    now = dict(_keyed(tree))
    return {number: now[path] for number, (path, old) in enumerate(before) if now.get(path, old) is not old}


def _keyed(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def write_back(targets: Sequence[Target], changes: Changes) -> None:
    """Write what a function changed into the arguments of the call."""
    import flax.errors
    from flax import nnx

    for target, changed in zip(targets, changes, strict=True):
        if not changed:
            continue
        # As they are now: another argument may be the same module.
        leaves = _replaced(target.tree, changed, nnx.Variable)
        is_whole = lambda node: isinstance(node, nnx.Module | nnx.Variable)
        old, new = (jax.tree.leaves(tree, is_leaf=is_whole) for tree in (target.tree, target.treedef.unflatten(leaves)))
        try:
            for one, other in zip(old, new, strict=True):
                if is_whole(one):
                    # A list, because a Variable alone is no node of its library.
                    nnx.update([one], nnx.state([other]))
        except flax.errors.TraceContextError:
            # The module comes from outside of a transformation around this one.
            warn_of((target,), (changed,))


def _replaced(tree: Any, changed: Mapping[int, Any], kind: type) -> list[Any]:
    """The leaves of a tree with those that changed; a node of a kind that is in two places changes in both."""
    keys: list[Any] = []
    for part in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind)):
        own = [(id(part), offset) for offset, _ in enumerate(jax.tree.leaves(part))]
        keys += own if isinstance(part, kind) else [len(keys)]
    new = {keys[number]: value for number, value in changed.items()}
    return [new.get(key, leaf) for key, leaf in zip(keys, jax.tree.leaves(tree), strict=True)]


def warn_of(targets: Sequence[Target], changes: Changes) -> None:
    """Warn, once for each class of arguments, that what the function changed is lost."""
    for target, changed in zip(targets, changes, strict=True):
        _warn(target.position, target.tree, map(target.skeleton.path, changed))


def _warn(position: int | str, tree: Any, changed: Iterable[str]) -> None:
    kind, paths = type(tree), list(changed)
    if not paths or kind in _warned:
        return
    _warned.add(kind)
    message = word(
        f"The function changes {listed(map(at, paths))} of its argument {position}, a `{kind.__name__}`, and the "
        "change is lost.",
        "JAX gives the function a copy. Statistics stand still, and every call draws the same random numbers.",
        fix="return the module as auxiliary data, (loss, model) with has_aux=True, and go on with that; partgrad.grad "
        "and partgrad.value_and_grad write changes back to a module that they differentiate.",
    )
    warnings.warn(message, stacklevel=2)
