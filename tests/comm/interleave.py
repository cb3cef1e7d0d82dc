"""Every interleaving of what ranks do in shared memory: does each read find what the call says it must?

A program is the list of actions of one rank, as `native/trace.cc` records it. Memory is sequentially consistent here;
what weaker order could break is for a race detector to find. Every place is written by one rank only, so what it holds
follows from how far that rank is, and a state is one number a rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

Action = tuple[Any, ...]
Program = list[Action]
Tag = tuple[int, str, int]
"""Who wrote it: the call's number, what the place holds then, the chunk."""


class Violation(AssertionError):
    """An order of events in which a rank reads something else than it must, or in which all ranks wait."""


@dataclass(frozen=True)
class Explored:
    states: int
    reads: int


@dataclass
class _Step:
    """An action, made ready: at most one of the two is there."""

    wait: tuple[int, tuple[int, int], int] | None = None  # rank, (rank, group), phase
    reads: tuple[tuple[int, Tag], ...] = ()  # place, what must be there


class _Memory:
    """Places (runs of bytes that no action cuts) and how each one's content follows its writer's progress."""

    def __init__(self, programs: list[Program]):
        actions = [a for program in programs for a in program if a[0] in ("read", "write")]
        self._cuts = sorted({c for _, _, _, at, size in actions for c in (at, at + size)})
        self.writer: dict[int, int] = {}
        self.when: defaultdict[int, list[int]] = defaultdict(list)
        self.tags: defaultdict[int, list[Tag]] = defaultdict(list)
        self.published: defaultdict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))

    def places(self, at: int, size: int) -> range:
        return range(bisect_left(self._cuts, at), bisect_left(self._cuts, at + size))

    def holds(self, place: int, progress: tuple[int, ...]) -> Tag | None:
        writer = self.writer.get(place)
        if writer is None:
            return None
        done = bisect_left(self.when[place], progress[writer])
        return self.tags[place][done - 1] if done else None

    def phase(self, key: tuple[int, int], progress: int) -> int:
        when, phases = self.published[key]
        done = bisect_left(when, progress)
        return phases[done - 1] if done else 0


def _prepare(programs: list[Program]) -> tuple[_Memory, list[list[_Step]]]:
    memory, prepared = _Memory(programs), []
    for rank, program in enumerate(programs):
        call, steps = -1, []
        for at, (what, *terms) in enumerate(program):
            step = _Step()
            if what == "call":
                call = terms[0]
            elif what == "publish":
                when, phases = memory.published[rank, terms[0]]
                when.append(at)
                phases.append(terms[1])
            elif what == "wait":
                step.wait = terms[1], (terms[1], terms[0]), terms[2]
            else:
                tag, places = (call, terms[0], terms[1]), memory.places(terms[2], terms[3])
                if what == "read":
                    step.reads = tuple((place, tag) for place in places)
                else:
                    for place in places:
                        assert memory.writer.setdefault(place, rank) == rank, "two ranks write one place"
                        memory.when[place].append(at)
                        memory.tags[place].append(tag)
            steps.append(step)
        prepared.append(steps)
    return memory, prepared


def explore(programs: list[Program]) -> Explored:
    """Go through every interleaving; raise Violation."""
    memory, prepared = _prepare(programs)
    start = (0,) * len(programs)
    end = tuple(len(p) for p in programs)
    seen, todo, reads = {start}, [start], 0
    while todo:
        state = todo.pop()
        stuck = state != end
        for rank, at in enumerate(state):
            if at == end[rank]:
                continue
            step = prepared[rank][at]
            if step.wait is not None:
                peer, key, phase = step.wait
                if memory.phase(key, state[peer]) < phase:
                    continue
            stuck = False
            for place, wanted in step.reads:
                reads += 1
                if (found := memory.holds(place, state)) != wanted:
                    raise Violation(f"rank {rank}, action {at} {programs[rank][at]}: {found}, not {wanted}, at {state}")
            following = (*state[:rank], at + 1, *state[rank + 1 :])
            if following not in seen:
                seen.add(following)
                todo.append(following)
        if stuck:
            raise Violation(f"all ranks wait at {state}")
    return Explored(len(seen), reads)
