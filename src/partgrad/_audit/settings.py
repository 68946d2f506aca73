"""What an audit looks at, for how long, and what a project says it intends."""

import dataclasses
import fnmatch
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._message import near_misses
from .._programs import is_users
from ..errors import ArgumentError

_EXAMPLES = {
    "intended": '"model.py:42"',
    "skip": '"legacy.*"',
    "packages": '"package"',
    "calls": '"package.physics.*"',
    "wrt": '"params.**"',
}
_KEYS = tuple(_EXAMPLES)
# How many seconds there are for all functions, if nobody says: so many for each, and at least so many.
_EACH, _LEAST = 3.0, 300.0
_TABLES = ("tool", "partgrad", "audit")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of an audit.

    Attributes:
        root: The folder of the project.
        everything: Whether functions of other libraries are audited too.
        search: Whether bad points near the given ones are searched for.
        seconds: The most seconds for one function.
        total: The most seconds for all; None for what depends on how many there are.
        intended: What findings are intended: `file.py:42`, the qualified name of a rule or of a function, or the path
            of a leaf.
        skip: Globs of the qualified names or files of functions that are not audited.
        packages: Installed packages whose functions are audited too.
        calls: Globs of the qualified names of functions whose calls are audited.
        wrt: For these, paths of the arguments that are differentiated; none for all that are floating.
    """

    root: Path
    everything: bool = False
    search: bool = False
    seconds: float = 20.0
    total: float | None = None
    intended: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    wrt: tuple[str, ...] = ()
    # The globs of `skip` that some function matched.
    matched: set[str] = dataclasses.field(default_factory=set, init=False, compare=False, repr=False)
    # The user's functions that are written elsewhere, with their files.
    elsewhere: dict[str, str] = dataclasses.field(default_factory=dict, init=False, compare=False, repr=False)

    def time_for(self, count: int) -> float:
        """The most seconds for so many functions, each with arguments of one structure."""
        return max(_EACH * count, _LEAST) if self.total is None else self.total

    def line(self, file: str, line: int) -> str:
        """A line of code, as seen from the root of the project; empty if there is none."""
        path = Path(file)
        return f"{path.relative_to(self.root) if path.is_relative_to(self.root) else path}:{line}" if file else ""

    def is_skipped(self, file: str, name: str) -> bool:
        """Whether `skip` names a function that is written in a file."""
        skipping = [glob for glob in self.skip if fnmatch.fnmatch(name, glob) or fnmatch.fnmatch(file, f"*{glob}")]
        self.matched.update(skipping)
        return bool(skipping)

    def is_audited(self, file: str, name: str) -> bool:
        """Whether a function that is written in a file is audited."""
        if self.is_skipped(file, name):
            return False
        if self.everything:
            return True
        parts = Path(file).parts
        if any(package in parts for package in self.packages):
            return True
        is_below = _is_below(file, self.root)
        if is_users(file) and not is_below:
            self.elsewhere[name] = file
        return is_users(file) and is_below


def _is_below(file: str, root: Path) -> bool:
    # What was typed in at a prompt or run from a string is nobody else's.
    return file.startswith("<") or os.path.realpath(file).startswith(os.path.join(os.path.realpath(root), ""))


def from_project(root: Path, **options: Any) -> Settings:
    """The settings for a project, with `[tool.partgrad.audit]` of its `pyproject.toml`."""
    file = root / "pyproject.toml"
    found = _table(file) if file.is_file() else {}
    for key, value in found.items():
        if key not in _KEYS:
            near = near_misses(key, _KEYS)
            raise ArgumentError(
                f"[tool.partgrad.audit] of {file} has no key `{key}`.",
                f"Expected some of {', '.join(_KEYS)}.",
                fix=f"write {near[0]}." if near else "take it out.",
            )
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ArgumentError(
                f"`{key}` in [tool.partgrad.audit] of {file} is {value!r:.60}.",
                "Expected a list of strings.",
                fix=f"write {key} = [{json.dumps(value) if isinstance(value, str) else _EXAMPLES[key]}].",
            )
    given: dict[str, Any] = {key: (*found.get(key, ()), *options.pop(key, ())) for key in _KEYS}
    return Settings(root, **given, **options)


def _table(file: Path) -> Mapping[str, Any]:
    """What a project says about the audit."""
    try:
        found: Any = tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArgumentError(f"{file} cannot be read: {error}.", fix="correct it; it is to be TOML in UTF-8.") from None
    for number, name in enumerate(_TABLES):
        found = found.get(name, {})
        if not isinstance(found, dict):
            table = ".".join(_TABLES[: number + 1])
            raise ArgumentError(
                f"`{table}` in {file} is {found!r:.60}.", "Expected a table.", fix=f"write [{'.'.join(_TABLES)}]."
            )
        near = [own for own in near_misses(_TABLES[-1], found) if name == "partgrad" and "audit" not in found]
        if near:
            raise ArgumentError(
                f"[tool.partgrad] of {file} has no key `{near[0]}`.",
                "Expected `audit`.",
                fix="write [tool.partgrad.audit].",
            )
    return found
