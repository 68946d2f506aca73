"""A tree with what is selected of it: its leaves, and how to put other values in."""

from typing import Any

import jax

from .. import _words as words
from .._marks import first_difference
from .plan import Plan, plan
from .selectors import Selection


class Target:
    """One differentiated argument of one call: its leaves, and which of them are differentiated.

    Args:
        argument: The argument.
        selection: What is selected of it.
    """

    __slots__ = ("argument", "leaves", "plan", "treedef")

    def __init__(self, argument: Any, selection: Selection):
        self.argument = argument
        self.leaves, self.treedef = jax.tree.flatten(argument)
        self.plan: Plan = plan(selection, argument, self.leaves, self.treedef)

    @property
    def is_empty(self) -> bool:
        """Whether there are leaves, and none of them is differentiated."""
        return not self.plan.indices and bool(self.leaves)

    @property
    def selected(self) -> list[Any]:
        """The differentiated leaves."""
        return self.plan.selected(self.leaves)

    def with_selected(self, values: list[Any]) -> Any:
        """The argument with other values in the differentiated leaves."""
        return self.plan.structure(self.treedef).unflatten(self.plan.inserted(self.leaves, values))

    def shaped(self, values: list[Any]) -> Any:
        """One value per differentiated leaf, in the shape of the gradient."""
        return self.plan.gradient(self.treedef, values)

    def values(self, shaped: Any, what: str) -> list[Any]:
        """Take out of a tree in the shape of the gradient one value per differentiated leaf."""
        return values_like(self.shaped(self.selected), shaped, what)


def values_like(template: Any, shaped: Any, what: str) -> list[Any]:
    """The leaves of a tree, which must have the structure of a template.

    Raises:
        PartsError: If the structures differ; `what` says what the tree is.
    """
    leaves, structure = jax.tree.flatten(shaped)
    if structure != jax.tree.structure(template):
        raise words.wrong_structure(what, *first_difference(template, shaped))
    return leaves
