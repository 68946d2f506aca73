"""Stands in for JAX's transforms, and keeps every function that is handed to one.

Where the arguments are concrete, they are copied. Inside `jit`, `vmap`, `scan` and the like they are tracers; there a
callback brings their values out when the compiled program runs.
"""

import copy
import functools
import multiprocessing.process
import os
import subprocess
import sys
import threading
import types
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .._programs import Operands, Recorded, host_copies, is_users
from .origin import Origin, caller, origin_of
from .program import Conditions, distance, recorded
from .settings import Settings

# How many points of one function are kept: the first, and those that are furthest from it.
_POINTS = 3
# How many calls are looked at before they become ever fewer, as looking takes a trace.
_FIRST = 16
_FORWARD = frozenset({"jvp", "jacfwd", "linearize"})
# How many seconds a thread waits for another one that traces: what is traced may itself wait for this thread.
_PATIENCE = 20.0


class Point(NamedTuple):
    """A call: its program, and the values of the program's operands."""

    program: Recorded
    operands: Operands


class Place:
    """A function that is differentiated at one line with arguments of one kind.

    Attributes:
        origin: The function.
        where: The file and line that differentiate it.
        running: What was running, such as the name of a test.
        transform: The name of the transform.
        kind: What is the same for one program with arguments of one kind, wherever it is differentiated.
        conditions: The settings of JAX there.
        reason: Why its program could not be kept; empty if it was.
        points: The calls that are kept.
    """

    def __init__(self, origin: Origin, where: tuple[str, int], running: str, transform: str, kind: Any):
        self.kind = kind
        self.origin, self.where, self.running, self.transform = origin, where, running, transform
        self.conditions = Conditions.now()
        self.reason = ""
        self.points: list[Point] = []

    @property
    def is_forward(self) -> bool:
        """Whether only forward mode is used."""
        return self.transform in _FORWARD

    def arrive(self, program: Recorded, *operands: Any) -> None:
        """Keep a point, if it is one of the few."""
        apart = [self._apart(point.operands) for point in self.points]
        here = self._apart(operands)
        if len(self.points) < _POINTS:
            if not self.points or here > 0.0:
                self.points.append(Point(program, host_copies(operands)))
            return
        nearest = min(range(1, _POINTS), key=apart.__getitem__)
        if here > apart[nearest]:
            self.points[nearest] = Point(program, host_copies(operands))

    def _apart(self, operands: Sequence[Any]) -> float:
        """How far a point is from the first."""
        return distance(self.points[0].operands, operands) if self.points else 0.0


class Recorder:
    """Keeps the functions that are differentiated while it is in place.

    Attributes:
        places: What was differentiated.
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
        self.running = ""
        self.children: dict[tuple[str, int], str] = {}

    def __reduce__(self) -> Any:
        # A function that was differentiated is sent to another process, in which nothing is recorded.
        return Recorder, (self._settings,)

    @property
    def places(self) -> list[Place]:
        """What was differentiated."""
        return list(self._known.values())

    def install(self) -> None:
        """Stand in for JAX's transforms, also where a module of the user's has imported them already."""
        loaded = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
        modules = [module for module in loaded if is_users(str(vars(module).get("__file__") or "<"))]
        for name, wrap in _WRAPPERS.items():
            original = getattr(jax, name)
            standing_in = wrap(self, name, original)
            # So that it can be pickled.
            standing_in.__module__, standing_in.__qualname__ = "jax", name
            self._replace(jax, name, standing_in)
            for module in modules:
                for own in [own for own, value in vars(module).items() if value is original]:
                    self._replace(module, own, standing_in)
        self._replace(subprocess.Popen, "__init__", _starting(self, "subprocess", subprocess.Popen.__init__))
        process = multiprocessing.process.BaseProcess
        self._replace(process, "start", _starting(self, "multiprocessing", process.start))

    def _replace(self, place: Any, name: str, value: Any) -> None:
        self._originals[place, name] = getattr(place, name)
        setattr(place, name, value)

    def remove(self) -> None:
        """Put JAX's transforms back."""
        for (place, name), original in self._originals.items():
            setattr(place, name, original)
        self._originals = {}

    def see_child(self, how: str, command: Any) -> None:
        """Remember which line of the project starts another Python process."""
        where = caller()
        if where[0] and self._originals and (how == "multiprocessing" or _is_python(command)):
            self.children.setdefault(where, how)

    def see(
        self, transform: str, function: Any, args: Sequence[Any], kwargs: dict[str, Any], argnums: Any, has_aux: bool
    ) -> None:
        """Keep a function, if it is the project's own."""
        # What is traced here may differentiate other functions, which were seen when it ran.
        if getattr(self._own, "is_busy", False) or not self._originals:
            return
        self._own.is_busy = True
        try:
            self._see(transform, function, args, kwargs, argnums, has_aux)
        finally:
            self._own.is_busy = False

    def _see(self, transform: str, function: Any, args: Any, kwargs: Any, argnums: Any, has_aux: bool) -> None:
        origin = origin_of(function, self._settings.is_audited)
        if origin is None:
            return
        where = caller()
        shapes = tuple(
            (getattr(leaf, "shape", ()), str(getattr(leaf, "dtype", type(leaf))))
            for leaf in jax.tree.leaves((args, kwargs))
        )
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        key = (origin, where, transform, numbers, (shapes, jax.config.jax_enable_x64))
        if not self._lock.acquire(timeout=_PATIENCE):
            self._place(key, None, transform).reason = "another thread was being traced"
            return
        try:
            self._calls[key] += 1
            if self._calls[key] > _FIRST and self._calls[key] & (self._calls[key] - 1):
                return
            program = recorded(function, args, kwargs, numbers, has_aux)
            place = self._place(key, program.keyed, transform)
        except Exception as error:
            # Whatever it is, the function itself has just run: it is said in the report, and no reason to stop.
            self._place(key, None, transform).reason = f"it cannot be traced: {last_line(error)}"
            return
        finally:
            self._lock.release()
        operands = program.taken()
        if any(isinstance(operand, jax.core.Tracer) for operand in operands):
            jax.debug.callback(functools.partial(place.arrive, program), *operands)
        else:
            place.arrive(program, *operands)

    def _place(self, key: Any, structure: Any, transform: str) -> Place:
        """Functions that differ only in what they close over are written in one line, and are not one function."""
        origin, where, *rest = key
        if (key, structure) not in self._known:
            kind = origin, rest[-1], structure
            self._known[key, structure] = Place(origin, where, self.running, transform, kind)
        return self._known[key, structure]


def last_line(error: BaseException) -> str:
    """An error in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def _spare(function: Any) -> Any:
    """A function that can be called once more: flax gives JAX objects that use up what they hold in a call."""
    used_up = {name: held for name, held in getattr(function, "__dict__", {}).items() if isinstance(held, deque)}
    if not used_up:
        return function
    spare = copy.copy(function)
    spare.__dict__.update({name: held.copy() for name, held in used_up.items()})
    return spare


def _of_function(recorder: Recorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For transforms that return a function."""

    @functools.wraps(original)
    def transform(fun: Any, *options: Any, **named: Any) -> Any:
        transformed = original(fun, *options, **named)
        argnums = named.get("argnums", options[0] if options else 0)
        has_aux = bool(named.get("has_aux", options[1] if len(options) > 1 else False))

        @functools.wraps(transformed)
        def call(*args: Any, **kwargs: Any) -> Any:
            spare = _spare(fun)
            result = transformed(*args, **kwargs)
            recorder.see(name, spare, args, kwargs, argnums, has_aux)
            return result

        return call

    return transform


def _of_primals(recorder: Recorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For `vjp` and `linearize`, which take the primals after the function."""

    @functools.wraps(original)
    def transform(fun: Any, *primals: Any, **named: Any) -> Any:
        spare = _spare(fun)
        result = original(fun, *primals, **named)
        recorder.see(name, spare, primals, {}, range(len(primals)), bool(named.get("has_aux", False)))
        return result

    return transform


def _of_tangents(recorder: Recorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For `jvp`, which takes a tuple of primals."""

    @functools.wraps(original)
    def transform(fun: Any, primals: Any, tangents: Any, has_aux: bool = False) -> Any:
        spare = _spare(fun)
        result = original(fun, primals, tangents, has_aux=has_aux)
        recorder.see(name, spare, tuple(primals), {}, range(len(primals)), has_aux)
        return result

    return transform


def _starting(recorder: Recorder, how: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """For what starts another process."""

    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.see_child(how, args[0] if args else kwargs.get("args"))
        return original(self, *args, **kwargs)

    return start


def _is_python(command: Any) -> bool:
    """Whether a command of `subprocess` runs Python, as far as its first word tells."""
    words = [command] if isinstance(command, str | bytes | os.PathLike) else list(command or ())[:1]
    first = os.fsdecode(words[0]) if words and isinstance(words[0], str | bytes | os.PathLike) else ""
    return os.path.basename(first.split(" ")[0].strip("'\"")).lower().startswith(("python", "pypy"))


_WRAPPERS: dict[str, Callable[[Recorder, str, Any], Any]] = {
    **dict.fromkeys(("grad", "value_and_grad", "jacfwd", "jacrev", "hessian"), _of_function),
    **dict.fromkeys(("vjp", "linearize"), _of_primals),
    "jvp": _of_tangents,
}
