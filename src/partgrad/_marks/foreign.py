"""Marks of other libraries: what they hold is held here too, but only `thaw` removes them."""

from typing import Any


def is_foreign_mark(node: Any) -> bool:
    """Whether a node holds its contents, as `paramax.NonTrainable` does until `paramax.unwrap`."""
    cls = type(node)
    # By name: partgrad does not import paramax.
    return cls.__name__ == "NonTrainable" and cls.__module__.partition(".")[0] == "paramax"
