"""Prefix reuse: a radix tree over whole pages of tokens (the idea of RadixAttention, arXiv 2312.07104).

Each node is a page of tokens; its path from the root is the whole prefix. It holds, of each cache group, what the page
left there: its page, or the recurrent state after its last token. A node may lack what only its neighbours need: pages
behind a window, states that were not kept. A prefix can be reused where every group has what goes on from there: all
pages of the prefix, the last window of pages, the state at its end.

Where every cache is of whole sequences, a page may also be reused in part: its first tokens, where a prompt goes on
otherwise after them, or where the page was not filled before its request ended, which makes a leaf with fewer tokens.
The caller copies such a page.

Requests may name a salt. Each salt has a root of its own, so prefixes are reused under equal salts only; which of them
are evicted is decided over all.

The tree holds its pages and states; a sequence that matches holds them too. What is shared is never written: a
sequence writes only past what it matched, and a state is written to another slot than it was read from.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.kv.cache_events import CacheEvents, page_hash, salt_hash
from weft.kv.cache_spec import Rule
from weft.kv.pages import PagePool

ABSENT = -1


@dataclass(eq=False)
class _Node:
    parent: _Node | None
    key: tuple[int, ...]
    held: list[int]
    """Of each group a page or a slot, or ABSENT."""
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    order: list[tuple[int, ...]] = field(default_factory=list)
    """The children's keys, sorted: next to any tokens stand those that begin with most of them."""
    used: int = 0
    salt: str = ""
    """Of a root; the nodes below are of the same."""
    hash: int = 0
    """Of a full page and all before it, where events are recorded."""


class Match(NamedTuple):
    """What of a prompt can be reused. tokens: in whole pages; tables: what a sequence goes on from after these.

    more: how many further tokens are the first ones of `page`, which is to be copied; ABSENT where there are none.
    """

    tokens: int
    tables: list[list[int]]
    more: int
    page: int


class PrefixTree:
    """The cached prefixes of one DP group. rules, pools: of each cache group. events: record what it stores and
    removes, where anybody wants to know."""

    def __init__(
        self, rules: Sequence[Rule], pools: Sequence[PagePool], page_size: int, events: CacheEvents | None = None
    ):
        self._rules, self._pools, self._page_size, self._events = rules, pools, page_size, events
        self._whole = [g for g, r in enumerate(rules) if not r.state and r.window is None]
        self._tails = [g for g in range(len(rules)) if g not in self._whole]
        self._reach = {g: _reach(rules[g], page_size) for g in self._tails}
        self._roots: dict[str, _Node] = {}  # of the salts under which something is held
        self._clock, self._order = itertools.count(1), itertools.count()
        self._leaves: list[tuple[int, int, _Node]] = []  # a heap; entries may be out of date
        self._kept: dict[int, dict[_Node, None]] = {g: {} for g in self._tails}  # least recently used first
        self.held = [0] * len(rules)
        """Pages or slots that the tree holds, of each group."""
        self.nodes = 0

    def _root(self, salt: str) -> _Node:
        return self._roots.get(salt) or _Node(None, (), [ABSENT] * len(self._rules), salt=salt)

    def _walk(self, root: _Node, tokens: Sequence[int]) -> Iterator[_Node]:
        node = root
        for start in range(0, len(tokens) - self._page_size + 1, self._page_size):
            child = node.children.get(tuple(tokens[start : start + self._page_size]))
            if child is None:
                return
            yield child
            node = child

    def _reusable(self, root: _Node, tokens: Sequence[int]) -> list[_Node]:
        """The path of the longest prefix that every group can go on from."""
        path = list(self._walk(root, tokens))
        while path and any(n.held[g] == ABSENT for g in self._tails for n in path[self._passed(g, len(path)) :]):
            path.pop()
        return path

    def _passed(self, group: int, pages: int) -> int:
        """Of a prefix's pages, how many the tokens behind it need no more: all, where a window is one token."""
        return max(0, pages - self._reach[group])

    def _part(self, root: _Node, path: list[_Node], tokens: Sequence[int]) -> tuple[int, list[_Node]]:
        """How many tokens after a path's are the first ones of another page, and its node, if there is any."""
        node, size = path[-1] if path else root, self._page_size
        rest = tuple(tokens[len(path) * size : (len(path) + 1) * size])
        at = bisect.bisect(node.order, rest)
        near = [] if self._tails else node.order[max(0, at - 1) : at + 1]
        count, key = max(((_common(key, rest), key) for key in near), default=(0, ()))
        return count, [node.children[key]] if count else []

    def longest(self, tokens: Sequence[int], salt: str = "") -> int:
        """How many leading tokens can be reused; holds nothing."""
        path = self._reusable(root := self._root(salt), tokens)
        return self._page_size * len(path) + self._part(root, path, tokens)[0]

    def match(self, tokens: Sequence[int], salt: str = "") -> Match:
        """How many leading tokens can be reused, and what a sequence goes on from, held for the caller.

        That is, of each group, its page table, ABSENT where a window has passed; or its state's slot, if any. A page
        that is to be copied is not held: what it holds stays until a step that is scheduled from now on writes to it.
        """
        path = self._reusable(root := self._root(salt), tokens)
        more, part = self._part(root, path, tokens)
        self._touch(path + part)
        tables = []
        for group, rule in enumerate(self._rules):
            held = [node.held[group] for node in path]
            if group in self._reach:
                passed = self._passed(group, len(held))
                held = held[passed:] if rule.state else [ABSENT] * passed + held[passed:]
            self._pools[group].hold(page for page in held if page != ABSENT)
            tables.append(held)
        return Match(self._page_size * len(path), tables, more, part[0].held[0] if part else ABSENT)

    def insert(
        self, tokens: Sequence[int], tables: Sequence[Sequence[int]], *, part: bool = False, salt: str = ""
    ) -> None:
        """Remembers the full pages of a computed prefix; tables as `match` gives them.

        A state is that after the last token, and is remembered where that ends a page. Where a prefix is there
        already, its older page stays. part: also the last page, which is not full, and which nobody writes any more.
        """
        node, path = self._root(salt), []
        end = len(tokens) if part and not self._tails else len(tokens) // self._page_size * self._page_size
        for at in range(-(-end // self._page_size)):
            key = tuple(tokens[at * self._page_size : (at + 1) * self._page_size])
            child = node.children.get(key) or self._add(node, key)
            if len(child.key) > len(key):  # the tree has a page that goes on from these tokens
                path.append(child)
                break
            path.append(child)
            for group in range(len(self._rules)):
                if child.held[group] == ABSENT and (page := self._entry(group, at, tokens, tables[group])) != ABSENT:
                    self._pools[group].hold([page])
                    child.held[group] = page
                    self.held[group] += 1
                    if self._events and len(key) == self._page_size:
                        self._note_stored(self._events, group, child)
            node = child
        self._touch(path)
        self._prune(node)

    def _note_stored(self, events: CacheEvents, group: int, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        if parent.parent is None:
            events.stored(group, self._rules[group], node.hash, None, node.key, parent.salt)
        else:
            events.stored(group, self._rules[group], node.hash, parent.hash, node.key, "")

    def _add(self, node: _Node, key: tuple[int, ...]) -> _Node:
        """A new child, in the place of one that it goes on from; or the child that goes on from it, if there is one."""
        at = bisect.bisect(node.order, key)
        if node.order[at : at + 1] and node.order[at][: len(key)] == key:
            return node.children[node.order[at]]
        if at and _common(before := node.order[at - 1], key) == len(before):
            shorter = node.children[before]
            for group in range(len(self._rules)):
                self._drop(shorter, group)
            self._remove(shorter)
            at -= 1
        child = node.children[key] = _Node(node, key, [ABSENT] * len(self._rules))
        node.order.insert(at, key)
        self.nodes += 1
        if node.parent is None:
            self._roots[node.salt] = node
        if self._events and len(key) == self._page_size:
            child.hash = page_hash(node.hash if node.parent else salt_hash(node.salt), key)
        return child

    def _entry(self, group: int, at: int, tokens: Sequence[int], table: Sequence[int]) -> int:
        if not self._rules[group].state:
            return table[at]
        return table[-1] if table and (at + 1) * self._page_size == len(tokens) else ABSENT

    def evict(self, group: int, count: int) -> int:
        """Frees up to `count` pages or slots that only the tree holds, least recently used first.

        Of whole sequences' pages leaves go first, and take with them what other groups have there.
        """
        return self._evict_leaves(group, count) if group in self._whole else self._evict_tails(group, count)

    def _evict_leaves(self, group: int, count: int) -> int:
        freed, in_use = 0, []
        while self._leaves and freed < count:
            entry = heapq.heappop(self._leaves)
            node = entry[2]
            if not _current(entry):
                continue
            if self._pools[group].holders(node.held[group]) > 1:
                in_use.append(entry)
                continue
            for each in range(len(self._rules)):
                self._drop(node, each)
            freed += 1
            self._remove(node)
        for entry in in_use:
            heapq.heappush(self._leaves, entry)
        return freed

    def _evict_tails(self, group: int, count: int) -> int:
        pool, freed = self._pools[group], 0
        for node in list(self._kept[group]):
            if freed == count:
                break
            if pool.holders(node.held[group]) == 1:
                self._drop(node, group)
                freed += 1
                self._prune(node)
        return freed

    def _prune(self, node: _Node) -> None:
        """Takes out a leaf that holds nothing, and what it leaves so."""
        while node.parent is not None and not node.children and all(held == ABSENT for held in node.held):
            node = self._remove(node)

    def _drop(self, node: _Node, group: int) -> None:
        if node.held[group] == ABSENT:
            return
        self._pools[group].release([node.held[group]])
        node.held[group] = ABSENT
        self.held[group] -= 1
        if group in self._kept:
            self._kept[group].pop(node)
        if self._events and len(node.key) == self._page_size:
            self._events.removed(group, node.hash)

    def _remove(self, node: _Node) -> _Node:
        """Takes a leaf out; gives its parent."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        del parent.order[bisect.bisect_left(parent.order, node.key)]
        node.parent = None
        self.nodes -= 1
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]
        self._offer(parent)
        return parent

    def _touch(self, path: list[_Node]) -> None:
        now = next(self._clock)
        for node in path:
            node.used = now
        for group, kept in self._kept.items():
            for node in path:
                if node.held[group] != ABSENT:
                    kept.pop(node, None)
                    kept[node] = None
        if path:
            self._offer(path[-1])

    def _offer(self, node: _Node) -> None:
        if node.parent is not None and not node.children:
            heapq.heappush(self._leaves, (node.used, next(self._order), node))
        if len(self._leaves) > 2 * self.nodes + 64:
            self._leaves = [entry for entry in self._leaves if _current(entry)]
            heapq.heapify(self._leaves)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _reach(rule: Rule, page_size: int) -> int:
    """The pages before a page's border that the tokens behind it still see; of a state, that which ends there."""
    return 1 if rule.window is None else -(-(rule.window - 1) // page_size)


def _current(entry: tuple[int, int, _Node]) -> bool:
    """Whether its node is still a leaf of the tree and was not used since: else it is in the heap again, or gone."""
    used, _, node = entry
    return node.parent is not None and not node.children and node.used == used
