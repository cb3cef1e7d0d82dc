"""One DP group's scheduler, which chooses the rows of the next step.

A step has at most `max_batch_tokens` rows, or `mixed_batch_tokens` if a sequence of any DP group decodes in it, in this
order:
1. a decode row of each running sequence that decodes: by priority, then oldest first;
2. prompts of running sequences, in the same order, cut to the rows that are left (chunked prefill: Sarathi-Serve,
   arXiv 2403.02310);
3. waiting sequences, by priority, clients taking turns (`weft.engine.scheduler.waiting_queue`), while there are pages
   for the whole prompt.
A running sequence that needs a page when none is free preempts the last one in that order. The preempted one loses its
pages, waits at the head of the queue of its priority, and is computed again. The first sequence is never preempted, so
no sequence starves because of others of its priority.

A step may be scheduled while the previous one still runs. The scheduler then assumes that every sequence goes on: the
token sampled by the previous step counts as `pending`, and the sequence's next row is in the step. If the sequence
ends with that token, the token of the extra row is dropped. A sequence skips the step if the pending token is known to
be its last by a limit of length, or if its sampling depends on the pending token, as with a grammar. Freed pages may be
reused at once, even while steps in flight read them: ranks run steps in the order of scheduling.

With `--speculative` a decode row also runs drafts, tokens that may follow (`weft.engine.speculation.drafting`). They
preempt nobody and leave every running sequence a row. Drafts follow the last token, so a step is not scheduled before
the tokens of the previous one are known if a sequence drafts.

`weft.engine.kv.manager` keeps track of the owners of pages.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from weft.engine.config.config import EngineConfig
from weft.engine.kv.cache_events import CacheEvents
from weft.engine.kv.cache_spec import CacheGroup
from weft.engine.kv.manager import CacheAllocation, CacheManager
from weft.engine.messages.rank_messages import Adjust, Chunk, Entries, GroupRows, Join
from weft.engine.messages.request import Sequence
from weft.engine.scheduler.draft_rows import plan_drafts, propose
from weft.engine.scheduler.sampling_rows import adjust, adjust_each, sampling, scoring
from weft.engine.scheduler.scheduled import Scheduled
from weft.engine.scheduler.waiting_queue import WaitingQueue
from weft.engine.speculation.drafting import Drafting, Speculation

PAGES_AHEAD = 4
"""Maximum pages that a decoding sequence allocates at once. A step with allocations for all costs as much as dozens
without."""
SCORED_COST = 8
"""Budget weight of a prompt token with logprobs: its logits dominate its memory."""


class Scheduler:
    """Owner of one DP group's sequences from `add` to `finish`.

    max_batch_tokens, max_running, mixed_batch_tokens: limits of a step. speculation: of all DP groups; None: off.

    Attributes:
        drafts_next: a sequence may draft in the next step, so the tokens of all steps must be known before it.
        draft_count: maximum drafts of a sequence in the next step.
    """

    drafts_next, draft_count = False, 0

    def __init__(
        self,
        caches: CacheManager,
        *,
        max_batch_tokens: int,
        max_running: int,
        mixed_batch_tokens: int | None = None,
        speculation: Speculation | None = None,
    ):
        self.caches, self.max_batch_tokens, self.max_running = caches, max_batch_tokens, max_running
        self.mixed_batch_tokens = mixed_batch_tokens or max_batch_tokens
        self.speculation = speculation
        # Rows of ranks' drafts behind a sequence's last token.
        self._rows_ahead = speculation.max_drafts if speculation and speculation.source is None else 0
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.preemptions = self.stalls = 0
        self._step: list[tuple[Sequence, int]] = []
        self._same, self._repeats = Scheduled(GroupRows(), [], []), 0  # a repeating step, and repeats left
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._steps = 0  # those that `schedule` returned; schedulers of an engine count alike

    # --- requests in and out ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ValueError if it could never fit in the cache."""
        limit = sequence.prompt_tokens + sequence.max_tokens
        if limit > self.caches.max_tokens:
            raise ValueError(
                f"prompt and completion may take {limit} tokens, but the key-value cache of a group holds "
                f"{self.caches.max_tokens}; ask for fewer or start with a larger kv_tokens"
            )
        if self.speculation is not None:
            sequence.drafting = Drafting(self.speculation)
        self.waiting.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, running or waiting, and free its pages or leave them to the prefix tree."""
        if sequence.allocation is not None:
            self.running.remove(sequence)
            self._repeats = 0
            # At most one step is in flight when a step is scheduled, so all tokens with a row are known.
            assert sequence.computed <= len(sequence.tokens)
            self.caches.cache_prefix(sequence.allocation, sequence.tokens[: sequence.computed], ended=True)
            self._free(sequence)
        else:
            self.waiting.remove(sequence)

    @property
    def queued_tokens(self) -> int:
        """Rows still to run of all sequences, without tokens to come: a measure of a new request's wait.

        It is read for every new request, so its time must not grow with the number of waiting sequences.
        """
        return self.waiting.rows + sum(s.left for s in self.running)

    # --- steps ------------------------------------------------------------------------------------------------

    def schedule(self, decodes: bool = False) -> Scheduled:
        """Return the rows of the next step, which count as computed from now on. Earlier steps may still run. decodes:
        whether a sequence of another DP group decodes in it."""
        self._steps += 1
        if self._repeats and not (self.waiting and len(self.running) < self.max_running):
            return self._repeat()
        decoding = [s for s in self.running if s.decoding]
        budget = self.mixed_batch_tokens if decoding or decodes else self.max_batch_tokens
        if self.speculation is not None:
            propose(decoding, min(budget - len(self.running), self.speculation.step_drafts))
        ahead = self._rows_ahead
        if any(
            (a := s.allocation) and s.computed + s.decode_tokens + ahead > a.capacity and not s.ending for s in decoding
        ):
            self._preallocate(decoding)
        for sequence in decoding:  # in the order of `running`
            end = sequence.computed + sequence.decode_tokens
            if budget and sequence.allocation is not None and not sequence.ending:  # else it was preempted
                if sequence.stalled:
                    self.stalls += 1
                elif end <= sequence.allocation.capacity or self._grow(sequence, budget):
                    self._step.append((sequence, tokens := sequence.decode_tokens))
                    budget -= tokens
        for sequence in [s for s in self.running if not s.decoding]:
            if budget and sequence.allocation is not None and self._grow(sequence, budget):
                budget -= self._plan_rows(sequence, budget)
        while budget and len(self.running) < self.max_running and (admitted := self._admit(budget)):
            budget -= self._plan_rows(admitted, budget)
        scheduled = self._rows_of_step()
        for sequence, rows in self._step:
            sequence.computed += rows
            done = sequence.left <= 0
            assert sequence.allocation is not None
            if not sequence.decoding or self.caches.frees_on_advance:
                # Let other sequences reuse a prompt once it is complete.
                first = done and not sequence.output_tokens and not sequence.pending
                certain = sequence.computed - (rows - 1 if sequence.decoding else 0)  # drafts may be rejected
                self.caches.advance(sequence.allocation, sequence.tokens, certain, keep=first)
            if done:
                sequence.pending += rows if sequence.decoding else 1
                sequence.decoding = True
        self._step = []
        if self.speculation is not None:
            self.draft_count = plan_drafts(self.speculation, self.running, self._steps + 1)
            self.drafts_next = bool(self.draft_count or scheduled.rows.decode_tokens)
        self._plan_repeats(scheduled)
        return scheduled

    def check_idle(self) -> None:
        """Raise AssertionError if a page is neither free nor the prefix tree's. Call it when no sequence is here."""
        assert not self.running and not self.waiting and len(self._free_rows) == self.max_running
        assert not any(pool.used for pool in self.caches.pools)

    # --- inside -----------------------------------------------------------------------------------------------

    def _plan_repeats(self, scheduled: Scheduled) -> None:
        """Note how often this step of one token a row can repeat, unless a sequence comes or goes."""
        rows, self._repeats = scheduled.rows, 0
        changes = rows.adjust or self.caches.frees_on_advance or self.drafts_next
        if len(rows.decode_rows) == len(self.running) and not changes:
            steps_left = (min(s.allocation.capacity, s.to_run) - s.computed for s in self.running if s.allocation)
            self._repeats = min(steps_left, default=0)
            if self.speculation is not None:
                pauses = [s.drafting.resumes - self._steps - 2 for s in self.running if s.drafting]
                self._repeats = max(0, min([self._repeats, *pauses]))
            self._same = Scheduled(GroupRows(rows.decode_rows), scheduled.sampled, [])

    def _repeat(self) -> Scheduled:
        self._repeats -= 1
        for sequence in self.running:
            sequence.computed += 1
            sequence.pending += 1
        return self._same

    def _preallocate(self, decoding: Seq[Sequence]) -> None:
        """Allocate pages for all decoding sequences when one needs a page, so that the steps in between are alike.

        Each gets up to PAGES_AHEAD pages, free ones or the prefix tree's, so no sequence is preempted for them. If
        sequences wait for a row, the pages of the first of these stay free.
        """
        if self.caches.frees_on_advance or (self.waiting and len(self.running) < self.max_running):
            return
        page_size, running = self.caches.page_size, len(self.running)
        first = -(-self.waiting.first().left // page_size) if self.waiting else 0  # it waits for a row
        pages_held = sum(len(s.allocation.tables[0]) for s in self.running if s.allocation)
        if pages_held + first + 2 * running > self.caches.total:
            return
        ahead = page_size * max(1, min(PAGES_AHEAD, (self.caches.free - first) // running))
        self.caches.grow_all([(s.allocation, min(s.computed + ahead, s.to_run)) for s in decoding if s.allocation])

    def _rows_of_step(self) -> Scheduled:
        """Return the step in the ranks' form."""
        decode_rows: list[int] = []
        decode_tokens: list[int] = []
        chunks: list[Chunk] = []
        joins: list[Join] = []
        entries: list[Entries] = []
        adjusted: list[tuple[int, Adjust]] = []
        sampled: list[tuple[Sequence, CacheAllocation]] = []
        scores: list[tuple[Sequence, CacheAllocation]] = []
        drafts, tokens_sampled = b"", 0
        for sequence, rows in self._step:
            allocation = sequence.allocation
            assert allocation is not None
            if not sequence.sent_tables:
                sequence.sent_tables = [list(table) for table in allocation.tables]
                tables = tuple(map(tuple, allocation.tables))
                how, copy = sampling(sequence), allocation.copy
                joins.append(Join(sequence.row, sequence.request, sequence.computed, tables, how, copy))
            elif self.caches.frees_on_advance or len(allocation.tables[0]) != len(sequence.sent_tables[0]):
                entries += self._new_entries(sequence, allocation)
            if sequence.decoding:
                decode_rows.append(sequence.row)
                decode_tokens.append(rows)
                drafts += sequence.drafts.tobytes() if sequence.drafts else b""
            else:
                end = sequence.computed + rows
                tokens, samples = sequence.tokens[sequence.computed : end].tobytes(), rows == sequence.left
                after = 0 if samples or self.speculation is None else sequence.tokens[end]
                chunks.append(Chunk(sequence.row, tokens, samples, scoring(sequence, rows), after))
                if chunks[-1].score:
                    scores.append((sequence, allocation))
                if not chunks[-1].samples:
                    continue
            sampled.append((sequence, allocation))
            try:
                if sequence.drafts:
                    adjusted += adjust_each(sequence, tokens_sampled)
                elif (adjustment := adjust(sequence)) is not None:
                    adjusted.append((tokens_sampled, adjustment))
            except Exception as error:  # ends this request alone, at its next token
                sequence.fault = error
            tokens_sampled += sequence.decode_tokens
        counts = tuple(decode_tokens) if len(decode_rows) < sum(decode_tokens) else ()
        parts = tuple(decode_rows), tuple(chunks), tuple(joins), tuple(entries), tuple(adjusted), counts, drafts
        return Scheduled(GroupRows(*parts), sampled, scores)

    def _new_entries(self, sequence: Sequence, allocation: CacheAllocation) -> Iterator[Entries]:
        """Yield the page table entries that the ranks do not have yet."""
        for group, (table, sent) in enumerate(zip(allocation.tables, sequence.sent_tables, strict=True)):
            new = range(len(sent), len(table))  # omit pages behind a window: ranks do not read them
            if self.caches.rules[group].state:
                changed = [i for i in (0, 1) if table[i] != sent[i]]
                new = range(changed[0], changed[-1] + 1) if changed else range(0)
            if new:
                sent[new.start :] = table[new.start :]
                yield Entries(sequence.row, group, new.start, tuple(table[new.start : new.stop]))

    def _rows(self, sequence: Sequence, budget: int) -> int:
        if sequence.decoding:
            return sequence.decode_tokens
        limit = max(1, budget // SCORED_COST) if sequence.to_score else budget
        return min(self.caches.rows_to_boundary(sequence.computed, len(sequence.tokens)), limit)

    def _plan_rows(self, sequence: Sequence, budget: int) -> int:
        """Add the next rows of a prompt to the step. Returns their share of the budget."""
        rows = self._rows(sequence, budget)
        self._step.append((sequence, rows))
        return min(budget, rows * SCORED_COST if sequence.to_score else rows)

    def _grow(self, sequence: Sequence, budget: int) -> bool:
        """Allocate pages for all tokens of the sequence; preempt others if pages are missing.

        Returns False if the sequence itself was preempted, or skips this step. It skips if others are about to end,
        and if its own pending token would be lost: it might never get beyond that token.
        """
        assert sequence.allocation is not None
        end = sequence.computed + self._rows(sequence, budget)
        while not self.caches.grow(sequence.allocation, max(sequence.computed + sequence.left, end), end):
            if sequence.drafts:
                del sequence.drafts[max(0, sequence.allocation.capacity - sequence.computed - 1) :]
                end = sequence.computed + sequence.decode_tokens
                continue
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
        """Start the next waiting sequence, with its cached prefix and pages for its other tokens.

        Returns None if no sequence waits, or if pages are missing for the next one.
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
        self._free(sequence)
        self.waiting.put_back(sequence)

    def _free(self, sequence: Sequence) -> None:
        assert sequence.allocation is not None
        self.caches.release(sequence.allocation)
        self._free_rows.append(sequence.row)
        sequence.forget_pages()


def make_schedulers(
    config: EngineConfig, groups: Seq[CacheGroup], events: Seq[CacheEvents] = (), drafts: Speculation | None = None
) -> list[Scheduler]:
    """Return an empty scheduler per DP group. groups: the model's cache groups. events: record of each DP group;
    drafts: of the engine."""
    records: Seq[CacheEvents | None] = events or [None] * config.attn_dp
    return [
        Scheduler(
            CacheManager(
                groups,
                config.interleave.span,
                prefix_cache=config.prefix_cache,
                events=record,
                lookahead=config.speculative in ("mtp", "eagle3"),
            ),
            max_batch_tokens=config.batch_tokens,
            max_running=config.batch_sequences,
            mixed_batch_tokens=config.mixed_tokens,
            speculation=drafts,
        )
        for record in records
    ]


def schedule_all(schedulers: Seq[Scheduler]) -> list[Scheduled]:
    """Return the rows of each DP group in the next step."""
    decodes = any(sequence.decoding for scheduler in schedulers for sequence in scheduler.running)
    return [scheduler.schedule(decodes) for scheduler in schedulers]


def drafts_asked(schedulers: Seq[Scheduler]) -> tuple[int, bool]:
    """Return the number of drafts that ranks propose after each row of the next step, and whether they hold them: no
    sequence samples by earlier tokens."""
    count = max(s.draft_count if s.speculation and s.speculation.source is None else 0 for s in schedulers)
    return count, count > 0 and not any(sequence.params.depends_on_output for s in schedulers for sequence in s.running)
