"""Strategies for `hypothesis`: trees, models, marks, selectors, and smooth functions of them.

`hypothesis` is imported when a strategy is made: partgrad does not depend on it.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._marks import Diff, NonDiff, Static, dataclass, field
from .._selection import Selection, exclude, freeze, items, mask, matching, path

Strategy = Any
_SURROUNDINGS: dict[str, Callable[..., Any]] = {"plainly": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint}
_SMOOTH: dict[str, Callable[..., Any]] = {"sin": jnp.sin, "tanh": jnp.tanh, "arctan": jnp.arctan}


def _hypothesis() -> Any:
    try:
        import hypothesis.strategies
    except ModuleNotFoundError as error:
        error.add_note("The strategies of partgrad.testing need it.\n  Fix: python -m pip install 'partgrad[testing]'")
        raise
    return hypothesis.strategies


@dataclass
class Pair:
    """A model with two parameters."""

    first: Any
    second: Any


@dataclass
class Held:
    """A model whose class holds one parameter."""

    free: Any
    held: Any = field(nondiff=True)


@dataclass
class Named:
    """A model with static data."""

    value: Any
    name: Any = field(static=True, default="name")


class Coordinates(NamedTuple):
    """A NamedTuple of two numbers."""

    x: Any
    y: Any


def _floats() -> Strategy:
    st = _hypothesis()
    numbers = st.floats(-2, 2).filter(lambda x: x == 0 or abs(x) > 1e-3)
    return numbers | numbers.map(lambda x: np.array([x, 0.25], np.float32))


def models(children: Strategy | None = None) -> Strategy:
    """A strategy for models: instances of `partgrad.dataclass` with every kind of mark, and with static data.

    Args:
        children: A strategy for the values of the fields. None draws Python floats and small arrays.

    Returns:
        A strategy.

    Example:
        >>> import hypothesis, partgrad as pg
        >>> @hypothesis.given(pg.testing.models())
        ... def test_freezing_leaves_nothing_to_differentiate(model):
        ...     assert not any(jax.tree.leaves(pg.mask(pg.freeze(model, None), None)))
        >>> import jax
        >>> test_freezing_leaves_nothing_to_differentiate()
    """
    st = _hypothesis()
    pair = st.tuples(*[_floats() if children is None else children] * 2)
    return st.one_of(
        pair.map(lambda p: Pair(*p)),
        pair.map(lambda p: Pair(NonDiff(_dynamic(p[0])), p[1])),
        pair.map(lambda p: Held(p[0], _dynamic(p[1]))),
        pair.map(lambda p: Held(p[0], Diff(_dynamic(p[1])))),
        pair.map(lambda p: Named(p[0])),
        pair.map(lambda p: Named(p[0], np.array([0.5, 1.5]))),
    )


def _dynamic(value: Any) -> Any:
    """A field that is marked cannot be static as well: a number takes the place of static data."""
    inner = value
    while isinstance(inner, NonDiff | Diff | Static):
        if isinstance(inner, Static):
            return 0.5
        inner = inner.value
    return value


def trees(
    leaves: Strategy | None = None, nodes: Sequence[Callable[[Strategy], Strategy]] = (), max_leaves: int = 8
) -> Strategy:
    """A strategy for pytrees: lists, dicts, tuples, models, and `NonDiff` and `Static` wrappers, nested.

    Args:
        leaves: A strategy for leaves. None draws Python floats and small arrays.
        nodes: Your own containers: functions from a strategy for children to a strategy for nodes.
        max_leaves: About how many leaves a tree has at most.

    Returns:
        A strategy.

    Example:
        >>> import hypothesis, jax, partgrad as pg
        >>> @hypothesis.given(pg.testing.trees())
        ... def test_combine_undoes_partition(tree):
        ...     again = pg.combine(*pg.partition(tree))
        ...     assert jax.tree.structure(again) == jax.tree.structure(tree)
        >>> test_combine_undoes_partition()
    """
    st = _hypothesis()

    def containers(children: Strategy) -> Strategy:
        return st.one_of(
            st.lists(children, max_size=3),
            st.dictionaries(st.sampled_from(["a", "b", "w.x", "second"]), children, max_size=3),
            st.tuples(children, children).map(lambda p: Coordinates(*p)),
            models(children),
            children.map(NonDiff),
            st.just(Static({"n": 2, "grid": np.array([0.5, 0.25], np.float32)})),
            *(node(children) for node in nodes),
        )

    return st.recursive(_floats() if leaves is None else leaves, containers, max_leaves=max_leaves)


def marked(trees: Strategy) -> Strategy:
    """A strategy for trees with some of their leaves frozen.

    Args:
        trees: A strategy of trees.

    Returns:
        A strategy.

    Example:
        >>> import hypothesis, partgrad as pg
        >>> @hypothesis.given(pg.testing.marked(pg.testing.trees()))
        ... def test_thawing_frees_all(tree):
        ...     assert len(pg.items(pg.thaw(tree, None))) >= len(pg.items(tree))
        >>> test_thawing_frees_all()
    """
    st = _hypothesis()

    def freeze_some(tree: Any) -> Strategy:
        paths = [name for name, _ in items(tree) if name]
        if not paths:
            return st.just(tree)
        return st.sets(st.sampled_from(paths), max_size=3).map(lambda names: _frozen(tree, names))

    return trees.flatmap(freeze_some)


def _frozen(tree: Any, names: set[str]) -> Any:
    for name in sorted(names):
        tree = freeze(tree, name)
    return tree


def selectors(tree: Any) -> Strategy:
    """A strategy for selectors that select something in a tree: paths, globs, functions, masks, unions, exclusions.

    Args:
        tree: A tree with at least one leaf that is not held.

    Returns:
        A strategy, which is empty if there is no such leaf.

    Example:
        >>> import hypothesis, partgrad as pg
        >>> tree = {"a": 1.0, "b": pg.NonDiff(2.0), "c": [3.0, 4.0]}
        >>> @hypothesis.given(pg.testing.selectors(tree))
        ... def test_a_held_leaf_is_left_out(wrt):
        ...     assert "['b']" not in dict(pg.items(tree, wrt))
        >>> test_a_held_leaf_is_left_out()
    """
    st = _hypothesis()
    paths = [name for name, _ in items(tree) if name]
    if not paths:
        return st.just(None) if items(tree) else st.nothing()
    chosen = st.sets(st.sampled_from(paths), min_size=1)
    some = [
        st.just(None),
        st.just("**"),
        st.sampled_from(paths),
        chosen.map(_some),
        chosen.map(lambda names: mask(tree, _some(names))),
        chosen.map(lambda names: functools.reduce(operator.or_, map(path, sorted(names)))),
    ]
    # Nothing would be left of a single leaf.
    return st.one_of(*some, *[st.sampled_from(paths).map(exclude)] * (len(paths) > 1))


def _some(names: set[str]) -> Selection:
    return matching(lambda name, leaf: name in names)


class SmoothProgram(NamedTuple):
    """A smooth function of all floating leaves of a tree, in which they interact; its `repr` says which."""

    functions: tuple[str, ...]
    surrounding: str

    def __call__(self, tree: Any) -> Any:
        """The number."""
        leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]
        return _SURROUNDINGS[self.surrounding](self._total)(leaves)

    def _total(self, leaves: list[Any]) -> Any:
        total = jnp.float32(0.3)
        for number, leaf in enumerate(leaves):
            smooth = _SMOOTH[self.functions[number % len(self.functions)]]
            total = total + jnp.sum(smooth(jnp.asarray(leaf) * (number + 1.5))) * jnp.cos(total)
        return total


def programs() -> Strategy:
    """A strategy for smooth functions from any tree to a number: plain, under `jit` or under `checkpoint`.

    Returns:
        A strategy of functions.

    Example:
        >>> import hypothesis, partgrad as pg
        >>> tree = {"a": 1.0, "b": pg.NonDiff(2.0)}
        >>> @hypothesis.settings(deadline=None, max_examples=5)
        ... @hypothesis.given(pg.testing.programs())
        ... def test_a_mark_does_not_change_the_value(f):
        ...     assert f(tree) == f(pg.thaw(tree, None))
        >>> test_a_mark_does_not_change_the_value()
    """
    st = _hypothesis()
    names = st.lists(st.sampled_from(sorted(_SMOOTH)), min_size=1, max_size=3).map(tuple)
    return st.builds(SmoothProgram, names, st.sampled_from(sorted(_SURROUNDINGS)))
