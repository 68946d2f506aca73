"""The function that a transform differentiates: of the selected leaves alone, with the marks open that were named."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._compat import speaks_of_structures
from .._marks import EXPLICIT, Inside, Watch, close, closed, mark_in, next_level
from .._message import at, listed, word
from .._programs import Chain, arrivals, line, reaching, running_line
from .._selection import Target
from ..errors import HeldError, PartgradError


class OfSelected:
    """A function of the list of the differentiated leaves alone; everything else is a constant of it.

    A mark that a selector named is open in the arguments that the function gets: it is there, and the derivative passes
    it. What leaves the function has the mark closed again, so whatever a transform returns goes through `closed`.

    Args:
        f: The function of the arguments.
        args: The positional arguments of a call.
        kwargs: The keyword arguments.
        targets: The differentiated ones of them.

    Attributes:
        level: The level at which this call opens marks; 0 if it opens none.
    """

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
                if not isinstance(error, PartgradError) and speaks_of_structures(error):
                    error.add_note(self._note())
                raise

    def with_marks_held(self, values: Sequence[Any]) -> Any:
        """What the function returns where no mark is open."""
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
        """What left the function, with the marks closed that this call opened."""
        return close(output, self.level) if self.level else output

    def closed_structure(self, structure: Any) -> Any:
        """As `closed`, of a treedef."""
        return closed(structure, self.level) if self.level else structure

    def refuse_silent_zeros(self, values: Sequence[Any], has_aux: bool = False) -> None:
        """Raise if the derivative of a leaf whose mark was opened ends at a mark that nobody wrote on its way.

        Args:
            values: The differentiated leaves.
            has_aux: Whether the function returns a pair, of which only the first is differentiated.

        Raises:
            HeldError: With the mark, and the line at which it stops the derivative.
        """
        if not self.level:
            return
        differentiated = (lambda values: self(values)[0]) if has_aux else self
        named = [i in target.plan.thaw for target in self._targets for i in target.plan.indices]
        try:
            jaxpr = jax.make_jaxpr(differentiated)(list(values)).jaxpr
        except jax.errors.ConcretizationTypeError:
            self._refuse_silent_zeros_while_running(differentiated, list(values), named)
            return
        met = [chain for chain, _ in arrivals(jaxpr, list(map(int, named)), _is_implicit)]
        for chain in reaching(jaxpr, met):
            mark = mark_in(str(chain[-1].source_info.name_stack)) or ""
            raise self._held_again(mark, line(chain) or _line_of(mark, differentiated, list(values)))

    def _refuse_silent_zeros_while_running(self, f: Callable[..., Any], values: list[Any], named: list[bool]) -> None:
        # It branches in Python on values: it cannot be traced as a program, and one more eager derivative has to tell.
        numbers = [number for number, is_named in enumerate(named) if is_named]

        def of_named(own: list[Any]) -> Any:
            everything = list(values)
            for number, value in zip(numbers, own, strict=True):
                everything[number] = value
            return f(everything)

        own = [jax.numpy.asarray(values[number]) for number in numbers]
        with Watch(running_line) as watch:
            jax.jvp(of_named, (own,), ([jax.numpy.ones_like(value) for value in own],))
        for label, where in watch.met:
            raise self._held_again(label, where)

    def _held_again(self, mark: str, where: str) -> HeldError:
        field = mark.rpartition(".")[2] if "." in mark else "field"
        return HeldError(
            word(
                f"The derivative of {self._opened()}, which `wrt` names, ends at another mark: {mark}"
                f"{f' at {where}' if where else ''}.",
                "Expected the derivative to reach the output; this part of it would be a zero that nobody asked for.",
                fix=f"build the model by dataclasses.replace(model, {field}=...), which keeps its marks, or "
                f"with {field}=partgrad.Diff(x), without the mark; jax.lax.stop_gradient(x) if a zero is meant.",
            )
        )

    def _opened(self) -> str:
        paths = (target.structure.path(i) for target in self._targets for i in target.plan.thaw)
        return listed(map(at, paths))

    def _note(self) -> str:
        return (
            f"partgrad: `wrt` names {self._opened()}, which a mark holds, so the mark is open inside this function. "
            "For JAX that is another structure than the held one: of a model from outside, of one that its class "
            "builds here, and of `in_axes` or specs made of that.\n"
            "Fix: build models here by dataclasses.replace or partgrad.replace, make `in_axes` and the like of the "
            "argument itself (jax.tree.map, then dataclasses.replace), use partgrad.apply_updates and "
            "partgrad.combine, or differentiate partgrad.thaw(model, ...)."
        )


def _line_of(mark: str, f: Callable[..., Any], values: list[Any]) -> str:
    """The line at which a mark holds something, if there is but one; for a program that does not bear its lines."""
    with Watch(running_line) as watch:
        # Not `f`, which JAX has traced before.
        jax.make_jaxpr(lambda values: f(values))(values)
    lines = {where for label, where in watch.held if label == mark}
    return lines.pop() if len(lines) == 1 else ""


def _is_implicit(chain: Chain) -> bool:
    equation = chain[-1]
    if equation.primitive.name != "stop_gradient":
        return False
    mark = mark_in(str(equation.source_info.name_stack))
    return mark is not None and mark != EXPLICIT
