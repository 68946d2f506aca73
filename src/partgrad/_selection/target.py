"""Targets: a tree with what a selection selects of it. Selections are resolved, kept and applied here."""

import functools
import itertools
from collections.abc import Container, Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._marks import alike, first_difference, refuse_forgotten, with_open_marks, without_marks
from .._message import at
from .._skeletons import Bound, Plan, Purpose, Skeleton, keep, skeleton_of
from .._trees import Elements, flatten, overwrite, put, reaches_array, shape_of, take
from ..errors import PartsError, SelectionError
from .choose import choose


def resolve(selection: Any, skeleton: Skeleton, tree: Any, leaves: list[Any], purpose: Purpose) -> Plan:
    """The plan of a selection for a tree of this skeleton and these leaves.

    What the selection always says about a skeleton is looked up; a callable runs on every call, and the plan for its
    match is looked up.
    """
    plans = skeleton.plans[purpose]
    found = _kept(plans, selection, leaves) if selection.is_fixed else None
    if found is None:
        before = skeleton.bind(Bound(tree, leaves, purpose))
        try:
            match = selection.match(skeleton)
            found = None if selection.is_fixed else _kept(plans, match, leaves)
            if found is None:
                found = choose(skeleton, match, selection.rules)
                if _may_be_kept(found, skeleton, selection):
                    keep(plans, selection if selection.is_fixed else match, found)
        finally:
            skeleton.bind(before)
    if selection.takes_everything and found.others:
        others = found.others
        refuse_forgotten([leaves[i] for i in others], lambda number: skeleton.path(others[number]))
    return found


def _kept(plans: dict[Hashable, Plan], key: Any, leaves: list[Any]) -> Plan | None:
    try:
        found = plans.get(key)
    except Exception:
        # A mask whose structure has auxiliary data that cannot be compared.
        return None
    return found if found is not None and found.fits(leaves) else None


def _may_be_kept(plan: Plan, skeleton: Skeleton, selection: Any) -> bool:
    """Whether a plan is right for every skeleton that compares equal, small, and keeps no array alive."""
    is_exact = plan.thawed is None or skeleton.typed is None
    return is_exact and plan.is_small and not (selection.is_fixed and reaches_array(selection))


class Form:
    """The shape of the gradient of an argument.

    Compared by identity, like the programs in what `jax.vjp` returns, beside which it is in one treedef.

    Attributes:
        plan: What is selected.
        treedef: The treedef of the argument.
        thawed: The same without the marks of held places that were named.
        position: Which argument it is.
    """

    __slots__ = ("plan", "position", "thawed", "treedef")

    def __init__(self, plan: Plan, treedef: Any, position: "int | str"):
        self.plan = plan
        self.treedef = treedef
        # The caller's own if possible: treedefs that compare equal may still differ (1 == True, two equal lists).
        self.thawed = treedef if plan.thawed is None else plan.thawed
        self.position = position

    def shaped(self, values: Iterable[Any]) -> Any:
        """One value per differentiated leaf, in the shape of the gradient."""
        if self.plan.groups is not None:
            remaining = iter(values)
            parts = ((name, Form(own, self.treedef, self.position)) for name, own in self.plan.groups.items())
            return {name: form.shaped(itertools.islice(remaining, len(form.plan.indices))) for name, form in parts}
        part = self.plan.part
        if part is None:
            everywhere: list[Any] = [None] * self.treedef.num_leaves
            for i, value in zip(self.plan.indices, values, strict=True):
                everywhere[i] = value
            return unflatten_part(self.thawed, everywhere)
        if part.containers is None:
            (value,) = values
            return value
        remaining, built = iter(values), []
        for node in part.nodes:
            treedef = self.treedef
            for number in node.route:
                treedef = treedef.children()[number]
            leaves: list[Any] = [None] * node.size
            for number in node.selected:
                leaves[number] = next(remaining)
            built.append((without_marks(treedef) if node.is_thawed else treedef).unflatten(leaves))
        return part.containers.unflatten(built)

    def values(self, shaped: Any, what: str) -> list[Any]:
        """Take one value per differentiated leaf out of a tree in the shape of the gradient."""
        return values_like(self.shaped([0.0] * len(self.plan.indices)), shaped, what)


class Target(Form):
    """A tree with what is selected of it for a purpose: its leaves, and how to replace their values.

    Attributes:
        skeleton: The skeleton of the tree, on which the selection was resolved.
    """

    __slots__ = ("leaves", "skeleton", "tree")

    def __init__(self, tree: Any, selection: Any, position: "int | str" = 0, purpose: Purpose = "differentiate"):
        self.tree = tree
        self.leaves, treedef = flatten(tree)
        self.skeleton = skeleton_of(tree, treedef, exactly=not selection.is_fixed)
        super().__init__(resolve(selection, self.skeleton, tree, self.leaves, purpose), treedef, position)

    @property
    def is_empty(self) -> bool:
        """Whether there are leaves, and none of them is differentiated."""
        return not self.plan.indices and bool(self.leaves)

    def path(self, i: int) -> str:
        """The path of a leaf."""
        return self.skeleton.path(i)

    @property
    def selected(self) -> list[Any]:
        """The differentiated leaves or elements."""
        if self.plan.is_whole:
            return list(map(self.leaves.__getitem__, self.plan.indices))
        pairs = zip(self.plan.indices, self.plan.elements, strict=True)
        return [take(self.leaves[i], elements) for i, elements in pairs]

    def _inserted(self, values: Iterable[Any], checked: bool = False, apart: Container[int] = ()) -> list[Any]:
        """The leaves with others in place of the differentiated ones; values of a user are `checked`.

        Leaves whose numbers are `apart` stay as they are.
        """
        leaves = self.leaves.copy()
        if self.plan.is_whole:
            for i, value in zip(self.plan.indices, values, strict=True):
                leaves[i] = value
            return leaves
        for i, elements, value in zip(self.plan.indices, self.plan.elements, values, strict=True):
            if i in apart:
                leaves[i] = jnp.asarray(leaves[i])
            elif checked and elements is not None:
                leaves[i] = overwrite(leaves[i], elements, value, functools.partial(self.path, i))
            else:
                leaves[i] = put(leaves[i], elements, value)
        return leaves

    def with_selected(self, values: Iterable[Any], checked: bool = False, apart: Container[int] = ()) -> Any:
        """The tree with other values in the differentiated leaves; named marks are off."""
        return self.thawed.unflatten(self._inserted(values, checked, apart))

    def with_values(self, values: Iterable[Any], checked: bool = False) -> Any:
        """The tree with other values in the differentiated leaves, with its own marks."""
        return self.treedef.unflatten(self._inserted(values, checked))

    def with_opened(self, values: Iterable[Any], level: int, apart: Container[int] = ()) -> Any:
        """The tree with other values in the differentiated leaves; named marks are open at a level."""
        treedef, opened = self.treedef, self.plan.opened
        if self.plan.thaw:
            if level not in opened:
                opened[level] = with_open_marks(treedef, self.skeleton.layout, self.plan.thaw, level)
            treedef = opened[level]
        return treedef.unflatten(self._inserted(values, apart=apart))

    def values(self, shaped: Any, what: str) -> list[Any]:
        """Like `Form.values`, but with the tree's own leaves when building the shape."""
        return values_like(self.shaped(self.selected), shaped, what)

    def refuse_elements(self, what: str) -> None:
        """Raise if elements of a leaf are selected where only whole leaves make sense."""
        for i, elements in zip(self.plan.indices, self.plan.elements, strict=True):
            if elements is not None:
                raise SelectionError(
                    f"`{what}` works on whole leaves, and the selector takes elements of {at(self.skeleton.path(i))}.",
                    "Expected leaves or nodes.",
                    fix="select the whole leaf; for single elements use grad, select, replace, ravel or stop_gradient.",
                )


def items_of(target: Target) -> list[tuple[str, Any]]:
    """The selected leaves with their paths, and selected elements one by one."""
    skeleton, pairs = target.skeleton, []
    for i, elements in zip(target.plan.indices, target.plan.elements, strict=True):
        leaf, path = target.leaves[i], skeleton.path(i)
        if elements is None:
            pairs.append((path, leaf))
            continue
        names = entry_names(path, shape_of(leaf), elements)
        pairs += zip(names, take(leaf, elements.ravel()), strict=True)
    return pairs


def unflatten_part(treedef: Any, leaves: list[Any]) -> Any:
    """Build a tree with None in place of leaves."""
    try:
        return treedef.unflatten(leaves)
    except Exception as error:
        error.add_note(
            "partgrad built a tree with None in the place of the leaves that are not in it, and the constructor of a "
            "class in it, which JAX runs to build one, refused that.\n"
            "Fix: let the constructor accept None, or name the leaves by a callable, whose gradient has no such tree."
        )
        raise


def values_like(template: Any, shaped: Any, what: str) -> list[Any]:
    """The leaves of a tree, which must have the structure of a template; `what` names the tree."""
    leaves, treedef = jax.tree.flatten(shaped)
    if not alike(treedef, jax.tree.structure(template)):
        path, expected, found = first_difference(template, shaped)
        raise PartsError(
            f"{what} has a different structure from the selection, at {at(path)}.",
            f"Expected {expected}, got {found}.",
            fix="give it the shape of the gradient: the selected part, or the tree with None at what is not selected.",
        )
    return leaves


def entry_names(path: str, shape: tuple[int, ...], elements: Elements = None) -> list[str]:
    """The paths of all or some entries of a leaf, which are selectors, like `w[0,1]`; for a number, its own path."""
    if not shape:
        return [path]
    if elements is None:
        axes = [list(map(str, range(length))) for length in shape]
        return [f"{path}[{index}]" for index in map(",".join, itertools.product(*axes))]
    indices = zip(*(axis.tolist() for axis in np.unravel_index(elements.ravel(), shape)), strict=True)
    return [f"{path}[{','.join(map(str, index))}]" for index in indices]
