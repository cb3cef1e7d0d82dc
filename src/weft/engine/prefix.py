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
        self._clock = itertools.count(1)
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
        now, nodes = next(self._clock), list(self._walk(tokens))
        for node in nodes:
            node.used = now
        pages = [node.page for node in nodes]
        self._pool.hold(pages)
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Remembers the full pages of a computed prefix. Where a prefix is there already, its older page stays."""
        now, node = next(self._clock), self._root
        for at in range(len(tokens) // self._page_size):
            key = tuple(tokens[at * self._page_size : (at + 1) * self._page_size])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(pages[at], node, key)
                self._pool.hold([pages[at]])
                self.pages += 1
            child.used = now
            node = child

    def evict(self, count: int) -> int:
        """Frees up to `count` pages that only the tree holds, leaves first, least recently used first."""
        order = itertools.count()
        heap = [(n.used, next(order), n) for n in self._nodes() if self._evictable(n)]
        heapq.heapify(heap)
        freed = 0
        while heap and freed < count:
            _, _, node = heapq.heappop(heap)
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            self._pool.release([node.page])
            self.pages -= 1
            freed += 1
            if parent is not self._root and self._evictable(parent):
                heapq.heappush(heap, (parent.used, next(order), parent))
        return freed

    def _evictable(self, node: _Node) -> bool:
        return not node.children and self._pool.holders(node.page) == 1

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
