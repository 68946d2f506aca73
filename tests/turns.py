"""Cases that the two versions of JAX under test share: each takes every other one, or all if ALL_CASES is set."""

import os

import jax

ALL = bool(os.environ.get("ALL_CASES"))
OLDER = jax.__version_info__ < (0, 11)


def is_mine(number):
    """Whether this version of JAX takes the case of a number."""
    return ALL or number % 2 == int(OLDER)
