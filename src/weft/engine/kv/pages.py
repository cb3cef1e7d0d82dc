"""Pages of the key-value cache, counted by who holds them (paged attention: arXiv 2309.06180)."""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Page numbers 0 … total-1. A page is free when nobody holds it; sequences and the prefix tree hold pages.

    used: pages that sequences hold, be they the prefix tree's too.
    """

    def __init__(self, total: int):
        self.total, self.used = total, 0
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._cached = [0] * total  # how many of these are prefixes of the tree

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
        self.used += count
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more sequence holds pages in use."""
        for page in pages:
            if not self._holders[page]:
                raise _is_free(page)
            self.used += self._holders[page] == self._cached[page]
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One sequence less; a page without any holder is free."""
        for page in pages:
            if self._holders[page] == self._cached[page]:
                raise ValueError(f"page {page} is released more often than it was held")
            self._holders[page] -= 1
            self.used -= self._holders[page] == self._cached[page]
            if not self._holders[page]:
                self._free.append(page)

    def cache(self, pages: Iterable[int]) -> None:
        """A prefix of the tree holds pages in use, too."""
        for page in pages:
            if not self._holders[page]:
                raise _is_free(page)
            self._cached[page] += 1
            self._holders[page] += 1

    def uncache(self, pages: Iterable[int]) -> None:
        """One prefix of the tree less; a page without any holder is free."""
        for page in pages:
            if not self._cached[page]:
                raise ValueError(f"page {page} is released more often than it was cached")
            self._cached[page] -= 1
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]


def _is_free(page: int) -> ValueError:
    return ValueError(f"page {page} is free; only a page in use can be shared")
