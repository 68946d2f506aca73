"""A `jax.Ref` among the arguments is the caller's, and a function may write into it: a check has one of its own."""

from typing import Any

import jax

from .._trees import is_reference


def with_own_references(tree: Any) -> Any:
    """A tree with a new reference for each one in it, of the same array and in the same kind of memory."""
    copies: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        # What is one reference in several places stays one.
        return copies.setdefault(id(leaf), _copy(leaf)) if is_reference(leaf) else leaf

    return jax.tree.map(copied, tree)


def _copy(reference: Any) -> Any:
    kind = jax.typeof(reference)
    return jax.new_ref(reference[...], memory_space=kind.memory_space, kind=kind.kind)
