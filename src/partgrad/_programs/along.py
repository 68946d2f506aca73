"""A function of operands along some of them, and JAX's derivatives of it there, with the outputs beside them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from .equations import Operands

# From operands and tangents, or cotangents, to outputs and what these come to.
Moved = Callable[[Operands, Operands], tuple[Operands, Operands]]


def along(
    function: Callable[[Operands], Operands], moving: Sequence[int], operands: Sequence[Any]
) -> tuple[Callable[..., Operands], Operands]:
    """A function of operands as one of some of them, together with these."""
    return (
        lambda *moved: function(replaced(operands, moving, moved)),
        [operands[number] for number in moving],
    )


def replaced(values: Iterable[Any], numbers: Iterable[int], by: Iterable[Any]) -> Operands:
    """Values, with others in place of those that have given numbers."""
    at = dict(zip(numbers, by, strict=True))
    return [at.get(number, value) for number, value in enumerate(values)]


def _some_beside_all(function: Callable[..., Operands], numbers: Sequence[int]) -> Callable[..., Any]:
    def chosen(*operands: Any) -> tuple[Operands, Operands]:
        outputs = function(*operands)
        return [outputs[number] for number in numbers], outputs

    return chosen


def pushing(function: Callable[[Operands], Operands], moving: Sequence[int], floating: Sequence[int]) -> Moved:
    """JAX's forward derivative of a function: from operands and tangents to outputs and their tangents.

    Args:
        function: From operands to outputs.
        moving: The numbers of the operands that have tangents.
        floating: The numbers of the outputs whose tangents are wanted.
    """

    def pushed(operands: Operands, tangents: Operands) -> tuple[Operands, Operands]:
        of_moving, start = along(function, moving, operands)
        _, rates, outputs = jax.jvp(_some_beside_all(of_moving, floating), start, tangents, has_aux=True)
        return outputs, rates

    return pushed


def pulling(function: Callable[[Operands], Operands], moving: Sequence[int], floating: Sequence[int]) -> Moved:
    """The same for reverse mode: from operands and the cotangents of outputs to outputs and those of operands."""

    def pulled(operands: Operands, cotangents: Operands) -> tuple[Operands, Operands]:
        of_moving, start = along(function, moving, operands)
        _, pull, outputs = jax.vjp(_some_beside_all(of_moving, floating), *start, has_aux=True)
        return outputs, list(pull(cotangents))

    return pulled
