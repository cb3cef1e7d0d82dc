"""Prefix reuse: a radix tree over whole pages of tokens (the idea of RadixAttention, arXiv 2312.07104).

Each node is a page of tokens; its path from the root is the whole prefix. It holds, of each cache group, what the page
left there: its page, or the recurrent state after its last token. A node may lack what only its neighbours need: pages
behind a window, states that were not kept. A prefix can be reused where every group has what goes on from there: all
pages of the prefix, the last window of pages, the state at its end.

The tree holds its pages and states; a sequence that matches holds them too. What is shared is never written: a
sequence writes only past what it matched, and a state is written to another slot than it was read from.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from weft.kv.pages import PagePool
from weft.kv.spec import Rule

ABSENT = -1


@dataclass(eq=False)
class _Node:
    parent: _Node | None
    key: tuple[int, ...]
    held: list[int]
    """Of each group a page or a slot, or ABSENT."""
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    used: int = 0


class PrefixTree:
    """The cached prefixes of one DP group. rules, pools: of each cache group."""

    def __init__(self, rules: Sequence[Rule], pools: Sequence[PagePool], page_size: int):
        self._rules, self._pools, self._page_size = rules, pools, page_size
        self._whole = [g for g, r in enumerate(rules) if not r.state and r.window is None]
        self._tails = [g for g in range(len(rules)) if g not in self._whole]
        self._reach = {g: _reach(rules[g], page_size) for g in self._tails}
        self._root = _Node(None, (), [ABSENT] * len(rules))
        self._clock, self._order = itertools.count(1), itertools.count()
        self._leaves: list[tuple[int, int, _Node]] = []  # a heap; entries may be out of date
        self._kept: dict[int, dict[_Node, None]] = {g: {} for g in self._tails}  # least recently used first
        self.held = [0] * len(rules)
        """Pages or slots that the tree holds, of each group."""
        self.nodes = 0

    def _walk(self, tokens: Sequence[int]) -> Iterator[_Node]:
        node = self._root
        for start in range(0, len(tokens) - self._page_size + 1, self._page_size):
            child = node.children.get(tuple(tokens[start : start + self._page_size]))
            if child is None:
                return
            yield child
            node = child

    def _reusable(self, tokens: Sequence[int]) -> list[_Node]:
        """The path of the longest prefix that every group can go on from."""
        path = list(self._walk(tokens))
        while path and any(n.held[g] == ABSENT for g in self._tails for n in path[-self._reach[g] :]):
            path.pop()
        return path

    def longest(self, tokens: Sequence[int]) -> int:
        """How many leading tokens can be reused; holds nothing."""
        return self._page_size * len(self._reusable(tokens))

    def match(self, tokens: Sequence[int]) -> tuple[int, list[list[int]]]:
        """How many leading tokens can be reused, and what a sequence goes on from, held for the caller.

        That is, of each group, its page table, ABSENT where a window has passed; or its state's slot, if any.
        """
        path = self._reusable(tokens)
        self._touch(path)
        tables = []
        for group, rule in enumerate(self._rules):
            held = [node.held[group] for node in path]
            if group in self._reach:
                reach = self._reach[group]
                held = held[-1:] if rule.state else [ABSENT] * len(held[:-reach]) + held[-reach:]
            self._pools[group].hold(page for page in held if page != ABSENT)
            tables.append(held)
        return self._page_size * len(path), tables

    def insert(self, tokens: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        """Remembers the full pages of a computed prefix; tables as `match` gives them.

        A state is that after the last token, and is remembered where that ends a page. Where a prefix is there
        already, its older page stays.
        """
        node, path = self._root, []
        for at in range(len(tokens) // self._page_size):
            key = tuple(tokens[at * self._page_size : (at + 1) * self._page_size])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(node, key, [ABSENT] * len(self._rules))
                self.nodes += 1
            path.append(child)
            for group in range(len(self._rules)):
                if child.held[group] == ABSENT and (page := self._entry(group, at, tokens, tables[group])) != ABSENT:
                    self._pools[group].hold([page])
                    child.held[group] = page
                    self.held[group] += 1
            node = child
        self._touch(path)
        self._prune(node)

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
        while node is not self._root and not node.children and all(held == ABSENT for held in node.held):
            node = self._remove(node)

    def _drop(self, node: _Node, group: int) -> None:
        if node.held[group] == ABSENT:
            return
        self._pools[group].release([node.held[group]])
        node.held[group] = ABSENT
        self.held[group] -= 1
        if group in self._kept:
            self._kept[group].pop(node)

    def _remove(self, node: _Node) -> _Node:
        """Takes a leaf out; gives its parent."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.parent = None
        self.nodes -= 1
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


def _reach(rule: Rule, page_size: int) -> int:
    """The pages before a page's border that the tokens behind it still see; of a state, that which ends there."""
    return 1 if rule.window is None else -(-(rule.window - 1) // page_size)


def _current(entry: tuple[int, int, _Node]) -> bool:
    """Whether its node is still a leaf of the tree and was not used since: else it is in the heap again, or gone."""
    used, _, node = entry
    return node.parent is not None and not node.children and node.used == used
