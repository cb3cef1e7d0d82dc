"""Prices of drafts: what measured steps say, and the number of drafts that follows from it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any

import pytest

from engine.fake import Driver, Parts
from engine.test_scheduler import RandomDrafts, make
from speculation.toy import FixedPrices
from weft.engine.scheduler.draft_rows import note_step, plan_drafts
from weft.engine.speculation.draft_prices import REMEASURE, BucketTimes, Price, StepPrices
from weft.engine.speculation.drafting import PROBES, AcceptRates, Drafting, Speculation


class Steps:
    """Steps whose times are given, and the prices that follow."""

    def __init__(self) -> None:
        self.now = 5.0
        self.prices = StepPrices(lambda: self.now)
        self.run(1.0, sequences=0)

    def run(self, seconds: float, drafts: int | None = None, sequences: int = 4) -> None:
        self.now += seconds
        self.prices.note(sequences, drafts)

    def plain(self, seconds: float, count: int = 4) -> None:
        for _ in range(count):
            self.run(seconds)


def test_a_price_is_that_of_steps_with_other_numbers_of_drafts() -> None:
    steps = Steps()
    steps.plain(2.0)
    for at in range(250):
        drafts = at % 13
        steps.run(2.0 * (1.1 + 0.3 * drafts / 4), drafts)
    price = steps.prices.price()
    assert price and price == pytest.approx((0.1, 0.3), abs=0.06)


def test_steps_that_tell_nothing_are_not_noted() -> None:
    """Steps with prompts, and the first step of a kind, which waits for the other's."""
    steps = Steps()
    steps.plain(1.0)
    for _ in range(60):
        steps.run(9.0, 4)
        steps.run(1.2, 4)
        steps.run(9.0, 4, sequences=0)
        steps.run(9.0)
        steps.run(9.0, sequences=0)
        steps.run(1.0)
    price = steps.prices.price()
    assert price and price.fixed + price.each == pytest.approx(0.2, abs=0.03)


def test_steps_without_drafts_are_measured_first_for_each_number_of_sequences_and_again_later() -> None:
    steps = Steps()
    steps.plain(1.0, 1)
    assert steps.prices.price() is None
    steps.plain(1.0, 2)
    assert steps.prices.price() is not None
    steps.run(1.0, sequences=5)
    assert steps.prices.price() is None
    for at in range(REMEASURE + 2):
        steps.run(1.4, 4)
        assert (steps.prices.price() is None) == (at > REMEASURE)  # the first one is not noted
    steps.plain(4.0, 2)
    assert steps.prices.price() is not None


def test_one_slow_step_does_not_set_a_price() -> None:
    steps = Steps()
    steps.plain(1.0)
    for _ in range(40):
        steps.run(1.2, 4)
    steps.run(1000.0, 4)
    price = steps.prices.price()
    assert price and price.fixed + price.each < 0.35


def test_the_number_of_drafts_has_the_most_tokens_per_time() -> None:
    """The definition is a sum over the number of accepted drafts."""

    def tokens(rates: Seq[float], found: float, k: int) -> float:
        right = [1.0, *accumulate(rates[:k], lambda a, b: a * b)]
        ends = [right[n] - (right[n + 1] if n < k else 0.0) for n in range(k + 1)]
        return 1 + found * sum(n * share for n, share in enumerate(ends))

    seen = set()
    shares = [0.05, 0.4, 0.7, 0.95]
    for first, later, found, fixed, each in product(shares, shares, [0.2, 1.0], [0.0, 0.1, 0.9], [0.0, 0.1, 0.45]):
        rates = [first, later, later]
        gains = [tokens(rates, found, k) / (1 + bool(k) * fixed + each * found * k) for k in range(4)]
        best = AcceptRates(rates, found).best(Price(fixed, each))
        assert gains[best] == pytest.approx(max(gains)), (rates, found, fixed, each)
        seen.add(best)
    assert seen == {0, 1, 2, 3}


class TimedDriver(Driver):
    """Driver on a device with a clock: a step takes `fixed` + `each` per row, and `host` where it is not sent ahead.

    noise: standard deviation of the time's logarithm; one step in ten also takes three times as long.
    """

    fixed, each, host, now, noise = 1.0, 0.01, 0.1, 0.0, 0.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.random = random.Random(5)

    def take_tokens(self) -> None:
        scheduled, parts = self.in_flight[0]
        waits = any(sequence.drafts is not None for sequence, _ in scheduled.sampled)
        time = self.fixed + self.each * parts.count + self.host * waits
        slow = 3 if self.noise and self.random.random() < 0.1 else 1
        self.now += time * slow * math.exp(self.random.gauss(0, self.noise))
        note_step(self.scheduler.speculation, [scheduled])
        super().take_tokens()


def decode(
    chance: float, sequences: int = 1, tokens: int = 500, drafts: int = 3, **times: float
) -> tuple[float, list[Parts]]:
    """Return the time of the output tokens of all sequences, and the steps."""
    speculation = Speculation(RandomDrafts(random.Random(3), chance), drafts, 256) if drafts else None
    limits = dict(num_pages=1024, page_size=16, max_batch_tokens=300, max_running=16)
    driver = make(driver=TimedDriver, ahead=True, speculation=speculation, **limits)
    vars(driver).update(times)
    if speculation is not None:
        speculation.prices = StepPrices(lambda: driver.now)
    for request in range(sequences):
        driver.add(request, [request, 2, 3], tokens)
    steps = []
    while driver.live or driver.in_flight:
        steps.append(driver.step())
    return driver.now, steps


@pytest.mark.parametrize("sequences", [1, pytest.param(12, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("each", "noise"), [(0.0, 0.0), (0.05, 0.2), (0.5, 0.0)])
def test_wrong_drafts_cost_little_whatever_a_row_costs(sequences: int, each: float, noise: float) -> None:
    plain, _ = decode(0.0, sequences, drafts=0, each=each, noise=noise)
    time, steps = decode(0.0, sequences, each=each, noise=noise)
    assert time < 1.05 * plain
    assert sum(bool(part.drafts) for step in steps for part in step.parts) > 10 * sequences


def test_right_drafts_pay_where_rows_are_cheap_and_are_fewer_where_they_are_not() -> None:
    for chance, each, noise, best in ((1, 0.01, 0.2, 0.4), (0.7, 0.01, 0.2, 0.7), (0.7, 0.3, 0.0, 0.97)):
        plain, _ = decode(chance, drafts=0, each=each, noise=noise)
        time, steps = decode(chance, each=each, noise=noise)
        assert time < best * plain, (chance, each, time / plain)
    lengths = [len(part.drafts) for step in steps[-200:] for part in step.parts]
    assert 0 < sum(lengths) / len(lengths) < 2
    plain, _ = decode(0.7, drafts=0, each=9.0)
    time, steps = decode(0.7, each=9.0)
    assert time < 1.08 * plain and not any(part.drafts for part in steps[60].parts)


@pytest.mark.parametrize("pausing", [0, 11])
def test_sequences_that_draft_pay_for_those_that_wait_for_them(pausing: int) -> None:
    speculation = Speculation(RandomDrafts(random.Random(3)), 3, 256)
    speculation.prices = FixedPrices()  # type: ignore[assignment]
    running = [SimpleNamespace(drafting=Drafting(speculation), ending=False) for _ in range(12)]
    for sequence in running[12 - pausing :]:
        sequence.drafting.resumes = 1000
    for sequence in running:
        sequence.drafting.rates = AcceptRates([0.5] * 3)
    assert plan_drafts(speculation, running, 5) == (0 if pausing else 2)  # type: ignore[arg-type]


def test_a_position_without_drafts_follows_the_one_before() -> None:
    rates = AcceptRates([0.2, 0.1, 0.1])
    for _ in range(100):
        rates.note(1, 1, 1 / 8)
    assert min(rates.each) > 0.8
    rates.note(3, 1, 1.0)
    assert rates.each[:2] == [1.0, 0.0] and rates.each[2] > 0.8


def test_a_step_that_is_recorded_does_not_hide_the_price_of_drafts() -> None:
    """The first step without drafts may be forty times as long as the others."""
    times = BucketTimes()
    for seconds in (0.04, 0.001, 0.0012):
        times.note(seconds, None)
    for _ in range(40):
        times.note(0.005, 3.0)
    price = times.price()
    assert price is not None and AcceptRates([0.7] * 3).best(price) == 0


def test_a_slow_first_measurement_is_soon_corrected() -> None:
    """Drafts are dear here, but the first steps without them took three times as long as later ones."""
    times = BucketTimes()
    for measured in range(3):
        for _ in range(4):
            times.note(0.001 if measured else 0.003, None)
        for _ in range(60):
            times.note(0.0045, 3.0)
    price = times.price()
    assert price is not None and AcceptRates([0.7] * 3).best(price) == 0


def test_new_sequences_go_on_with_the_pauses_of_earlier_ones() -> None:
    """Drafts that do not pay are not tried anew by each sequence, however short sequences are."""
    speculation = Speculation(RandomDrafts(random.Random(3)), 3, 256)
    speculation.rates.each = [0.0] * 3
    drafted = list[int]()
    for first in range(1, 4001, 40):
        drafting = Drafting(speculation)
        for step in range(first, first + 40):
            if step >= drafting.resumes:
                drafting.plan(Price(0.2, 0.2), step)
            if step >= drafting.resumes and drafting.count:
                drafted.append(step)
    assert drafted[:PROBES] == [*range(32, 32 + PROBES)] and len(drafted) < 40, "not 4 in 40 steps"
    assert speculation.pause > 32


@pytest.mark.parametrize("price, steps", [(0.4, 32), (0.62, 64), (2.0, 128), (90.0, 1024)])
def test_pauses_are_longer_where_drafts_cost_more(price: float, steps: int) -> None:
    """Four steps with a draft cost at most a sixteenth of the pause before them."""
    drafting = Drafting(Speculation(RandomDrafts(random.Random(3)), 3, 256))
    drafting.rates.each = [0.0] * 3
    drafting.plan(Price(price, 0.0), 1)
    assert drafting.pause == drafting.resumes == steps and not drafting.count
