"""A node of the prefix tree: a run of pages, with the tokens that it is found by."""

from __future__ import annotations

from dataclasses import dataclass, field

ABSENT = -1


@dataclass(eq=False, slots=True)
class Run:
    """Consecutive pages. Only a leaf of one page may be not full."""

    parent: Run | None
    tokens: bytes
    """Of all its pages (`weft.engine.kv.tokens`)."""
    held: list[list[int]]
    """Of each group, for each page: a page or a slot, or ABSENT."""
    children: dict[bytes, Run] = field(default_factory=dict)
    """By the tokens of their first page."""
    order: list[bytes] = field(default_factory=list)
    """The children's keys, sorted: next to any tokens stand those that begin with most of them."""
    used: int = 0
    salt: str = ""
    """Of a root; the runs below are of the same."""
    hashes: list[int] = field(default_factory=list)
    """Of each full page and all before it, where events are recorded."""

    @property
    def pages(self) -> int:
        """How many."""
        return len(self.held[0])

    def holds(self, group: int) -> bool:
        """Whether it holds anything of a group."""
        return self.held[group].count(ABSENT) < self.pages


RunPath = list[tuple[Run, int]]
"""From the root on, runs and how many of their first pages: of all runs but the last one, all."""


def common_length(one: bytes, other: bytes) -> int:
    """How many bytes both begin with."""
    alike, end = 0, min(len(one), len(other))
    if one[:end] == other[:end]:
        return end
    while end - alike > 1:  # those before `alike` are equal, those from there to `end` are not
        middle = (alike + end) // 2
        if one[alike:middle] == other[alike:middle]:
            alike = middle
        else:
            end = middle
    return alike
