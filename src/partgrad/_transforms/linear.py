"""jvp, vjp and linearize: transforms that take primals, instead of returning a function of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeVar, TypeVarTuple, Unpack, cast, overload

import jax

from .._marks import Inside, alike, close, flatten_one_level
from .._selection import Intermediate, Selector
from .._trees import refuse_uncallable
from ..errors import ArgumentError, PartsError
from .arguments import Argnames, Argnums, Arguments
from .call import Call, Shape, refuse_other_kinds
from .options import WITH_BACKWARD_PASS, LinearOptions, NonFinite, documented, refuse_options

A = TypeVar("A")
R = TypeVar("R")
Primals = TypeVarTuple("Primals")

# JAX's own options that are trees of bools, prefixes of the primals.
_OF_PRIMALS = ("in_nzs", "saveable_args")
_FUNCTION = "A function from the primals, any pytrees, to any pytree of arrays."
_WRT = """None for every primal, one selector for the first primal (the others are then constants), or a tuple of
    selectors, one for each primal; with `argnums` or `argnames`, one for each of those. {selector}"""


class _Prepared(NamedTuple):
    """A call, its selected leaves, and JAX's options."""

    call: Call
    leaves: list[Any]
    options: dict[str, Any]


def _prepared(
    transform: str,
    f: Any,
    primals: Sequence[Any],
    has_aux: bool,
    wrt: Any,
    argnums: Argnums,
    argnames: Argnames,
    double_where: bool,
    nonfinite: NonFinite,
    options: dict[str, Any],
) -> _Prepared:
    fix = "pass the function itself, and its arguments beside it."
    refuse_uncallable(transform, f, "the function to differentiate", fix)
    refuse_options({"has_aux": has_aux, "double_where": double_where, "nonfinite": nonfinite})
    if not isinstance(primals, tuple | list):
        raise ArgumentError(
            f"`partgrad.{transform}` got {type(primals).__name__} {primals!r:.60} as primals.",
            "Expected a tuple of the arguments of the function.",
            fix="write (x,) for one argument.",
        )
    if isinstance(wrt, Intermediate) and (unfit := [name for name in _OF_PRIMALS if name in options]):
        raise ArgumentError(
            f"`{transform}` got {unfit[0]}= beside wrt={wrt!r}.",
            "Expected options that are not about the primals, since a value inside the function is none.",
            fix=f"leave {unfit[0]} out.",
        )
    arguments = Arguments.of_primals(f, primals, wrt, argnums, argnames, double_where)
    if transform not in WITH_BACKWARD_PASS:
        arguments.refuse_reductions(transform)
    call = arguments.call(primals, {}, has_aux)
    options = {name: _flags(own, call) if name in _OF_PRIMALS else own for name, own in options.items()}
    return _Prepared(call, call.selected, options)


def _watcher(call: Call, has_aux: bool, nonfinite: NonFinite) -> Any:
    """What keeps a call if a derivative that is found later is not finite; None if nothing does."""
    if nonfinite == "ignore":
        return None
    # Not every program needs it.
    from .nonfinite import Watcher

    return Watcher.of(call, has_aux, nonfinite)


def _flags(prefix: Any, call: Call) -> Any:
    """Bools for the differentiated leaves, given a prefix of the primals."""
    if not isinstance(prefix, tuple | list):
        return prefix
    flags = [_broadcast(prefix[cast(int, target.position)], target.treedef) for target in call.targets]
    return (tuple(own[i] for own, target in zip(flags, call.targets, strict=True) for i in target.plan.indices),)


def _broadcast(prefix: Any, treedef: Any) -> list[Any]:
    """A value for each leaf; the classes of containers do not matter."""
    if isinstance(prefix, bool):
        return [prefix] * treedef.num_leaves
    below = [child for _, child in flatten_one_level(prefix)[0]]
    return [own for child, part in zip(below, treedef.children(), strict=True) for own in _broadcast(child, part)]


class _OfJax:
    """A linear function that JAX returned, whose leaves are residuals, with what else is known about it; a pytree.

    If it is to keep the call where what it finds is not finite, a watcher does, which has the arrays of the call.
    """

    def __init__(self, function: Any, watcher: Any, shape: Shape, *rest: Any):
        self._function, self._watcher, self._shape, self._rest = function, watcher, shape, rest

    def __getattr__(self, name: str) -> Any:
        # The other attributes of JAX's own object.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._function, name, value)

    def tree_flatten(self) -> tuple[Any, Any]:
        """JAX's function and the watcher, and the rest."""
        return (self._function, self._watcher), (self._shape, *self._rest)

    @classmethod
    def tree_unflatten(cls, rest: Any, children: Any) -> Self:
        """The function with other residuals."""
        return cls(*children, *rest)

    @property
    def _arguments(self) -> str:
        counts = (f"argument {form.position} ({len(form.plan.indices)} leaves)" for form in self._shape.forms)
        return ", ".join(counts)


@jax.tree_util.register_pytree_node_class
class Pullback(_OfJax):
    """Pulls cotangents of a value back to the selected leaves; a pytree, as JAX's is, with JAX's methods.

    In addition to JAX's function, it has the shape of the gradients, the structure of the value (outside the function,
    and inside, where marks may be open), and the level at which they are open.
    """

    def __repr__(self) -> str:
        return f"<partgrad.vjp: from a cotangent of {self._rest[0]} to gradients of {self._arguments}>"

    def __call__(self, *cotangents: Any) -> tuple[Any, ...]:
        """A tuple of one pulled-back cotangent for each selected primal, in the shape of its gradient."""
        return cast(tuple[Any, ...], self._pulled(self._function, cotangents))

    def _pulled(self, function: Any, cotangents: Sequence[Any]) -> Any:
        inside = self._inside(cotangents)
        # Backward passes may run code in which marks are open.
        with Inside(self._rest[2]):
            gradients = function(inside)
        if getattr(function, "want_logs", False):
            gradients, logs = gradients
            return self._shaped(gradients[0]), logs
        return self._shaped(gradients[0])

    def _shaped(self, gradients: list[Any]) -> Any:
        if self._watcher is not None:
            self._watcher.watch(gradients)
        return self._shape.shaped(gradients)

    def with_refs(self, *refs: Any) -> Callable[[Any], Any]:
        """A function of the cotangent that adds gradients to references, as that of JAX's object.

        Args:
            *refs: For each selected primal a tree in the shape of its gradient, with a `jax.Ref` where the gradient is
                added to a reference, and what else JAX's `with_refs` takes (`jax.ad.DontWant()`).

        Raises:
            ArgumentError: If there is not one tree for each selected primal.
            PartsError: If a tree does not have the structure of the gradient.
        """
        function = self._function.with_refs(self._shape.values(refs, "reference"))
        return lambda *cotangents: self._pulled(function, cotangents)

    @property
    def with_logs(self) -> Pullback:
        """The same, which returns the gradients and the dict of what backward passes logged, as JAX's does."""
        return Pullback(self._function.with_logs, self._watcher, self._shape, *self._rest)

    def _inside(self, cotangents: Sequence[Any]) -> Any:
        """The cotangent with the structure of the value inside the function."""
        output, inside, _ = self._rest
        if len(cotangents) != 1:
            raise ArgumentError(
                f"The function that `vjp` returns takes one cotangent, and got {len(cotangents)}.",
                "Expected a tree in the structure of the output.",
                fix="if the output is a tuple, give a tuple: pull((a, b)).",
            )
        leaves, treedef = jax.tree.flatten(cotangents[0])
        if not alike(treedef, output):
            raise PartsError(
                "The cotangent has a different structure from the output of the function.",
                f"Expected {output}, got {treedef}.",
                fix="give a tree like the value, with a cotangent in the place of every array.",
            )
        return inside.unflatten(leaves)


@jax.tree_util.register_pytree_node_class
class LinearMap(_OfJax):
    """The derivative along tangents of the selected leaves; a pytree, as JAX's is.

    In addition to JAX's function, it has the shape of the gradients, the level at which marks are open in its results
    (0 if none is), and the paths and kinds of the leaves.
    """

    def __repr__(self) -> str:
        return f"<partgrad.linearize: a linear map of tangents of {self._arguments}>"

    def __call__(self, *tangents: Any) -> Any:
        """The derivative along tangents, one for each selected primal, in the shape of its gradient."""
        level, kinds = self._rest
        direction = self._shape.values(tangents, "tangent")
        refuse_other_kinds("tangent", kinds, direction)
        along = self._function(direction)
        if self._watcher is not None:
            self._watcher.watch(jax.tree.leaves(along))
        return close(along, level) if level else along


@overload
def jvp(
    f: Callable[..., R],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[LinearOptions],
) -> tuple[R, R]: ...


@overload
def jvp(
    f: Callable[..., tuple[R, A]],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    has_aux: Literal[True],
    **options: Unpack[LinearOptions],
) -> tuple[R, R, A]: ...


@documented(
    f=_FUNCTION,
    wrt=_WRT,
    tangents="""The direction, one tree for each selected primal, in the shape of its gradient: the selected part, or
    the tree with None at every leaf that is not selected.""",
    PartsError="If a tangent does not have the structure of the gradient.",
)
def jvp(
    f: Any,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    wrt: Selector = None,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    double_where: bool = False,
    nonfinite: NonFinite = "ignore",
    **options: Any,
) -> Any:
    """Compute the value of a function and its derivative along a direction (forward mode).

    Returns:
        The value and the derivative; with `has_aux` also the auxiliary data.

    Example:
        >>> import partgrad as pg
        >>> f = lambda p, x: p["a"] ** 2 * x
        >>> value, derivative = pg.jvp(f, ({"a": 3.0, "n": 1}, 2.0), (1.0,), wrt="a")
        >>> print(value, derivative)
        18.0 12.0
        >>> print(pg.jvp(f, ({"a": 3.0, "n": 1}, 2.0), (1.0,), argnums=1))
        (Array(18., dtype=float32, weak_type=True), Array(9., dtype=float32, weak_type=True))

    See Also:
        `linearize`, for many directions at one point; `hvp`, for a derivative of the gradient.
    """
    given = wrt, argnums, argnames, double_where, nonfinite, options
    call, leaves, options = _prepared("jvp", f, primals, has_aux, *given)
    direction = call.shape.values(tangents, "tangent")
    refuse_other_kinds("tangent", call.kinds, direction)
    value, along, *aux = jax.jvp(call, (leaves,), (direction,), has_aux=has_aux, **options)
    if nonfinite != "ignore":
        # Not every program needs it.
        from .nonfinite import watch

        watch(call, jax.tree.leaves(along), has_aux, nonfinite)
    return call.closed((value, along, *aux))


@overload
def vjp(
    f: Callable[[*Primals], R],
    *primals: *Primals,
    has_aux: Literal[False] = False,
    dtype: Any = None,
    **options: Unpack[LinearOptions],
) -> tuple[R, Pullback]: ...


@overload
def vjp(
    f: Callable[[*Primals], tuple[R, A]],
    *primals: *Primals,
    has_aux: Literal[True],
    dtype: Any = None,
    **options: Unpack[LinearOptions],
) -> tuple[R, Pullback, A]: ...


@documented(f=_FUNCTION, wrt=_WRT)
def vjp(
    f: Any,
    *primals: *Primals,
    wrt: Selector = None,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    double_where: bool = False,
    nonfinite: NonFinite = "ignore",
    dtype: Any = None,
    **options: Any,
) -> Any:
    """Compute the value of a function, and a function that maps cotangents back to the selected leaves (reverse mode).

    Returns:
        The value, and a function from a cotangent of the value to a tuple of cotangents, one for each selected primal,
        in the shape of its gradient; with `has_aux` also the auxiliary data. The function is a pytree and has the
        methods of JAX's: `with_refs` takes references in the shapes of the gradients, and adds the gradients to them.

    Example:
        >>> import partgrad as pg
        >>> value, pull = pg.vjp(lambda p, x: p["a"] ** 2 * x, {"a": 3.0, "n": 1}, 2.0)
        >>> print(value, pull(1.0))
        18.0 ({'a': Array(12., dtype=float32, weak_type=True), 'n': None}, Array(9., dtype=float32, weak_type=True))

    See Also:
        `grad`, for one gradient of a scalar; `linearize`, for forward mode.
    """
    given = wrt, argnums, argnames, double_where, nonfinite, options
    call, leaves, options = _prepared("vjp", f, primals, has_aux, *given)
    function: Any = call
    if dtype is not None:
        refuse_options({"dtype": dtype})
        # Importing it takes longer than importing everything that `vjp` needs.
        from .precision import in_precision

        function, leaves = in_precision(call, leaves, dtype)
    value, pull, *aux = jax.vjp(function, leaves, has_aux=has_aux, **options)
    inside = jax.tree.structure(value)
    value, *aux = call.closed((value, *aux))
    watcher, shape = _watcher(call, has_aux, nonfinite), call.shape.without_leaves()
    return value, Pullback(pull, watcher, shape, jax.tree.structure(value), inside, call.level), *aux


@overload
def linearize(
    f: Callable[[*Primals], R],
    *primals: *Primals,
    has_aux: Literal[False] = False,
    **options: Unpack[LinearOptions],
) -> tuple[R, LinearMap]: ...


@overload
def linearize(
    f: Callable[[*Primals], tuple[R, A]],
    *primals: *Primals,
    has_aux: Literal[True],
    **options: Unpack[LinearOptions],
) -> tuple[R, LinearMap, A]: ...


@documented(f=_FUNCTION, wrt=_WRT)
def linearize(
    f: Any,
    *primals: *Primals,
    wrt: Selector = None,
    argnums: Argnums = None,
    argnames: Argnames = None,
    has_aux: bool = False,
    double_where: bool = False,
    nonfinite: NonFinite = "ignore",
    **options: Any,
) -> Any:
    """Compute the value of a function and its linear approximation in the selected leaves, to apply to many directions.

    Returns:
        The value, and a function from tangents, one for each selected primal in the shape of its gradient, to the
        derivative along them; with `has_aux` also the auxiliary data. The function is a pytree.

    Example:
        >>> import partgrad as pg
        >>> value, linear = pg.linearize(lambda p: p["a"] ** 2, {"a": 3.0, "n": 1}, wrt="a")
        >>> print(value, linear(1.0), linear(10.0))
        9.0 6.0 60.0

    See Also:
        `jvp`, for one direction; `jacfwd`, for all of them.
    """
    given = wrt, argnums, argnames, double_where, nonfinite, options
    call, leaves, options = _prepared("linearize", f, primals, has_aux, *given)
    value, linear, *aux = jax.linearize(call, leaves, has_aux=has_aux, **options)
    value, *aux = call.closed((value, *aux))
    watcher = _watcher(call, has_aux, nonfinite)
    return value, LinearMap(linear, watcher, call.shape.without_leaves(), call.level, call.kinds), *aux
