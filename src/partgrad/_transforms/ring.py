"""The arguments of the last calls on disk, in a ring of files, to be read by another process.

A folder has one file for each of the last calls, which holds the arrays, and one for each kind of call, which says how
to build the arguments of them. A file is written beside its place and then put there, so it is whole or not there at
all. Once a derivative is not finite, nothing is overwritten any more.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pickle
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from .._selection import as_selection, intermediate
from ..errors import ArgumentError
from .call import ALONE, INSIDE, Call

# What `pickle` raises for what it cannot store, and for what it does not find again.
_NOT_PICKLED = (pickle.PickleError, AttributeError, ImportError, TypeError, ValueError, RecursionError)


class KeepCalls:
    """Keep the arguments of the last calls on disk: `nonfinite=` of a transform.

    Every call writes its arguments, so they leave the device. Once a derivative is not finite, nothing more is written;
    `partgrad.last_nonfinite(path)` then has that call and those before it, in another process too, and after the job
    was killed. In a program of several processes the first one writes, and whole arrays, which XLA collects on one
    device.

    Args:
        path: A folder, which is made if it is not there.
        last: How many calls to keep.

    Raises:
        ArgumentError: If `last` is no positive integer.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, partgrad as pg
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     step = jax.jit(pg.grad(lambda x: jnp.sum(jnp.sqrt(x)), nonfinite=pg.KeepCalls(folder, last=2)))
        ...     for x in (3.0, 2.0, 1.0, 0.0):
        ...         _ = jax.block_until_ready(step(jnp.array([x])))
        ...     jax.effects_barrier()
        ...     found = pg.last_nonfinite(folder)
        >>> print(found.args, [args for args, _ in found.before])
        (array([0.], dtype=float32),) [(array([1.], dtype=float32),)]
    """

    def __init__(self, path: Any, last: int = 100):
        if isinstance(last, bool) or not isinstance(last, int | np.integer) or last < 1:
            raise ArgumentError(
                f"`last` of `partgrad.KeepCalls` is {last!r:.60}.",
                "Expected how many calls to keep: a positive integer.",
                fix="write last=100.",
            )
        self._path, self._last = Path(path), int(last)
        self._lock = threading.Lock()
        # The number of the next call; None before the first.
        self._next: int | None = None
        self._is_full_stop = False

    def __repr__(self) -> str:
        return f"KeepCalls({str(self._path)!r}, last={self._last})"

    def write(self, description: "Description", arrays: Sequence[Any], is_bad: bool) -> None:
        """Write a call, unless one that is not finite is there."""
        with self._lock:
            if self._next is None:
                self._path.mkdir(parents=True, exist_ok=True)
                stored = [call for call in calls_in(self._path) if call.process == jax.process_index()]
                # What a process was writing when it was killed, and what is more than fits into this ring.
                for file in (*self._path.glob(".*.npz.*"), *(call.file for call in stored[: -self._last])):
                    file.unlink(missing_ok=True)
                self._next = 1 + max((call.number for call in stored), default=-1)
                self._is_full_stop = any(call.is_bad for call in stored)
                if self._is_full_stop:
                    print(
                        f"partgrad: {self._path} has a call whose derivative is not finite; no other is kept before "
                        f"partgrad.last_nonfinite({str(self._path)!r}).clear().",
                        file=sys.stderr,
                    )
            if self._is_full_stop and any(self._path.glob("call-*.npz")):
                return
            kind = self._path / description.file
            if not kind.exists():
                _put(kind, description.stored)
            header = {"number": self._next, "is_bad": is_bad, "kind": description.file, "process": jax.process_index()}
            file_of = lambda number: self._path / f"call-{jax.process_index()}-{number}.npz"
            _put(file_of(self._next), _written(header, arrays))
            file_of(self._next - self._last).unlink(missing_ok=True)
            self._next += 1
            self._is_full_stop = is_bad
            if is_bad:
                print(
                    f"partgrad: the gradient of `{description.name}` is not finite. Its arguments and those of calls "
                    f"before it are in {self._path}: partgrad.last_nonfinite({str(self._path)!r}).report says which "
                    "line makes it so.",
                    file=sys.stderr,
                )


class Description(NamedTuple):
    """What calls of one program have in common, as it is stored.

    Attributes:
        name: The name of the function.
        file: The name of the file for it.
        stored: The file.
    """

    name: str
    file: str
    stored: bytes

    @classmethod
    def of(cls, name: str, call: Call, treedef: Any, others: Sequence[Any], has_aux: bool) -> "Description":
        """The description of a call.

        Args:
            name: The name of its function.
            call: The call.
            treedef: The structure of its arguments.
            others: For each leaf of them None for an array, and otherwise a tuple of the leaf.
            has_aux: Whether the function returns auxiliary data too.
        """
        numbers = iter(range(len(others)))
        slots = [Slot(next(numbers)) if other is None else other[0] for other in others]
        arguments = None
        with contextlib.suppress(*_NOT_PICKLED):
            arguments = pickle.dumps(treedef.unflatten(slots))
        function = None
        with contextlib.suppress(*_NOT_PICKLED):
            function = pickle.dumps(call.written.function)
        own = [(t.position, tuple(map(t.path, t.plan.indices))) for t in call.targets if t.position != INSIDE]
        inside = {None if key is ALONE else key: name for key, name in call.names_inside.items()}
        described = Described(
            name, arguments, function, has_aux, call.written.double_where, tuple(own), tuple(inside.values())
        )
        stored = pickle.dumps(described._asdict())
        return cls(name, f"kind-{hashlib.sha256(stored).hexdigest()[:16]}.pickle", stored)


class Described(NamedTuple):
    """What is stored of a program: how to build the arguments, and what was differentiated with respect to what."""

    name: str
    arguments: bytes | None
    function: bytes | None
    has_aux: bool
    double_where: bool
    selected: tuple[tuple[Any, tuple[str, ...]], ...]
    inside: tuple[str, ...]

    @property
    def options(self) -> dict[str, Any]:
        """The options with which `check` looks at what was differentiated."""
        options: dict[str, Any] = {"has_aux": self.has_aux}
        if not self.selected:
            return {**options, "wrt": {name: intermediate(name) for name in self.inside}}
        selections = [_union(paths) for _, paths in self.selected]
        positions = [position for position, _ in self.selected]
        numbers = tuple(position for position in positions if isinstance(position, int))
        names = tuple(position for position in positions if isinstance(position, str))
        return {**options, "wrt": tuple(selections), "argnums": numbers, "argnames": names or None}

    def found(self, given: Any) -> Any:
        """The function that was differentiated."""
        found = given if given is not None else _loaded(self.function)
        if found is None:
            raise ArgumentError(
                f"`{self.name}` is not found in this process.",
                "Expected a function of a module, which has a name there, or the function itself.",
                fix="write partgrad.last_nonfinite(path, f).",
            )
        if self.double_where:
            from .._double_where import double_where

            return double_where(found)
        return found


@dataclasses.dataclass(frozen=True)
class Slot:
    """Stands for an array where only the structure of arguments is stored."""

    number: int


class Stored(NamedTuple):
    """A call in a folder.

    Attributes:
        file: Its file.
        number: Its number, counted from the first one.
        process: The number of the process that wrote it.
        is_bad: Whether a derivative of it is not finite.
        kind: The file that describes it.
    """

    file: Path
    number: int
    process: int
    is_bad: bool
    kind: Path

    @property
    def described(self) -> Described:
        """What it has in common with others."""
        return Described(**pickle.loads(self.kind.read_bytes()))

    def arguments(self, like: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call, with arrays on the host.

        Args:
            like: The arguments of a call like it, `(args, kwargs)`, where their structure could not be stored.
        """
        arrays = _read(self.file)
        described = self.described
        if like is None:
            like = _loaded(described.arguments)
        if like is None:
            raise ArgumentError(
                f"The arguments of `{described.name}` in {self.file.parent} have a class that `pickle` cannot store.",
                f"Expected the arguments of any call like it: {len(arrays)} arrays are to be put in their places.",
                fix="write partgrad.last_nonfinite(path, f, like=(model, x)).",
            )
        leaves, treedef = jax.tree.flatten(like)
        rest = iter(arrays)
        is_slot = lambda leaf: isinstance(leaf, Slot | jax.Array | np.ndarray)
        args, kwargs = treedef.unflatten([next(rest) if is_slot(leaf) else leaf for leaf in leaves])
        return args, kwargs


def calls_in(path: Path) -> list[Stored]:
    """The calls in a folder, by their numbers."""
    found = []
    for file in path.glob("call-*.npz"):
        with np.load(file) as stored:
            header = json.loads(bytes(stored["header"]))
        kind = path / header["kind"]
        found.append(Stored(file, header["number"], header["process"], header["is_bad"], kind))
    return sorted(found, key=lambda call: (call.number, call.process))


def clear(path: Path) -> None:
    """Remove what is stored in a folder."""
    for pattern in ("call-*.npz", "kind-*.pickle"):
        for file in path.glob(pattern):
            file.unlink(missing_ok=True)


def _union(paths: Sequence[str]) -> Any:
    first, *rest = map(as_selection, paths)
    for other in rest:
        first = first | other
    return first


def _loaded(stored: bytes | None) -> Any:
    """What is stored; None if it is not there, or has a class or function that this process has not."""
    if stored is not None:
        with contextlib.suppress(*_NOT_PICKLED):
            return pickle.loads(stored)
    return None


def _put(file: Path, content: bytes) -> None:
    """Write a file at once: a process that is killed leaves the old one or the new one."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    with open(beside, "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(beside, file)


def _written(header: dict[str, Any], arrays: Sequence[Any]) -> bytes:
    """The file of a call. Arrays are bytes, since NumPy has not every dtype."""
    kinds = []
    parts: dict[str, Any] = {}
    for number, array in enumerate(arrays):
        implementation = None
        if jax.dtypes.issubdtype(getattr(array, "dtype", None), jax.dtypes.prng_key):
            implementation = str(jax.random.key_impl(array))
            array = jax.random.key_data(array)
        array = np.asarray(array)
        is_object = array.dtype.kind == "O"
        kinds.append({"dtype": str(array.dtype), "shape": array.shape, "key": implementation})
        content = pickle.dumps(array) if is_object else np.ascontiguousarray(array).tobytes()
        parts[f"array{number}"] = np.frombuffer(content, np.uint8)
    written = io.BytesIO()
    np.savez(written, header=np.frombuffer(json.dumps({**header, "arrays": kinds}).encode(), np.uint8), **parts)
    return written.getvalue()


def _read(file: Path) -> list[Any]:
    with np.load(file) as stored:
        kinds = json.loads(bytes(stored["header"]))["arrays"]
        return [_array(bytes(stored[f"array{number}"]), **kind) for number, kind in enumerate(kinds)]


def _array(content: bytes, dtype: str, shape: Sequence[int], key: str | None) -> Any:
    if dtype == "object":
        return pickle.loads(content)
    array = np.frombuffer(content, jax.numpy.dtype(dtype)).reshape(shape).copy()
    return array if key is None else jax.random.wrap_key_data(array, impl=key)
