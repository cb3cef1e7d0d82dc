"""A fake device for scheduler tests: caches that hold token ids, and a next token that depends on all that is read.

Whatever goes wrong with pages — one freed too early, shared and written, matched to another prefix, not computed anew
after a preemption — changes the history that a sequence reads through its page table, and so the tokens that it draws.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Seq

from weft.engine.messages import GroupRows, Part
from weft.engine.request import SamplingParams, Sequence
from weft.engine.scheduler import Scheduler
from weft.kv.spec import CacheGroup

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
    """The caches of one DP group. `run` writes all rows of a step before it reads any, as attention over pages does.

    A page holds the tokens that rows wrote; a state holds all tokens that it stands for.
    """

    def __init__(self, groups: Seq[CacheGroup], page_size: int):
        self.page_size, self.rules = page_size, [group.rule for group in groups]
        self.slots = [[UNWRITTEN] * (group.size * page_size) for group in groups]
        self.states: list[list[list[int] | None]] = [[None] * group.size for group in groups]

    def run(self, rows: GroupRows) -> list[tuple[int, int]]:
        """(request, drawn token) of each sampled part. AssertionError for a step that no device could run right."""
        assert len(rows.tokens) == sum(part.rows for part in rows.parts)
        written: set[tuple[int, int]] = set()
        first = 0
        for part in rows.parts:
            assert part.rows > 0 and len(part.tables) == len(self.rules), "a part without rows or a table"
            new = list(rows.tokens[first : first + part.rows])
            for group, (rule, table) in enumerate(zip(self.rules, part.tables, strict=True)):
                at = [table[1]] if rule.state else self._slots(table, part.context, part.context + part.rows)
                assert not any((group, slot) in written for slot in at), "two sequences write one slot in the same step"
                written |= {(group, slot) for slot in at}
                if not rule.state:
                    for slot, token in zip(at, new, strict=True):
                        self.slots[group][slot] = token
            first += part.rows
        drawn, first, states = [], 0, []
        for part in rows.parts:
            new = list(rows.tokens[first : first + part.rows])
            seen = [self._read(group, part, new) for group in range(len(self.rules))]
            history = max(seen, key=len)
            assert all(history[len(history) - len(each) :] == each for each in seen), "groups hold different tokens"
            states += [(g, part.tables[g][1], history) for g, rule in enumerate(self.rules) if rule.state]
            if part.sampling is not None:
                drawn.append((part.request, next_token(history)))
            first += part.rows
        for group, slot, history in states:  # all have been read: one may be written where another was read
            assert (group, slot) not in {
                (g, p.tables[g][0])
                for g, r in enumerate(self.rules)
                if r.state
                for p in rows.parts
                if p.tables[g][0] != p.tables[g][1]
            }, "a state is written that another reads"
            self.states[group][slot] = history
        return drawn

    def _read(self, group: int, part: Part, new: list[int]) -> list[int]:
        """What a part's rows can see of their sequence in a group: its last tokens, or all."""
        rule, table, end = self.rules[group], part.tables[group], part.context + part.rows
        if rule.state:
            before = [] if table[0] == UNWRITTEN else self.states[group][table[0]]
            assert before is not None and len(before) == part.context, "a state of other tokens"
            return before + new
        first = 0 if rule.window is None else max(0, part.context - rule.window + 1)
        seen = [self.slots[group][slot] for slot in self._slots(table, first, end)]
        assert UNWRITTEN not in seen, "a sequence reads a slot that nobody has written"
        return seen

    def _slots(self, pages: Seq[int], begin: int, end: int) -> list[int]:
        assert len(pages) * self.page_size >= end, "the page table is too short"
        at = [pages[position // self.page_size] for position in range(begin, end)]
        assert UNWRITTEN not in at, "a page is needed that was given back"
        return [page * self.page_size + (begin + i) % self.page_size for i, page in enumerate(at)]


class Driver:
    """Steps one scheduler on a fake device, as the engine does, and checks what must hold in every step."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.device = FakeDevice(scheduler.caches.groups, scheduler.caches.page_size)
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
        size = scheduler.caches.page_size
        for group, (rule, pool) in enumerate(zip(scheduler.caches.rules, scheduler.caches.pools, strict=True)):
            holders: dict[int, set[int]] = {}
            for sequence in scheduler.running:
                table = [page for page in sequence.holding.tables[group] if page != UNWRITTEN]
                assert rule.state or len(set(table)) == len(table), "a page twice in one table"
                for page in table:
                    holders.setdefault(page, set()).add(sequence.request)
            for part in rows.parts:
                first, end = part.context // size, -(-(part.context + part.rows) // size)
                pages = part.tables[group][1:] if rule.state else part.tables[group][first:end]
                for page in pages:
                    assert holders[page] == {part.request}, "a row is written into a shared page"
                    assert pool.holders(page) == 1, "a row is written into a page of the prefix tree"
