"""Caches of the requests of one DP group: a page table per request and group, or slots of recurrent states.

Ownership: tokens [0, computed) of a request have run. Full pages may be shared with the prefix tree and other requests
and are never written again; new rows go to pages that the request alone holds. A page that is reused in part is copied
first. A state is updated in place, unless its slot is shared: then it is written to another slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.engine.kv.cache_events import CacheEvents
from weft.engine.kv.cache_spec import CacheGroup
from weft.engine.kv.pages import PagePool
from weft.engine.kv.prefix import PrefixMatch, PrefixTree
from weft.engine.kv.prefix_run import ABSENT


@dataclass(eq=False, slots=True)
class CacheAllocation:
    """Caches of one request.

    Attributes:
        tables: per group, the page table, or [slot of the state before the next rows, slot after them]. ABSENT marks
            pages that a window has passed and the state of a new request. Both slots are equal for an update in place.
        copy: (source page, destination page), to copy before any row of the request's first step is written.
        capacity: tokens up to which `grow` allocates nothing.
        salt: prefixes are reused only under an equal salt.
    """

    tables: list[list[int]]
    copy: tuple[int, int] | None = None
    capacity: int = 0
    salt: str = ""


class CacheManager:
    """Pages and slots of one DP group. groups, page_size: sizes. prefix_cache: reuse prefixes. events: of changes.
    lookahead: the cache of a token depends on the next one too, as draft layers' do, so that the last token of a common
    prefix runs again."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        page_size: int,
        *,
        prefix_cache: bool = True,
        events: CacheEvents | None = None,
        lookahead: bool = False,
    ):
        self._lookahead = lookahead
        self.groups, self.page_size = tuple(groups), page_size
        self.rules = [group.rule for group in groups]
        self.pools = [PagePool(group.size) for group in groups]
        self.tree = PrefixTree(self.rules, self.pools, page_size, events) if prefix_cache else None
        self._events = events
        self._states = [g for g, rule in enumerate(self.rules) if rule.state]
        self._paged = [g for g, rule in enumerate(self.rules) if not rule.state]
        self.frees_on_advance = any(rule.state or rule.window is not None for rule in self.rules)
        """True if `advance` may free something after rows that end no prompt."""

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a request."""
        unwindowed = [self.pools[g].total for g in self._paged if self.rules[g].window is None]
        return min(unwindowed) * self.page_size if unwindowed else 2**62

    @property
    def used(self) -> int:
        """Pages or slots of `total` that requests hold."""
        return self.pools[0].used

    @property
    def total(self) -> int:
        """Pages of the first group, or slots if the model has no pages."""
        return self.pools[0].total

    @property
    def free(self) -> int:
        """Pages or slots of `total` that neither a request nor the prefix tree holds."""
        return self.pools[0].free

    def longest(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return the number of leading tokens that a request would reuse. At least one token has to run."""
        return self.tree.longest(self._known(tokens, salt), salt) if self.tree else 0

    def _known(self, tokens: Sequence[int], salt: str) -> Sequence[int]:
        """Return the leading tokens that may be reused."""
        known = tokens[: len(tokens) - 1]
        if self._lookahead and self.tree:
            known = known[: max(0, self.tree.longest(known, salt) - 1)]
        return known

    def admit(
        self, tokens: Sequence[int], rows: int, *, reuse: bool = True, salt: str = ""
    ) -> tuple[CacheAllocation, int] | None:
        """Allocate for a request of `tokens` and its next `rows`. Return the allocation and the number of reused ones;
        None, and no change, if memory is short. reuse: the request may start from a cached prefix under its `salt`."""
        known = self._known(tokens, salt) if reuse else []
        match = self.tree.match(known, salt) if self.tree else PrefixMatch(0, [[] for _ in self.groups], 0, ABSENT)
        reused, tables = match.tokens + match.more, match.tables
        for group in self._states:
            tables[group] = [*(tables[group] or [ABSENT]), ABSENT]
        allocation = CacheAllocation(tables, salt=salt)
        if self.grow(allocation, len(tokens), min(len(tokens), reused + rows)):
            if match.more:  # its destination may be the page itself, evicted: it is read before any write
                allocation.copy = match.page, tables[0][match.tokens // self.page_size]
            return allocation, reused
        self.release(allocation)
        return None

    def grow(self, allocation: CacheAllocation, tokens: int, end: int) -> bool:
        """Allocate for all `tokens` of a request. Return False and change nothing if memory is short. end: tokens up to
        the end of the next rows; windows need pages for these alone."""
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
            pages = self.pools[group].take(count)
            assert pages is not None
            table = allocation.tables[group]
            table[len(table) - (1 if self.rules[group].state else 0) :] = pages
        self._note_capacity(allocation)
        return True

    def grow_all(self, ends: Sequence[tuple[CacheAllocation, int]]) -> None:
        """Grow each allocation to its number of tokens while pages are free. Requires not `frees_on_advance`."""
        for group, pool in enumerate(self.pools):
            missing = [-(-end // self.page_size) - len(allocation.tables[group]) for allocation, end in ends]
            if (count := sum(max(0, pages) for pages in missing) - pool.free) > 0 and self.tree:
                self.tree.evict(group, count)
            for (allocation, _), count in zip(ends, missing, strict=True):
                if count > 0:
                    allocation.tables[group] += pool.take(count) or []
        for allocation, _ in ends:
            self._note_capacity(allocation)

    def _note_capacity(self, allocation: CacheAllocation) -> None:
        allocation.capacity = min((len(allocation.tables[g]) * self.page_size for g in self._paged), default=1 << 62)

    def rows_to_boundary(self, computed: int, tokens: int) -> int:
        """Return the maximum rows before a state has to be kept, at the last page border before a prompt's last token.
        A state is kept only where a step ends, and others can start from it only at a page border."""
        boundary = self._boundary(tokens)
        return boundary - computed if self._states and self.tree and computed < boundary else tokens - computed

    def advance(self, allocation: CacheAllocation, tokens: Sequence[int], computed: int, *, keep: bool) -> None:
        """Free everything that no later row reads, after the first `computed` of a request's `tokens` have run. keep:
        others may start from here; they always may at a border where a state is kept."""
        for group in self._states:
            before, after = allocation.tables[group]
            if before not in (ABSENT, after):
                self.pools[group].release([before])
            allocation.tables[group] = [after, after]
        if keep or (self._states and computed == self._boundary(len(tokens))):
            self.cache_prefix(allocation, tokens[:computed])
        for group in self._paged:
            window = self.rules[group].window
            if window is not None:
                table = allocation.tables[group]
                passed = max(0, computed - window + 1) // self.page_size
                self.pools[group].release(page for page in table[:passed] if page != ABSENT)
                table[:passed] = [ABSENT] * passed

    def cache_prefix(self, allocation: CacheAllocation, tokens: Sequence[int], *, ended: bool = False) -> None:
        """Let others start from `tokens`, which the request has run. ended: the request is finished, so its last page
        is kept although it is not full."""
        if self.tree is None:
            return
        tables = [list(table) for table in allocation.tables]
        for group in self._states:
            table, at_border = allocation.tables[group], len(tokens) % self.page_size == 0
            if at_border and table[0] == table[1]:
                # The next rows must not overwrite a state that others start from: without a second slot, it is not
                # kept.
                if not self.pools[group].free:
                    self.tree.evict(group, 1)
                table[1:] = self.pools[group].take(1) or table[1:]
            tables[group] = table[:1] if at_border and table[0] != table[1] else []
        self.tree.insert(tokens, tables, part=ended, salt=allocation.salt)

    def release(self, allocation: CacheAllocation) -> None:
        """Free everything that a request holds."""
        for group, table in enumerate(allocation.tables):
            self.pools[group].release(page for page in dict.fromkeys(table) if page != ABSENT)
            allocation.tables[group] = []

    def forget(self) -> None:
        """Free everything that the prefix tree alone holds."""
        for group, pool in enumerate(self.pools if self.tree else []):
            assert self.tree is not None
            self.tree.evict(group, pool.total)
        if self._events and self.tree and not self.tree.nodes:
            self._events.cleared()

    def _boundary(self, tokens: int) -> int:
        return (tokens - 1) // self.page_size * self.page_size
