"""The function that a transform differentiates: of the selected leaves alone, with the named marks open."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from .._compat import speaks_of_structures
from .._marks import Inside, close, closed, next_level
from .._message import at, listed
from .._selection import Target
from ..errors import PartgradError
from .arguments import Call, selected

_NOTE = "partgrad: "


class OfSelected:
    """A function of the list of differentiated leaves alone; everything else is a constant.

    In the arguments of the function, a mark that a selector named is open: it is still there, but the derivative passes
    it. The mark is closed again in what leaves the function, so whatever a transform returns goes through `closed`.
    This call opens marks at `level`, which is 0 if it opens none.
    """

    # JAX asks for it on every call, and Python would look for a while.
    __signature__ = inspect.Signature([inspect.Parameter("values", inspect.Parameter.POSITIONAL_OR_KEYWORD)])

    def __init__(self, f: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], targets: Sequence[Target]):
        self._f, self._args, self._kwargs, self._targets = f, args, kwargs, targets
        self.level = 0
        if any(target.plan.thaw for target in targets):
            self.level = next_level(target.treedef for target in targets)

    def __call__(self, values: Sequence[Any]) -> Any:
        if not self.level:
            return self._called(values, Target.with_selected)
        with Inside(self.level):
            try:
                return self._called(values, lambda target, own: target.with_opened(own, self.level))
            except (TypeError, ValueError) as error:
                self.annotate(error)
                raise

    def without_aux(self, has_aux: bool) -> Callable[[Sequence[Any]], Any]:
        """The differentiated output: the first of a pair if the function returns auxiliary data too."""
        return (lambda values: self(values)[0]) if has_aux else self

    def with_marks_held(self, values: Sequence[Any]) -> Any:
        """What the function returns if no mark is open."""
        return self._called(values, Target.with_values)

    def _called(self, values: Sequence[Any], argument: Callable[[Target, Sequence[Any]], Any]) -> Any:
        args, kwargs, start = list(self._args), dict(self._kwargs), 0
        for target in self._targets:
            stop = start + len(target.plan.indices)
            if isinstance(target.position, str):
                kwargs[target.position] = argument(target, values[start:stop])
            else:
                args[target.position] = argument(target, values[start:stop])
            start = stop
        return self._f(*args, **kwargs)

    def closed(self, output: Any) -> Any:
        """A result of the function, with the marks closed that this call opened."""
        return close(output, self.level) if self.level else output

    def closed_treedef(self, treedef: Any) -> Any:
        """Like `closed`, for a treedef."""
        return closed(treedef, self.level) if self.level else treedef

    def refuse_silent_zeros(self, values: Sequence[Any], has_aux: bool = False) -> None:
        """Raise if the derivative of a named leaf that its class holds ends at a mark that nobody wrote there."""
        if not any(target.plan.watched for target in self._targets):
            return
        # Importing it takes longer than importing everything that `grad` needs.
        from .silent import refuse_silent_zeros

        watched = [i in target.plan.watched for target in self._targets for i in target.plan.indices]
        refuse_silent_zeros(self.without_aux(has_aux), list(values), watched, self._watched)

    def _watched(self) -> str:
        return listed(at(target.skeleton.path(i)) for target in self._targets for i in target.plan.watched)

    def _opened(self) -> str:
        return listed(at(target.skeleton.path(i)) for target in self._targets for i in target.plan.thaw)

    def annotate(self, error: Exception) -> None:
        """Say in an error of JAX about trees that do not match which marks are open; once."""
        if not self.level or isinstance(error, PartgradError) or not speaks_of_structures(error):
            return
        if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
            error.add_note(self._note())

    def _note(self) -> str:
        return (
            f"{_NOTE}`wrt` names {self._opened()}, which a mark holds, so the mark is open inside this function. "
            "For JAX that is a different structure from the held one: of a model from outside, of one that its class "
            "builds here, and of `in_axes` or specs made of that.\n"
            "Fix: build models here by dataclasses.replace or partgrad.replace, make `in_axes` and the like of the "
            "argument itself (jax.tree.map, then dataclasses.replace), use partgrad.apply_updates and "
            "partgrad.combine, or differentiate partgrad.thaw(model, ...)."
        )


def of_selected(call: Call, has_aux: bool = False) -> tuple[OfSelected, list[Any]]:
    """The function of the differentiated leaves of a call, and these leaves; refuses silent zeros."""
    function, leaves = OfSelected(*call), selected(call.targets)
    function.refuse_silent_zeros(leaves, has_aux)
    return function, leaves
