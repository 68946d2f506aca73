"""Flags of JAX, set for a while."""

import contextlib

import jax


@contextlib.contextmanager
def flag_set(flag):
    """Switch on a flag that is off, for the body of a `with`."""
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        yield
    finally:
        jax.config.update(flag, before)
