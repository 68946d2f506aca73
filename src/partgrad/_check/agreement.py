"""Whether derivatives agree with finite differences: the one law, and what it says along one direction.

A number agrees if it lies between the slopes on the two sides, up to the errors of both.
"""

from typing import Any, NamedTuple

import numpy as np

from .exact import Vector

AGREE, ROUNDING, INCONCLUSIVE, MISMATCH, ABSENT = "agree", "rounding", "inconclusive", "mismatch", "absent"

# Relative disagreements: one that counts as none, and the largest that is no error if finite differences cannot tell.
_AIM = 1e-8
_WORST = 1e-4
# In units of the error of the differences: what still counts as agreement, and what is a mismatch.
_WITHIN, _BEYOND = 3.0, 10.0
# How much of a derivative may be its own rounding errors, if it is to agree.
_MOST_NOISE = 1e-2
# The noise of slopes that does not matter, relative to the value: less than that may agree as zeros.
_NEGLIGIBLE = 1e-6
# Relative errors of a derivative that has not two right digits, and of one that has none, as a number and twice that.
TWO_DIGITS, NO_DIGIT = 1e-2, 0.5
# How exact a slope must be that noise hides, if a derivative is to agree with it in two digits.
COARSE = 0.05


class Agreement(NamedTuple):
    """Whether a derivative agrees with finite differences, and the numbers where the agreement is worst.

    The status `rounding` means that constants of low precision may explain the difference; `relative` is the
    difference relative to the sum of the magnitudes; and `unseen`, that some numbers agree because they are less than
    the noise of the differences.
    """

    status: str
    got: Any = 0.0
    expected: Any = 0.0
    relative: float = 0.0
    unseen: bool = False


NOTHING = Agreement(INCONCLUSIVE)


class Reading(NamedTuple):
    """Both derivatives compared with finite differences along one direction and, in `modes`, with each other.

    The reverse derivative is that of a weighted sum of the outputs that have slopes; `right` and `left` are the slopes
    of that sum, `pushed` and `pulled` those by forward and reverse mode, and the numbers of kinks, jumps and unsettled
    outputs are counted.
    """

    forward: Agreement
    reverse: Agreement
    modes: Agreement
    kinks: int
    jumps: int
    unsure: int
    right: float
    left: float
    noise: float
    steps: tuple[float, ...]
    pushed: float | None
    pulled: float | None

    @property
    def status(self) -> str:
        """A mismatch if there is any, or else the worse status of the two."""
        known = [self.forward.status, self.reverse.status]
        if MISMATCH in (*known, self.modes.status):
            return MISMATCH
        # If the two agree with each other, a status that one of them earned holds for both.
        order = (
            [ROUNDING, INCONCLUSIVE, AGREE] if self.modes.status == INCONCLUSIVE else [ROUNDING, AGREE, INCONCLUSIVE]
        )
        return next((status for status in order if status in known), ABSENT)

    @property
    def is_clean(self) -> bool:
        """Whether every output is smooth and both derivatives agree with the differences."""
        return self.status in (AGREE, ROUNDING, ABSENT) and not (self.kinks or self.jumps or self.unsure)

    @property
    def is_settled(self) -> bool:
        """Whether every output has slopes, and the derivatives agree with them."""
        return self.status in (AGREE, ROUNDING, ABSENT) and not (self.jumps or self.unsure)

    @property
    def is_unseen(self) -> bool:
        """Whether a derivative agrees because the differences cannot see it."""
        return self.is_clean and (self.forward.unseen or self.reverse.unseen)

    @property
    def telling(self) -> Agreement:
        """The most telling agreement."""
        order = (MISMATCH, ROUNDING, AGREE, INCONCLUSIVE, ABSENT)
        return min((self.forward, self.reverse, self.modes), key=lambda a: (order.index(a.status), -a.relative))


def agreement(
    slack: float,
    got: Vector,
    left: Vector,
    right: Vector,
    noise: Vector,
    magnitude: Vector,
    off: Vector,
    *,
    size: Vector,
    hidden: Vector | None = None,
    arrays: Vector | None = None,
) -> Agreement:
    """Whether numbers lie between others, which have a noise, and they themselves are off by rounding.

    Numbers that are less than the noise agree as zeros, unless that is much of the `size` of the value, or so large
    that it hides slopes: `hidden` says then which numbers it hides. Those that agree say nothing of the numbers of
    another of the `arrays`, most of which may be undecided.
    """
    if not got.size:
        return Agreement(INCONCLUSIVE)
    error = noise + off
    with np.errstate(all="ignore"):
        middle = np.where(np.isfinite(left), np.where(np.isfinite(right), (left + right) / 2, left), right)
        beyond = np.maximum(np.minimum(left, right) - got, got - np.maximum(left, right))
        if np.iscomplexobj(left):
            beyond = np.abs(got - middle) - np.abs(right - left) / 2
        difference = np.where(np.isfinite(got), np.maximum(beyond, 0.0), np.inf)
        # The error of a finite difference may only explain away so much.
        agrees = difference <= np.maximum(_AIM * magnitude, np.minimum(_WITHIN * error, _WORST * magnitude))
        # The derivative itself has lost digits, in float64.
        agrees |= (difference <= _WITHIN * off) & (off <= _MOST_NOISE * magnitude)
        # Both are zero up to the noise of the differences.
        is_nothing = (magnitude <= _WITHIN * noise) & (noise <= _NEGLIGIBLE * size) & (hidden is None)
        unseen, agrees = is_nothing & ~agrees, agrees | is_nothing
        differs = ~agrees & (difference > _BEYOND * error)
        if hidden is not None:
            differs &= ~hidden
        is_slight = difference <= slack * magnitude
        relative = np.where(difference > 0, difference / np.maximum(magnitude, np.finfo(float).tiny), 0.0)
    by_status = {
        MISMATCH: differs & ~is_slight,
        ROUNDING: differs & is_slight,
        INCONCLUSIVE: _of_undecided_arrays(~(agrees | differs), magnitude, arrays),
        AGREE: agrees,
    }
    undecided = (INCONCLUSIVE, np.ones(got.shape, bool))
    status, of_status = next((item for item in by_status.items() if item[1].any()), undecided)
    worst = int(np.argmax(np.where(of_status, relative, -1.0)))
    # No negative zeros.
    numbers = got[worst].item() + 0.0, middle[worst].item() + 0.0
    return Agreement(status, *numbers, float(relative[worst]), bool(unseen.any()))


def _of_undecided_arrays(undecided: Vector, magnitude: Vector, arrays: Vector | None) -> Vector:
    """The numbers of which most of their array, by magnitude, is undecided."""
    if arrays is None or not undecided.any():
        return np.zeros(undecided.shape, bool)
    known = np.where(np.isfinite(magnitude), magnitude, 0.0)
    total, unknown = (np.bincount(arrays, weights=weights) for weights in (known, known * undecided))
    return undecided & (unknown > total / 2)[arrays]


def coarsely(reading: Reading) -> Reading:
    """The reading; if noise hides all but two digits of the slope, the derivative agrees if it has these."""
    confirms = lambda a: (
        a.status == INCONCLUSIVE
        and np.isfinite(reading.noise)
        and abs(a.got - a.expected) <= _WITHIN * reading.noise
        and reading.noise <= COARSE * abs(a.expected)
        and abs(a.got - a.expected) <= TWO_DIGITS * abs(a.expected)
    )
    agreed = {
        name: a._replace(status=AGREE) for name in ("forward", "reverse") if confirms(a := getattr(reading, name))
    }
    return reading._replace(**agreed)
