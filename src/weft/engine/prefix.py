"""Prefix reuse: a radix tree over whole pages of tokens (the idea of RadixAttention, arXiv 2312.07104).

Each node is one full page; its key is the page's tokens, its path from the root the whole prefix. The tree holds its
pages; a sequence that matches holds them too. A shared page is never written: a sequence writes only past what it
matched, and it matches whole pages only.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from weft.engine.pages import PagePool


@dataclass(eq=False)
class _Node:
    page: int
    parent: _Node | None
    key: tuple[int, ...]
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    used: int = 0


class PrefixTree:
    """The cached prefixes of one DP group."""

    def __init__(self, pool: PagePool, page_size: int):
        self._pool, self._page_size = pool, page_size
        self._root = _Node(-1, None, ())
        self._clock, self._order = itertools.count(1), itertools.count()
        self._leaves: list[tuple[int, int, _Node]] = []  # a heap; entries may be out of date
        self.pages = 0

    def _walk(self, tokens: Sequence[int]) -> Iterator[_Node]:
        node = self._root
        for start in range(0, len(tokens) - self._page_size + 1, self._page_size):
            child = node.children.get(tuple(tokens[start : start + self._page_size]))
            if child is None:
                return
            yield child
            node = child

    def longest(self, tokens: Sequence[int]) -> int:
        """How many leading tokens are cached; holds nothing."""
        return self._page_size * sum(1 for _ in self._walk(tokens))

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest cached prefix, held for the caller."""
        nodes = list(self._walk(tokens))
        self._touch(nodes)
        pages = [node.page for node in nodes]
        self._pool.hold(pages)
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Remembers the full pages of a computed prefix. Where a prefix is there already, its older page stays."""
        node, path = self._root, []
        for at in range(len(tokens) // self._page_size):
            key = tuple(tokens[at * self._page_size : (at + 1) * self._page_size])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(pages[at], node, key)
                self._pool.hold([pages[at]])
                self.pages += 1
            path.append(child)
            node = child
        self._touch(path)

    def evict(self, count: int) -> int:
        """Frees up to `count` pages that only the tree holds, leaves first, least recently used first."""
        freed, in_use = 0, []
        while self._leaves and freed < count:
            entry = heapq.heappop(self._leaves)
            node = entry[2]
            parent = node.parent
            if parent is None or not _current(entry):
                continue
            if self._pool.holders(node.page) > 1:
                in_use.append(entry)
                continue
            del parent.children[node.key]
            node.parent = None
            self._pool.release([node.page])
            self.pages -= 1
            freed += 1
            if parent is not self._root:
                self._offer(parent)
        for entry in in_use:
            heapq.heappush(self._leaves, entry)
        return freed

    def _touch(self, path: list[_Node]) -> None:
        now = next(self._clock)
        for node in path:
            node.used = now
        if path:
            self._offer(path[-1])

    def _offer(self, node: _Node) -> None:
        if not node.children:
            heapq.heappush(self._leaves, (node.used, next(self._order), node))
        if len(self._leaves) > 2 * self.pages + 64:
            self._leaves = [entry for entry in self._leaves if _current(entry)]
            heapq.heapify(self._leaves)


def _current(entry: tuple[int, int, _Node]) -> bool:
    """Whether its node is still a leaf of the tree and was not used since: else it is in the heap again, or gone."""
    used, _, node = entry
    return node.parent is not None and not node.children and node.used == used
