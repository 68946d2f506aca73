"""How a function becomes a transformed one: what `grad`, the Jacobians and `hvp` have in common."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax

from .._marks import Inside
from .._message import listed
from .._trees import refuse_uncallable
from ..errors import SelectionError
from .arguments import Arguments, F
from .call import Call
from .options import WITH_BACKWARD_PASS, refuse_options

# One value per differentiated leaf, in the shape of the derivative.
Shaped = Callable[[Sequence[Any]], Any]
_COMMON = ("wrt", "argnums", "argnames", "double_where", "unused", "nonfinite")


class Derivative(NamedTuple):
    """What a transform computes: the derivative in its shape, the value, and the auxiliary data."""

    derivative: Any
    value: Any = None
    aux: Any = None


def without_value(found: Derivative, has_aux: bool) -> Any:
    """What a transform returns that is asked for the derivative alone."""
    return (found.derivative, found.aux) if has_aux else found.derivative


def transform(
    public: F, compute: Callable[..., Derivative], title: str, returned: Callable[..., Any], given: dict[str, Any]
) -> F:
    """A transformed function, or without a function a decorator.

    Args:
        public: The public transform.
        compute: See `derivative_of`.
        title: What the transformed function computes.
        returned: From what is computed, and whether there is auxiliary data, to what the function returns.
        given: What `public` was given: `f`, `wrt`, and the options.
    """
    refuse_options(given)
    f, has_aux = given.pop("f"), given["has_aux"]
    if f is None:
        return functools.partial(public, **given)
    derivative = derivative_of(public.__name__, f, compute, given)
    return _dressed(public.__name__, f, title, lambda *args, **kwargs: returned(derivative(args, kwargs), has_aux))


def derivative_of(
    name: str, f: F, compute: Callable[..., Derivative], given: dict[str, Any]
) -> Callable[..., Derivative]:
    """The function of the arguments of a call, a tuple and a dict, that computes a derivative.

    Args:
        name: The name of the transform.
        f: The function to differentiate.
        compute: From a call, its selected leaves, the function that gives derivatives their shape, whatever else a call
            is given, and the options that are left, to what the transform computes.
        given: `wrt` and the options.
    """
    refuse_uncallable(
        name, f, "the function to differentiate", "write partgrad.{0}(f, wrt=...)(model), or @partgrad.{0}(wrt=...)."
    )
    wrt, argnums, argnames, double_where, unused, nonfinite = (given[option] for option in _COMMON)
    options = {option: own for option, own in given.items() if option not in _COMMON}
    arguments, has_aux = Arguments(f, wrt, argnums, argnames, double_where), given["has_aux"]
    if name not in WITH_BACKWARD_PASS:
        arguments.refuse_reductions(name)

    def derivative(args: Sequence[Any], kwargs: dict[str, Any], *others: Any) -> Derivative:
        call = arguments.call(args, kwargs, has_aux)
        leaves, shaped = call.selected, cast(Shaped, call.shape.shaped)
        if unused != "zero":
            shaped = _shaped_where_used(call, leaves, has_aux, unused)
        try:
            if call.level:
                # The backward pass, too, may run code in which the marks are open.
                with Inside(call.level):
                    found = compute(call, leaves, shaped, *others, **options)
            else:
                found = compute(call, leaves, shaped, *others, **options)
        except (TypeError, ValueError) as error:
            # The backward pass of a `custom_vjp` runs after the function has returned.
            call.annotate(error)
            raise
        if nonfinite != "ignore":
            # Not every program needs it.
            from .nonfinite import watch

            watch(call, jax.tree.leaves(found.derivative), has_aux, nonfinite)
        return found

    return derivative


def _shaped_where_used(call: Call, leaves: list[Any], has_aux: bool, unused: str) -> Shaped:
    # Importing it takes longer than importing everything that `grad` needs.
    from .unused import used_leaves

    used = used_leaves(call.without_aux(has_aux), leaves)
    if unused == "error":
        if not all(used):
            raise _unused(path for path, flag in zip(call.paths, used, strict=True) if not flag)
        return call.shape.shaped
    return lambda values: call.shape.shaped([own if flag else None for own, flag in zip(values, used, strict=True)])


def _unused(unused: Iterable[str]) -> SelectionError:
    return SelectionError(
        f"The output cannot depend on {listed(f'`{path}`' for path in unused)}.",
        "Expected a path to the output for every selected leaf; stop_gradient and conversion to int cut paths.",
        fix="select what the function uses, or write unused='none' for None at these leaves.",
    )


def _dressed(transform: str, f: F, title: str, implementation: F) -> F:
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
