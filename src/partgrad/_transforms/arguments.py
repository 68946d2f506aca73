"""Which arguments of a function a transform differentiates, and what is selected of each."""

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from .._compat import cached_property
from .._message import listed, near_misses
from .._selection import Intermediate, Selection, Target, as_selection
from .._trees import has_variables, parameters_of, with_changes, without_changes
from ..errors import ArgumentError
from .call import ALONE, INSIDE, Call, ValuesInside, Written
from .steps import of_steps

F = Callable[..., Any]
Argnums = int | Sequence[int] | None
Argnames = str | Sequence[str] | None
Position = int | str


class Arguments:
    """Which arguments a transform differentiates with respect to, and which parts of them.

    `argnums` may be one position, several, or None for the first (if there are no names). Where there are several, the
    result is a tuple, and so is `wrt`.
    """

    def __init__(self, f: F, wrt: Any, argnums: Argnums, argnames: Argnames, double_where: bool = False):
        self._f, self._double_where, self._argnums = f, double_where, argnums
        self._taken = f if _is_inside(wrt) else self._along_taken_paths(f)
        if _is_inside(wrt) and (argnums is not None or argnames is not None):
            raise _beside_intermediate(wrt, argnums, argnames)
        if argnums is None and argnames is None:
            argnums = 0
        names = () if argnames is None else (argnames,) if isinstance(argnames, str) else argnames
        numbers = argnums if isinstance(argnums, Sequence) else () if argnums is None else (argnums,)
        try:
            self._numbers = tuple(map(operator.index, numbers))
        except TypeError:
            raise _no_position(argnums, numbers) from None
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise ArgumentError(
                f"`argnames` is {argnames!r:.60}.",
                "Expected the name of an argument, or several.",
                fix=f"write argnums={argnames!r:.60}." if isinstance(argnames, int) else "write argnames='x'.",
            )
        self._names = tuple(names)
        # A single int or string gives a single gradient.
        one = isinstance(argnames, str) if argnums is None else argnames is None and not isinstance(argnums, Sequence)
        self.is_tuple, self._may_be_empty = not one, False
        # The values inside the function that are selected, by name.
        self._inside: dict[Any, Intermediate] = {}
        self._selections: tuple[Selection, ...] = ()
        if isinstance(wrt, Intermediate):
            self._inside, self._numbers = {ALONE: wrt}, ()
        else:
            if _is_inside(wrt):
                self._inside = {name: own for name, own in wrt.items() if isinstance(own, Intermediate)}
                wrt = {name: own for name, own in wrt.items() if name not in self._inside}
                self._numbers = (0,) if wrt else ()
            if not self._inside or wrt:
                self._selections = self._selections_of(wrt)
        for name in self._names:
            self._refuse_unknown(name)
        # The usual case, which is to be quick.
        self._is_first = self._numbers == (0,) and not self._names

    @classmethod
    def of_primals(
        cls, f: F, primals: Sequence[Any], wrt: Any, argnums: Argnums, argnames: Argnames, double_where: bool
    ) -> "Arguments":
        """The arguments of a transform that takes primals: all of them by default, and one selector is for the first.

        Its results are tuples.
        """
        by_primal = argnums is None and argnames is None and not _is_inside(wrt)
        if by_primal:
            if wrt is None:
                wrt = (None,) * len(primals)
            elif not isinstance(wrt, tuple):
                wrt = (wrt,)
            elif len(wrt) != len(primals):
                fix = "write one selector for each primal, wrt=(selector, None), or wrt=selector for the first alone."
                raise _wrong_number_of_selectors(wrt, range(len(primals)), fix)
            argnums = tuple(range(len(wrt)))
        arguments = cls(f, wrt, argnums, argnames, double_where)
        arguments.is_tuple, arguments._may_be_empty = True, by_primal
        return arguments

    def refuse_reductions(self, transform: str) -> None:
        """Raise if a cotangent is to be reduced and the transform has no backward pass to reduce it in."""
        for name, own in self._inside.items():
            if own.reduce is not None:
                where = "" if name is ALONE else f" at {name!r}"
                raise ArgumentError(
                    f"`partgrad.{transform}` got wrt={own!r}{where}.",
                    "Expected a transform with a backward pass, in which a cotangent is reduced.",
                    fix=f"leave `reduce` out, partgrad.intermediate({own.name!r}), or use grad, value_and_grad, vjp or "
                    "jacrev.",
                )

    def _along_taken_paths(self, f: F) -> F:
        if not self._double_where:
            return f
        # Importing it takes longer than importing everything that `grad` needs.
        from .._double_where import double_where

        return double_where(f)

    def _selections_of(self, wrt: Any) -> tuple[Selection, ...]:
        if not self.is_tuple:
            return (as_selection(wrt),)
        count = len(self._numbers) + len(self._names)
        given = (None,) * count if wrt is None else wrt
        if not isinstance(given, tuple) or len(given) != count:
            fix = "write wrt=(selector, None) beside argnums=(0, 1); None is every unmarked differentiable leaf."
            raise _wrong_number_of_selectors(wrt, [*self._numbers, *self._names], fix)
        return tuple(map(as_selection, given))

    @cached_property
    def _changing(self) -> F:
        return self._along_taken_paths(with_changes(self._f, is_copied=True))

    @cached_property
    def _of_steps(self) -> F:
        return self._along_taken_paths(of_steps(self._f))

    @cached_property
    def _parameters(self) -> list[inspect.Parameter] | None:
        parameters = parameters_of(self._f)
        return None if parameters is None else list(parameters.values())

    def _refuse_unknown(self, name: str) -> None:
        parameters = self._parameters
        if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if name not in names:
            near = near_misses(name, names)
            raise ArgumentError(
                f"argnames names `{name}`, which is not a parameter of the function.",
                f"Parameters: {listed(names) or 'none'}.",
                fix=f"write {near[0]!r}." if near else "name one of these.",
            )

    def call(self, args: Sequence[Any], kwargs: dict[str, Any], has_aux: bool = False) -> Call:
        """A call as a function of what is selected of its arguments.

        Raises:
            NotDifferentiableError: If there is nothing to differentiate in an argument.
            HeldError: If the derivative of a leaf that was named ends at a mark that nobody wrote there.
        """
        call = self.call_to_check(args, kwargs, is_reduced=True)
        for target in call.targets:
            if target.plan.watched:
                # Importing it takes longer than importing everything that `grad` needs.
                from .silent import refuse_silent_zeros

                refuse_silent_zeros(call, self._f, has_aux)
                break
        return call

    def call_to_check(
        self, args: Sequence[Any], kwargs: dict[str, Any], *, of_values: bool = False, is_reduced: bool = False
    ) -> Call:
        """The same, wherever a derivative may end.

        Args:
            args: The positional arguments.
            kwargs: The keyword arguments.
            of_values: Whether it is a function of the selected values inside, not of what is added to them.
            is_reduced: Whether their cotangents are reduced where a selector says so.
        """
        f, targets, inside = self._taken, self._targets(args, kwargs), None
        written = Written(self._f, self._double_where, args, kwargs)
        if self._inside:
            f, args, kwargs, inside = self._of_inside(args, kwargs, of_values, is_reduced)
            targets.append(Target(kwargs[INSIDE], as_selection(None), INSIDE))
            if inside.unpacked is not None:
                unreduced = lambda: self.call_to_check(written.args, written.kwargs, of_values=of_values)
                inside = inside._replace(unreduced=unreduced)
        is_copied = self._double_where and not self._inside and has_variables((args, kwargs))
        stacking: Any = of_steps
        if self._double_where:
            stacking = None if self._inside else lambda _: self._of_steps
        if is_copied:
            positions = [target.position for target in targets]
            changing = functools.partial(with_changes(self._f, is_copied=True), positions)
            stacking = lambda _: self._along_taken_paths(of_steps(changing))
        call = Call(f, args, kwargs, targets, self.is_tuple, inside, self._changing if is_copied else None, stacking)
        call.written = written
        for target in targets:
            if not target.plan.indices:
                if not self._may_be_empty or all(other.is_empty for other in targets):
                    call.refuse_empty()
                break
        return call

    def _of_inside(
        self, args: Sequence[Any], kwargs: dict[str, Any], of_values: bool, is_reduced: bool
    ) -> tuple[F, Sequence[Any], dict[str, Any], ValuesInside]:
        """The function of values inside it as well, or of what is added to them, and the arguments with these."""
        # Not every program needs it.
        from .._intermediates import Shifted

        names = {name: own.name for name, own in self._inside.items()}
        f = without_changes(self._f) if has_variables((args, kwargs)) else self._f
        reductions = {name: own.reduce for name, own in self._inside.items() if own.reduce is not None}
        shifted = Shifted(f, names, args, kwargs, of_values, reductions if is_reduced else {})
        is_alone, is_constant = ALONE in self._inside, not self._numbers

        @functools.wraps(self._f, updated=())
        def of_inside(*own: Any, **given: Any) -> Any:
            inside = given.pop(INSIDE)
            return shifted({ALONE: inside} if is_alone else inside, *((args, kwargs) if is_constant else (own, given)))

        f, point = self._along_taken_paths(of_inside), shifted.point[ALONE] if is_alone else shifted.point
        unpacked = of_keys = shifted.unpacked
        if is_alone and of_keys is not None:
            unpacked = lambda part: of_keys({ALONE: part})[ALONE]
        given = {INSIDE: point} if is_constant else {**kwargs, INSIDE: point}
        return f, () if is_constant else args, given, ValuesInside(names, unpacked)

    def _targets(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Target]:
        """The differentiated arguments of a call, with what is selected of each."""
        given = len(args)
        if self._is_first and given:
            return [Target(args[0], self._selections[0], 0)]
        for number in self._numbers:
            if not -given <= number < given:
                raise self._missing(number, given)
        positions: list[Position] = [n % given for n in self._numbers]
        positions += [self._position_of(name, given, kwargs) for name in self._names]
        if len(set(positions)) < len(positions):
            twice = next(p for p in positions if positions.count(p) > 1)
            raise ArgumentError(
                f"`argnums` and `argnames` name argument {twice} twice.",
                "Expected every argument at most once: one of the two would be a constant of the other.",
                fix="select several parts of one argument with one selector: wrt=lambda m: (m.a, m.b).",
            )
        return [
            Target(kwargs[position] if isinstance(position, str) else args[position], selection, position)
            for position, selection in zip(positions, self._selections, strict=True)
        ]

    def _missing(self, number: int, given: int) -> ArgumentError:
        # The first line is JAX's, plus the argument, which JAX leaves out.
        needed = max(n + 1 if n >= 0 else -n for n in self._numbers)
        parameters = [p.name for p in self._parameters or () if p.kind is p.POSITIONAL_OR_KEYWORD]
        name = f", `{parameters[number]}`," if 0 <= number < len(parameters) else ""
        return ArgumentError(
            f"differentiating with respect to argnums={self._argnums} requires at least {needed} positional "
            f"arguments to be passed by the caller, but got only {given} positional arguments.",
            f"There is no argument {number}{name} among them.",
            fix="pass it by position, or name it by argnames." if name else "correct argnums; it counts from 0.",
        )

    def _position_of(self, name: str, given: int, kwargs: dict[str, Any]) -> Position:
        if name in kwargs:
            return name
        kinds = {p.name: p.kind for p in self._parameters or ()}
        positional = [own for own, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        if name in positional and positional.index(name) < given:
            return positional.index(name)
        raise ArgumentError(
            f"argnames names `{name}`, which the caller did not pass.",
            "A default value is not differentiated.",
            fix="give the position of the argument: argnums=..."
            if kinds.get(name) in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
            else f"pass it: f(..., {name}=...).",
        )


def _is_inside(wrt: Any) -> bool:
    """Whether a selector is about values inside the function, alone or beside parts of the first argument."""
    return isinstance(wrt, Intermediate) or (
        type(wrt) is dict and any(isinstance(own, Intermediate) for own in wrt.values())
    )


def _beside_intermediate(wrt: Any, argnums: Argnums, argnames: Argnames) -> ArgumentError:
    given = f"argnums={argnums!r}" if argnames is None else f"argnames={argnames!r}"
    return ArgumentError(
        f"`wrt` is {wrt!r:.80}, and there is {given}.",
        "A value inside the function is part of no argument; what stands beside it in a dict is of the first.",
        fix=f"write wrt={wrt!r:.80} without argnums and argnames.",
    )


def _no_position(argnums: Any, numbers: Sequence[Any]) -> ArgumentError:
    named = isinstance(argnums, str) or (numbers and all(isinstance(number, str) for number in numbers))
    return ArgumentError(
        f"`argnums` is {argnums!r}.",
        "Expected the position of an argument, or several.",
        fix=f"write argnames={argnums!r}." if named else "write argnums=0, or argnums=(0, 1).",
    )


def _wrong_number_of_selectors(wrt: object, arguments: Sequence[object], fix: str) -> ArgumentError:
    count = f"{len(wrt)} selectors" if isinstance(wrt, tuple) else f"one selector ({wrt!r:.60})"
    return ArgumentError(
        f"`wrt` and the arguments do not go together: {count} for {len(arguments)} arguments, {list(arguments)}.",
        "Expected a tuple of one selector for each argument.",
        fix=fix,
    )
