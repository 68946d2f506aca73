"""grad and its family: put the selected leaves in, take their derivative out.

Everything that is not selected is a constant that the differentiated function closes over, so transforms outside still
see it.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax

from . import _words as words, errors
from ._choice import Subject
from ._plan import Plan, plan
from ._select import Selection, as_selection

F = Callable[..., Any]
Argnums = int | Sequence[int]


class _Target:
    """One differentiated argument of one call: its leaves, and which of them are differentiated."""

    __slots__ = ("leaves", "plan", "treedef")

    def __init__(self, argument: Any, selection: Selection, position: int):
        self.leaves, self.treedef = jax.tree.flatten(argument)
        self.plan: Plan = plan(selection, argument, self.leaves, self.treedef)
        if not self.plan.indices and self.leaves:
            raise _nothing(argument, position)

    @property
    def selected(self) -> list[Any]:
        return [self.leaves[i] for i in self.plan.indices]

    def with_selected(self, values: list[Any]) -> Any:
        """The argument with other values in the selected leaves."""
        leaves = self.leaves.copy()
        for i, value in zip(self.plan.indices, values, strict=True):
            leaves[i] = value
        return self.plan.structure(self.treedef).unflatten(leaves)

    def gradient(self, values: list[Any]) -> Any:
        """The derivatives of the selected leaves, in the shape of the gradient."""
        return self.plan.gradient(self.treedef, values)


def _nothing(argument: Any, position: int) -> errors.NotDifferentiableError:
    leaves, treedef = jax.tree.flatten(argument)
    return words.nothing_to_differentiate(f"argument {position}", Subject(argument, leaves, treedef).typed_paths())


def _selections(wrt: Any, argnums: Argnums) -> tuple[Selection, ...]:
    """One selection for each differentiated argument."""
    if isinstance(argnums, Sequence):
        given = (None,) * len(argnums) if wrt is None else wrt
        if not isinstance(given, tuple) or len(given) != len(argnums):
            raise words.selectors_and_argnums(wrt, argnums)
        return tuple(map(as_selection, given))
    return (as_selection(wrt),)


def _positions(argnums: Argnums, given: int) -> list[int]:
    """The differentiated positions, counted from the front."""
    numbers = [operator.index(n) for n in argnums] if isinstance(argnums, Sequence) else [operator.index(argnums)]
    needed = max((n + 1 if n >= 0 else -n for n in numbers), default=0)
    if needed > given:
        raise words.argument_missing(argnums, needed, given)
    positions = [n % given for n in numbers]
    if len(set(positions)) < len(positions):
        raise words.argument_twice(argnums, next(p for p in positions if positions.count(p) > 1))
    return positions


def _value_and_grad(f: F, wrt: Any, argnums: Argnums, has_aux: bool, holomorphic: bool) -> F:
    selections = _selections(wrt, argnums)
    several = isinstance(argnums, Sequence)
    standard: dict[str, Any] = {"has_aux": has_aux, "holomorphic": holomorphic}

    def value_and_grad(*args: Any, **kwargs: Any) -> Any:
        positions = _positions(argnums, len(args))
        targets = [_Target(args[p], s, p) for p, s in zip(positions, selections, strict=True)]

        def of_selected(selected: list[list[Any]]) -> Any:
            rebuilt = list(args)
            for position, target, values in zip(positions, targets, selected, strict=True):
                rebuilt[position] = target.with_selected(values)
            return f(*rebuilt, **kwargs)

        value, gradients = jax.value_and_grad(of_selected, **standard)([target.selected for target in targets])
        shaped = tuple(target.gradient(gradient) for target, gradient in zip(targets, gradients, strict=True))
        return value, shaped if several else shaped[0]

    return value_and_grad


def _named(transform: str, f: F, words: str, implementation: F) -> F:
    """Dress a transformed function as a plain Python function with the name and signature of the original."""
    if not callable(f):
        raise words.not_a_function(transform, f)
    # Not `__dict__`: a model with __call__ keeps its parameters there.
    wrapped = functools.wraps(f, updated=())(implementation)
    name = getattr(f, "__name__", type(f).__name__)
    wrapped.__name__ = name if hasattr(f, "__name__") else f"{transform}_{name}"
    wrapped.__doc__ = f"{words} of `{name}`.\n\n{getattr(f, '__doc__', None) or ''}".rstrip()
    return wrapped


@overload
def grad(f: F, wrt: Any = None, *, argnums: Argnums = 0, has_aux: bool = False, holomorphic: bool = False) -> F: ...


@overload
def grad(
    *, wrt: Any = None, argnums: Argnums = 0, has_aux: bool = False, holomorphic: bool = False
) -> Callable[[F], F]: ...


def grad(
    f: F | None = None,
    wrt: Any = None,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Any:
    """The gradient of a function with respect to the selected leaves of an argument.

    `jax.grad` with one more word. Leaves that are not selected are constants of this differentiation only; an enclosing
    transform still sees them. Leaves held by a mark (`NonDiff`) take part only if `wrt` names them.

    Args:
        f: A function of any pytrees to a real scalar (or to a pair of it and auxiliary data, with `has_aux`).
        wrt: A selector: a callable on the argument (`lambda k: k.variance`), a path or glob
            (`"kernels[0].variance"`), or a `Selection`. None selects every floating or complex leaf that no mark holds.
            With several `argnums`, a tuple of selectors.
        argnums: Which positional argument to differentiate, or several.
        has_aux: As in `jax.grad`.
        holomorphic: As in `jax.grad`.

    Returns:
        A plain Python function of the same arguments that returns the gradient: in the shape of the part, if `wrt`
        names a part; else the tree of the argument with None at every leaf that was not differentiated. A leaf's
        gradient has its shape and dtype. Without `f`, a decorator.

    Raises:
        SelectionError: When called, if the selector does not go with the argument.
        ArgumentError: If `wrt` and `argnums` do not go together.

    Example:
        >>> import partgrad as pg
        >>> def loss(model, x):
        ...     return model["w"] * x + model["b"] ** 2
        >>> pg.grad(loss)({"w": 2.0, "b": 3.0, "count": 7}, 5.0)
        {'b': Array(6., dtype=float32, weak_type=True), 'count': None, 'w': Array(5., dtype=float32, weak_type=True)}
        >>> pg.grad(loss, wrt="b")({"w": 2.0, "b": 3.0, "count": 7}, 5.0)
        Array(6., dtype=float32, weak_type=True)
    """
    if f is None:
        return functools.partial(grad, wrt=wrt, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic)
    if not callable(f):
        raise words.not_a_function("grad", f)
    both = _value_and_grad(f, wrt, argnums, has_aux, holomorphic)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, result = both(*args, **kwargs)
        return (result, value[1]) if has_aux else result

    return _named("grad", f, "Gradient", gradient)


@overload
def value_and_grad(
    f: F, wrt: Any = None, *, argnums: Argnums = 0, has_aux: bool = False, holomorphic: bool = False
) -> F: ...


@overload
def value_and_grad(
    *, wrt: Any = None, argnums: Argnums = 0, has_aux: bool = False, holomorphic: bool = False
) -> Callable[[F], F]: ...


def value_and_grad(
    f: F | None = None,
    wrt: Any = None,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Any:
    """The value of a function and its gradient with respect to the selected leaves of an argument.

    Args:
        f: As in `grad`.
        wrt: As in `grad`.
        argnums: As in `grad`.
        has_aux: As in `jax.value_and_grad`.
        holomorphic: As in `jax.value_and_grad`.

    Returns:
        A plain Python function of the same arguments that returns `(value, gradient)`, or
        `((value, aux), gradient)` with `has_aux`. Without `f`, a decorator.

    Raises:
        SelectionError: When called, if the selector does not go with the argument.
        ArgumentError: If `wrt` and `argnums` do not go together.

    Example:
        >>> import partgrad as pg
        >>> value, gradient = pg.value_and_grad(lambda p: p["a"] * p["b"], wrt="a")({"a": 2.0, "b": 3.0})
        >>> print(value, gradient)
        6.0 3.0
    """
    if f is None:
        return functools.partial(value_and_grad, wrt=wrt, argnums=argnums, has_aux=has_aux, holomorphic=holomorphic)
    if not callable(f):
        raise words.not_a_function("value_and_grad", f)
    return _named("value_and_grad", f, "Value and gradient", _value_and_grad(f, wrt, argnums, has_aux, holomorphic))
