"""A fake device for scheduler tests: pages that hold token ids, and a next token that depends on all that is read back.

Whatever goes wrong with pages — one freed too early, shared and written, matched to another prefix, not computed anew
after a preemption — changes the history that a sequence reads through its page table, and so the tokens that it draws.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Seq

from weft.engine.messages import GroupRows
from weft.engine.request import SamplingParams, Sequence
from weft.engine.scheduler import Scheduler

VOCABULARY = 50
UNWRITTEN = -1


def next_token(history: Seq[int], vocabulary: int = VOCABULARY) -> int:
    """The fake model: a token that depends on every token before it and on their order."""
    return zlib.crc32(repr(list(history)).encode()) % vocabulary


def answer(prompt: Seq[int], max_tokens: int, end_ids: frozenset[int] = frozenset()) -> list[int]:
    """What a request gets when it runs alone, without pages or batches."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in end_ids:
            break
    return tokens[len(prompt) :]


class FakeDevice:
    """The pages of one DP group. `run` writes all rows of a step before it reads any, as attention over pages does."""

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self.slots = [UNWRITTEN] * (num_pages * page_size)

    def run(self, rows: GroupRows) -> list[tuple[int, int]]:
        """(request, drawn token) of each sampled part. AssertionError for a step that no device could run right."""
        assert len(rows.tokens) == sum(part.rows for part in rows.parts)
        written: set[int] = set()
        first = 0
        for part in rows.parts:
            assert part.rows > 0, "a part without rows"
            assert len(part.pages) * self.page_size >= part.context + part.rows, "the page table is too short"
            for i in range(part.rows):
                slot = self._slot(part.pages, part.context + i)
                assert slot not in written, "two sequences write one slot in the same step"
                written.add(slot)
                self.slots[slot] = rows.tokens[first + i]
            first += part.rows
        drawn = []
        for part in rows.parts:
            history = [self.slots[self._slot(part.pages, at)] for at in range(part.context + part.rows)]
            assert UNWRITTEN not in history, "a sequence reads a slot that nobody has written"
            if part.sampling is not None:
                drawn.append((part.request, next_token(history)))
        return drawn

    def _slot(self, pages: Seq[int], position: int) -> int:
        return pages[position // self.page_size] * self.page_size + position % self.page_size


class Driver:
    """Steps one scheduler on a fake device, as the engine does, and checks what must hold in every step."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.device = FakeDevice(scheduler.pool.total, scheduler.page_size)
        self.live: dict[int, Sequence] = {}
        self.answers: dict[int, list[int]] = {}
        self.steps = 0

    def add(self, request: int, prompt: Seq[int], max_tokens: int, end_ids: frozenset[int] = frozenset()) -> Sequence:
        """Queues a request."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        sequence = Sequence(
            request, list(prompt), len(prompt), params, 0, max_tokens, end_ids, on_output=lambda output: None
        )
        self.scheduler.add(sequence)
        self.live[request] = sequence
        return sequence

    def cancel(self, request: int) -> list[int]:
        """Takes a request out; gives what it drew so far."""
        sequence = self.live.pop(request)
        self.scheduler.finish(sequence)
        return sequence.tokens[sequence.prompt_tokens :]

    def step(self) -> GroupRows:
        """One step; requests that end go to `answers`."""
        self.steps += 1
        rows = self.scheduler.schedule()
        self._check(rows)
        drawn = self.device.run(rows)
        sampled = self.scheduler.advance()
        assert [s.request for s in sampled] == [request for request, _ in drawn]
        for sequence, (_, token) in zip(sampled, drawn, strict=True):
            sequence.tokens.append(token)
            if token in sequence.end_ids or sequence.drawn >= sequence.max_tokens:
                self.answers[sequence.request] = self.cancel(sequence.request)
        return rows

    def finish_all(self, most_steps: int = 10_000) -> None:
        """Steps until nothing is left. AssertionError where that takes too long: somebody starves."""
        began = self.steps
        while self.live:
            self.step()
            assert self.steps - began < most_steps, f"requests {sorted(self.live)} starve"

    def _check(self, rows: GroupRows) -> None:
        scheduler = self.scheduler
        assert len(rows.tokens) <= scheduler.max_batch_tokens
        assert len(scheduler.running) <= scheduler.max_running
        assert rows.parts or not self.live, "an empty step while requests wait: the engine would spin"
        oldest = scheduler.running[0].request if scheduler.running else None
        assert oldest is None or any(p.request == oldest for p in rows.parts), "the oldest must go on in every step"
        holders: dict[int, set[int]] = {}
        for sequence in scheduler.running:
            assert len(set(sequence.pages)) == len(sequence.pages), "a page twice in one table"
            for page in sequence.pages:
                holders.setdefault(page, set()).add(sequence.request)
        for part in rows.parts:
            size = scheduler.page_size
            for page in part.pages[part.context // size : -(-(part.context + part.rows) // size)]:
                assert holders[page] == {part.request}, "a row is written into a shared page"
                assert scheduler.pool.holders(page) == 1, "a row is written into a page of the prefix tree"
