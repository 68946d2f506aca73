"""What a planted fault is: a function, a point, and the finding that a check must make of it."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """A function with one fault, planted in the line that ends in `# fault: NAME`.

    Attributes:
        name: What the fault is called.
        function: The function.
        args: The point.
        kind: The kind of the finding that must be there.
        severity: Its severity.
        leaf: The path of the leaf that it is about. Every other leaf must be without an error.
        ok: What the report must say.
        wrt: What is selected.
        marker: The name at the end of the faulty line, or lines where more than one may be blamed; by default that of
            the fault, and empty where there is no line to blame.
        words: What the message must contain.
        also: Other leaves that the fault is really in.
        x64: Whether it takes float64.
        note: What is special.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kind: str
    severity: str
    leaf: str
    ok: bool
    wrt: Any = None
    marker: str | None = None
    words: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    x64: bool = False
    note: str = ""

    @property
    def where(self) -> set[str]:
        """The lines that may be blamed, each as `file.py:42`; empty where there is none."""
        if self.marker == "":
            return set()
        source = Path(inspect.getsourcefile(self.function))
        marker = f"# fault: {self.marker or self.name}"
        lines = source.read_text().splitlines()
        found = {f"{source.name}:{number}" for number, line in enumerate(lines, 1) if line.endswith(marker)}
        assert found, f"No line of {source.name} ends in `{marker}`."
        return found
