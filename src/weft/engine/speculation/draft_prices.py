"""Price of drafts: how much longer a step takes with them, measured while the engine runs."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

WEIGHT, FASTER_WEIGHT, OUTLIER = 1 / 8, 1 / 2, 1.5
"""Weight of the last step in a mean, that of a step without drafts which is faster than the mean, and the maximum time
of a step relative to the expected one. Few steps without drafts are measured while drafts pay, and the first of them
are slow."""
REMEASURE = 256
"""Steps with drafts after which some without are measured again."""


class Price(NamedTuple):
    """Additional time of a step in which sequences draft, in steps of one token for each sequence. fixed: without any
    draft, as they are sought and the step is not sent ahead. each: of one draft for each sequence."""

    fixed: float
    each: float


ANCHORS = [0.5, 1.0, 0.125, 4.0, 0.45]
"""First sums of `BucketTimes`: two points of weight 1/4, by which no draft costs 0.05 and four a sequence 0.45."""


class BucketTimes:
    """Times of steps with about the same number of sequences."""

    def __init__(self) -> None:
        self._plain, self._samples, self._since = 0.0, 0, 0  # mean seconds and steps without drafts; steps since then
        self._sums = ANCHORS  # of 1, x, y, xx and xy: with x drafts per sequence a step took 1 + y times `_plain`

    def note(self, seconds: float, drafts: float | None) -> None:
        """Note the time of a step. drafts: per sequence; None: none were sought."""
        if drafts is None:
            self._samples, self._since = self._samples + 1, 0
            known = self._plain or seconds
            weight = FASTER_WEIGHT if seconds < known else WEIGHT
            after = known + (min(seconds, OUTLIER * known) - known) * weight
            self._plain = after if self._samples > 3 else min(known, seconds)  # the first ones may also be recorded
        elif self._samples:
            self._since, (fixed, each) = self._since + 1, self._line()
            more = min(seconds / self._plain, OUTLIER * (1 + fixed + each * drafts)) - 1
            sums = zip(self._sums, ANCHORS, (1.0, drafts, more, drafts**2, drafts * more), strict=True)
            self._sums = [total + (anchor - total) * WEIGHT + term for total, anchor, term in sums]

    def price(self) -> Price | None:
        """Return the price of drafts; None: no step without drafts was measured, or none for long."""
        return self._line() if self._samples > 1 and self._since <= REMEASURE else None

    def _line(self) -> Price:
        weight, x, y, xx, xy = self._sums
        each = max(0.0, (weight * xy - x * y) / (weight * xx - x * x))  # least squares
        return Price(max(0.0, (y - each * x) / weight), each)


class StepPrices:
    """Prices of drafts by the number of sequences that decode. clock: returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._last, self._bucket = clock, (0.0, False), 0
        self._times = defaultdict[int, BucketTimes](BucketTimes)

    def note(self, sequences: int, drafts: int | None) -> None:
        """Note a step that has run. sequences: those that decode; 0 if it has prompts, since its time is
        no measure. drafts: of all sequences; None: none were sought, so that the step was sent ahead."""
        (last, sought), self._last = self._last, (self._clock(), drafts is not None)
        if sequences:
            self._bucket = round(4 * math.log2(sequences))  # each number up to 8, and then quarters of octaves
            if sought == self._last[1]:  # the first step of a kind overlaps with one of the other
                self._times[self._bucket].note(self._last[0] - last, None if drafts is None else drafts / sequences)

    def price(self) -> Price | None:
        """Return the price in a step like the last one; None: steps without drafts must be measured first."""
        return self._times[self._bucket].price()
