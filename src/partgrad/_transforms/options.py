"""The options of transforms: what they may be, for type checkers and at run time, and what their documentation says."""

import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, Literal, TypedDict, TypeVar

import jax
import numpy as np

from .._selection import Selector
from .._trees import refuse_non_bools
from ..errors import ArgumentError
from .arguments import Argnames, Argnums
from .ring import KeepCalls

C = TypeVar("C", bound=Callable[..., Any])
Unused = Literal["zero", "none", "error"]
NonFinite = Literal["ignore", "report"] | KeepCalls


class ProductOptions(TypedDict, total=False):
    """The options of `hvp`."""

    argnums: Argnums
    argnames: Argnames
    has_aux: bool
    unused: Unused
    double_where: bool
    nonfinite: NonFinite


class GradOptions(ProductOptions, total=False):
    """The options of `grad` and `value_and_grad`."""

    holomorphic: bool
    dtype: Any


class JacobianOptions(ProductOptions, total=False):
    """The options of `jacfwd`, `jacrev` and `hessian`."""

    holomorphic: bool
    chunk_size: int | None


class LinearOptions(TypedDict, total=False):
    """The options of `jvp`, `vjp` and `linearize`; those of JAX pass through."""

    wrt: Selector
    argnums: Argnums
    argnames: Argnames
    double_where: bool
    nonfinite: NonFinite
    reduce_axes: Any
    saveable_args: Any
    in_nzs: Any


# The transforms whose results are those of one backward pass, or of one for each row.
WITH_BACKWARD_PASS = ("grad", "value_and_grad", "jacrev", "vjp")

_CHOICES = {
    "unused": {
        "zero": "omit it for JAX's zeros",
        "none": "write unused='none' for None",
        "error": "write unused='error' to be told what the output cannot depend on",
    },
    "nonfinite": {
        "ignore": "omit it",
        "report": "write nonfinite='report' to keep the arguments of the first gradient that is not finite, or "
        "nonfinite=partgrad.KeepCalls('calls') to keep those of the last calls on disk",
    },
}


def refuse_options(options: dict[str, Any]) -> None:
    """Raise if an option has a value that it cannot have."""
    for name, choices in _CHOICES.items():
        given = options.get(name, "zero")
        if name == "nonfinite" and isinstance(given, KeepCalls):
            continue
        if name in options and not (isinstance(given, str) and given in choices):
            raise ArgumentError(
                f"`{name}` is {given!r:.60}.",
                f"Expected {' or '.join(map(repr, choices))}.".replace(" or ", ", ", len(choices) - 2),
                fix=f"{', or '.join(choices.values())}.",
            )
    refuse_non_bools(**{name: options[name] for name in ("has_aux", "holomorphic", "double_where") if name in options})
    size = options.get("chunk_size")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1):
        raise ArgumentError(
            f"`chunk_size` is {type(size).__name__} {size!r:.60}.",
            "Expected how many columns or rows to compute at once: a positive integer, or None for all.",
            fix="write chunk_size=100.",
        )
    if options.get("dtype") is not None:
        _refuse_dtype(options["dtype"])


def _refuse_dtype(given: Any) -> None:
    try:
        dtype = jax.numpy.dtype(given)
    except TypeError:
        dtype = None
    fix = "write dtype=jax.numpy.float32."
    if dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.floating):
        if jax.dtypes.canonicalize_dtype(dtype) == dtype:
            return
        fix = "jax.config.update('jax_enable_x64', True) first, or write dtype=jax.numpy.float32."
    raise ArgumentError(
        f"`dtype` is {given if dtype is None else dtype!s:.60}.",
        "Expected a floating dtype that JAX has, or None.",
        fix=fix,
    )


_SELECTOR = """A selector: a callable on the argument (`lambda k: k.variance`), a path or glob
    (`"kernels[0].variance"`), a class, a mask, a `Selection`, or a dict of selectors, which gives a dict of
    gradients. A callable may take elements of a leaf, `lambda m: m.embedding[rows]`; where `rows` are integers of JAX,
    traced or not, a row may be there twice, and each of its positions has the gradient of the row."""
_TEXTS = {
    "f": "A function from any pytrees to any pytree of arrays.",
    "primals": "The arguments of `f`.",
    "wrt": """{selector} None selects every floating or complex leaf that no mark holds. With several arguments, a
        tuple of selectors. `partgrad.intermediate("h")`, alone or in the dict, selects a value inside the function.""",
    "argnums": """The position or positions of the arguments to differentiate; by default the first, unless `argnames`
        is given.""",
    "argnames": """The name or names of the arguments to differentiate, keyword arguments included. A single string
        gives a single gradient, as an int does.""",
    "has_aux": "Whether `f` returns a pair of what is differentiated and auxiliary data, as for `jax.{name}`.",
    "holomorphic": "Whether `f` is holomorphic, as for `jax.{name}`.",
    "unused": """What to do about selected leaves that the output cannot depend on, found by tracing: `"zero"` gives
        JAX's zero, `"none"` gives None, `"error"` raises and names them. A leaf that only passes through
        `stop_gradient` counts as unused.""",
    "double_where": "Whether to differentiate `partgrad.double_where(f)`: no NaN from a path that was not taken.",
    "nonfinite": """`"report"` keeps the arguments of the first derivative that is not finite on the host, and says so
        on standard error; `partgrad.last_nonfinite` returns them. While all is well nothing is kept and, under `jit`,
        nothing is moved; outside of it, each call waits for one bool. `partgrad.KeepCalls(path)` keeps the arguments of
        the last calls on disk.""",
    "chunk_size": """How many columns (of `jacfwd` and `hessian`) or rows (of `jacrev`) to compute at once, one after
        another by `lax.map`, so that the temporaries are those of so many. None computes all of them at once, as JAX
        does.""",
    "dtype": """A floating dtype in which gradients are accumulated and arrive, such as `jnp.float32` for weights in
        bfloat16. Leaves with fewer bits have gradients in it, and no value changes; the others have gradients in their
        own dtype. The function is traced, as under `jit`. None gives every gradient the dtype of its leaf.""",
    "options": "Other options of `jax.{name}`. Trees of bools among them are prefixes of the primals.",
}
_RAISES = {
    "SelectionError": "When called, if the selector does not fit the argument.",
    "ArgumentError": """If `wrt`, `argnums` and `argnames` do not fit together or do not fit the function, or an option
        has a value that it cannot have.""",
    "HeldError": """When called, if the derivative of a leaf that `wrt` names, and whose class holds it, ends at another
        mark on the way to the output. A function is traced for this once for each structure of its argument.""",
}


def documented(**own: str) -> Callable[[C], C]:
    """Write the sections Args and Raises of a transform's docstring, before its section Returns or Example.

    Args:
        **own: What one transform says differently, by the name of the parameter or of the error.
    """

    def decorate(transform: C) -> C:
        signature = inspect.signature(transform)
        texts = {**_TEXTS, **own}
        arguments = {str(p).partition(":")[0].partition("=")[0]: texts[p.name] for p in signature.parameters.values()}
        raises = {**_RAISES, **{error: said for error, said in own.items() if error.endswith("Error")}}
        # Python's `-OO` leaves none.
        head, _, rest = inspect.cleandoc(transform.__doc__ or "").partition("Returns:\n")
        returns, _, example = rest.partition("Example:\n")
        sections = {"Args": _entries(arguments), "Returns": returns, "Raises": _entries(raises), "Example": example}
        said = head + "".join(f"{title}:\n{section}" for title, section in sections.items())
        transform.__doc__ = said.replace("{name}", transform.__name__)
        return transform

    return decorate


def _entries(entries: dict[str, str]) -> str:
    wrapped = functools.partial(textwrap.fill, width=116, initial_indent=4 * " ", subsequent_indent=8 * " ")
    texts = (f"{entry}: {said.replace('{selector}', _SELECTOR)}" for entry, said in entries.items())
    lines = (wrapped(" ".join(text.split())) for text in texts)
    return "".join(f"{line}\n" for line in lines) + "\n"
