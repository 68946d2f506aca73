"""What becomes of the state that a function changes in modules of `flax.nnx`.

`nnx.grad` writes it back to the module that was passed; so do `grad` and `value_and_grad`. The other transforms warn.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .._selection import Target
from .._trees import Changes, warn_of_change


def may_change(target: Target) -> bool:
    """Whether an argument has a Variable of `flax.nnx`."""
    # Nobody can have one who has not imported it.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and any(isinstance(place.value, nnx.Variable) for place in target.skeleton.nodes)


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
        warn_of_change(target.position, target.tree, map(target.skeleton.path, changed))
