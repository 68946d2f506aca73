"""A tap: it passes values on, and shows them to a function of Python when the program runs, whatever is around it.

`jax.debug.callback` has an effect, which transformations see: reverse mode gives up at a loop that it could skip. A tap
has none. It is the identity of the values that it passes on, in every derivative and transpose too, and stays in a
program as long as one of these is used.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.jet import jet_rules
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from .._compat import runs_on_one_device

# How many elements of a batch are shown.
_SHOWN = 16
Show = Callable[..., object]


def tapped(show: Show, operands: Sequence[Any], passed: Sequence[Any]) -> list[Any]:
    """The values that are passed on; `show` gets the operands when the program runs, once for a batch's elements."""
    given = [*operands, *passed]
    return list(tap.bind(*given, show=show, axes=((),) * len(operands)))


def passed_on(equation: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
    """What a tap returns; None for any other equation."""
    return list(operands[len(equation.params["axes"]) :]) if equation.primitive is tap else None


# `axes` has, for each operand that is shown, the sizes of the batches that it is an element of: the first axis belongs
# to the last of them. None stands for a batch that the operand is the same in.
tap = Primitive("partgrad_tap")
tap.multiple_results = True


@tap.def_abstract_eval
def _avals(*avals: Any, show: Show, axes: Any) -> list[Any]:
    return list(avals[len(axes) :])


@tap.def_impl
def _run(*values: Any, show: Show, axes: Any) -> list[Any]:
    _show_elements(show, axes, *values[: len(axes)])
    return list(values[len(axes) :])


def _show_elements(show: Show, axes: Any, *operands: Any) -> None:
    """Show the operands, or some elements of a batch of them."""
    if not axes:
        return
    if not axes[0]:
        show(*operands)
        return
    for numbers in _elements([next(filter(None, sizes), 1) for sizes in zip(*axes, strict=True)]):
        # The last batch has the first axis.
        show(
            *(
                operand[tuple(number for number, size in zip(numbers, sizes, strict=True) if size is not None)[::-1]]
                for operand, sizes in zip(operands, axes, strict=True)
            )
        )


def _elements(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The numbers of elements of nested batches, from the first to the last, evenly apart."""
    total = int(np.prod(sizes))
    for number in sorted(set(np.linspace(0, total - 1, min(total, _SHOWN)).astype(int).tolist())) if total else ():
        yield tuple(int(index) for index in np.unravel_index(number, sizes))


def _lowered(*values: Any, show: Show, axes: Any) -> list[Any]:
    if axes:
        jax.debug.callback(functools.partial(_show_elements, show, axes), *values[: len(axes)])
    return list(values[len(axes) :])


def _lowering(context: Any, *values: Any, show: Show, axes: Any) -> Any:
    """A callback that gets arrays of NumPy where it can: `jax.debug.callback` takes ten times as long."""
    count = len(axes)
    shown = context.avals_in[:count]
    if not count or not runs_on_one_device(context) or not all(isinstance(aval.dtype, np.dtype) for aval in shown):
        return mlir.lower_fun(_lowered, multiple_results=True)(context, *values, show=show, axes=axes)

    def called(*operands: Any) -> tuple[()]:
        _show_elements(show, axes, *operands)
        return ()

    own = context.replace(avals_in=shown, avals_out=[])
    mlir.emit_python_callback(own, called, None, list(values[:count]), shown, [], has_side_effect=True)
    return [[value] for value in values[count:]]


def _jvp(primals: Any, tangents: Any, *, show: Show, axes: Any) -> tuple[Any, Any]:
    return tap.bind(*primals, show=show, axes=axes), list(tangents[len(axes) :])


def _transposed(cotangents: Any, *operands: Any, show: Show, axes: Any) -> list[Any]:
    return [*itertools.repeat(None, len(axes)), *cotangents]


def _batched(operands: Any, dims: Any, *, show: Show, axes: Any) -> tuple[Any, Any]:
    count = len(axes)
    pairs = list(zip(operands[:count], dims[:count], strict=True))
    size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    shown = [x if dim is None else jax.numpy.moveaxis(x, dim, 0) for x, dim in pairs]
    sizes = [(*own, None if dim is None else size) for own, (_, dim) in zip(axes, pairs, strict=True)]
    return tap.bind(*shown, *operands[count:], show=show, axes=tuple(sizes)), list(dims[count:])


def _series(primals: Any, series: Any, *, show: Show, axes: Any) -> tuple[Any, Any]:
    return tap.bind(*primals, show=show, axes=axes), list(series[len(axes) :])


def _partly_known(trace: Any, *tracers: Any, show: Show, axes: Any) -> list[Any]:
    """What is not known yet, such as a tangent, makes nothing else unknown: what is known is passed on as it is."""
    count, parameters = len(axes), {"show": show, "axes": axes}
    if all(tracer.is_known() for tracer in tracers):
        return list(trace.default_process_primitive(tap, tracers, parameters))
    given = [*tracers[:count], *(tracer for tracer in tracers[count:] if not tracer.is_known())]
    later = iter(trace.default_process_primitive(tap, given, parameters))
    return [tracer if tracer.is_known() else next(later) for tracer in tracers[count:]]


def _partly_known_equation(
    saveable: Any, are_unknown: Any, are_there: Any, equation: JaxprEqn
) -> tuple[Any, Any, Any, Any, Any]:
    """The same for an equation of a checkpoint: now, in the backward pass, and what that needs beside."""
    count, unknown = len(equation.params["axes"]), are_unknown[len(equation.params["axes"]) :]
    missing = lambda number: [v for v, is_one in zip(equation.invars[:number], are_there, strict=False) if not is_one]
    if not any(are_unknown):
        # It is computed again, so that nothing more has to be kept.
        return equation, equation, [False] * len(unknown), [True] * len(unknown), missing(len(equation.invars))
    of = lambda is_one: [number for number, one in enumerate(unknown) if one == is_one]
    now = _passing(equation, of(False), []) if of(False) else None
    later = _passing(equation, of(True), list(range(count))) if of(True) else None
    return now, later, list(unknown), list(unknown), missing(count)


def _passing(equation: JaxprEqn, passed: list[int], shown: list[int]) -> JaxprEqn:
    """A tap that shows and passes on some of what another one does."""
    axes = equation.params["axes"]
    return equation.replace(
        invars=[equation.invars[number] for number in (*shown, *(len(axes) + number for number in passed))],
        outvars=[equation.outvars[number] for number in passed],
        params={"show": equation.params["show"] if shown else _nothing, "axes": tuple(axes[n] for n in shown)},
    )


def _nothing(*operands: Any) -> None:
    """For a tap that shows nothing."""


ad.primitive_jvps[tap] = _jvp
jet_rules[tap] = _series
ad.primitive_transposes[tap] = _transposed
batching.primitive_batchers[tap] = _batched
partial_eval.custom_partial_eval_rules[tap] = _partly_known
partial_eval.partial_eval_jaxpr_custom_rules[tap] = _partly_known_equation
mlir.register_lowering(tap, _lowering)
