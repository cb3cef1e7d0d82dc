"""A fake device for scheduler tests: caches that hold token ids, and a next token that depends on all that is read.

Whatever goes wrong with pages — one freed too early, shared and written, matched to another prefix, not computed anew
after a preemption — changes the history that a sequence reads through its page table, and so its tokens.
"""

from __future__ import annotations

import operator
import zlib
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.kv.tokens import token_array
from weft.engine.messages.rank_messages import GroupRows, Ran, Result, Scored
from weft.engine.messages.request import FAIR_SHARE, SamplingParams, Sequence, Sharing, TokenLogprob
from weft.engine.scheduler.scheduled import Scheduled
from weft.engine.scheduler.scheduler import Scheduler

VOCABULARY = 50
UNWRITTEN = -1


def next_token(history: Seq[int], vocabulary: int = VOCABULARY) -> int:
    """The fake model: a token that depends on every token before it and on their order."""
    return zlib.crc32(repr(list(history)).encode()) % vocabulary


def expected_output(prompt: Seq[int], max_tokens: int, end_ids: frozenset[int] = frozenset()) -> list[int]:
    """Return the output of a request that runs alone, without pages or batches."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in end_ids:
            break
    return tokens[len(prompt) :]


@dataclass
class Part:
    """A sequence's rows in a step: `rows` tokens after the first `context`. tokens: None for the one last sampled and
    its drafts; scored: those whose logprobs are wanted."""

    row: int
    request: int
    context: int
    rows: int
    tokens: tuple[int, ...] | None
    tables: tuple[tuple[int, ...], ...]
    samples: bool
    scored: tuple[int, ...] = ()
    drafts: tuple[int, ...] = ()


@dataclass
class Parts:
    """A step of one group. copies: pages of whole sequences, (from, to), all read before anything is written."""

    parts: list[Part]
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def scored(self) -> tuple[Scored, ...]:
        """Scores as a rank reports them: a token's own number is its logprob, so that tests see the scored ones."""
        return tuple(Scored(p.context + 1, tuple((float(t), ()) for t in p.scored)) for p in self.parts if p.scored)

    @property
    def count(self) -> int:
        return sum(part.rows for part in self.parts)


class FakeDevice:
    """The caches of one DP group. `run` writes all rows of a step before it reads any, as attention over pages does.

    A page holds the tokens that rows wrote; a state holds all tokens that it stands for.
    """

    def __init__(self, groups: Seq[CacheGroup], page_size: int):
        self.page_size, self.rules = page_size, [group.rule for group in groups]
        self.slots = [[UNWRITTEN] * (group.size * page_size) for group in groups]
        self.states: list[list[list[int] | None]] = [[None] * group.size for group in groups]
        self.table: dict[int, tuple[int, list[list[int]]]] = {}  # request and tables of each row
        self.length: dict[int, int] = {}
        self.last: dict[int, int] = {}

    def take(self, rows: GroupRows) -> Parts:
        """Return the parts of a message, given the messages before it."""
        for join in rows.joins:
            self.table[join.row] = (join.request, [list(table) for table in join.tables])
            self.length[join.row] = join.context
        for entry in rows.entries:
            table = self.table[entry.row][1][entry.group]
            place = slice(entry.first, entry.first + len(entry.values))
            changes = self.rules[entry.group].state and all(map(operator.ne, table[place], entry.values))
            assert changes or entry.first == len(table), "entries that are no news, or beyond the table's end"
            table[place] = entry.values
        rest = [(row, count, None, True, None) for row, count in rows.decode_each]
        rest += [(c.row, c.count, tuple(token_array(c.tokens)), c.samples, c.score) for c in rows.chunks]
        parts = []
        for row, count, tokens, sampled, score in rest:
            request, tables = self.table[row]
            scored = score.tokens if score else ()
            assert not score or scored[:-1] == tokens[1 : len(scored)], "other tokens are scored than follow the rows"
            context, pages = self.length[row], tuple(map(tuple, tables))
            parts.append(Part(row, request, context, count, tokens, pages, sampled, scored))
            self.length[row] += count
        for part, drafts in zip(parts, rows.drafts_each, strict=False):
            part.drafts = tuple(drafts)
        return Parts(parts, [join.copy for join in rows.joins if join.copy])

    def run(self, step: Parts) -> dict[str, tuple[int, ...]]:
        """The fields of `Result` with the sampled tokens. AssertionError for a step that no device could run right."""
        for slots in (slots for slots, rule in zip(self.slots, self.rules, strict=True) if rule == Rule()):
            pages = [slots[a * self.page_size : (a + 1) * self.page_size] for a, _ in step.copies]
            for (_, to), page in zip(step.copies, pages, strict=True):
                slots[to * self.page_size : (to + 1) * self.page_size] = page
        written: set[tuple[int, int]] = set()
        given = [[self.last[p.row], *p.drafts] if p.tokens is None else list(p.tokens) for p in step.parts]
        for part, new in zip(step.parts, given, strict=True):
            assert part.rows > 0 and len(part.tables) == len(self.rules), "a part without rows or a table"
            for group, (rule, table) in enumerate(zip(self.rules, part.tables, strict=True)):
                at = [table[1]] if rule.state else self._slots(table, part.context, part.context + part.rows)
                assert not any((group, slot) in written for slot in at), "two sequences write one slot in the same step"
                written |= {(group, slot) for slot in at}
                if not rule.state:
                    for slot, token in zip(at, new, strict=True):
                        self.slots[group][slot] = token
        sampled, states = [], []
        for part, new in zip(step.parts, given, strict=True):
            seen = [self._read(group, part, new) for group in range(len(self.rules))]
            history = max(seen, key=len)
            assert all(history[len(history) - len(each) :] == each for each in seen), "groups hold different tokens"
            states += [(g, part.tables[g][1], history) for g, rule in enumerate(self.rules) if rule.state]
            if part.samples:
                ends = range(1 if part.tokens is None else part.rows, part.rows + 1)
                own = tuple(next_token(history[: len(history) - part.rows + end]) for end in ends)
                right = next((i for i, draft in enumerate(part.drafts) if draft != own[i]), len(part.drafts))
                sampled.append(own[: right + 1])
                self.length[part.row] -= len(part.drafts) - right
                self.last[part.row] = sampled[-1][-1]
        for group, slot, history in states:  # all have been read: one may be written where another was read
            assert (group, slot) not in {
                (g, p.tables[g][0])
                for g, r in enumerate(self.rules)
                if r.state
                for p in step.parts
                if p.tables[g][0] != p.tables[g][1]
            }, "a state is written that another reads"
            self.states[group][slot] = history
        several = any(part.drafts for part in step.parts)
        return dict(tokens=sum(sampled, ()), accepted=tuple(map(len, sampled)) if several else ())

    def _read(self, group: int, part: Part, new: list[int]) -> list[int]:
        """Return the tokens of their sequence that a part's rows see in a group: the last ones, or all."""
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
    """Steps one scheduler on a fake device, as the engine does, and checks what must hold in every step.

    ahead: a step is scheduled before the tokens of the one before are known. others: pages of the first group that a
    test holds itself.
    """

    def __init__(self, scheduler: Scheduler, ahead: bool = False):
        self.scheduler, self.ahead = scheduler, ahead
        self.device = FakeDevice(scheduler.caches.groups, scheduler.caches.page_size)
        self.live: dict[int, Sequence] = {}
        self.outputs: dict[int, list[int]] = {}
        self.steps, self.others = 0, list[int]()
        self.in_flight: deque[tuple[Scheduled, Parts]] = deque()
        rows_of_step = scheduler._rows_of_step

        def checked() -> Scheduled:
            scheduled = rows_of_step()
            self._check(scheduled.rows)
            return scheduled

        scheduler._rows_of_step = checked  # type: ignore[method-assign]

    def add(
        self,
        request: int,
        prompt: Seq[int],
        max_tokens: int,
        end_ids: frozenset[int] = frozenset(),
        sharing: Sharing = FAIR_SHARE,
        **options: Any,
    ) -> Sequence:
        """Queue a request. options: of its SamplingParams."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, **options)
        sequence = Sequence(request, token_array(prompt), len(prompt), params, 0, max_tokens, end_ids, sharing=sharing)
        self.scheduler.add(sequence)
        self.live[request] = sequence
        return sequence

    def cancel(self, request: int) -> list[int]:
        """Take a request out; return what it drew so far."""
        sequence = self.live.pop(request)
        self.scheduler.finish(sequence)
        return sequence.tokens[sequence.prompt_tokens :].tolist()

    def step(self) -> Parts:
        """Schedule a step, and take the tokens of the one before, or its own; requests that end go to `outputs`."""
        self.steps += 1
        scheduled = self.scheduler.schedule()
        parts = self.device.take(scheduled.rows)
        assert parts.count == scheduled.rows.count
        for s in self.scheduler.running:
            assert s.pending <= 1 or s.drafts or not s.params.depends_on_output, (
                "a token whose sampling needs the one before it"
            )
            limit, size = max(s.prompt_tokens, s.to_run), self.scheduler.caches.page_size
            for rule, table in zip(self.scheduler.caches.rules, s.allocation.tables, strict=True):
                assert rule.state or len(table) <= -(-limit // size), "a page that nothing can ever be written to"
        if parts.count:
            self.in_flight.append((scheduled, parts))
        while len(self.in_flight) > bool(parts.count and self.ahead and not self.scheduler.drafts_next):
            self.take_tokens()
        return parts

    def take_tokens(self) -> None:
        """Run the oldest step under way."""
        scheduled, parts = self.in_flight.popleft()
        result = Result(0, Ran(0, (), 0, 0), **self.device.run(parts), scored=parts.scored)
        for sequence, scored in scheduled.scored(result):
            found = [TokenLogprob(int(value), value) for value, _ in scored.logprobs]
            sequence.scores[scored.first - 1 : scored.first - 1 + len(found)] = found
        for sequence, token, _ in scheduled.take_tokens(result):
            if sequence.params.prompt_logprobs is not None:
                prompt = sequence.tokens[1 : sequence.prompt_tokens].tolist()
                assert [score.token_id for score in sequence.scores] == prompt, (
                    "a prompt that is not scored, or wrongly"
                )
            sequence.tokens.append(token)
            if token in sequence.end_ids or sequence.output_tokens >= sequence.max_tokens:
                self.outputs[sequence.request] = self.cancel(sequence.request)

    def finish_all(self, max_steps: int = 10_000) -> None:
        """Steps until nothing is left. AssertionError where that takes too long: somebody starves."""
        began = self.steps
        while self.live or self.in_flight:
            self.step()
            assert self.steps - began < max_steps, f"requests {sorted(self.live)} starve"

    def _check(self, rows: GroupRows) -> None:
        scheduler = self.scheduler
        assert rows.count <= scheduler.max_batch_tokens
        assert len(scheduler.running) <= scheduler.max_running
        assert len({s.row for s in scheduler.running}) == len(scheduler.running), "two sequences in one row"
        if not self.in_flight:
            assert rows.count or not self.live, "an empty step while requests wait: the engine would spin"
            oldest = scheduler.running[0] if scheduler.running else None
            assert oldest is None or any(s is oldest for s, _ in scheduler._step), "the oldest must go on in every step"
        size = scheduler.caches.page_size
        for group, (rule, pool) in enumerate(zip(scheduler.caches.rules, scheduler.caches.pools, strict=True)):
            holders: dict[int, set[int]] = {}
            for sequence in scheduler.running:
                table = [page for page in sequence.allocation.tables[group] if page != UNWRITTEN]
                assert rule.state or len(set(table)) == len(table), "a page twice in one table"
                for page in table:
                    holders.setdefault(page, set()).add(sequence.request)
            used = len(holders) + (len(self.others) if group == 0 else 0)
            assert pool.used == used, "pages of the prefix tree alone, or of nobody, are counted as used"
            for sequence, count in scheduler._step:
                first, end = sequence.computed // size, -(-(sequence.computed + count) // size)
                table = sequence.allocation.tables[group]
                for page in table[1:] if rule.state else table[first:end]:
                    assert holders[page] == {sequence.request}, "a row is written into a shared page"
                    assert pool.holders(page) == 1, "a row is written into a page of the prefix tree"
