"""Pages of the key-value cache, counted by holder (paged attention: arXiv 2309.06180)."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Page numbers 0 … total-1. A page is free when nobody holds it; sequences and the prefix tree hold pages.

    Attributes:
        used: pages that sequences hold, including pages that the prefix tree holds too.
    """

    def __init__(self, total: int):
        self.total, self.used = total, 0
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._cached = [0] * total  # prefixes of the tree per page

    @property
    def free(self) -> int:
        """Number of pages that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Return `count` free pages, held once, or None and change nothing if fewer are free."""
        remaining = len(self._free) - count
        if remaining < 0:
            return None
        pages = self._free[remaining:][::-1]
        del self._free[remaining:]
        for page in pages:
            self._holders[page] = 1
        self.used += count
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Add a sequence as a holder of pages in use."""
        for page in pages:
            if not self._holders[page]:
                raise _is_free(page)
            self.used += self._holders[page] == self._cached[page]
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a sequence as a holder; a page without holders becomes free."""
        for page in pages:
            if self._holders[page] == self._cached[page]:
                raise ValueError(f"page {page} is released more often than it was held")
            self._holders[page] -= 1
            self.used -= self._holders[page] == self._cached[page]
            if not self._holders[page]:
                self._free.append(page)

    def cache(self, pages: Iterable[int]) -> None:
        """Add a prefix of the tree as a holder of pages in use."""
        for page in pages:
            if not self._holders[page]:
                raise _is_free(page)
            self._cached[page] += 1
            self._holders[page] += 1

    def uncache(self, pages: Iterable[int]) -> None:
        """Remove a prefix of the tree as a holder; a page without holders becomes free."""
        for page in pages:
            if not self._cached[page]:
                raise ValueError(f"page {page} is released more often than it was cached")
            self._cached[page] -= 1
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def holders(self, page: int) -> int:
        """Number of holders of a page."""
        return self._holders[page]


def _is_free(page: int) -> ValueError:
    return ValueError(f"page {page} is free; only a page in use can be shared")
