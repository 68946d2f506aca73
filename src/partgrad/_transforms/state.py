"""State that a function changes in place in modules of `flax.nnx`: statistics, counters of random numbers.

JAX gives a function a copy of its arguments, so what it changes there is lost. `nnx.grad` writes it back to the module
that was passed; so do `grad` and `value_and_grad`. The other transforms warn.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._message import at, listed, word
from .._selection import Target

# For each target the changed leaves, by number.
Changes = tuple[dict[int, Any], ...]

_warned: set[type] = set()


def may_change(target: Target) -> bool:
    """Whether an argument has a Variable of `flax.nnx`."""
    # Nobody can have one who has not imported it.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and any(isinstance(place.value, nnx.Variable) for place in target.skeleton.nodes)


def changes_in(targets: Sequence[Target], before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Changes:
    """The leaves that a function replaced in its arguments; both by position.

    A function may also add and remove Variables, which is not a change of those that stay.
    """
    found = []
    for target in targets:
        now = dict(_keyed(after[target.position]))
        changed = {
            number: now[path]
            for number, (path, old) in enumerate(before[target.position])
            if now.get(path, old) is not old
        }
        found.append(changed)
    return tuple(found)


def before_call(targets: Sequence[Target], given: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """What `changes_in` compares with."""
    return {target.position: _keyed(given[target.position]) for target in targets}


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
        kind = type(target.tree)
        if changed and kind not in _warned:
            _warned.add(kind)
            message = word(
                f"The function changes {listed(at(target.skeleton.path(i)) for i in changed)} of its argument "
                f"{target.position}, a `{kind.__name__}`, and the change is lost.",
                "JAX gives the function a copy. Statistics stand still, and every call draws the same random numbers.",
                fix="return the module as auxiliary data, (loss, model) with has_aux=True, and go on with that; "
                "partgrad.grad and partgrad.value_and_grad write changes back to a module that is an argument of the "
                "same function.",
            )
            warnings.warn(message, stacklevel=2)
