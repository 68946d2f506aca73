"""The differentiated arguments of a call: which they are, what of them is selected, and how to put it back."""

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from .. import _words as words
from .._marks import Layout
from .._selection import Selection, Subject, Target, as_selection

F = Callable[..., Any]
Argnums = int | Sequence[int] | None
Argnames = str | Sequence[str] | None
Position = int | str


class Call:
    """One call of a transformed function.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
        positions: Where the differentiated arguments are: numbers and keywords.
        selections: What is selected of each.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], positions: list[Position], selections: Any):
        self._args = args
        self._kwargs = kwargs
        self._positions = positions
        given = [kwargs[p] if isinstance(p, str) else args[p] for p in positions]
        self.targets = [Target(argument, selection) for argument, selection in zip(given, selections, strict=True)]

    def refuse_empty(self) -> None:
        """Raise if an argument has leaves and none of them is differentiated."""
        for position, target in zip(self._positions, self.targets, strict=True):
            if target.is_empty:
                subject = Subject(target.argument, target.leaves, target.treedef)
                raise words.nothing_to_differentiate(f"argument {position}", subject.typed_paths())

    def paths_where(self, flags: list[list[bool]], wanted: bool) -> list[str]:
        """The paths of the differentiated leaves with a flag."""
        return [
            leaves[i].path
            for target, own in zip(self.targets, flags, strict=True)
            for leaves in [Layout(target.argument).leaves]
            for i, flag in zip(target.plan.indices, own, strict=True)
            if flag is wanted
        ]

    @property
    def selected(self) -> list[list[Any]]:
        """The differentiated leaves of each argument."""
        return [target.selected for target in self.targets]

    def of_selected(self, f: F) -> F:
        """The function of the differentiated leaves alone; everything else is a constant of it."""

        def of_selected(selected: list[list[Any]]) -> Any:
            args, kwargs = list(self._args), dict(self._kwargs)
            for position, target, values in zip(self._positions, self.targets, selected, strict=True):
                argument = target.with_selected(values)
                if isinstance(position, str):
                    kwargs[position] = argument
                else:
                    args[position] = argument
            return f(*args, **kwargs)

        return of_selected

    def shaped(self, values: list[list[Any]]) -> tuple[Any, ...]:
        """One value per differentiated leaf, in the shapes of the gradients, one for each argument."""
        return tuple(target.shaped(own) for target, own in zip(self.targets, values, strict=True))


class Arguments:
    """Which arguments a transform is taken with respect to, and what of them.

    Args:
        f: The function.
        wrt: A selector, or a tuple of one for each argument.
        argnums: One position, several, or None for the first (if there are no names).
        argnames: One name, several, or None.
    """

    def __init__(self, f: F, wrt: Any, argnums: Argnums, argnames: Argnames):
        self._f = f
        if argnums is None and argnames is None:
            argnums = 0
        self._argnums = argnums
        names = (argnames,) if isinstance(argnames, str) else tuple(argnames or ())
        numbers = argnums if isinstance(argnums, Sequence) else () if argnums is None else (argnums,)
        self._numbers, self._names = tuple(map(operator.index, numbers)), names
        # One int, or one string alone, gives one gradient.
        one = isinstance(argnames, str) if argnums is None else argnames is None and not isinstance(argnums, Sequence)
        self.several = not one
        self._selections = self._selections_of(wrt)
        for name in names:
            self._refuse_unknown(name)

    def _selections_of(self, wrt: Any) -> tuple[Selection, ...]:
        if not self.several:
            return (as_selection(wrt),)
        count = len(self._numbers) + len(self._names)
        given = (None,) * count if wrt is None else wrt
        if not isinstance(given, tuple) or len(given) != count:
            raise words.selectors_and_arguments(wrt, [*self._numbers, *self._names])
        return tuple(map(as_selection, given))

    @functools.cached_property
    def _parameters(self) -> list[inspect.Parameter] | None:
        try:
            return list(inspect.signature(self._f).parameters.values())
        except (TypeError, ValueError):
            return None

    def _refuse_unknown(self, name: str) -> None:
        parameters = self._parameters
        if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
        known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if name not in known:
            raise words.argument_unknown(name, known)

    def on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with these arguments."""
        given = len(args)
        needed = max((n + 1 if n >= 0 else -n for n in self._numbers), default=0)
        if needed > given:
            raise words.argument_missing(self._argnums, needed, given)
        positions: list[Position] = [n % given for n in self._numbers]
        positions += [self._position_of(name, given, kwargs) for name in self._names]
        if len(positions) > 1 and len(set(positions)) < len(positions):
            raise words.argument_twice(next(p for p in positions if positions.count(p) > 1))
        return Call(args, kwargs, positions, self._selections)

    def _position_of(self, name: str, given: int, kwargs: dict[str, Any]) -> Position:
        if name in kwargs:
            return name
        positional = [p.name for p in self._parameters or () if p.kind is p.POSITIONAL_OR_KEYWORD]
        if name in positional and positional.index(name) < given:
            return positional.index(name)
        raise words.argument_not_passed(name)
