"""Drafts of running sequences: how many are proposed, and counts of those that were accepted.

Ranks sample a token at the position of each draft as they would without drafts, with the noise of that position, and
accept the draft if it is equal. So outputs do not depend on drafts, and a wrong draft costs only time. Their number
follows from their price (`weft.engine.speculation.draft_prices`) and from rates of accepted drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weft.engine.kv.tokens import token_array
from weft.engine.speculation.draft_prices import Price, StepPrices
from weft.engine.speculation.sources import DraftSource

WEIGHT, SHARED_WEIGHT = 1 / 8, 1 / 64
"""Weight of the last step in the rates of a sequence, and in the engine's, with which new sequences begin."""
FIRST_RATE, PROBE_RATE = 0.6, 0.25
"""Rate at each position of the first sequence, and at the first position after a pause."""
MEASURED, PROBES = 8, 4
"""Steps without drafts where their time is unknown, and steps with a draft after a pause, whatever it costs."""
MIN_PAUSE, MAX_PAUSE, PROBED = 32, 1024, 1 / 16
"""Steps of a pause, and the fraction of its time that drafts after it may cost, unless it is the longest. Each pause is
twice as long as the one before, unless drafts paid in between."""


@dataclass(slots=True)
class AcceptRates:
    """Moving averages of a sequence's drafts, or of an engine's."""

    each: list[float]  # rate of accepted drafts by position, of those that follow accepted ones
    found: float = 1.0  # share of steps with drafts, of those in which they were sought

    def note(self, drafted: int, accepted: int, weight: float) -> None:
        """Note a step with `drafted` drafts and its first `accepted` ones, with this `weight`."""
        self.found += ((drafted > 0) - self.found) * weight
        for at in range(min(drafted, accepted + 1)):
            self.each[at] += ((at < accepted) - self.each[at]) * weight
        for at in range(drafted, len(self.each) if drafted else 0):  # not tried: they follow the one before
            self.each[at] += (self.each[at - 1] - self.each[at]) * weight / 4

    def best(self, price: Price) -> int:
        """Return the number of drafts with the most tokens per time; 0: drafts do not pay."""
        likely, tokens, best, count = self.found, 1.0, 1.0, 0
        for k, rate in enumerate(self.each, 1):
            likely *= rate
            tokens += likely
            if (gain := tokens / (1 + price.fixed + price.each * self.found * k)) > best:
                best, count = gain, k
        return count


class Speculation:
    """Drafts of an engine. source: None: ranks propose. max_drafts, step_drafts: maximum drafts of a row, and of a DP
    group's step.

    Attributes:
        drafted, accepted: drafts so far by position in their row.
        rates, prices: rates of all sequences, and prices of their drafts.
        planned: maximum drafts of a row of the next step, and the price by which they were chosen.
        pause: steps of the first pause of a new sequence: as of the last sequence that planned.
    """

    pause = MIN_PAUSE

    def __init__(self, source: DraftSource | None, max_drafts: int, step_drafts: int):
        self.source, self.max_drafts, self.step_drafts = source, max_drafts, step_drafts
        self.drafted, self.accepted = [0] * max_drafts, [0] * max_drafts
        self.rates, self.prices = AcceptRates([FIRST_RATE] * max_drafts), StepPrices()
        self.planned: tuple[int, Price | None] = 0, None


@dataclass(slots=True)
class Drafting:
    """Drafts of one sequence, which pauses while they do not pay.

    Attributes:
        rates: how often its drafts were accepted.
        count: maximum drafts of its next row.
        resumes: step from which it drafts. Sequences resume together, since the first one's price is the highest.
        probes: step before which it drafts although that does not pay.
        pause: steps of its last pause; None: it had none.
        given: drafts of the ranks for the next step alone.
    """

    speculation: Speculation
    rates: AcceptRates = field(init=False)
    count: int = 0
    resumes: int = 0
    probes: int = 0
    pause: int | None = None
    given: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.rates = replace(self.speculation.rates, each=[*self.speculation.rates.each])

    def plan(self, price: Price | None, step: int) -> None:
        """Choose the number of drafts of the next row, in a step with this number."""
        self.count, pause = self.rates.best(price) if price else 0, self.pause or self.speculation.pause
        if price is None:
            self.resumes = step + MEASURED
            return
        if self.count:
            pause = MIN_PAUSE if step >= self.probes else pause
        elif step < self.probes:
            self.count = 1
        else:
            if self.probes:  # drafts after the last one did not pay
                pause *= 2
            while pause < min(MAX_PAUSE, PROBES * (price.fixed + price.each) / PROBED):
                pause *= 2
            pause = min(pause, MAX_PAUSE)
            self.resumes = (step + pause + pause // 2) // pause * pause
            self.probes = self.resumes + PROBES
            self.rates.each[0], self.rates.found = max(PROBE_RATE, self.rates.each[0]), 1.0
        self.pause = self.speculation.pause = pause

    def propose(self, tokens: array[int], limit: int) -> array[int]:
        """Return up to `limit` drafts."""
        count, source, given, self.given = min(limit, self.count), self.speculation.source, self.given, ()
        return token_array((given if source is None or not count else source.propose(tokens, count))[:count])

    def note(self, drafted: int, accepted: int) -> None:
        """Count the drafts of a step, perhaps 0 although drafts were sought, and its first `accepted` ones."""
        shared = self.speculation
        for at in range(drafted):
            shared.drafted[at] += 1
            shared.accepted[at] += at < accepted
        self.rates.note(drafted, accepted, WEIGHT)
        shared.rates.note(drafted, accepted, SHARED_WEIGHT)
