"""Finds functions by their names, and gives them code that shows each call, whatever refers to them.

A function stays the object that it was, so that whatever took it before sees the change: another module, a class, a
`functools.partial`, a function under `jax.jit`, a table. It gets the code of a function with the same parameters that
calls a function of the audit; putting its own back is one assignment.
"""

import fnmatch
import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .._trees import held_by

# From the arguments of a rule to those of the function that it belongs to.
Given = Callable[[tuple[Any, ...]], tuple[Any, ...]]
# From a function and its call to what the call returns; the last but one runs the function itself, or the rule of it
# that JAX calls in its place, whose arguments are then to be converted.
See = Callable[["Target", tuple[Any, ...], dict[str, Any], Callable[..., Any], Given | None], Any]

_WAITING = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_STARRED = inspect.CO_VARARGS, inspect.CO_VARKEYWORDS
# Libraries call these to flatten and unflatten trees; they compute nothing.
_OF_TREES = frozenset({"tree_flatten", "tree_unflatten", "tree_flatten_with_keys"})
# The audit itself runs these.
_NEVER = frozenset({"jax", "jaxlib", "numpy", "partgrad", "builtins"})
# Their objects can be called, and are no functions.
_TYPES = frozenset({"typing", "types", "typing_extensions", "jaxtyping", "abc"})
_PLACEHOLDER = "the function of the audit that is called"
_RULES = jax.custom_jvp, jax.custom_vjp
_DEPTH = 8


class Target(NamedTuple):
    """A function whose calls are seen.

    Attributes:
        function: The function itself.
        whole: What is called with the same arguments and has the function's derivative: the function, or a custom rule.
        code: The code that it had.
    """

    function: Any
    whole: Callable[..., Any]
    code: types.CodeType


class Swapped:
    """The functions that some globs name, with code that shows their calls.

    Args:
        globs: Qualified names with wildcards: of a function, or of whatever module or class refers to it.
        see: What is called in the place of a function.

    Attributes:
        left: What a glob names and cannot be seen, with the reason.
        matched: The globs that name something.
        targets: The functions.
    """

    def __init__(self, globs: Iterable[str], see: See):
        self._globs, self._see = tuple(globs), see
        self.targets: dict[Any, Target] = {}
        self._codes: dict[Any, types.CodeType] = {}
        self.left: dict[str, str] = {}
        self.matched: set[str] = set()

    @property
    def is_asked(self) -> bool:
        """Whether any function is to be seen."""
        return bool(self._globs)

    def extend(self, modules: Iterable[types.ModuleType]) -> None:
        """Look for functions in more modules."""
        found: dict[Any, Any] = {}
        for module in modules:
            prefixes = [prefix for prefix in _names_of(module) if self._may_match(prefix)]
            for name, value in self._named(module, prefixes) if prefixes else ():
                self._take(_home(module.__name__), name, value, found)
        for function, whole in found.items():
            if function not in self.targets:
                self.targets[function] = Target(function, whole, function.__code__)
                self._swap(function, self.targets[function], None)
        # Where a function is differentiated, JAX runs its rule, and the function only if the rule calls it.
        for target in [target for function, target in self.targets.items() if function in found]:
            for rule, given in _rules_of(target.whole):
                if rule not in self._codes:
                    self._swap(rule, target, given)

    def _swap(self, function: types.FunctionType, target: Target, given: Given | None) -> None:
        self._codes[function] = function.__code__
        own = _own(function)
        see = lambda args, kwargs: self._see(target, args, kwargs, own, given)
        function.__code__ = _calling(function, see)

    def restore(self) -> None:
        """Give all functions their own code again, and look for no more."""
        self._globs = ()
        for function, code in self._codes.items():
            function.__code__ = code

    # --- names -------------------------------------------------------------------------------------------------------

    def _may_match(self, module: str) -> bool:
        home = _home(module)
        return home not in _NEVER and any(fnmatch.fnmatchcase(home, _home(glob)) for glob in self._globs)

    def _named(self, module: types.ModuleType, prefixes: list[str]) -> Iterator[tuple[str, Any]]:
        """What a module or one of its classes refers to by a name that a glob fits."""
        for attribute, value in list(vars(module).items()):
            for prefix in prefixes:
                name = f"{prefix}.{attribute}"
                if isinstance(value, type):
                    is_own = _home(value.__module__) == _home(module.__name__)
                    yield from self._of_class(name, value) if is_own else ()
                elif callable(value) and self._fits(name, value):
                    yield name, value

    def _of_class(self, name: str, cls: type, depth: int = 0) -> Iterator[tuple[str, Any]]:
        for attribute, value in list(vars(cls).items()):
            own = f"{name}.{attribute}"
            if isinstance(value, type):
                if depth < _DEPTH and value.__module__ == cls.__module__ and value is not cls:
                    yield from self._of_class(own, value, depth + 1)
            elif attribute not in _OF_TREES and self._fits(own, value):
                yield own, value

    def _fits(self, name: str, value: Any) -> list[str]:
        """The globs that name something, by the name by which it is referred to, or by its own."""
        own = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        return [glob for glob in self._globs if _is_named(name, glob) or _is_named(own, glob)]

    def _take(self, home: str, name: str, value: Any, found: dict[Any, Any]) -> None:
        function, whole = _inside(value)
        if function is None and callable(value) and not isinstance(value, type):
            # An object is called by a method of its class, which may be the package's own.
            method, _ = _inside(type(value).__call__)
            function = whole = method if method is not None and _home(method.__module__) == home else None
        if function is None:
            is_imported = isinstance(value, types.BuiltinFunctionType) and _home(value.__module__) != home
            if callable(value) and not is_imported and _home(type(value).__module__) not in _TYPES:
                self.left[name] = f"it is an object of {type(value).__name__}, not a function of Python"
            return
        if _home(function.__module__) != home:
            # It is imported from another package.
            return
        if getattr(function, "__isabstractmethod__", False):
            return
        if function.__code__.co_flags & _WAITING:
            self.left[name] = "generators and coroutines run later than they are called"
            return
        self.matched.update(self._fits(name, value))
        # What is named without its rule is called without it.
        if whole is function or function not in found:
            found[function] = whole


def _home(name: Any) -> str:
    """The package that a qualified name begins with; a class may have anything for the name of its module."""
    return name.partition(".")[0] if isinstance(name, str) else ""


def _names_of(module: types.ModuleType) -> list[str]:
    """The names of a module: a script is known by its file too, and what `python -m` runs by its own name."""
    if module.__name__ != "__main__":
        return [module.__name__]
    spec, file = vars(module).get("__spec__"), vars(module).get("__file__") or ""
    return ["__main__", spec.name if spec is not None else Path(file).stem]


def _is_named(name: str, glob: str) -> bool:
    """Whether a glob names something; what is private it has to name as such."""
    if not fnmatch.fnmatchcase(name, glob):
        return False
    parts = [part for part in glob.split(".") if part.startswith("_")]
    private = [part for part in name.split(".") if part.startswith("_") and part not in ("__call__", "__main__")]
    return all(any(fnmatch.fnmatchcase(own, part) for part in parts) for own in private)


def _inside(value: Any) -> tuple[Any, Any]:
    """The function of Python that runs when something is called, and what is to be called in its place."""
    whole: Any = None
    for _ in range(_DEPTH):
        if isinstance(value, types.FunctionType):
            return value, value if whole is None else whole
        if isinstance(value, _RULES):
            whole = value
        value = _wrapped_by(value)
        if value is None:
            break
    return None, None


def _wrapped_by(value: Any) -> Any:
    """What an object that is called, or that a class holds, calls with the same arguments."""
    if isinstance(value, functools.partial | functools.partialmethod | functools.cached_property):
        return value.func
    if isinstance(value, property):
        return value.fget
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        return value.__func__
    if isinstance(value, type | types.BuiltinFunctionType | types.ModuleType):
        return None
    found = getattr(value, "__wrapped__", None)
    if found is not None:
        return found
    # A descriptor of another library that holds a method.
    held = (own for _, own in held_by(value) if isinstance(own, types.FunctionType))
    return next(held, None) if not callable(value) else None


# --- code ------------------------------------------------------------------------------------------------------------


def _rules_of(whole: Any) -> Iterator[tuple[types.FunctionType, Given]]:
    """The functions that JAX calls in the place of one with a custom rule, and how to find its arguments in theirs."""
    if isinstance(whole, jax.custom_vjp) and isinstance(whole.fwd, types.FunctionType):
        yield whole.fwd, lambda args: args
    if isinstance(whole, jax.custom_jvp) and isinstance(whole.jvp, types.FunctionType):
        numbers = sorted(whole.nondiff_argnums)

        def given(args: tuple[Any, ...]) -> tuple[Any, ...]:
            found = list(args[-2])
            for number, held in zip(numbers, args[:-2], strict=True):
                found.insert(number, held)
            return tuple(found)

        yield whole.jvp, given


def _own(function: types.FunctionType) -> types.FunctionType:
    """A function as it is now."""
    own = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__, own.__module__ = function.__kwdefaults__, function.__module__
    own.__qualname__ = function.__qualname__
    return own


def _calling(function: types.FunctionType, see: Callable[..., Any]) -> types.CodeType:
    """Code with the parameters, name and line of a function, which hands its arguments over."""
    code = function.__code__
    count, named = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    names, only = list(code.co_varnames[:count]), list(code.co_varnames[count:named])
    rest = iter(code.co_varnames[named:])
    starred, double = (next(rest) if code.co_flags & flag else None for flag in _STARRED)
    parameters = [*names]
    parameters[code.co_posonlyargcount : code.co_posonlyargcount] = ["/"] * bool(code.co_posonlyargcount)
    parameters += [f"*{starred}"] if starred else ["*"] * bool(only)
    parameters += [*only, *([f"**{double}"] if double else [])]
    positional = "".join(f"{name}, " for name in [*names, *([f"*{starred}"] if starred else [])])
    keywords = ", ".join([*(f"{name!r}: {name}" for name in only), *([f"**{double}"] if double else [])])
    text = f"def function({', '.join(parameters)}): return {_PLACEHOLDER!r}(({positional}), {{{keywords}}})"
    with warnings.catch_warnings():
        # It says that a string cannot be called.
        warnings.simplefilter("ignore")
        compiled = compile(text, code.co_filename, "exec")
    inner = next(const for const in compiled.co_consts if isinstance(const, types.CodeType))
    return inner.replace(
        co_consts=tuple(see if const == _PLACEHOLDER else const for const in inner.co_consts),
        co_freevars=code.co_freevars,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
    )


def loaded() -> list[types.ModuleType]:
    """The modules that are loaded now."""
    return [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
