"""One call of a transformed function: the function of the selected leaves alone, and the shape of its derivative."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .._compat import speaks_of_structures
from .._marks import Inside, close, closed, next_level, refuse_forgotten
from .._message import at, listed
from .._selection import Form, Target
from .._trees import Changes, describe, dtype_of, is_array, number_class, shape_of, with_changes
from ..errors import ArgumentError, NotDifferentiableError, PartgradError
from .state import may_change, warn_of
from .steps import inserting, of_steps, selected_steps

# The keyword by which values inside the function arrive; no parameter can have this name.
INSIDE = "partgrad.inside"
_NOTE = "partgrad: "
_NOTHING = contextlib.nullcontext()
# The name of a value inside the function that is selected alone; a dict may have any key, None too.
ALONE = object()
# Errors that come of values and of the world, not of traced numbers.
_OF_VALUES = (ArithmeticError, EOFError, MemoryError, OSError)
# The paths of leaves, each with shape and dtype; None for these where JAX alone knows them.
Kinds = tuple[tuple[str, tuple[tuple[int, ...], str] | None], ...]
# How many numbers a note names in its remedy.
_NAMED = 4


class ValuesInside(NamedTuple):
    """Values inside the function that are selected.

    Attributes:
        names: Their names, or globs, by the keys of the gradient or by `ALONE`.
        unpacked: From their derivative to their part of the gradient; None where the two are the same.
        unreduced: Makes the call whose derivative is that of the values, if in this one it is reduced.
    """

    names: Mapping[Any, str]
    unpacked: Callable[[Any], Any] | None
    unreduced: "Callable[[], Call] | None" = None


_NOTHING_INSIDE = ValuesInside({}, None)


class Written(NamedTuple):
    """A call as its user wrote it.

    Attributes:
        function: The function.
        double_where: Whether it is differentiated under `double_where`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    function: Callable[..., Any]
    double_where: bool
    args: Sequence[Any]
    kwargs: dict[str, Any]


class Shape:
    """The shape of a derivative: the gradient of each selected argument.

    Compared by identity, like the programs in what `jax.vjp` returns, beside which it is in one treedef.

    Attributes:
        forms: The shapes of the gradients of the arguments. If values inside the function are selected, the last is
            theirs.
        is_tuple: Whether the derivative is a tuple, with an entry for each argument.
        inside: The keys of values inside the function that are entries of one dict with the parts of the argument.
        unpacked: From the derivative of values inside to their part of the gradient; None where the two are the same.
    """

    __slots__ = ("forms", "inside", "is_tuple", "unpacked")

    def __init__(
        self,
        forms: tuple[Form, ...],
        is_tuple: bool,
        inside: frozenset[Any] = frozenset(),
        unpacked: Callable[[Any], Any] | None = None,
    ):
        self.forms, self.is_tuple, self.inside, self.unpacked = forms, is_tuple, inside, unpacked

    def without_leaves(self) -> "Shape":
        """The shape alone, which keeps no argument alive."""
        forms = tuple(Form(form.plan.without_arrays(), form.treedef, form.position) for form in self.forms)
        return Shape(forms, self.is_tuple, self.inside, self.unpacked)

    def shaped(self, values: Sequence[Any]) -> Any:
        """One value per differentiated leaf, in the shape of the derivative."""
        if len(self.forms) == 1 and not self.is_tuple and self.unpacked is None:
            return self.forms[0].shaped(values)
        parts: list[Any] = []
        start = 0
        for form in self.forms:
            stop = start + len(form.plan.indices)
            parts.append(form.shaped(values[start:stop]))
            start = stop
        if self.unpacked is not None:
            parts[-1] = self.unpacked(parts[-1])
        if self.inside:
            parts = [{name: value for part in parts for name, value in part.items()}]
        return tuple(parts) if self.is_tuple else parts[0]

    def values(self, given: Any, what: str) -> list[Any]:
        """Take one value per differentiated leaf out of a tree in the shape of the derivative.

        Args:
            given: The tree.
            what: What it is, such as `"tangent"`.

        Raises:
            ArgumentError: If it is no tuple with an entry for each argument, where it should be.
            PartsError: If the structure of a part differs.
        """
        if self.unpacked is not None:
            raise ArgumentError(
                f"The {what}s of values inside the function are reduced.",
                f"Expected a selector without `reduce`: no {what} has the shape of what it returns.",
                fix="leave `reduce` out: partgrad.intermediate('h').",
            )
        parts: tuple[Any, ...] = (given,)
        count = 1 if self.inside else len(self.forms)
        if self.is_tuple:
            if not isinstance(given, tuple | list) or len(given) != count:
                found = len(given) if isinstance(given, tuple | list) else type(given).__name__
                raise ArgumentError(
                    f"Expected a tuple of {count} {what}s, one for each selected argument, got {found}.",
                    "In `jvp`, `vjp` and `linearize`, every primal is selected without wrt; one selector is for the "
                    "first alone.",
                    fix="give a tuple with one tree for each selected argument, or select others by wrt=(selector, "
                    "None, ...) or by argnums.",
                )
            parts = tuple(given)
        if self.inside:
            entries = parts[0] if isinstance(parts[0], dict) else {None: parts[0]}
            parts = tuple(
                {name: value for name, value in entries.items() if (name in self.inside) is is_inside}
                for is_inside in (False, True)[-len(self.forms) :]
            )
        return [
            value
            for form, part in zip(self.forms, parts, strict=True)
            for value in form.values(part, f"The {what} of {_named(form.position)}")
        ]


class Call:
    """A call as a function of its selected leaves alone; everything else in it is a constant.

    In the arguments of the function, a mark that a selector named is open: it is still there, but the derivative passes
    it. The mark is closed again in what leaves the function, so whatever a transform returns goes through `closed`.

    Args:
        f: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        targets: The selected arguments.
        is_tuple: Whether its derivative is a tuple.
        inside: The selected values inside the function, if there are any.
        changing: The function `with_changes`, if it is another than that of `f`; what it warns of may change, too.
        stacking: From the function to that of leaves of which steps are selected as well; None if there is none.

    Attributes:
        level: The level at which the call opens marks; 0 if it opens none.
        may_change: Whether the function may change something in its arguments in place.
        written: The call as its user wrote it.
    """

    # JAX asks for it on every call, and Python would look for a while.
    __signature__ = inspect.Signature([inspect.Parameter("values", inspect.Parameter.POSITIONAL_OR_KEYWORD)])

    def __init__(
        self,
        f: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        targets: Sequence[Target],
        is_tuple: bool = False,
        inside: ValuesInside | None = None,
        changing: Callable[..., tuple[Any, Changes]] | None = None,
        stacking: Callable[[Callable[..., Any]], Callable[..., Any]] | None = of_steps,
    ):
        self.f, self.args, self.kwargs, self.targets = f, args, kwargs, tuple(targets)
        inside = inside or _NOTHING_INSIDE
        self.shape = Shape(self.targets, is_tuple, frozenset(inside.names) - {ALONE}, inside.unpacked)
        self._inside, self._changing, self._stacking = inside, changing, stacking
        self.level, self.may_change = 0, changing is not None
        self.written = Written(f, False, args, kwargs)
        for target in self.targets:
            plan = target.plan
            if plan.thaw:
                self.level = next_level()
            if plan.may_change is None:
                plan.may_change = may_change(target)
            self.may_change = self.may_change or plan.may_change

    @property
    def selected(self) -> list[Any]:
        """The differentiated leaves of all arguments."""
        if len(self.targets) == 1:
            return self.targets[0].selected
        return [leaf for target in self.targets for leaf in target.selected]

    @property
    def paths(self) -> list[str]:
        """Their paths."""
        return [self.path(target, i) for target in self.targets for i in target.plan.indices]

    @property
    def kinds(self) -> Kinds:
        """The paths, shapes and dtypes of the leaves."""
        return tuple((path, _kind_of(leaf)) for path, leaf in zip(self.paths, self.selected, strict=True))

    def path(self, target: Target, number: int) -> str:
        """The path of a leaf; that of a value inside the function begins with its selector, `intermediate('h')`."""
        path = target.skeleton.path(number)
        if target.position == INSIDE:
            for key, name in self._inside.names.items():
                start = "" if key is ALONE else f"[{key!r}]"
                if path.startswith(start):
                    return f"intermediate({name!r}){path.removeprefix(start)}"
        return path

    def at(self, targets: Sequence[Target]) -> "Call":
        """The same call at other values of the selected arguments."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for target in targets:
            given: Any = kwargs if isinstance(target.position, str) else args
            given[target.position] = target.tree
        return Call(self.f, args, kwargs, targets, self.shape.is_tuple, self._inside, self._changing, self._stacking)

    @property
    def unreduced(self) -> "Call":
        """The call whose derivative is that of values inside it, if in this one it is reduced; else this one."""
        return self if self._inside.unreduced is None else self._inside.unreduced()

    @property
    def names_inside(self) -> Mapping[Any, str]:
        """The names of values inside it that are selected, by the keys of the gradient or by `ALONE`."""
        return self._inside.names

    def refuse_empty(self) -> None:
        """Raise if an argument has leaves and none of them is differentiated."""
        for target in self.targets:
            if not target.plan.indices and target.is_empty:
                refuse_forgotten(target.leaves, target.skeleton.path, None)
                fix = "store floats (1.0 for 1), name a held leaf with wrt=..., or choose another argument by argnums."
                if any(isinstance(leaf, jax.Ref) for leaf in target.leaves):
                    fix = (
                        "differentiate a copy with values in the place of references: jax.tree.map(lambda leaf: "
                        "leaf[...] if isinstance(leaf, jax.Ref) else leaf, model)."
                    )
                raise NotDifferentiableError(
                    f"There is nothing to differentiate in argument {target.position}.",
                    "Expected a floating or complex leaf that is not held by a mark, got: "
                    f"{target.skeleton.listed_leaves(target.leaves)}.",
                    fix=fix,
                )

    def __call__(self, values: Sequence[Any]) -> Any:
        output, changes = self._run(values)
        if changes:
            warn_of(self.targets, changes)
        return output

    def with_changes(self, has_aux: bool) -> Callable[[Sequence[Any]], Any]:
        """A function of the leaves that returns the output, and the auxiliary data with what it changed in place."""

        def changing(values: Sequence[Any]) -> Any:
            output, changes = self._run(values)
            return (output[0], (output[1], changes)) if has_aux else (output, (None, changes))

        return changing

    def _run(self, values: Sequence[Any]) -> tuple[Any, Changes]:
        """The output of the function, and what it changed in its arguments, if it may change anything."""
        selected: list[Any] = []
        insert: Callable[[Target, Sequence[Any]], Any] = Target.with_selected
        if self.level:
            insert = lambda target, own: target.with_opened(own, self.level)
        for target in self.targets:
            # Where whole leaves are selected, as nearly always, nothing more is called.
            if not target.plan.is_whole and self._stacking is not None:
                selected = selected_steps(self.targets, values)
                insert = inserting(selected, self.level)
                break
        args, kwargs = self._arguments(values, insert)
        with Inside(self.level) if self.level else _NOTHING:
            try:
                function = self.f
                if self.may_change:
                    positions = [target.position for target in self.targets]
                    function = functools.partial(self._changing or with_changes(self.f), positions)
                if selected and self._stacking is not None:
                    function = functools.partial(self._stacking(function), selected)
                output = function(*args, **kwargs)
                return output if self.may_change else (output, ())
            except Exception as error:
                # Whatever it raises is raised, with a note if there is something to say.
                self.annotate(error)
                self._explain_numbers(error)
                raise

    def _explain_numbers(self, error: Exception) -> None:
        """Say in an error of the function which Python numbers are traced in it, if it runs where they are not."""
        pairs = list(zip(self.paths, self.selected, strict=True))
        numbers = [path for path, leaf in pairs if number_class(leaf) is not None]
        if not numbers or isinstance(error, (PartgradError, *_OF_VALUES)) or _is_noted(error):
            return
        arrays = [leaf for _, leaf in pairs if number_class(leaf) is None]

        def with_numbers(arrays: list[Any]) -> Any:
            rest = iter(arrays)
            values = [leaf if number_class(leaf) is not None else next(rest) for _, leaf in pairs]
            args, kwargs = self._arguments(values, Target.with_values)
            return self.f(*args, **kwargs)

        # An error at run time comes in neither of them.
        if not _traces(with_numbers, arrays) or _traces(self.with_marks_held, self.selected):
            return
        each = " | ".join((f"partgrad.path({numbers[0]!r})", *map(repr, numbers[1:])))
        if len(numbers) > _NAMED:
            each = "partgrad.matching(lambda path, leaf: isinstance(leaf, float))"
        error.add_note(
            f"{_NOTE}the function is differentiated with respect to Python numbers, which are traced in it: "
            f"{listed(at(path) for path in numbers)}. It runs if they are not.\n"
            f"Fix: hold them, model = partgrad.freeze(model, {each}), or leave them out of `wrt`."
        )

    def without_aux(self, has_aux: bool) -> Callable[[Sequence[Any]], Any]:
        """The differentiated output, for a look at the program: what that changes in place is not lost."""
        if not has_aux:
            return lambda values: self._run(values)[0]
        return lambda values: first_of_pair(self._run(values)[0])

    def with_marks_held(self, values: Sequence[Any]) -> Any:
        """What the function returns if no mark is open."""
        args, kwargs = self._arguments(values, Target.with_values)
        return self.f(*args, **kwargs)

    def _arguments(
        self, values: Sequence[Any], argument: Callable[[Target, Sequence[Any]], Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs, start = list(self.args), dict(self.kwargs), 0
        for target in self.targets:
            stop = start + len(target.plan.indices)
            if isinstance(target.position, str):
                kwargs[target.position] = argument(target, values[start:stop])
            else:
                args[target.position] = argument(target, values[start:stop])
            start = stop
        return args, kwargs

    def closed(self, output: Any) -> Any:
        """A result of the function, with the marks closed that this call opened."""
        return close(output, self.level) if self.level else output

    def closed_treedef(self, treedef: Any) -> Any:
        """Like `closed`, for a treedef."""
        return closed(treedef, self.level) if self.level else treedef

    def annotate(self, error: Exception) -> None:
        """Say in an error of JAX about trees that do not match which marks are open; once."""
        is_of_jax = isinstance(error, TypeError | ValueError) and not isinstance(error, PartgradError)
        if self.level and is_of_jax and speaks_of_structures(error) and not _is_noted(error):
            error.add_note(self._note())

    def _note(self) -> str:
        opened = listed(at(target.skeleton.path(i)) for target in self.targets for i in target.plan.thaw)
        return (
            f"{_NOTE}`wrt` names {opened}, which a mark holds, so the mark is open inside this function. "
            "For JAX that is a different structure from the held one: of a model from outside, of one that its class "
            "builds here, and of `in_axes` or specs made of that.\n"
            "Fix: build models here by dataclasses.replace or partgrad.replace, make `in_axes` and the like of the "
            "argument itself (jax.tree.map, then dataclasses.replace), use partgrad.apply_updates and "
            "partgrad.combine, or differentiate partgrad.thaw(model, ...)."
        )


def first_of_pair(output: Any) -> Any:
    """What is differentiated of an output with auxiliary data; an error, as in JAX, if it is no pair."""
    if not isinstance(output, tuple | list) or len(output) != 2:
        raise ArgumentError(
            f"The function returns {describe(output)}, and has_aux=True.",
            "Expected a pair of the value to differentiate and auxiliary data.",
            fix="return (value, aux), or omit has_aux.",
        )
    return output[0]


def refuse_other_kinds(what: str, kinds: Kinds, values: Sequence[Any]) -> None:
    """Raise if a value for a leaf has another shape or dtype than the leaf."""
    for (path, expected), value in zip(kinds, values, strict=True):
        found = _kind_of(value)
        if expected is None or found is None or expected == found:
            continue
        (shape, dtype), (other, other_dtype) = expected, found
        if shape != other:
            raise ArgumentError(
                f"The {what} of {at(path)} has shape {other}.",
                f"Expected the shape of what is selected there, {shape}.",
                fix=f"give a {what} like jax.numpy.zeros({shape}), with a number for each number.",
            )
        raise ArgumentError(
            f"The {what} of {at(path)} has dtype {other_dtype}.",
            f"Expected the dtype of what is selected there, {dtype}.",
            fix="give a real one."
            if "complex" in other_dtype and "complex" not in dtype
            else f"convert it: jax.numpy.asarray({what}, {dtype!r}).",
        )


def _kind_of(value: Any) -> tuple[tuple[int, ...], str] | None:
    """The shape and dtype of an array or a number in JAX; None for what has none, or is for JAX to refuse."""
    if not is_array(value) and number_class(value) is None:
        return None
    return shape_of(value), str(jax.dtypes.canonicalize_dtype(dtype_of(value)))


def _named(position: int | str) -> str:
    return "values inside the function" if position == INSIDE else f"argument {position}"


def _traces(function: Callable[[list[Any]], Any], values: list[Any]) -> bool:
    try:
        jax.make_jaxpr(function)(values)
    except Exception:
        return False
    return True


def _is_noted(error: Exception) -> bool:
    return any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ()))
