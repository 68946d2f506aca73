"""Which lines of code are the user's, and which are of a library."""

import functools
import os
import sysconfig
import traceback

import jax

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(
    os.path.realpath(folder) + os.sep
    for folder in {
        _HERE,
        os.path.dirname(jax.__file__),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
    }
)
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))

_TYPED_IN = ("<ipython-input", "<python-input", "<stdin>")


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Whether a file, as a code object names it, is one that the user wrote."""
    if file.startswith("<"):
        # What is typed in is the user's; `<frozen importlib>` is not.
        return file.startswith(_TYPED_IN)
    path = os.path.realpath(file)
    return not path.startswith(_LIBRARIES) and not any(part in path for part in _INSTALLED)


def as_where(file: str, line: int | None) -> str:
    """A line of code as `file.py:42`."""
    return f"{os.path.basename(file)}:{line}"


def raised_at(error: BaseException) -> str:
    """The innermost line of the user's code from which an error came, or ""."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if is_users(frame.f_code.co_filename)]
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if is_users(frame.f_code.co_filename)]
    return as_where(frames[-1].f_code.co_filename, lines[-1]) if frames else ""
