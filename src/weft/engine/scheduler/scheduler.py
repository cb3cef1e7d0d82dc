"""One DP group's scheduler: which rows run in the next step.

Policy, in this order, within `max_batch_tokens` rows a step:
1. running sequences that need one row (they answer), in their order: by priority, then oldest first;
2. running sequences that still read their prompt, in that order, cut to what is left (chunked prefill: Sarathi-Serve,
   arXiv 2403.02310);
3. waiting ones, by priority, clients taking turns (`weft.engine.scheduler.waiting_queue`), while the whole prompt's
pages can be had. When a running sequence needs a page and none is to be had, the last in that order gives up its pages
and waits again, at the head of the queue of its priority; it will be computed anew. The first always goes on, so nobody
starves for others of its priority.

A step may be scheduled while the one before still runs, supposing that every sequence goes on: the token that it is
about to get counts as `pending`, and its next row is in the step. Where an answer has ended after all, that row was for
nothing and its token is dropped. Two kinds of sequences sit such a step out: those whose last token is pending, which
is known beforehand where a length ends them, and those whose next draw needs the pending token here, such as a grammar.
What a sequence gives back may be handed out at once, also while steps under way name it: ranks run steps in the order
in which they were scheduled, each after the one before.

What a sequence holds in the caches is its `allocation`; who owns what there, `weft.kv.manager` says.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from weft.engine.config import EngineConfig
from weft.engine.messages import Adjust, Chunk, Entry, GroupRows, Join, Logprobs, Result, Scored
from weft.engine.request import Sequence
from weft.engine.scheduler.sampling_rows import adjust, sampling, scoring
from weft.engine.scheduler.waiting_queue import WaitingQueue
from weft.kv.cache_spec import CacheGroup
from weft.kv.manager import CacheAllocation, CacheManager

PAGES_AHEAD = 4
"""Pages that a sequence takes at once, at most: taking them for all costs as much as dozens of steps in between."""
SCORED_COST = 8
"""Rows that one row of a scored prompt counts for: its logits are wanted, which are many times a row's other values."""


@dataclass(eq=False, slots=True)
class Scheduled:
    """What a step runs of one group: its rows, and the sequences that wait for a token or for scores of it, in order.

    A sequence that ends or gives way while the step runs has another allocation by then, or none.
    """

    rows: GroupRows
    sampled: list[tuple[Sequence, CacheAllocation]]
    scores: list[tuple[Sequence, CacheAllocation]]

    def take_tokens(self, result: Result) -> list[tuple[Sequence, int, Logprobs | None]]:
        """Once its tokens have come: what is whose, pending no longer; what is nobody's any more is left out."""
        sampled, logprobs = [], result.logprobs or [None] * len(result.tokens)
        for (sequence, allocation), token, known in zip(self.sampled, result.tokens, logprobs, strict=True):
            if sequence.allocation is allocation:
                sequence.pending -= 1
                sampled.append((sequence, token, known))
        return sampled

    def scored(self, result: Result) -> Iterator[tuple[Sequence, Scored]]:
        """Whose the scores are, in the same way."""
        for (sequence, allocation), scored in zip(self.scores, result.scored, strict=True):
            if sequence.allocation is allocation:
                yield sequence, scored


class Scheduler:
    """Holds the sequences of one DP group between `add` and `finish`.

    caches: the group's, and whether equal prefixes are reused.
    """

    def __init__(self, caches: CacheManager, *, max_batch_tokens: int, max_running: int):
        self.caches, self.max_batch_tokens, self.max_running = caches, max_batch_tokens, max_running
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.preemptions = self.stalls = 0
        self._step: list[tuple[Sequence, int]] = []
        self._same, self._repeats = Scheduled(GroupRows(), [], []), 0  # a step that comes again, and how often
        self._free_rows = list(range(max_running - 1, -1, -1))

    # --- requests in and out ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. ValueError where it could never fit in the cache."""
        limit = sequence.prompt_tokens + sequence.max_tokens
        if limit > self.caches.max_tokens:
            raise ValueError(
                f"prompt and answer may take {limit} tokens, but the key-value cache of a group holds "
                f"{self.caches.max_tokens}; ask for fewer or start with a larger kv_tokens"
            )
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; its pages are free, or the tree's, at once."""
        if sequence.allocation is not None:
            self.running.remove(sequence)
            self._repeats = 0
            # A step's tokens are taken before the next but one is scheduled: whatever has a row is known here.
            assert sequence.computed <= len(sequence.tokens)
            self.caches.remember(sequence.allocation, sequence.tokens[: sequence.computed], ended=True)
            self._give_up(sequence)
        else:
            self.waiting.remove(sequence)

    def cached_tokens(self, tokens: list[int], salt: str = "") -> int:
        """How many leading tokens of a prompt are cached here, under a salt."""
        return self.caches.longest(tokens, salt)

    @property
    def queued_tokens(self) -> int:
        """Rows that are still to run for what is here, were nothing more drawn: the wait of a newcomer.

        Asked for every newcomer, so it must not take longer the more wait.
        """
        return self.waiting.rows + sum(s.left for s in self.running)

    @property
    def used_pages(self) -> int:
        """Pages that sequences hold; what only the tree holds can be had at any time and does not count."""
        return self.caches.used([s.allocation for s in self.running if s.allocation])

    def forget(self) -> None:
        """Forgets the prefixes that no request holds."""
        self.caches.forget()

    # --- steps ------------------------------------------------------------------------------------------------

    def schedule(self) -> Scheduled:
        """The rows of the next step, which counts as run from now on; those of the steps before may still run."""
        if self._repeats and not (self.waiting and len(self.running) < self.max_running):
            return self._repeat()
        budget, decoding = self.max_batch_tokens, [s for s in self.running if s.decoding]
        if any(s.allocation is not None and s.computed >= s.allocation.capacity and not s.ending for s in decoding):
            self._grow_ahead(decoding)
        for sequence in decoding:  # in the order of those that run, as in all that follows
            if budget and sequence.allocation is not None and not sequence.ending:  # else an earlier one took its pages
                if sequence.stalled:
                    self.stalls += 1
                elif sequence.computed < sequence.allocation.capacity or self._grow(sequence, budget):
                    self._step.append((sequence, 1))
                    budget -= 1
        for sequence in [s for s in self.running if not s.decoding]:
            if budget and sequence.allocation is not None and self._grow(sequence, budget):
                budget -= self._plan_rows(sequence, budget)
        while budget and len(self.running) < self.max_running and (admitted := self._admit(budget)):
            budget -= self._plan_rows(admitted, budget)
        scheduled = self._rows_of_step()
        for sequence, rows in self._step:
            sequence.computed += rows
            done = sequence.left == 0
            assert sequence.allocation is not None
            if not sequence.decoding or self.caches.frees_on_advance:
                # Where the prompt is done, others may start from it.
                first = done and not sequence.output_tokens and not sequence.pending
                self.caches.advance(sequence.allocation, sequence.tokens, sequence.computed, keep=first)
            if done:
                sequence.pending, sequence.decoding = sequence.pending + 1, True
        self._step = []
        self._foresee(scheduled)
        return scheduled

    def check_idle(self) -> None:
        """With nothing running or waiting, every page must be free or the tree's. AssertionError otherwise."""
        assert not self.running and not self.waiting and len(self._free_rows) == self.max_running
        self.caches.check_idle()

    # --- inside -----------------------------------------------------------------------------------------------

    def _foresee(self, scheduled: Scheduled) -> None:
        """How often a step comes again after this one, with nothing new to say, unless somebody comes or goes."""
        rows, self._repeats = scheduled.rows, 0
        if len(rows.decode_rows) == len(self.running) and not (rows.adjust or self.caches.frees_on_advance):
            left = (min(s.allocation.capacity, s.to_run) - s.computed for s in self.running if s.allocation)
            self._repeats, self._same = (
                min(left, default=0),
                Scheduled(GroupRows(rows.decode_rows), scheduled.sampled, []),
            )

    def _repeat(self) -> Scheduled:
        self._repeats -= 1
        for sequence in self.running:
            sequence.computed += 1
            sequence.pending += 1
        return self._same

    def _grow_ahead(self, decoding: Seq[Sequence]) -> None:
        """Where one needs a page, all get room for as many tokens, so that the steps in between are alike: for more
        than a page's where so many pages are free.

        They take no page that another may need soon, but such as only the prefix tree holds.
        """
        held = sum(len(s.allocation.tables[0]) for s in self.running if s.allocation)
        if self.waiting or self.caches.frees_on_advance or held + 2 * len(self.running) > self.caches.total:
            return
        ahead = self.caches.page_size * max(1, min(PAGES_AHEAD, self.caches.free // len(self.running)))
        self.caches.grow_all([(s.allocation, min(s.computed + ahead, s.to_run)) for s in decoding if s.allocation])

    def _rows_of_step(self) -> Scheduled:
        """What the ranks are told of the step."""
        decode_rows: list[int] = []
        chunks: list[Chunk] = []
        joins: list[Join] = []
        entries: list[Entry] = []
        asked: list[tuple[int, Adjust]] = []
        sampled: list[tuple[Sequence, CacheAllocation]] = []
        scores: list[tuple[Sequence, CacheAllocation]] = []
        for sequence, rows in self._step:
            allocation = sequence.allocation
            assert allocation is not None
            if not sequence.sent_tables:
                sequence.sent_tables = [list(table) for table in allocation.tables]
                tables = tuple(map(tuple, allocation.tables))
                draw, copy = sampling(sequence), allocation.copy
                joins.append(Join(sequence.row, sequence.request, sequence.computed, tables, draw, copy))
            elif self.caches.frees_on_advance or len(allocation.tables[0]) != len(sequence.sent_tables[0]):
                entries += self._news(sequence, allocation)
            if sequence.decoding:
                decode_rows.append(sequence.row)
            else:
                tokens = tuple(sequence.tokens[sequence.computed : sequence.computed + rows])
                chunks.append(Chunk(sequence.row, tokens, rows == sequence.left, scoring(sequence, rows)))
                if chunks[-1].score:
                    scores.append((sequence, allocation))
                if not chunks[-1].samples:
                    continue
            sampled.append((sequence, allocation))
            try:
                how = adjust(sequence)
            except Exception as error:  # of one answer: it ends when its token comes, and the others go on
                how, sequence.fault = None, error
            if how is not None:
                asked.append((sequence.row, how))
        rows_of_step = GroupRows(tuple(decode_rows), tuple(chunks), tuple(joins), tuple(entries), tuple(asked))
        return Scheduled(rows_of_step, sampled, scores)

    def _news(self, sequence: Sequence, allocation: CacheAllocation) -> Iterator[Entry]:
        """What of its tables the ranks do not know yet."""
        for group, (table, sent) in enumerate(zip(allocation.tables, sequence.sent_tables, strict=True)):
            if self.caches.rules[group].state:
                new = [i for i in (0, 1) if table[i] != sent[i]]
                sent[:] = table
            else:  # what a window has passed needs no word: it is not read any more
                new = list(range(len(sent), len(table)))
                sent += table[len(sent) :]
            for i in new:
                yield Entry(sequence.row, group, i, table[i])

    def _rows(self, sequence: Sequence, budget: int) -> int:
        if sequence.decoding:
            return 1
        limit = max(1, budget // SCORED_COST) if sequence.to_score else budget
        return min(self.caches.rows_to_border(sequence.computed, len(sequence.tokens)), limit)

    def _plan_rows(self, sequence: Sequence, budget: int) -> int:
        """Puts the next rows of a prompt into the step; what they cost of the budget."""
        rows = self._rows(sequence, budget)
        self._step.append((sequence, rows))
        return min(budget, rows * SCORED_COST if sequence.to_score else rows)

    def _grow(self, sequence: Sequence, budget: int) -> bool:
        """Room for all the sequence's tokens, at others' cost if need be.

        False where it had to give way itself, or where it sits this step out: because others are about to end, or
        because its own token is pending and would be lost, so that it might never get beyond it.
        """
        assert sequence.allocation is not None
        end = sequence.computed + self._rows(sequence, budget)
        while not self.caches.grow(sequence.allocation, sequence.computed + sequence.left, end):
            if any(other.ending for other in self.running):
                return False
            planned = [s for s, _ in self._step]
            victim = next(s for s in reversed(self.running) if s is sequence or s not in planned)
            if victim is not sequence or not sequence.pending:
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
        salt, reuse = sequence.sharing.cache_salt, not sequence.to_score
        admitted = self.caches.admit(sequence.tokens, budget, reuse=reuse, salt=salt)
        if admitted is None:
            return None
        self.waiting.take()
        bisect.insort(self.running, sequence, key=lambda s: s.sharing.priority)
        sequence.allocation, sequence.computed = admitted
        sequence.row = self._free_rows.pop()
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
        assert sequence.allocation is not None
        self.caches.release(sequence.allocation)
        self._free_rows.append(sequence.row)
        sequence.forget_pages()


def make_schedulers(config: EngineConfig, groups: Seq[CacheGroup]) -> list[Scheduler]:
    """One for each DP group, empty. groups: of the model's caches."""
    return [
        Scheduler(
            CacheManager(groups, config.interleave.span, prefix_cache=config.prefix_cache),
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
        )
        for _ in range(config.attn_dp)
    ]
