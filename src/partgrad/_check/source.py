"""The line of the user's code that an equation comes from."""

import functools
import os
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from .._programs import inner_jaxprs
from .program import Chain
from .user import as_where, is_users

# A file and a line.
_Frame = tuple[str, int]

_OWN = (os.path.join(Path(__file__).parents[1], ""),)
_JAX = tuple(os.path.join(path, "") for path in jax.__path__)
# A file before JAX 0.10, and a folder since.
_RANDOM = tuple(os.path.join(path, "_src", "random") for path in jax.__path__)


def line(chain: Chain) -> str:
    """Where an equation comes from, as `file.py:42`: the innermost line of the user's own code.

    A function of a library that is compiled is traced once and then used from a cache, together with the lines from
    which it was called the first time. So what is inside a call is believed only if the call is of the user's own
    function, or the lines lead through it, or they were running inside of the function that is called: as those of a
    function that a library has wrapped and compiled.

    Args:
        chain: The equation, and before it those that it is inside of, from the outermost in.

    Returns:
        The base name of the file and the number of the line; empty if no line is the user's.
    """
    for number in reversed(range(len(chain))):
        frames = _frames(chain[number], is_users)
        inside_users = number == 0 or _holds_users_function(chain[number - 1])
        if frames and (
            inside_users
            or _leads_through(frames, chain[number - 1])
            or _was_running_inside(chain[number], chain[number - 1])
        ):
            return as_where(*frames[-1])
    # All of it is in libraries: then the line of one that is not JAX is the best that there is.
    outside_jax = [frame for equation in chain[:1] for frame in _frames(equation, _is_outside_jax)]
    return as_where(*outside_jax[-1]) if outside_jax else ""


def is_in_library(chain: Chain) -> bool:
    """Whether an equation was traced by a library that the user called, not by the user's own code."""
    frames = _frames(chain[-1], _is_outside_jax)
    return bool(frames) and not is_users(frames[-1][0])


def is_of_jax_random(call: JaxprEqn) -> bool:
    """Whether an equation is a call of a function of `jax.random`."""
    return any(file.startswith(_RANDOM) for file in _files(call))


def sampler_of(equation: JaxprEqn) -> str | None:
    """The function of `jax.random` that ran when an equation was traced, the outermost one; None if there was none."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else []
    return next((frame.function_name for frame in reversed(frames) if frame.file_name.startswith(_RANDOM)), None)


def _files(call: JaxprEqn) -> list[str]:
    """The files of the functions that are inside an equation."""
    return [file for file, _ in _sites(call)]


def _sites(call: JaxprEqn) -> list[_Frame]:
    """Where the functions that are inside an equation begin."""
    named = [getattr(jaxpr.debug_info, "func_src_info", None) or "" for jaxpr in inner_jaxprs(call)]
    parts = [site.rpartition(" at ")[2].rpartition(":") for site in named if " at " in site]
    return [(file, int(number)) for file, _, number in parts if number.isdigit()]


def _was_running_inside(equation: JaxprEqn, call: JaxprEqn) -> bool:
    """Whether a line of the user's was running inside of the function that a call is of."""
    traceback, sites = equation.source_info.traceback, _sites(call)
    is_inside = False
    for frame in reversed(traceback.frames if traceback is not None else []):
        is_inside = is_inside or (frame.file_name, frame.function_start_line) in sites
        if is_inside and is_users(frame.file_name):
            return True
    return False


def _leads_through(frames: list[_Frame], call: JaxprEqn) -> bool:
    outer = _frames(call, is_users)
    return bool(outer) and frames[: len(outer)] == outer


def _frames(equation: JaxprEqn, wanted: Any) -> list[_Frame]:
    """The lines that were running when an equation was traced, from the outermost in."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else []
    return [(frame.file_name, frame.line_num) for frame in reversed(frames) if wanted(frame.file_name)]


def _holds_users_function(call: JaxprEqn) -> bool:
    """Whether a function that the user wrote is inside an equation."""
    return any(map(is_users, _files(call)))


@functools.lru_cache(maxsize=4096)
def _is_outside_jax(file: str) -> bool:
    return not file.startswith(("<", *_JAX, *_OWN))
