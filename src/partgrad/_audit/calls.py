"""Functions that a program calls: the states that they meet are kept while it runs, and traced when it has run.

So a function runs as often as without the audit, and whatever it changes, it changes once.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._programs import Operands, Recorded, host_copies
from .._selection import Target as Selected, path
from .._trees import is_differentiable
from ..errors import PartgradError
from .arguments import Exchange, Orders, orders_of, put_in_order
from .origin import Origin, written
from .place import MOST, Place, Point, is_looked_at, last_line
from .program import named_leaf
from .states import States
from .swapped import Target
from .tap import passed_on, tapped

# How many structures of arguments of one function are kept.
STRUCTURES = 8
# What is part of a structure by its value; any other object that is no array is part of it by its identity.
_PLAIN = frozenset({bool, int, str, bytes, type(None)})
_NUMBERS = (float, complex)
_ARRAYS = (jax.Array, np.ndarray, np.generic)
# Of NumPy's dtypes those of numbers; the narrow ones of JAX are void to it.
_KINDS = "fiubcV"


class State(NamedTuple):
    """The leaves of the arguments of a call, with arrays on the host, and what it returned, if that was concrete.

    Attributes:
        leaves: The leaves.
        of_jax: Which of them were arrays of JAX, among those that Python may need as values.
        orders: The order of keys in the arguments.
        returned: What the call returned; None if it was traced.
    """

    leaves: list[Any]
    of_jax: frozenset[int]
    orders: Orders
    returned: list[Any] | None


class CalledPlace(Place):
    """A function that is called with arguments of one structure.

    Attributes:
        target: The function.
        treedef: The structure of its arguments.
        defaulted: The parameters that had their defaults.
    """

    is_called = True

    def __init__(self, target: Target, treedef: Any, defaulted: frozenset[str], *rest: Any):
        super().__init__(origin_of_target(target), *rest)
        self.target, self.treedef, self.defaulted = target, treedef, defaulted
        self.met: States[State] = States(MOST)
        self._calls, self._is_traced = 0, False
        self._points: list[Point] = []

    @property
    def points(self) -> list[Point]:
        """The states that are kept, the first one first."""
        return self._points

    def before(self, given: "Arguments", *, returns: bool = True) -> Callable[[Any], None] | None:
        """What keeps a state once the call has returned; None if it is none of the few.

        Args:
            given: The arguments.
            returns: Whether what the call returns is what the function returns.
        """
        leaves, arrays = given.leaves, given.arrays
        with self._lock:
            self._calls += 1
            here = self.met.look([leaves[i] for i in arrays]) if is_looked_at(self._calls) else None
        if here is None:
            return None
        copies, orders = _copied(leaves, arrays), self._orders(given)
        of_jax = frozenset(i for i in arrays if _may_be_constant(leaves[i]) and isinstance(leaves[i], jax.Array))

        def after(returned: Any) -> None:
            outputs = _floating(returned)
            is_concrete = returns and not any(isinstance(output, jax.core.Tracer) for output in outputs)
            state = State(copies, of_jax, orders, host_copies(outputs) if is_concrete else None)
            with self._lock:
                self.met.keep(here, state)

        return after

    def tap(self, given: "Arguments") -> Exchange:
        """What a tap passes on for the leaves of a call that is traced; it keeps their values when the program runs."""
        leaves, arrays, orders = given.leaves, given.arrays, self._orders(given)
        self._is_traced = True
        traced = [i for i in arrays if isinstance(leaves[i], jax.core.Tracer)]
        held = _copied([None if i in traced else leaf for i, leaf in enumerate(leaves)], arrays)
        weak = [jax.typeof(leaves[i]).weak_type and jnp.issubdtype(leaves[i].dtype, jnp.inexact) for i in traced]

        def show(*values: Any) -> None:
            try:
                with self._lock:
                    if self.is_closed:
                        return
                    self._show(held, arrays, dict(zip(traced, values, strict=True)), weak, orders)
            except Exception as error:
                # In a callback an error would stop the program, which does not know of it.
                self.reason = f"its state cannot be kept: {last_line(error)}"

        operands = [leaves[i] for i in traced]
        passed = tapped(show, operands, operands)
        return Exchange({id(old): new for old, new in zip(operands, passed, strict=True)})

    def _orders(self, given: "Arguments") -> Orders:
        return orders_of(dict(inspect.signature(self.target.function).bind(*given.args, **given.kwargs).arguments))

    def _show(
        self, held: list[Any], arrays: Sequence[int], values: dict[int, Any], weak: list[bool], orders: Orders
    ) -> None:
        self._calls += 1
        if not is_looked_at(self._calls):
            return
        leaves = [values.get(i, leaf) for i, leaf in enumerate(held)]
        here = self.met.look([leaves[i] for i in arrays])
        if here is not None:
            for (i, value), is_weak in zip(values.items(), weak, strict=True):
                (copy,) = host_copies([value])
                # A number of Python has a weak type. Inside of `grad`, what JAX passes on for it has no `ndim`.
                leaves[i] = np.asarray(copy).item() if is_weak and not np.ndim(copy) else copy
            self.met.keep(here, State(leaves, frozenset(), orders, None))

    # --- when the program has run ------------------------------------------------------------------------------------

    def trace(self, wrt: Sequence[str], matched: set[str]) -> bool:
        """Make points of the states; whether there is anything to differentiate."""
        programs: dict[Any, Recorded] = {}
        for state in self.met:
            leaves = [jnp.asarray(x) if i in state.of_jax else x for i, x in enumerate(state.leaves)]
            args, kwargs = self.treedef.unflatten(leaves)
            call = _Call(self.target, args, kwargs, self.defaulted, state.orders)
            chosen = call.chosen(wrt, matched)
            if not any(chosen):
                return False
            try:
                program, operands = self._program(call, chosen, programs)
            except Exception as error:
                # Whatever it is, the function has run: it is said in the report, and the rest goes on.
                self.reason = f"it cannot be traced: {last_line(error)}"
                return True
            if not program.has_outputs:
                return False
            if all(map(_is_finite, program.point(operands).values)):
                self._points.append(Point(program, operands, state.returned))
        if not self._points and not self.reason:
            did_not_run = "it was traced and did not run" if self._is_traced else "it raised an error"
            self.reason = "its arguments are not finite" if len(self.met) else did_not_run
        return True

    def _program(self, call: "_Call", chosen: list[bool], programs: dict[Any, Recorded]) -> tuple[Recorded, Operands]:
        """The program for a state: one for all states that differ in arrays only.

        Python may need values: it branches on numbers, counts to an integer, makes a shape of some. These are then no
        variables. Which it needs nobody says, so those that are most seldom differentiated are tried first.
        """
        first: Exception | None = None
        for constant, tree in call.attempts():
            rest = [is_one and not is_held for is_one, is_held in zip(chosen, constant, strict=True)]
            if any(rest):
                try:
                    return self._kept(call, rest, tree, programs)
                except (TypeError, IndexError, AttributeError) as error:
                    # JAX has classes for some of these errors only.
                    first = first or error
        assert first is not None
        raise first

    @staticmethod
    def _kept(
        call: "_Call", chosen: list[bool], tree: dict[str, Any], programs: dict[Any, Recorded]
    ) -> tuple[Recorded, Operands]:
        held = tuple(
            (i, leaf.key if isinstance(leaf, _Constant) else leaf)
            for i, (leaf, is_one) in enumerate(zip(jax.tree.leaves(tree), chosen, strict=True))
            if not is_one and (isinstance(leaf, _Constant) or _is_number(leaf))
        )
        key = tuple(chosen), held, call.orders
        if key not in programs:
            programs[key] = Recorded(call.function, (tree,), {}, chosen, call.paths(chosen), stands_for=passed_on)
        return programs[key], programs[key].at((tree,), {})


class _Constant:
    """An array that a function has as a value while it is traced."""

    def __init__(self, value: Any):
        self.value = value
        array = np.asarray(value)
        self.key = type(value), array.dtype, array.shape, array.tobytes()


class _Call:
    """A call with its arguments by name, as a function of these."""

    def __init__(
        self,
        target: Target,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        defaulted: frozenset[str],
        orders: Orders,
    ):
        self._signature = inspect.signature(target.function)
        self._whole, self._defaulted, self.orders = target.whole, defaulted, orders
        self.tree = dict(self._signature.bind(*args, **kwargs).arguments)
        self.keyed, self._treedef = jax.tree_util.tree_flatten_with_path(self.tree)
        self.leaves = [leaf for _, leaf in self.keyed]

        def function(tree: dict[str, Any]) -> list[Any]:
            tree = jax.tree.map(lambda leaf: leaf.value if isinstance(leaf, _Constant) else leaf, tree)
            put_in_order(tree, orders)
            bound = inspect.BoundArguments(self._signature, tree)
            return _floating(self._whole(*bound.args, **bound.kwargs))

        function.__name__ = function.__qualname__ = target.function.__name__
        self.function = function

    def chosen(self, wrt: Sequence[str], matched: set[str]) -> list[bool]:
        """For each leaf whether it is differentiated: what no mark holds, and some entry of `wrt` fits."""
        everything, fitting = self._fitting("**"), set[int]()
        for entry in wrt:
            own = self._fitting(entry) & everything
            matched.update([entry] if own else [])
            fitting |= own
        numbers = fitting if wrt else everything
        return [
            i in numbers and is_differentiable(leaf) and place[0].key not in self._defaulted
            for i, (place, leaf) in enumerate(self.keyed)
        ]

    def attempts(self) -> Iterator[tuple[list[bool], dict[str, Any]]]:
        """Ever more leaves that are values and no variables, and the arguments with these."""
        numbers = [_is_number(leaf) or isinstance(leaf, np.generic) for leaf in self.leaves]
        integers = [_is_integer(leaf) for leaf in self.leaves]
        arrays = [_may_be_constant(leaf) for leaf in self.leaves]
        several = (), (integers,), (numbers,), (integers, numbers), (numbers, arrays)
        kinds = (tuple(map(any, zip(*kind, strict=True))) if kind else (False,) * len(numbers) for kind in several)
        for kind in dict.fromkeys(kinds):
            # What JAX computes of a value is a variable; what NumPy has cannot be called as JAX's can.
            yield list(kind), self._holding(kind, np.asarray)
            if any(is_one and isinstance(x, jax.Array) for is_one, x in zip(kind, self.leaves, strict=True)):
                yield list(kind), self._holding(kind, lambda array: array)

    def _holding(self, kind: Sequence[bool], as_value: Callable[[Any], Any]) -> dict[str, Any]:
        def held(leaf: Any) -> Any:
            return _Constant(as_value(leaf) if isinstance(leaf, jax.Array) else leaf)

        each = zip(self.leaves, kind, strict=True)
        leaves = [held(x) if is_one and isinstance(x, _ARRAYS) else x for x, is_one in each]
        return dict(self._treedef.unflatten(leaves))

    def _fitting(self, pattern: str) -> frozenset[int]:
        """The leaves that a path of arguments fits and no mark holds."""
        try:
            return frozenset(Selected(self.tree, path(pattern)).plan.indices)
        except PartgradError:
            # There are none in this function.
            return frozenset()

    def paths(self, chosen: Sequence[bool]) -> list[str]:
        """The paths of the leaves that are differentiated, which begin with the argument's name."""
        return [named_leaf(place) for (place, _), is_one in zip(self.keyed, chosen, strict=True) if is_one]


class Arguments(NamedTuple):
    """The leaves of a call's arguments, and which of them are arrays or numbers that vary."""

    args: Any
    kwargs: Any
    leaves: list[Any]
    treedef: Any
    arrays: list[int]
    kinds: tuple[Any, ...]
    is_traced: bool

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> "Arguments | None":
        """Those of a call; None if nothing in them can be differentiated."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        arrays, kinds, is_traced, is_floating = list[int](), list[Any](), False, False
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, _ARRAYS):
                dtype = leaf.dtype
                # The dtype of a random key is one of JAX's own.
                if isinstance(dtype, np.dtype) and dtype.kind not in _KINDS:
                    kinds.append(id(leaf))
                    continue
                arrays.append(i)
                kinds.append((leaf.shape, dtype))
                is_traced = is_traced or isinstance(leaf, jax.core.Tracer)
                is_floating = is_floating or is_differentiable(leaf)
            elif isinstance(leaf, _NUMBERS):
                # Under a custom rule, JAX has a class of its own for numbers of Python.
                leaves[i] = float(leaf) if isinstance(leaf, float) else leaf
                arrays.append(i)
                kinds.append(type(leaves[i]))
                is_floating = True
            else:
                kinds.append((type(leaf), leaf) if type(leaf) in _PLAIN else id(leaf))
        return cls(args, kwargs, leaves, treedef, arrays, tuple(kinds), is_traced) if is_floating else None


def defaults_of(target: Target, args: Sequence[Any], kwargs: dict[str, Any]) -> frozenset[str]:
    """The parameters whose values are their defaults."""
    function = target.function
    positional, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    if not (positional or named):
        return frozenset()
    names = target.code.co_varnames[target.code.co_argcount - len(positional) : target.code.co_argcount]
    given = {**dict(zip(target.code.co_varnames, args, strict=False)), **kwargs}
    pairs = [*zip(names, positional, strict=True), *named.items()]
    return frozenset(name for name, default in pairs if given.get(name, pairs) is default)


def _is_number(leaf: Any) -> bool:
    """Whether a leaf is a number of Python that varies."""
    return isinstance(leaf, _NUMBERS) and not isinstance(leaf, np.generic)


def _is_integer(leaf: Any) -> bool:
    """Whether a leaf is an array of integers or of truth values; the dtype of a random key is one of JAX's own."""
    return isinstance(leaf, _ARRAYS) and isinstance(leaf.dtype, np.dtype) and leaf.dtype.kind in "iub"


def _may_be_constant(leaf: Any) -> bool:
    """Whether a leaf is an array that Python may need as a value: a count, a shape, an index, one to branch on."""
    return _is_integer(leaf) or (isinstance(leaf, _ARRAYS) and isinstance(leaf.dtype, np.dtype) and not leaf.ndim)


def _copied(leaves: Sequence[Any], arrays: Sequence[int]) -> list[Any]:
    copies = dict(zip(arrays, host_copies([leaves[i] for i in arrays]), strict=True))
    return [copies.get(i, leaf) for i, leaf in enumerate(leaves)]


def _floating(returned: Any) -> list[Any]:
    """The floating and complex arrays and numbers that a function returns."""
    leaves = jax.tree.leaves(returned)
    return [leaf for leaf in leaves if _is_number(leaf) or _is_floating(leaf)]


def _is_floating(leaf: Any) -> bool:
    is_one = isinstance(leaf, _ARRAYS)
    return is_one and bool(jax.dtypes.issubdtype(leaf.dtype, np.inexact))


def _is_finite(value: Any) -> bool:
    return bool(np.isfinite(np.asarray(value, dtype=np.complex128)).all())


def origin_of_target(target: Target) -> Origin:
    """Where a function is written."""
    function = inspect.unwrap(target.function)
    code = target.code if function is target.function else function.__code__
    return written(code, target.function)
