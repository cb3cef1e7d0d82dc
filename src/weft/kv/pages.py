"""Pages of the key-value cache, counted by who holds them (paged attention: arXiv 2309.06180)."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Page numbers 0 … total-1. A page is free when nobody holds it; sequences and the prefix tree hold pages."""

    def __init__(self, total: int):
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` free pages, held once; None where there are fewer, and then none is taken."""
        left = len(self._free) - count
        if left < 0:
            return None
        pages = self._free[left:][::-1]
        del self._free[left:]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for pages in use."""
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is free; only a page in use can be shared")
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less; a page without any is free."""
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is released more often than it was held")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]
