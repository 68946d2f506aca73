"""How the tests look at an error: its class, and the fragments of its message."""

import pytest

from partgrad import errors


def refused(call, error, *fragments):
    """A call raises partgrad's error, which is also this one, says these things, and how to fix it."""
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, errors.PartgradError)
    for fragment in (*fragments, "\n  Fix: "):
        assert fragment in str(caught.value)
