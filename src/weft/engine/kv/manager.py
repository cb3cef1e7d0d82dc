"""What the requests of one DP group hold in its caches: a page table, or a state's slots, of each group.

Who owns what: tokens [0, computed) of a request have run. Their pages may be shared with the prefix tree and other
requests, and are never written again once full; rows are written in pages that the request alone holds. Of a page of
which only the first tokens are reused a request gets a copy. A state is read from one slot and written to another where
the first is shared, else in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.engine.kv.cache_events import CacheEvents
from weft.engine.kv.cache_spec import CacheGroup
from weft.engine.kv.pages import PagePool
from weft.engine.kv.prefix import Match, PrefixTree
from weft.engine.kv.prefix_run import ABSENT


@dataclass(eq=False, slots=True)
class CacheAllocation:
    """What one request holds, of each group: its page table, or [slot of the state before the next rows, after them].

    ABSENT stands for pages that a window has passed, and for the state of a request that begins. Of the two slots the
    first holds the state of now; they are the same one where it is updated in place. copy: (page, page): what the first
    holds is to be copied to the second, before any row of the request's first step is written, or of any other's in it.
    capacity: tokens for which `grow` need take nothing more. salt: under which prefixes are reused for it and of it.
    """

    tables: list[list[int]]
    copy: tuple[int, int] | None = None
    capacity: int = 0
    salt: str = ""


class CacheManager:
    """The pages and slots of one DP group. groups: what there is; prefix_cache: whether equal prefixes are reused;
    events: record what the prefix cache stores and removes."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        page_size: int,
        *,
        prefix_cache: bool = True,
        events: CacheEvents | None = None,
    ):
        self.groups, self.page_size = tuple(groups), page_size
        self.rules = [group.rule for group in groups]
        self.pools = [PagePool(group.size) for group in groups]
        self.tree = PrefixTree(self.rules, self.pools, page_size, events) if prefix_cache else None
        self._events = events
        self._states = [g for g, rule in enumerate(self.rules) if rule.state]
        self._paged = [g for g, rule in enumerate(self.rules) if not rule.state]
        self.frees_on_advance = any(rule.state or rule.window is not None for rule in self.rules)
        """Whether `advance` frees anything after rows that end no prompt."""

    @property
    def max_tokens(self) -> int:
        """The longest request that can ever run here."""
        whole = [self.pools[g].total for g in self._paged if self.rules[g].window is None]
        return min(whole) * self.page_size if whole else 2**62

    @property
    def used(self) -> int:
        """Of `total`, how many requests hold."""
        return self.pools[0].used

    @property
    def total(self) -> int:
        """Pages, or slots where the model has no pages, of the first group."""
        return self.pools[0].total

    @property
    def free(self) -> int:
        """Of `total`, how many neither a request nor the prefix tree holds."""
        return self.pools[0].free

    def longest(self, tokens: Sequence[int], salt: str = "") -> int:
        """How many leading tokens of a request would be reused. One at least has to run."""
        return self.tree.longest(tokens[: len(tokens) - 1], salt) if self.tree else 0

    def admit(
        self, tokens: Sequence[int], rows: int, *, reuse: bool = True, salt: str = ""
    ) -> tuple[CacheAllocation, int] | None:
        """Allocates for a request and its next `rows` tokens, and how many of its tokens it need not run.

        None where there is too little, and then nothing is taken. reuse: whether it may begin with what others
        computed, under the same salt.
        """
        known = tokens[: len(tokens) - 1] if reuse else []
        found = self.tree.match(known, salt) if self.tree else Match(0, [[] for _ in self.groups], 0, ABSENT)
        reused, tables = found.tokens + found.more, found.tables
        for group in self._states:
            tables[group] = [*(tables[group] or [ABSENT]), ABSENT]
        allocation = CacheAllocation(tables, salt=salt)
        if self.grow(allocation, len(tokens), min(len(tokens), reused + rows)):
            if found.more:  # its place may be the page itself, evicted: it is read before anything is written
                allocation.copy = found.page, tables[0][found.tokens // self.page_size]
            return allocation, reused
        self.release(allocation)
        return None

    def grow(self, allocation: CacheAllocation, tokens: int, end: int) -> bool:
        """Allocates for all `tokens` of a request, of which those before `end` run next: windows need no more yet.

        False where there is too little, and then nothing is taken.
        """
        missing = {group: 1 for group in self._states if allocation.tables[group][1] == ABSENT}
        for group in self._paged:
            upto = tokens if self.rules[group].window is None else end
            if (count := -(-upto // self.page_size) - len(allocation.tables[group])) > 0:
                missing[group] = count
        for group, count in missing.items():
            if count > (free := self.pools[group].free) and self.tree:
                self.tree.evict(group, count - free)
        if any(count > self.pools[group].free for group, count in missing.items()):
            return False
        for group, count in missing.items():
            taken = self.pools[group].take(count)
            assert taken is not None
            table = allocation.tables[group]
            table[len(table) - (1 if self.rules[group].state else 0) :] = taken
        self._note_capacity(allocation)
        return True

    def grow_all(self, ends: Sequence[tuple[CacheAllocation, int]]) -> None:
        """Allocates for so many tokens of several requests each, while pages are free; not with `frees_on_advance`."""
        for group, pool in enumerate(self.pools):
            missing = [-(-end // self.page_size) - len(allocation.tables[group]) for allocation, end in ends]
            if (count := sum(max(0, each) for each in missing) - pool.free) > 0 and self.tree:
                self.tree.evict(group, count)
            for (allocation, _), count in zip(ends, missing, strict=True):
                if count > 0:
                    allocation.tables[group] += pool.take(count) or []
        for allocation, _ in ends:
            self._note_capacity(allocation)

    def _note_capacity(self, allocation: CacheAllocation) -> None:
        allocation.capacity = min((len(allocation.tables[g]) * self.page_size for g in self._paged), default=1 << 62)

    def rows_to_border(self, computed: int, tokens: int) -> int:
        """How many rows may run before a state has to be kept: at the last page's border before a prompt's last token.

        A state is kept only where a step ends, and others can start from it only at a border.
        """
        border = self._border(tokens)
        return border - computed if self._states and self.tree and computed < border else tokens - computed

    def advance(self, allocation: CacheAllocation, tokens: Sequence[int], computed: int, *, keep: bool) -> None:
        """After the first `computed` of a request's tokens have run: frees what no later row reads.

        keep: whether others may start from here; from a border where a state is kept they may in any case.
        """
        for group in self._states:
            before, after = allocation.tables[group]
            if before not in (ABSENT, after):
                self.pools[group].release([before])
            allocation.tables[group] = [after, after]
        if keep or (self._states and computed == self._border(len(tokens))):
            self.remember(allocation, tokens[:computed])
        for group in self._paged:
            window = self.rules[group].window
            if window is not None:
                table = allocation.tables[group]
                passed = max(0, computed - window + 1) // self.page_size
                self.pools[group].release(page for page in table[:passed] if page != ABSENT)
                table[:passed] = [ABSENT] * passed

    def remember(self, allocation: CacheAllocation, tokens: Sequence[int], *, ended: bool = False) -> None:
        """Lets others start from what the request has run, `tokens`. ended: it runs no more, and its last page is kept
        too, though it is not full.
        """
        if self.tree is None:
            return
        tables = [list(table) for table in allocation.tables]
        for group in self._states:
            table, at_border = allocation.tables[group], len(tokens) % self.page_size == 0
            if at_border and table[0] == table[1]:
                # The next rows must not write over what others start from: without another slot, it is not kept.
                if not self.pools[group].free:
                    self.tree.evict(group, 1)
                table[1:] = self.pools[group].take(1) or table[1:]
            tables[group] = table[:1] if at_border and table[0] != table[1] else []
        self.tree.insert(tokens, tables, part=ended, salt=allocation.salt)

    def release(self, allocation: CacheAllocation) -> None:
        """Frees all that a request holds."""
        for group, table in enumerate(allocation.tables):
            self.pools[group].release(page for page in dict.fromkeys(table) if page != ABSENT)
            allocation.tables[group] = []

    def forget(self) -> None:
        """Frees what the prefix tree alone holds."""
        for group, each in enumerate(self.pools if self.tree else []):
            assert self.tree is not None
            self.tree.evict(group, each.total)
        if self._events and self.tree and not self.tree.nodes:
            self._events.cleared()

    def _border(self, tokens: int) -> int:
        return (tokens - 1) // self.page_size * self.page_size

    def check_idle(self) -> None:
        """AssertionError where anything is held that neither is free nor the tree's; for when no request is here."""
        held = self.tree.held if self.tree else [0] * len(self.pools)
        for pool, kept in zip(self.pools, held, strict=True):
            assert pool.free + kept == pool.total, (pool.free, kept, pool.total)
