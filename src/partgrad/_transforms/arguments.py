"""The differentiated arguments of a call: which they are, what is selected, and how to put it back."""

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

from .._compat import cached_property
from .._marks import refuse_forgotten
from .._message import listed, near_misses
from .._selection import Form, Intermediate, Selection, Target, as_selection
from .._trees import parameters_of, refuse_uncallable
from ..errors import ArgumentError, NotDifferentiableError, PartsError

F = Callable[..., Any]
Argnums = int | Sequence[int] | None
Argnames = str | Sequence[str] | None
Position = int | str
Unused = Literal["zero", "none", "error"]
NonFinite = Literal["ignore", "report"]


class _Options(TypedDict, total=False):
    argnums: Argnums
    argnames: Argnames
    has_aux: bool
    holomorphic: bool
    double_where: bool


class JacobianOptions(_Options, total=False):
    """The options of `jacfwd`, `jacrev` and `hessian`, for type checkers."""

    chunk_size: int | None


class GradOptions(_Options, total=False):
    """The options of `grad` and `value_and_grad`, for type checkers."""

    unused: Unused
    nonfinite: NonFinite


class Arguments:
    """Which arguments a transform differentiates with respect to, and which parts of them.

    `argnums` may be one position, several, or None for the first (if there are no names). Where there are several, the
    result is a tuple, and so is `wrt`.
    """

    def __init__(self, f: F, wrt: Any, argnums: Argnums, argnames: Argnames, double_where: bool = False):
        self._f, self._taken = f, taken_paths(f, double_where)
        self._intermediate = (wrt.name, double_where) if isinstance(wrt, Intermediate) else None
        if self._intermediate:
            refuse_arguments(wrt, argnums, argnames)
            wrt = None
        if argnums is None and argnames is None:
            argnums = 0
        self._argnums = argnums
        names = (argnames,) if isinstance(argnames, str) else tuple(argnames or ())
        numbers = argnums if isinstance(argnums, Sequence) else () if argnums is None else (argnums,)
        try:
            self._numbers, self._names = tuple(map(operator.index, numbers)), names
        except TypeError:
            named = isinstance(argnums, str) or (numbers and all(isinstance(number, str) for number in numbers))
            raise ArgumentError(
                f"`argnums` is {argnums!r}.",
                "Expected the position of an argument, or several.",
                fix=f"write argnames={argnums!r}." if named else "write argnums=0, or argnums=(0, 1).",
            ) from None
        # A single int or string gives a single gradient.
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
            fix = "write wrt=(selector, None) beside argnums=(0, 1); None is every unmarked differentiable leaf."
            raise wrong_number_of_selectors(wrt, [*self._numbers, *self._names], fix)
        return tuple(map(as_selection, given))

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

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> "Call":
        """What a call differentiates."""
        if self._intermediate is None:
            call = Call(self._taken, args, kwargs, self.targets(args, kwargs))
        else:
            name, double_where = self._intermediate
            call = call_of_intermediate(self._f, name, args, kwargs, double_where)
        refuse_empty(call.targets)
        return call

    def targets(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Target]:
        """The differentiated arguments of a call, with what is selected of each."""
        given = len(args)
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

    def each(self, given: Any, what: str) -> Sequence[Any]:
        """What was given for each argument: a tuple if there are several."""
        if not self.several:
            return (given,)
        count = len(self._numbers) + len(self._names)
        if not isinstance(given, tuple | list) or len(given) != count:
            raise PartsError(
                f"{what} is {type(given).__name__} {given!r:.60}.",
                f"Expected a tuple of {count}, one for each argument.",
                fix="give a tuple of one tree for each argument, in the shape of its gradient.",
            )
        return given

    def shaped(self, targets: Sequence[Target], values: Sequence[Any]) -> Any:
        """One value per differentiated leaf, in the shape of the gradient; a tuple for several arguments."""
        parts = shaped(targets, values)
        return parts if self.several else parts[0]


class Call(NamedTuple):
    """A function, the arguments of one call, and what is differentiated of them."""

    f: F
    args: Sequence[Any]
    kwargs: dict[str, Any]
    targets: list[Target]


def call_of_intermediate(f: F, name: str, args: Sequence[Any], kwargs: dict[str, Any], double_where: bool) -> Call:
    """A call as one of the function of what is added to the values that it names."""
    # Not every program needs it.
    from .._intermediates import Shifted

    shifted = Shifted(f, name, args, kwargs)
    return Call(taken_paths(shifted, double_where), [shifted.zeros], {}, [Target(shifted.zeros, as_selection(None), 0)])


def refuse_arguments(wrt: Intermediate, argnums: Argnums, argnames: Argnames) -> None:
    """Raise if the selector of a value inside a function stands beside the choice of an argument."""
    if argnums is not None or argnames is not None:
        given = f"argnums={argnums!r}" if argnames is None else f"argnames={argnames!r}"
        raise ArgumentError(
            f"`wrt` is {wrt!r}, and there is {given}.",
            "A value inside the function is part of no argument.",
            fix=f"write wrt={wrt!r} without argnums and argnames.",
        )


def wrong_number_of_selectors(wrt: object, arguments: Sequence[object], fix: str) -> ArgumentError:
    """The error for a `wrt` without exactly one selector per argument."""
    count = f"{len(wrt)} selectors" if isinstance(wrt, tuple) else f"one selector ({wrt!r:.60})"
    return ArgumentError(
        f"`wrt` and the arguments do not go together: {count} for {len(arguments)} arguments, {list(arguments)}.",
        "Expected a tuple of one selector for each argument.",
        fix=fix,
    )


def dressed(transform: str, f: F, title: str, implementation: F) -> F:
    """Dress a transformed function as a plain Python function with the name and signature of the original."""
    # Not `__dict__`: a model with __call__ keeps its parameters there.
    wrapped = functools.wraps(f, updated=())(implementation)
    name = getattr(f, "__name__", type(f).__name__)
    wrapped.__name__ = name if hasattr(f, "__name__") else f"{transform}_{name}"
    described(transform, f, wrapped)
    wrapped.__doc__ = f"{title} of `{name}`.\n\n{getattr(f, '__doc__', None) or ''}".rstrip()
    return wrapped


def described(transform: str, f: F, function: F) -> F:
    """Let the repr of a function say what it is: `<function grad(loss) at ...>`."""
    name = getattr(f, "__qualname__", type(f).__qualname__)
    function.__qualname__ = f"{transform}({name.rsplit('<locals>.', 1)[-1]})"
    return function


def refuse_no_function(transform: str, f: Any) -> None:
    """Raise if what should be differentiated cannot be called."""
    fix = "write partgrad.{0}(f, wrt=...)(model), or @partgrad.{0}(wrt=...)."
    refuse_uncallable(transform, f, "the function to differentiate", fix)


def taken_paths(f: F, double_where: bool) -> F:
    """The function that a transform with the option `double_where=` differentiates."""
    if not double_where:
        return f
    # Importing it takes longer than importing everything that `grad` needs.
    from .._double_where import double_where as along_taken_paths

    return along_taken_paths(f)


def refuse_empty(targets: Sequence[Target]) -> None:
    """Raise if an argument has leaves and none of them is differentiated."""
    for target in targets:
        if target.is_empty:
            refuse_forgotten(target.leaves, target.skeleton.path, None)
            raise NotDifferentiableError(
                f"There is nothing to differentiate in argument {target.position}.",
                "Expected a floating or complex leaf that is not held by a mark, got: "
                f"{target.skeleton.listed_leaves(target.leaves)}.",
                fix="store floats (1.0 for 1), name a held leaf with wrt=..., or choose another argument by argnums.",
            )


def selected(targets: Sequence[Target]) -> list[Any]:
    """The differentiated leaves of all arguments."""
    return [leaf for target in targets for leaf in target.selected]


def shaped(forms: Sequence[Form], values: Sequence[Any]) -> tuple[Any, ...]:
    """One value per differentiated leaf, in the shapes of the gradients of the arguments."""
    parts, start = [], 0
    for form in forms:
        stop = start + len(form.plan.indices)
        parts.append(form.shaped(values[start:stop]))
        start = stop
    return tuple(parts)


def forms_of(targets: Sequence[Target]) -> tuple[Form, ...]:
    """The shapes of the gradients, without the arguments."""
    return tuple(Form(target.plan, target.treedef, target.position) for target in targets)


def paths(targets: Sequence[Target]) -> list[str]:
    """The paths of the differentiated leaves."""
    return [target.skeleton.path(i) for target in targets for i in target.plan.indices]
