"""One DP group's scheduler: which rows run in the next step.

Policy, in this order, within `max_batch_tokens` rows a step:
1. running sequences that need one row (they answer), oldest first;
2. running sequences that still read their prompt, oldest first, cut to what is left (chunked prefill: Sarathi-Serve,
   arXiv 2403.02310);
3. waiting ones, clients taking turns (`weft.engine.waiting`), while the whole prompt's pages can be had.
When a running sequence needs a page and none is to be had, the newest running one gives up its pages and waits again,
at the head of the queue; it will be computed anew. The oldest always goes on, so nobody starves.

What a sequence holds in the caches is its `holding`; who owns what there, `weft.kv.manager` says.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from weft.engine.config import EngineConfig
from weft.engine.messages import GroupRows, Part
from weft.engine.request import Sequence
from weft.engine.sampling import sampling, scoring
from weft.engine.waiting import WaitingQueue
from weft.kv.manager import CacheManager
from weft.kv.spec import CacheGroup

SCORED_COST = 8
"""Rows that one row of a scored prompt counts for: its logits are wanted, which are many times a row's other values."""


class Scheduler:
    """Holds the sequences of one DP group between `add` and `finish`.

    caches: the group's, and whether equal prefixes are reused.
    """

    def __init__(self, caches: CacheManager, *, max_batch_tokens: int, max_running: int):
        self.caches, self.max_batch_tokens, self.max_running = caches, max_batch_tokens, max_running
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._step: list[tuple[Sequence, int]] = []

    # --- requests in and out ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. ValueError where it could never fit in the cache."""
        most = sequence.prompt_tokens + sequence.max_tokens
        if most > self.caches.most_tokens:
            raise ValueError(
                f"prompt and answer may take {most} tokens, but the key-value cache of a group holds "
                f"{self.caches.most_tokens}; ask for fewer or start with a larger kv_tokens"
            )
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; its pages are free, or the tree's, at once."""
        if sequence in self.running:
            self.running.remove(sequence)
            assert sequence.holding is not None
            self.caches.remember(sequence.holding, sequence.tokens[: sequence.computed])
            self._give_up(sequence)
        else:
            self.waiting.remove(sequence)

    def cached_tokens(self, tokens: list[int]) -> int:
        """How many leading tokens of a prompt are cached here."""
        return self.caches.longest(tokens)

    @property
    def queued_tokens(self) -> int:
        """Rows that are still to run for what is here, were nothing more drawn: the wait of a newcomer.

        Asked for every newcomer, so it must not take longer the more wait.
        """
        return self.waiting.rows + sum(s.left for s in self.running)

    @property
    def used_pages(self) -> int:
        """Pages that sequences hold; what only the tree holds can be had at any time and does not count."""
        return self.caches.used([s.holding for s in self.running if s.holding])

    # --- steps ------------------------------------------------------------------------------------------------

    def schedule(self) -> GroupRows:
        """The rows of the next step; `advance` must follow once they have run."""
        assert not self._step, "the last step has not been advanced"
        budget = self.max_batch_tokens
        for sequence in sorted(self.running, key=lambda s: s.left > 1):  # stable: oldest first within each
            if budget == 0:
                break
            if sequence in self.running and self._grow(sequence, budget):  # an earlier one may have taken its pages
                budget -= self._plan_rows(sequence, budget)
        while budget and len(self.running) < self.max_running and (admitted := self._admit(budget)):
            budget -= self._plan_rows(admitted, budget)
        tokens: list[int] = []
        parts: list[Part] = []
        for sequence, rows in self._step:
            tokens += sequence.tokens[sequence.computed : sequence.computed + rows]
            how = sampling(sequence) if rows == sequence.left else None
            assert sequence.holding is not None
            tables = tuple(map(tuple, sequence.holding.tables))
            parts.append(Part(sequence.request, rows, sequence.computed, tables, how, scoring(sequence, rows)))
        return GroupRows(tuple(tokens), tuple(parts))

    def advance(self) -> list[Sequence]:
        """After the step has run: the sequences for which a token was drawn, in the order of its parts.

        The caller appends the tokens, or finishes the sequence.
        """
        sampled = []
        for sequence, rows in self._step:
            sequence.computed += rows
            if done := sequence.left == 0:
                sampled.append(sequence)
            assert sequence.holding is not None
            # Where the prompt is done, others may start from it.
            self.caches.advance(sequence.holding, sequence.tokens, sequence.computed, keep=done and not sequence.drawn)
        self._step = []
        return sampled

    def check_idle(self) -> None:
        """With nothing running or waiting, every page must be free or the tree's. AssertionError otherwise."""
        assert not self.running and not self.waiting and not self._step
        self.caches.check_idle()

    # --- inside -----------------------------------------------------------------------------------------------

    def _rows(self, sequence: Sequence, budget: int) -> int:
        most = max(1, budget // SCORED_COST) if sequence.to_score else budget
        return min(self.caches.rows_to_border(sequence.computed, len(sequence.tokens)), most)

    def _plan_rows(self, sequence: Sequence, budget: int) -> int:
        """Puts the sequence's next rows into the step; what they cost of the budget."""
        rows = self._rows(sequence, budget)
        self._step.append((sequence, rows))
        return min(budget, rows * SCORED_COST if sequence.to_score else rows)

    def _grow(self, sequence: Sequence, budget: int) -> bool:
        """Room for all the sequence's tokens, at others' cost if need be; False where it had to give way itself."""
        assert sequence.holding is not None
        end = sequence.computed + self._rows(sequence, budget)
        while not self.caches.grow(sequence.holding, len(sequence.tokens), end):
            planned = [s for s, _ in self._step]
            victim = next(s for s in reversed(self.running) if s is sequence or s not in planned)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self, budget: int) -> Sequence | None:
        """Gives the next waiting sequence what is cached of its prefix, and room for the rest of its tokens.

        None where nobody waits, or there is too little room for the one whose turn it is.
        """
        if not self.waiting:
            return None
        sequence = self.waiting.first()
        admitted = self.caches.admit(sequence.tokens, budget, reuse=not sequence.to_score)
        if admitted is None:
            return None
        self.waiting.take()
        self.running.append(sequence)
        sequence.holding, sequence.computed = admitted
        if sequence.cached is None:
            sequence.cached = min(sequence.computed, sequence.prompt_tokens)
        if sequence.admitted is None:
            sequence.admitted = time.monotonic()
        return sequence

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._give_up(sequence)
        self.waiting.put_back(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        assert sequence.holding is not None
        self.caches.release(sequence.holding)
        sequence.holding, sequence.computed = None, 0


def make_schedulers(config: EngineConfig, groups: Seq[CacheGroup]) -> list[Scheduler]:
    """One for each DP group, empty. groups: of the model's caches."""
    return [
        Scheduler(
            CacheManager(groups, config.deal.span, prefix_cache=config.prefix_cache),
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
        )
        for _ in range(config.attn_dp)
    ]
