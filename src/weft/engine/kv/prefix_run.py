"""Node of the prefix tree: a run of pages with its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

ABSENT = -1


@dataclass(eq=False, slots=True)
class Run:
    """Consecutive pages. Only a leaf of one page may be partly filled."""

    parent: Run | None
    tokens: bytes
    """Tokens of all its pages (`weft.engine.kv.tokens`)."""
    held: list[list[int]]
    """Page, slot or ABSENT, per group and page."""
    children: dict[bytes, Run] = field(default_factory=dict)
    """Children by the tokens of their first page."""
    order: list[bytes] = field(default_factory=list)
    """Keys of the children, sorted: the longest common prefix with any tokens is at a neighbour of their place."""
    used: int = 0
    salt: str = ""
    """Salt of a root; the runs below it share it."""
    hashes: list[int] = field(default_factory=list)
    """Hash of each full page with all pages before it, if events are recorded."""

    @property
    def pages(self) -> int:
        return len(self.held[0])

    def holds(self, group: int) -> bool:
        """True if the run holds a page or slot of a group."""
        return self.held[group].count(ABSENT) < self.pages


RunPath = list[tuple[Run, int]]
"""Runs from the root on, each with its number of matching pages; only the last run may match in part."""


def common_length(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix."""
    alike, end = 0, min(len(one), len(other))
    if one[:end] == other[:end]:
        return end
    while end - alike > 1:  # equal before `alike`, different somewhere from there to `end`
        middle = (alike + end) // 2
        if one[alike:middle] == other[alike:middle]:
            alike = middle
        else:
            end = middle
    return alike
