"""Prefix reuse: a radix tree over whole pages of tokens (the idea of RadixAttention, arXiv 2312.07104).

Each node is a run of pages up to where prefixes diverge; its path from the root is the whole prefix. A prompt of any
length costs a few nodes instead of one per page, so steps and garbage collections do not slow down as the cache fills.
A run holds, per cache group, the page of each of its pages or the recurrent state after it. It may lack pages before a
window and states that were not kept. A prefix can be reused if every group can continue from it: with all pages of the
prefix, the last window of pages, or the state at its end.

If all caches hold whole sequences, the first tokens of a page can be reused too: where a prompt diverges within the
page, or where a request ended before the page was full (a leaf with fewer tokens). The caller copies such a page.

Each salt has its own root, so prefixes are reused under equal salts only. Eviction is global.

The tree holds its pages and states, and so does a sequence that matches them. Shared data is never written: a sequence
writes only after its match, and a state is written to another slot than it was read from.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from weft.engine.kv.cache_events import CacheEvents, page_hash, salt_hash
from weft.engine.kv.cache_spec import Rule
from weft.engine.kv.pages import PagePool
from weft.engine.kv.prefix_run import ABSENT, Run, RunPath, common_length
from weft.engine.kv.tokens import TOKEN_BYTES, token_array, token_bytes


class PrefixMatch(NamedTuple):
    """Reusable part of a prompt.

    Attributes:
        tokens: number of reusable tokens, in whole pages.
        tables: per group, the page table or state to continue from.
        more: number of further tokens that are the first ones of `page`.
        page: page to copy, ABSENT if there is none.
    """

    tokens: int
    tables: list[list[int]]
    more: int
    page: int


class PrefixTree:
    """Cached prefixes of one DP group. rules, pools: one per cache group. page_size: tokens. events: of changes."""

    def __init__(
        self, rules: Sequence[Rule], pools: Sequence[PagePool], page_size: int, events: CacheEvents | None = None
    ):
        self._rules, self._pools, self._page_size, self._events = rules, pools, page_size, events
        self._page_bytes = page_size * TOKEN_BYTES
        self._whole = [g for g, r in enumerate(rules) if not r.state and r.window is None]
        self._tails = [g for g in range(len(rules)) if g not in self._whole]
        self._reach = {g: _reach(rules[g], page_size) for g in self._tails}
        self._roots: dict[str, Run] = {}  # by salt, without empty ones
        self._clock, self._order = itertools.count(1), itertools.count()
        self._leaves: list[tuple[int, int, Run]] = []  # a heap, which may have outdated entries
        self._kept: dict[int, dict[Run, None]] = {g: {} for g in self._tails}  # least recently used first
        self.nodes = 0
        """Number of runs."""

    def _root(self, salt: str) -> Run:
        return self._roots.get(salt) or Run(None, b"", [[] for _ in self._rules], salt=salt)

    def _walk(self, root: Run, tokens: bytes) -> RunPath:
        """Return the path of the full pages that the tree has."""
        path: RunPath = []
        run, at, size = root, 0, self._page_bytes
        while at + size <= len(tokens) and (child := run.children.get(tokens[at : at + size])) is not None:
            pages = common_length(child.tokens, tokens[at : at + len(child.tokens)]) // size
            path.append((child, pages))
            at += pages * size
            if pages < child.pages:
                break
            run = child
        return path

    def _reusable(self, root: Run, tokens: bytes) -> RunPath:
        """Return the path of the longest prefix that every group can continue from."""
        path = self._walk(root, tokens)
        held = {g: [at for run, pages in path for at in run.held[g][:pages]] for g in self._tails}
        count = length = sum(pages for _, pages in path)
        while count and any(ABSENT in each[self._passed(g, count) : count] for g, each in held.items()):
            count -= 1
        while length > count:
            run, pages = path.pop()
            length -= pages
        if length < count:
            path.append((run, count - length))
        return path

    def _passed(self, group: int, pages: int) -> int:
        """Return the number of pages of a prefix that later tokens do not see: all, if a window is one token."""
        return max(0, pages - self._reach[group])

    def _part(self, root: Run, path: RunPath, tokens: bytes) -> tuple[int, RunPath]:
        """Return the number of tokens after a path that start another page, and the path up to that page, if there is
        one."""
        size, at = self._page_bytes, self._page_bytes * sum(pages for _, pages in path)
        rest = tokens[at : at + size]
        run, pages = path[-1] if path else (root, 0)
        if self._tails or not rest:
            return 0, path
        if pages < run.pages:
            count = common_length(run.tokens[pages * size : (pages + 1) * size], rest) // TOKEN_BYTES
            return (count, [*path[:-1], (run, pages + 1)]) if count else (0, path)
        place = bisect.bisect(run.order, rest)
        near = run.order[max(0, place - 1) : place + 1]
        count, key = max(((common_length(key, rest) // TOKEN_BYTES, key) for key in near), default=(0, b""))
        return (count, [*path, (run.children[key], 1)]) if count else (0, path)

    def longest(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return the number of reusable leading tokens, without holding anything."""
        root, content = self._root(salt), token_bytes(tokens)
        path = self._reusable(root, content)
        return self._page_size * sum(pages for _, pages in path) + self._part(root, path, content)[0]

    def match(self, tokens: Sequence[int], salt: str = "") -> PrefixMatch:
        """Return the reusable part of a prompt and hold it for the caller.

        Tables have ABSENT for pages that a window has passed. A page to copy is not held: its content lasts until a
        step that is scheduled from now on writes to it.
        """
        root, content = self._root(salt), token_bytes(tokens)
        path = self._reusable(root, content)
        more, with_part = self._part(root, path, content)
        count, page = sum(pages for _, pages in path), ABSENT
        if more:
            run, pages = with_part[-1]
            page = run.held[0][pages - 1]
        tables = []
        for group, rule in enumerate(self._rules):
            held = [at for run, pages in path for at in run.held[group][:pages]]
            if group in self._reach:
                passed = self._passed(group, count)
                held = held[passed:] if rule.state else [ABSENT] * passed + held[passed:]
            self._pools[group].hold(page for page in held if page != ABSENT)
            tables.append(held)
        self._touch(with_part)
        return PrefixMatch(self._page_size * count, tables, more, page)

    def insert(
        self, tokens: Sequence[int], tables: Sequence[Sequence[int]], *, part: bool = False, salt: str = ""
    ) -> None:
        """Remember the full pages of a computed prefix of `tokens` under a `salt`. tables: as in `PrefixMatch`.

        A state is that after the last token, and is kept only at the end of a page. Pages that the tree already has are
        kept instead of newer ones. part: keep the last page too, which is not full and is never written again.
        """
        content, size = token_bytes(tokens), self._page_bytes
        full = len(content) // size
        path, known = self._walk(root := self._root(salt), content), 0
        for run, pages in path:
            self._hold(run, self._entries(tokens, tables, known, pages))
            known += pages
        if known < full:
            run = self._add(self._end(path) if path else root, content[known * size : full * size])
            self._hold(run, self._entries(tokens, tables, known, full - known))
            path.append((run, full - known))
        if part and not self._tails and (rest := content[full * size :]):
            run, pages = path[-1] if path else (root, 0)
            if run.tokens[pages * size :].startswith(rest):  # the tree has a page that continues these tokens
                path[-1] = run, pages + 1
            elif (longer := self._longer(run := self._end(path) if path else root, rest)) is not None:
                path.append((longer, 1))
            else:
                run = self._add(run, rest)
                self._hold(run, [table[full : full + 1] for table in tables])
                path.append((run, 1))
        self._touch(path)
        if path:
            self._prune(path[-1][0])

    def _entries(
        self, tokens: Sequence[int], tables: Sequence[Sequence[int]], first: int, pages: int
    ) -> list[Sequence[int]]:
        """Return, per group, the `pages` entries of a sequence's tables from number `first` on."""
        entries: list[Sequence[int]] = []
        for rule, table in zip(self._rules, tables, strict=True):
            if rule.state:
                ends = table and (first + pages) * self._page_size == len(tokens)
                entries.append([*[ABSENT] * (pages - 1), table[-1] if ends else ABSENT])
            else:
                entries.append(table[first : first + pages])
        return entries

    def _hold(self, run: Run, entries: Sequence[Sequence[int]]) -> None:
        """Hold the entries that the first pages of a run lack."""
        stored: list[tuple[int, int]] = []
        for group, (held, found) in enumerate(zip(run.held, entries, strict=True)):
            if group in self._whole and held[0] != ABSENT:
                continue  # the run already has all of them
            lacking = [at for at, page in enumerate(found) if page != ABSENT and held[at] == ABSENT]
            self._pools[group].cache(found[at] for at in lacking)
            for at in lacking:
                held[at] = found[at]
            if self._events:
                stored += [(at, group) for at in lacking if at < len(run.hashes)]
        for at, group in sorted(stored):
            self._note_stored(group, run, at)

    def _note_stored(self, group: int, run: Run, at: int) -> None:
        assert self._events is not None and run.parent is not None
        before = run.hashes[at - 1] if at else run.parent.hashes[-1] if run.parent.hashes else None
        key = token_array(run.tokens[at * self._page_bytes : (at + 1) * self._page_bytes])
        self._events.stored(
            group, self._rules[group], run.hashes[at], before, key, "" if before is not None else run.parent.salt
        )

    def _end(self, path: RunPath) -> Run:
        """Return the last run of a path, cut at the end of the path."""
        run, pages = path[-1]
        if pages < run.pages:
            path[-1] = self._cut(run, pages), pages
        return path[-1][0]

    def _cut(self, run: Run, pages: int) -> Run:
        """Cut a run after its first `pages`. These become a new run, which is returned; the caller touches it. The rest
        keeps the run's identity."""
        size, parent = pages * self._page_bytes, run.parent
        assert parent is not None
        head = Run(parent, run.tokens[:size], [held[:pages] for held in run.held], hashes=run.hashes[:pages])
        parent.children[self._key(run)] = head
        run.parent, run.tokens = head, run.tokens[size:]
        run.held, run.hashes = [held[pages:] for held in run.held], run.hashes[pages:]
        head.children[self._key(run)] = run
        head.order.append(self._key(run))
        for group, leaves in self._kept.items():
            if not run.holds(group):
                leaves.pop(run, None)
        self.nodes += 1
        return head

    def _key(self, run: Run) -> bytes:
        """Return the key of a run in its parent."""
        return run.tokens[: self._page_bytes]

    def _longer(self, run: Run, key: bytes) -> Run | None:
        """Return the child with a page that starts with these tokens, if there is one."""
        at = bisect.bisect_left(run.order, key)
        return run.children[run.order[at]] if run.order[at : at + 1] and run.order[at].startswith(key) else None

    def _add(self, parent: Run, tokens: bytes) -> Run:
        """Add an empty child, which replaces a child that is a prefix of it."""
        pages, key = -(-len(tokens) // self._page_bytes), tokens[: self._page_bytes]
        at = bisect.bisect(parent.order, key)
        if at and key.startswith(before := parent.order[at - 1]):
            shorter = parent.children[before]
            self._shorten(shorter, 0)
            self._remove(shorter)
            at -= 1
        child = parent.children[key] = Run(parent, tokens, [[ABSENT] * pages for _ in self._rules])
        parent.order.insert(at, key)
        self.nodes += 1
        if parent.parent is None:
            self._roots[parent.salt] = parent
        if self._events:
            before_hash = parent.hashes[-1] if parent.parent else salt_hash(parent.salt)
            for start in range(0, len(tokens) - self._page_bytes + 1, self._page_bytes):
                before_hash = page_hash(before_hash, token_array(tokens[start : start + self._page_bytes]))
                child.hashes.append(before_hash)
        return child

    def evict(self, group: int, count: int) -> int:
        """Free up to `count` pages or slots that only the tree holds, least recently used first. Leaves of whole
        sequences go first, together with their pages in other groups."""
        return self._evict_leaves(group, count) if group in self._whole else self._evict_tails(group, count)

    def _evict_leaves(self, group: int, count: int) -> int:
        pool, freed, in_use = self._pools[group], 0, []
        while self._leaves and freed < count:
            entry = heapq.heappop(self._leaves)
            run = entry[2]
            if not _current(entry):
                continue
            held, remaining = run.held[group], run.pages
            while remaining and freed < count and pool.holders(held[remaining - 1]) == 1:
                remaining, freed = remaining - 1, freed + 1
            self._shorten(run, remaining)
            if not remaining:
                self._remove(run)
            else:
                in_use.append(entry)
        for entry in in_use:
            heapq.heappush(self._leaves, entry)
        return freed

    def _evict_tails(self, group: int, count: int) -> int:
        pool, freed = self._pools[group], 0
        for run in list(self._kept[group]):
            if freed == count:
                break
            alone = [at for at, held in enumerate(run.held[group]) if held != ABSENT and pool.holders(held) == 1]
            self._drop(run, group, alone[: count - freed])
            freed = min(count, freed + len(alone))
            self._prune(run)
        return freed

    def _prune(self, run: Run) -> None:
        """Remove the last empty pages of a leaf, and of its ancestors that become leaves."""
        while run.parent is not None and not run.children:
            remaining = run.pages
            while remaining and all(held[remaining - 1] == ABSENT for held in run.held):
                remaining -= 1
            if remaining < run.pages:
                self._shorten(run, remaining)
            if remaining:
                return
            run = self._remove(run)

    def _shorten(self, run: Run, pages: int) -> None:
        """Cut a leaf to its first pages, and free the others."""
        for group, held in enumerate(run.held):
            self._drop(run, group, [at for at in range(run.pages - 1, pages - 1, -1) if held[at] != ABSENT])
        run.tokens = run.tokens[: pages * self._page_bytes] if pages else self._key(run)
        run.held = [held[:pages] for held in run.held]
        del run.hashes[pages:]

    def _drop(self, run: Run, group: int, places: Sequence[int]) -> None:
        """Free the pages or slots of a group at these places of a run."""
        held = run.held[group]
        self._pools[group].uncache([held[at] for at in places])
        for at in places:
            held[at] = ABSENT
        if group in self._kept and not run.holds(group):
            self._kept[group].pop(run, None)
        if self._events:
            for at in places:
                if at < len(run.hashes):
                    self._events.removed(group, run.hashes[at])

    def _remove(self, run: Run) -> Run:
        """Remove a leaf and return its parent."""
        parent, key = run.parent, self._key(run)
        assert parent is not None
        del parent.children[key]
        del parent.order[bisect.bisect_left(parent.order, key)]
        run.parent = None
        self.nodes -= 1
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]
        self._offer(parent)
        return parent

    def _touch(self, path: RunPath) -> None:
        if not path:
            return
        last, now = self._end(path), next(self._clock)
        for run, _ in path:
            run.used = now
            for group, leaves in self._kept.items():
                leaves.pop(run, None)
                if run.holds(group):
                    leaves[run] = None
        self._offer(last)

    def _offer(self, run: Run) -> None:
        if run.parent is not None and not run.children:
            heapq.heappush(self._leaves, (run.used, next(self._order), run))
        if len(self._leaves) > 2 * self.nodes + 64:
            self._leaves = [entry for entry in self._leaves if _current(entry)]
            heapq.heapify(self._leaves)


def _reach(rule: Rule, page_size: int) -> int:
    """Return the number of pages before a page border that later tokens still see, or 1 for a state."""
    return 1 if rule.window is None else -(-(rule.window - 1) // page_size)


def _current(entry: tuple[int, int, Run]) -> bool:
    """Check that the run is still a leaf and was not used since. Otherwise it was offered to the heap again, or
    removed."""
    used, _, run = entry
    return run.parent is not None and not run.children and run.used == used
