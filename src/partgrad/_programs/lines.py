"""Whose line is it: the line of the user's code that an equation, a call or an error comes from.

Code is the user's if it is not in partgrad, JAX, the standard library or an installed package. Code typed at a prompt
or run from a string is the user's too.
"""

import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from .._compat import codes_of, is_root_primitive
from ..errors import PartgradError
from .equations import (
    Chain,
    custom_rule_body,
    inner_jaxprs,
    jaxpr_and_consts,
    name_of,
    rule_file,
    written,
)
from .primitives import (
    CALLS,
    CUSTOM_JVPS,
    CUSTOM_RULES,
    TRANSPARENT,
)

_OWN = os.path.join(Path(__file__).parents[1], "")
# So that JAX never reports a line of partgrad as the source of an equation.
source_info_util.register_exclusion(_OWN)

# A file and a line.
_Frame = tuple[str, int]

_JAX = tuple(os.path.join(path, "") for path in jax.__path__)
# It is a file before JAX 0.10, and a folder since.
_RANDOM = tuple(os.path.join(path, "_src", "random") for path in jax.__path__)
_STANDARD = tuple(os.path.join(os.path.realpath(sysconfig.get_path(name)), "") for name in ("stdlib", "platstdlib"))
_LIBRARIES = (*(os.path.join(os.path.realpath(path), "") for path in (_OWN, *_JAX)), *_STANDARD)
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
# Code that the standard library and others generate or freeze is in angle brackets too.
_TYPED_IN = ("<ipython-input", "<python-input", "<stdin>", "<string>")


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Whether the user wrote a file, given as a code object names it."""
    if file.startswith("<"):
        return file.startswith(_TYPED_IN)
    path = os.path.realpath(file)
    return not path.startswith(_LIBRARIES) and not any(part in path for part in _INSTALLED)


@functools.lru_cache(maxsize=4096)
def is_of_jax(file: str) -> bool:
    """Whether a file is one of JAX's; a code object or `written` names it."""
    return file.startswith(_JAX)


def has_rule_outside_jax(equation: JaxprEqn) -> bool:
    """Whether an equation is the call of a function with a custom rule, unless that is known to be one of JAX's."""
    name = equation.primitive.name
    return name in CUSTOM_RULES and not (name in CUSTOM_JVPS and is_of_jax(rule_file(equation)))


def _is_outside_jax(file: str) -> bool:
    return not is_of_jax(file) and not file.startswith(("<", _OWN))


def as_where(file: str, line: int | None) -> str:
    """A line of code as `file.py:42`."""
    return f"{os.path.basename(file)}:{line}"


def raised_at(error: BaseException) -> tuple[str, int]:
    """The file and the number of the innermost line of the user's code from which an error came; empty if none is."""
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    users = [frame for frame in frames if is_users(frame[0])]
    return users[-1] if users else ("", 0)


def is_own_fault(error: BaseException) -> bool:
    """Whether it was a line of partgrad's own that failed, and not what it called: a function of the user or of JAX."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code.co_filename.startswith(_OWN) and not isinstance(error, PartgradError)


def running_line() -> str:
    """The innermost line of the user's code that is running, or else of a library that is not JAX."""
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_stack(sys._getframe())]
    found = [frame for wanted in (is_users, _is_outside_jax) for frame in frames if wanted(frame[0])]
    return as_where(*found[0]) if found else ""


def line(chain: Chain) -> str:
    """Where an equation comes from, as `file.py:42`; empty if no line is known."""
    file, number = place(chain)
    return as_where(file, number) if file else ""


def place(chain: Chain) -> tuple[str, int]:
    """Where an equation comes from: the file and the number of the innermost line of the user's own code.

    A function of a library that is compiled is traced once and then used from a cache, together with the lines from
    which it was called the first time. So what is inside a call is believed only if the innermost call that it is in is
    of the user's own function, or the lines lead through it, or they were running inside the function that is
    called: as those of a function that a library has wrapped and compiled.

    Args:
        chain: The equation, and before it those that it is inside, from the outermost in.

    Returns:
        The file, empty if no line is the user's, and the number of the line.
    """
    file, number, _ = placed(chain)
    return file, number


def placed(chain: Chain) -> tuple[str, int, int]:
    """`place`, and which equation of the chain it is the line of."""
    for number in reversed(range(len(chain))):
        frames = _frames(chain[number], is_users)
        call = next((outer for outer in reversed(chain[:number]) if outer.primitive.name in CALLS), None)
        if frames and (
            call is None
            or holds_users_function(call)
            or _leads_through(frames, call)
            or _was_running_inside(chain[number], call)
        ):
            return *frames[-1], number
    # Everything is in libraries: the line of one other than JAX is the best there is.
    outside_jax = [frame for equation in chain[:1] for frame in _frames(equation, _is_outside_jax)]
    # A function that partgrad itself calls has only the line where it is defined.
    defined = [site for equation in chain for site in _sites(equation) if is_users(site[0])]
    return *next((frame for frame in [*outside_jax[-1:], *defined[-1:]]), ("", 0)), 0


def is_in_library(chain: Chain) -> bool:
    """Whether an equation was traced by a library that the user called, not by the user's own code."""
    frames = _frames(chain[-1], _is_outside_jax)
    return bool(frames) and not is_users(frames[-1][0])


def is_of_jax_random(call: JaxprEqn) -> bool:
    """Whether an equation is a call of a function of `jax.random`."""
    return any(file.startswith(_RANDOM) for file, _ in _sites(call))


def is_custom_root(equation: JaxprEqn) -> bool:
    """Whether an equation is a call of `jax.lax.custom_root`, which is a `custom_jvp` before JAX 0.12."""
    name, file = written(jaxpr_and_consts(custom_rule_body(equation))[0])
    return is_root_primitive(equation) or (name == "_custom_root" and is_of_jax(file))


def sampler_of(equation: JaxprEqn) -> str | None:
    """The outermost function of `jax.random` that was running when an equation was traced; None if there was none."""
    trace = equation.source_info.traceback
    frames = trace.frames if trace is not None else []
    return next((frame.function_name for frame in reversed(frames) if frame.file_name.startswith(_RANDOM)), None)


def has_line(equation: JaxprEqn) -> bool:
    """Whether the user's code was running when an equation was traced."""
    return _shows_line(equation.source_info.traceback)


# Of the equations of one derivative, many have the traceback of the same operation.
@functools.lru_cache(maxsize=256)
def _shows_line(traceback: Any) -> bool:
    return any(is_users(code.co_filename) for code in codes_of(traceback))


def _sites(call: JaxprEqn) -> list[_Frame]:
    """Where the functions inside an equation begin."""
    parts = [written(jaxpr).file.rpartition(":") for jaxpr in inner_jaxprs(call)]
    return [(file, int(number)) for file, _, number in parts if number.isdigit()]


def running(chain: Chain) -> list[tuple[str, int, str]]:
    """The functions that were running when an equation was traced: file, first line and name, innermost first.

    What ran outside a function that JAX keeps compiled is told by its call: the frames inside are those of its first
    caller.
    """
    found: list[tuple[str, int, str]] = []
    for number in reversed(range(len(chain))):
        trace = chain[number].source_info.traceback
        call = next((outer for outer in reversed(chain[:number]) if outer.primitive.name in CALLS), None)
        sites = [] if call is None else _sites(call)
        for frame in trace.frames if trace is not None else []:
            found.append((frame.file_name, frame.function_start_line, frame.function_name))
            if (frame.file_name, frame.function_start_line) in sites:
                break
    return found


def _was_running_inside(equation: JaxprEqn, call: JaxprEqn) -> bool:
    """Whether the user's code was running inside the called function.

    JAX keeps the innermost frames: a function of another library whose frame is not among them is further out.
    """
    trace, sites = equation.source_info.traceback, _sites(call)
    frames = trace.frames if trace is not None else []
    first = lambda found: next((number for number, frame in enumerate(frames) if found(frame)), len(frames))
    users = first(lambda frame: is_users(frame.file_name))
    of_call = first(lambda frame: (frame.file_name, frame.function_start_line) in sites)
    is_lost = bool(sites) and not any(is_of_jax(file) for file, _ in sites)
    return users < of_call and (of_call < len(frames) or is_lost)


def _leads_through(frames: list[_Frame], call: JaxprEqn) -> bool:
    outer = _frames(call, is_users)
    return bool(outer) and frames[: len(outer)] == outer


def _frames(equation: JaxprEqn, wanted: Callable[[str], bool]) -> list[_Frame]:
    """The lines that were running when an equation was traced, from the outermost inwards."""
    trace = equation.source_info.traceback
    frames = trace.frames if trace is not None else []
    return [(frame.file_name, frame.line_num) for frame in reversed(frames) if wanted(frame.file_name)]


def holds_users_function(call: JaxprEqn) -> bool:
    """Whether a function written by the user is inside an equation."""
    return name_of(call) in TRANSPARENT or any(is_users(file) for file, _ in _sites(call))
