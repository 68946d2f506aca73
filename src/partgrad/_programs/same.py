"""When two jaxprs are the same program, so that what was made of the first serves for the second."""

import contextlib
import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import CodeType
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from .equations import (
    jaxpr_and_consts,
    primal_jaxpr,
    rule_file,
    written,
)
from .lines import is_of_jax
from .primitives import (
    CUSTOM_JVPS,
    CUSTOM_RULES,
    HIGH,
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_LARGEST_LITERAL = 64
# Functions of JAX whose custom rules read only the operands: each call makes its rule anew, but it is the same rule.
_PLAIN_RULES = frozenset({"relu", "relu6", "logaddexp", "logaddexp2", "xlogy", "xlog1py", "_xlogx"})
# JAX hands out the same jaxpr for each call of a function under `jit`.
_keys: dict[bool, weakref.WeakKeyDictionary[Jaxpr, Hashable]] = {
    exact: weakref.WeakKeyDictionary() for exact in (False, True)
}


class KeyedJaxpr:
    """A jaxpr that equals another if both compute the same; it keeps alive whatever it compares by identity."""

    def __init__(self, key: Hashable):
        self._key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyedJaxpr) and self._key == other._key


class _Identity:
    """An object that equals only itself."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value


class Recent(OrderedDict[Hashable, R]):
    """A cache of what was made last, by what it depends on."""

    def __init__(self, size: int):
        super().__init__()
        self._size = size

    def __reduce__(self) -> Any:
        # Programs of JAX cannot be pickled; another process makes its own.
        return type(self), (self._size,)

    def of(self, key: Hashable, make: Callable[[], R], lasts: Callable[[R], bool] = lambda made: True) -> R:
        """What was made for a key, or is made now; not kept if the key is None or if it does not last."""
        found = self.get(key)
        if found is None:
            found = make()
            if key is None or not lasts(found):
                return found
            self[key] = found
        # Another thread may drop it at this moment.
        with contextlib.suppress(KeyError):
            self.move_to_end(key)
            if len(self) > self._size:
                self.popitem(last=False)
        return found


def made_once(make: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """A method, or a function of an object and more, that makes its result once for each set of arguments.

    The object holds what was made of it, so that both end together.
    """

    @functools.wraps(make)
    def of(self: T, *args: P.args, **named: P.kwargs) -> R:
        made: dict[Hashable, R] = vars(self).setdefault("_made", {})
        key = make, *args, *named.items()
        if key not in made:
            made[key] = make(self, *args, **named)
        return made[key]

    return of


def lasts(closed: Any) -> bool:
    """Whether a closed jaxpr holds no traced value, so that it may be kept."""
    return not any(isinstance(const, jax.core.Tracer) for const in jaxpr_and_consts(closed)[1])


def keyed_jaxpr(jaxpr: Jaxpr, *, exact: bool) -> KeyedJaxpr | None:
    """A jaxpr as something that equals another which computes the same of constants and inputs.

    Args:
        jaxpr: An open jaxpr.
        exact: Whether the lines of the user's code count too, and each Python function, such as a custom rule, equals
            itself only. Without, a compiled function that cannot be compared equals itself, as JAX keeps its jaxpr.

    Returns:
        Its key; None where it cannot be told: it contains what cannot be hashed, or, if not exact,
        a custom rule, which may read what has changed since.
    """
    try:
        return KeyedJaxpr((_jaxpr(jaxpr, exact), jax.config.jax_enable_x64))
    except TypeError:
        return None


def operation_of(equation: JaxprEqn, *, exact: bool = True) -> Hashable:
    """What equals that of another equation if both compute the same of their operands; None where it cannot be told.

    If exact, both are on the same line, too.
    """
    literals = (_literal(atom) if isinstance(atom, Literal) else None for atom in equation.invars)
    try:
        return hashable((_operation(equation, exact), tuple(literals), jax.config.jax_enable_x64))
    except TypeError:
        return None


def hashable(key: Hashable) -> Hashable:
    """A key of a cache; None, for nothing that is kept, if it cannot be hashed."""
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _jaxpr(jaxpr: Jaxpr, exact: bool) -> Hashable:
    keys = _keys[exact]
    if jaxpr not in keys:
        keys[jaxpr] = _new_key(jaxpr, exact)
    return keys[jaxpr]


def _new_key(jaxpr: Jaxpr, exact: bool) -> Hashable:
    numbers: dict[Any, int] = {}

    def named(atom: Any) -> Hashable:
        return _literal(atom) if isinstance(atom, Literal) else numbers.setdefault(atom, len(numbers))

    def key(equation: JaxprEqn) -> Hashable:
        operands = tuple(map(named, equation.invars))
        results = tuple((named(variable), variable.aval) for variable in equation.outvars)
        return operands, results, _operation(equation, exact)

    inputs = tuple((named(variable), variable.aval) for variable in (*jaxpr.constvars, *jaxpr.invars))
    return len(jaxpr.constvars), inputs, tuple(map(key, jaxpr.eqns)), tuple(map(named, jaxpr.outvars))


def _operation(equation: JaxprEqn, exact: bool) -> Hashable:
    body = _body_of_jax(equation, exact)
    if body is None and not exact and equation.primitive.name in CUSTOM_RULES | HIGH:
        raise TypeError
    parameters = body or tuple((name, _parameter(value, exact)) for name, value in sorted(equation.params.items()))
    return equation.primitive, parameters, equation.ctx, _line(equation) if exact else None


def _body_of_jax(equation: JaxprEqn, exact: bool) -> Hashable:
    """The body of a function whose custom rule is JAX's own and reads nothing else; None for any other equation."""
    if equation.primitive.name not in CUSTOM_JVPS:
        return None
    body = primal_jaxpr(equation)
    name, file = written(jaxpr_and_consts(body)[0])
    is_plain = name in _PLAIN_RULES and is_of_jax(file) and is_of_jax(rule_file(equation))
    return (name, _parameter(body, exact)) if is_plain else None


def _literal(literal: Literal) -> Hashable:
    value = np.asarray(literal.val)
    if value.size > _LARGEST_LITERAL:
        raise TypeError
    return type(literal.val), literal.aval, value.dtype, value.tobytes()


def _parameter(value: Any, exact: bool) -> Hashable:
    inner, consts = jaxpr_and_consts(value)
    if isinstance(inner, Jaxpr):
        if consts:
            # Arrays and tracers must not be kept alive.
            raise TypeError
        return _inner(inner, exact)
    if isinstance(value, tuple | list):
        return type(value), tuple(_parameter(item, exact) for item in value)
    if isinstance(value, float):
        return float, repr(value)
    return _Identity(value) if exact and callable(value) else (type(value), value)


def _inner(jaxpr: Jaxpr, exact: bool) -> Hashable:
    try:
        return _jaxpr(jaxpr, exact)
    except TypeError:
        if exact:
            raise
        return jaxpr


def _line(equation: JaxprEqn) -> Hashable:
    """Where in the user's code an equation comes from."""
    frames = getattr(equation.source_info.traceback, "raw_frames", None)
    names = str(equation.source_info.name_stack)
    pairs = zip(*frames(), strict=True) if frames else ()
    return names, next((_position(code, place) for code, place in pairs if not is_of_jax(code.co_filename)), None)


@functools.lru_cache(maxsize=4096)
def _position(code: CodeType, place: int) -> Hashable:
    """A code object, and the lines and columns of an instruction."""
    # Python rewrites instructions that run often, and one that it rewrote may be elsewhere.
    return code, next(itertools.islice(code.co_positions(), place // 2, None), None)
