"""Stands in for JAX's transforms and for functions of the project, and keeps what is handed to one or is called.

Where the arguments are concrete, they are copied. Inside `jit`, `vmap`, `scan` and the like they are tracers; there a
tap brings their values out when the compiled program runs.
"""

import contextlib
import functools
import importlib.abc
import multiprocessing.process
import operator
import subprocess
import sys
import threading
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from .._programs import is_users
from .arguments import Exchange
from .calls import STRUCTURES, Arguments, CalledPlace, defaults_of, origin_of_target
from .origin import caller, name_of, origin_of
from .place import Place, last_line
from .program import recorded
from .settings import Settings
from .stand_ins import WRAPPERS, is_python, starting
from .swapped import Given, Swapped, Target, loaded
from .tap import tapped

# How many seconds a thread waits for another one that traces: what is traced may itself wait for this thread.
_PATIENCE = 20.0
# How many calls of a transform are looked at before they become ever fewer, as looking takes a trace.
_FIRST = 16
# The frames between a call and the function that sees it: the swapped code, and what that calls.
_BEYOND = 4
# Where a callback to Python cannot run: in kernels, and in programs that are exported.
_ELSEWHERE = ("/pallas/", "/jax/_src/export/", "/jax2tf/")
# The audit's own frames, one for each call, come on top of a program's.
_DEEPER = 3


class Recorder:
    """Keeps the functions that are differentiated while it is in place.

    Attributes:
        places: What was differentiated or called.
        swapped: The functions whose calls are seen.
        running: What is running now, such as the name of a test.
        children: The lines that start other Python processes, in which nothing is recorded, and how.
    """

    def __init__(self, settings: Settings):
        self._settings = settings
        self._known: dict[Any, Place] = {}
        # How many calls were seen where they are traced; compiled programs do not count theirs.
        self._calls: Counter[Any] = Counter()
        # Of a module or a class, by the name of the attribute.
        self._originals: dict[tuple[Any, str], Any] = {}
        # Whatever is traced holds the lock: it redirects what the whole process prints.
        self._lock, self._own = threading.Lock(), threading.local()
        self.swapped = Swapped(settings.calls, self._call)
        self._structures: Counter[Target] = Counter()
        self._finder, self._limit = Finder(self.swapped), 0
        self.running = ""
        self.children: dict[tuple[str, int], str] = {}

    def __reduce__(self) -> Any:
        # A function that was differentiated is sent to another process, in which nothing is recorded.
        return Recorder, (self._settings,)

    @property
    def places(self) -> list[Place]:
        """What was differentiated or called."""
        return list(self._known.values())

    def install(self) -> None:
        """Stand in for JAX's transforms, also where a module of the user's has imported them already."""
        modules = [module for module in loaded() if is_users(str(vars(module).get("__file__") or "<"))]
        for name, wrap in WRAPPERS.items():
            original = getattr(jax, name)
            standing_in = wrap(self, name, original)
            # So that it can be pickled.
            standing_in.__module__, standing_in.__qualname__ = "jax", name
            self._replace(jax, name, standing_in)
            for module in modules:
                for own in [own for own, value in vars(module).items() if value is original]:
                    self._replace(module, own, standing_in)
        self._replace(subprocess.Popen, "__init__", starting(self, "subprocess", subprocess.Popen.__init__))
        process = multiprocessing.process.BaseProcess
        self._replace(process, "start", starting(self, "multiprocessing", process.start))

    def _replace(self, place: Any, name: str, value: Any) -> None:
        self._originals[place, name] = getattr(place, name)
        setattr(place, name, value)

    def see_calls(self) -> None:
        """Show the calls of the functions that `calls` names, in the modules that are loaded and in later ones."""
        if not self._settings.calls:
            return
        self.swapped.extend(loaded())
        # What was compiled before would not be traced again.
        jax.clear_caches()
        sys.meta_path.insert(0, self._finder)
        self._limit = sys.getrecursionlimit()
        sys.setrecursionlimit(_DEEPER * self._limit)

    def remove(self) -> None:
        """Put JAX's transforms and the functions back."""
        for (place, name), original in self._originals.items():
            setattr(place, name, original)
        self._originals = {}
        self.swapped.restore()
        for place in self.places:
            place.is_closed = True
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
            sys.setrecursionlimit(self._limit)
            # What was compiled meanwhile would go on to show its calls.
            jax.clear_caches()

    def see_child(self, how: str, command: Any) -> None:
        """Remember which line of the project starts another Python process."""
        where = caller()
        if where[0] and self._originals and (how == "multiprocessing" or is_python(command)):
            self.children.setdefault(where, how)

    def see(
        self,
        transform: str,
        function: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        argnums: Any,
        has_aux: Any,
        result: Any,
    ) -> Any:
        """Keep a function, if it is the project's own; what the transform returned, to be returned in its place."""
        # What is traced here may differentiate other functions, which were seen when it ran.
        if self._is_busy or not self._originals:
            return result
        self._is_busy = True
        try:
            origin = origin_of(function, self._settings.is_audited)
            if origin is None:
                return result
            numbers = tuple(map(operator.index, argnums if isinstance(argnums, Iterable) else (argnums,)))
            leaves = jax.tree.leaves((args, kwargs))
            shapes = tuple((getattr(x, "shape", ()), str(getattr(x, "dtype", type(x)))) for x in leaves)
            key = (origin, caller(), transform, numbers, (shapes, jax.config.jax_enable_x64))
        except Exception:
            # Whatever the arguments are, JAX takes them.
            return result
        finally:
            self._is_busy = False
        return self._see(key, function, args, kwargs, bool(has_aux), result)

    def _see(self, key: Any, function: Any, args: Any, kwargs: Any, has_aux: bool, result: Any) -> Any:
        transform, numbers = key[2:4]
        if not self._lock.acquire(timeout=_PATIENCE):
            self._place(key, None, transform).reason = "another thread was being traced"
            return result
        self._is_busy = True
        try:
            self._calls[key] += 1
            if self._calls[key] > _FIRST and self._calls[key] & (self._calls[key] - 1):
                return result
            program = recorded(function, args, kwargs, numbers, has_aux)
            place = self._place(key, program.keyed, transform)
            operands = program.taken()
            if not _are_traced(operands):
                place.arrive(program, *operands)
                return result
            # A tangent may be unknown while the value is known: it is passed on by itself.
            parts = result if transform == "jvp" and isinstance(result, tuple) else (result,)
            passed = [_passed(functools.partial(place.arrive, program), operands, part) for part in parts]
            return tuple(passed) if parts is result else passed[0]
        except Exception as error:
            # Whatever it is, the function itself has just run: it is said in the report, and no reason to stop.
            self._place(key, None, transform).reason = f"it cannot be traced: {last_line(error)}"
            return result
        finally:
            self._is_busy = False
            self._lock.release()

    def _place(self, key: Any, structure: Any, transform: str) -> Place:
        """Functions that differ only in what they close over are written in one line, and are not one function."""
        origin, where, *rest = key
        if (key, structure) not in self._known:
            kind = origin, rest[-1], structure
            self._known[key, structure] = Place(origin, where, self.running, transform, kind)
        return self._known[key, structure]

    @property
    def _is_busy(self) -> bool:
        return getattr(self._own, "is_busy", False)

    @_is_busy.setter
    def _is_busy(self, value: bool) -> None:
        self._own.is_busy = value

    # --- calls -------------------------------------------------------------------------------------------------------

    def _call(
        self, target: Target, args: Any, kwargs: dict[str, Any], own: Callable[..., Any], given_in: Given | None
    ) -> Any:
        """Run a function in the place of which this is called, or its rule, and keep the state that it met."""
        if self._is_busy or not self._originals:
            return own(*args, **kwargs)
        after: Callable[[Any], None] | None = None
        exchange = Exchange({})
        self._is_busy = True
        try:
            given = Arguments.of(args, kwargs) if given_in is None else Arguments.of(given_in(args), {})
            place = None if given is None else self._called_place(target, given)
            if given is not None and place is not None:
                if given.is_traced:
                    exchange = place.tap(given)
                    args, kwargs = exchange.put_in((args, kwargs))
                else:
                    after = place.before(given, returns=given_in is None)
        except Exception as error:
            # Whatever the arguments are, the function takes them.
            self._left(target, f"a call cannot be kept: {last_line(error)}")
        finally:
            self._is_busy = False
        try:
            result = own(*args, **kwargs)
        finally:
            exchange.take_out()
        if after is not None:
            self._is_busy = True
            try:
                after(result)
            except Exception as error:
                # Whatever it returned, its caller gets it.
                self._left(target, f"a call cannot be kept: {last_line(error)}")
            finally:
                self._is_busy = False
        return result

    def _called_place(self, target: Target, given: Arguments) -> CalledPlace | None:
        defaulted = defaults_of(target, given.args, given.kwargs)
        key = target.function, given.treedef, given.kinds, defaulted, jax.config.jax_enable_x64
        place = self._known.get(key)
        if place is None:
            origin = origin_of_target(target)
            if self._settings.is_skipped(origin.file, origin.name):
                return None
            if given.is_traced and _is_elsewhere():
                self._left(target, "in a kernel or an exported program nothing can be called back")
                return None
            if self._structures[target] == STRUCTURES:
                self._left(target, f"it is called with more than {STRUCTURES} structures of arguments")
                return None
            self._structures[target] += 1
            rest = caller(_BEYOND), self.running, "call", key
            place = self._known[key] = CalledPlace(target, given.treedef, defaulted, *rest)
        assert isinstance(place, CalledPlace)
        return place

    def _left(self, target: Target, reason: str) -> None:
        self.swapped.left[name_of(target.function)] = reason


def wait() -> None:
    """Wait until everything that runs has brought out its values."""
    jax.effects_barrier()
    with contextlib.suppress(RuntimeError):
        # One may have been deleted meanwhile.
        jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])


def _are_traced(values: Iterable[Any]) -> bool:
    return any(isinstance(value, jax.core.Tracer) for value in values)


def _passed(show: Callable[..., object], operands: Sequence[Any], result: Any) -> Any:
    """What a transform returned, through a tap that shows the operands when the program runs."""
    leaves, treedef = jax.tree.flatten(result)
    traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]
    if not traced or _is_elsewhere():
        return result
    passed = dict(zip(traced, tapped(show, operands, [leaves[i] for i in traced]), strict=True))
    return treedef.unflatten([passed.get(i, leaf) for i, leaf in enumerate(leaves)])


def _is_elsewhere() -> bool:
    """Whether what is traced now will run where nothing can be called back."""
    files = (frame.f_code.co_filename.replace("\\", "/") for frame, _ in traceback.walk_stack(sys._getframe()))
    return any(part in file for file in files for part in _ELSEWHERE)


class Finder(importlib.abc.MetaPathFinder):
    """Finds no module, and has those that others find looked through once they have run."""

    def __init__(self, swapped: Swapped):
        self._swapped = swapped

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The specification that the next finder has, with a loader that looks through the module."""
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((found for found in (one.find_spec(name, path, target) for one in others) if found), None)
        if spec is not None and isinstance(spec.loader, importlib.abc.Loader):
            loader, swapped = spec.loader, self._swapped

            def exec_module(module: types.ModuleType) -> None:
                type(loader).exec_module(loader, module)
                swapped.extend([module])

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
