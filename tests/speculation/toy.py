"""A source of drafts that are right with a chance, made of outputs recorded without drafts, and a fixed price."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from weft.engine.messages.request import Output
from weft.engine.speculation import drafting
from weft.engine.speculation.draft_prices import Price
from weft.engine.speculation.sources import SOURCES


class FixedPrices:
    """Prices that do not depend on the time of steps. value: price of drafts."""

    value = Price(0.05, 0.1)

    def note(self, sequences: int, drafts: int | None) -> None: ...

    def price(self) -> Price:
        return self.value


class Toy:
    """Drafts of recorded sequences. Whether one is right depends on the seed, the request and the position alone.

    recorded: prompts with their outputs; chance: of a right draft.
    """

    def __init__(self, recorded: Sequence[Sequence[int]], chance: float, seed: int = 0):
        self.recorded, self.chance, self.seed = [list(tokens) for tokens in recorded], chance, seed
        self.calls = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        known = next((each for each in self.recorded if each[: len(tokens)] == list(tokens)), None)
        self.calls += 1
        if known is None:
            return []
        drafts = known[len(tokens) : len(tokens) + count]
        chances = [random.Random(f"{self.seed}/{known[0]}/{len(tokens) + at}").random() for at in range(len(drafts))]
        # Rows are ragged: some have fewer drafts.
        drafts = drafts[: len(drafts) - (self.chance < 1 and chances[0] < 0.1) * 2] if drafts else []
        return [d if c < self.chance else (d + 1) % 257 for d, c in zip(drafts, chances, strict=False)]

    def use(self, monkeypatch: pytest.MonkeyPatch) -> Toy:
        """Let engines with `speculative="ngram"` draft by this source, for a fixed price."""
        monkeypatch.setattr(drafting, "StepPrices", FixedPrices)
        monkeypatch.setitem(SOURCES, "ngram", lambda *lengths: self)
        return self


def recorded(prompts: Sequence[Sequence[int]], results: Sequence[Output]) -> list[list[int]]:
    """Return prompts with their outputs."""
    return [[*prompt, *result.token_ids] for prompt, result in zip(prompts, results, strict=True)]
