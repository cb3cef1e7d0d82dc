"""Layouts that tests try."""

from __future__ import annotations

from functools import cache

from weft.planner.spec import Mesh


@cache
def layouts(max_world: int) -> tuple[Mesh, ...]:
    """Return every layout of up to `max_world` ranks."""
    return tuple(
        Mesh(dp, world // dp, ep, world // ep)
        for world in range(1, max_world + 1)
        for dp in range(1, world + 1)
        if world % dp == 0
        for ep in range(1, world + 1)
        if world % ep == 0
    )
