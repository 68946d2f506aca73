"""The exceptions of partgrad.

Every message says what went wrong, where (the key path), what was expected and what was found, and how to fix it, in
that order. Every class also derives from the builtin that a caller would catch::

    PartgradError
    ├── SelectionError(ValueError)          a selector does not fit a tree
    │   ├── NoMatchError(LookupError)       it fits nowhere, or selects nothing
    │   ├── NotDifferentiableError(TypeError)   it names an int, a bool, a string, a function ...
    │   ├── ElementError(IndexError)        it takes elements that a leaf does not have
    │   └── SelectorTypeError(TypeError)    it is not a selector at all
    ├── SlotError(TypeError)                a selector computed on what it should only point at
    ├── ArgumentError(TypeError, ValueError)    the arguments of a transform do not go together
    ├── HeldError(ValueError)               a mark stops the derivative of a leaf that was named
    ├── PartsError(ValueError)              parts that `combine` cannot put together
    ├── DataclassError(TypeError)           a class, or the building of an instance
    │   └── ForgottenDecoratorError(TypeError)  a leaf is a dataclass that JAX does not know as a pytree
    ├── StaticError(TypeError)              a value that cannot be static
    ├── DrawError(TypeError)                a derivative through a draw that has none, or would be wrong
    ├── CheckError(AssertionError)          a gradient that did not pass its check
    └── LibraryError(ImportError)           a library that is needed for this is not installed
"""

from ._message import word


class PartgradError(Exception):
    """Base class of every error that partgrad raises.

    Args:
        what: What went wrong, or the whole message.
        details: Where, and what was expected and found.
        fix: The remedy.
    """

    def __init__(self, what: str, *details: str, fix: str = ""):
        super().__init__(word(what, *details, fix=fix))


class SelectionError(PartgradError, ValueError):
    """A selector does not fit a tree."""


class NoMatchError(SelectionError, LookupError):
    """A selector fits nowhere in the tree, or selects nothing that can be differentiated."""


class NotDifferentiableError(SelectionError, TypeError):
    """A selector names a leaf that has no derivative: an int, a bool, a string, a key, a function."""


class ElementError(SelectionError, IndexError):
    """A selector takes elements that a leaf does not have."""


class SelectorTypeError(SelectionError, TypeError):
    """An object passed as a selector is not one."""


class SlotError(PartgradError, TypeError):
    """A selector computed with a slot or iterated over it; it may only return it."""


class ArgumentError(PartgradError, TypeError, ValueError):
    """The arguments of a transform do not fit together."""


class HeldError(PartgradError, ValueError):
    """The derivative of a named leaf ends at a mark that was not written there explicitly."""


class PartsError(PartgradError, ValueError):
    """Parts of a tree overlap, or have different structures."""


class DataclassError(PartgradError, TypeError):
    """A class cannot be a partgrad dataclass, or an instance was built wrongly."""


class ForgottenDecoratorError(DataclassError):
    """A leaf is a dataclass that JAX does not know as a pytree, so nothing in it would be differentiated."""


class StaticError(PartgradError, TypeError):
    """A value cannot be static."""


class DrawError(PartgradError, TypeError):
    """A derivative through a draw was refused, or would be wrong."""


class CheckError(PartgradError, AssertionError):
    """A gradient did not pass its check."""


class LibraryError(PartgradError, ImportError):
    """A library that is needed for this, and for nothing else, is not installed."""


__all__ = sorted(name for name, value in list(globals().items()) if isinstance(value, type))


def __dir__() -> list[str]:
    return __all__
