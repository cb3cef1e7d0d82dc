"""A rank's end of its dcp group: which tokens it holds, and what passes between the group's ranks around attention."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from torch import Tensor

from weft.comm.transport import Ranks, Transport
from weft.dcp.interleave import Interleave
from weft.dcp.merge import Merger, Merging, Tally, TraceMerger, in_a_range
from weft.place import exchange
from weft.place.cost import Offer
from weft.place.dcp import Prefill, Prompts
from weft.place.merge import GatherPlan, Merge, plan_gather
from weft.place.spec import Mesh


class Gathering(Protocol):
    """What gathers rows over a dcp group."""

    def __call__(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """x: this rank's rows `[own, width]`; sizes: rows of every rank. Gives `[sum(sizes), width]`, in rank order."""
        ...


class Gatherer:
    """All-gathers rows over a group by the transport that is quickest for their size.

    transports: by name; offers: what they cost. Rows that a transport cannot take at once go in several calls, each a
    range in torch's profiler. tally: counts what is called.
    """

    def __init__(
        self,
        group: Ranks,
        transports: Mapping[str, Transport],
        offers: Sequence[Offer],
        tally: Tally | None = None,
    ):
        self._group, self._transports, self._offers, self._tally = group, transports, offers, tally

    def __call__(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """As `Gathering` says. Raises CommError, and LayoutError where no transport takes even a row of each rank."""
        if not sum(sizes):
            return x
        row_bytes = x.shape[1] * x.element_size()
        plan = plan_gather(row_bytes, len(sizes), max(sizes), self._offers)
        began = time.perf_counter()
        out = self._gather(plan, x, sizes)
        if self._tally is not None:
            seconds = 0.0 if x.is_cuda else time.perf_counter() - began
            self._tally.gathered(plan, (sum(sizes) - min(sizes)) * row_bytes, seconds=seconds)
        return out

    def _gather(self, plan: GatherPlan, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        transport, kind, rows = self._transports[plan.transport], exchange.all_gatherv(len(self._group)), plan.rows
        call = partial(in_a_range, transport)
        if rows >= max(sizes):
            return call(x, kind, self._group, sizes)
        out = x.new_empty(sum(sizes), x.shape[1])
        into = out.split(list(sizes))
        for begin in range(0, max(sizes), rows):
            part = tuple(min(rows, max(0, size - begin)) for size in sizes)
            came = call(x[begin : begin + rows], kind, self._group, part)
            for run, rank_rows in zip(came.split(list(part)), into, strict=True):
                rank_rows[begin : begin + len(run)] = run
        return out


@dataclass(frozen=True)
class ContextGroup:
    """What attention needs where its tokens are dealt out over ranks. place: this rank's in the group.

    prefill: how a step's prompts attend, the same on every rank. Without rows neither gather nor merge communicates.
    """

    deal: Interleave
    place: int
    gather: Gathering
    merge: Merging
    prefill: Callable[[Prompts], Prefill]

    def lengths(self, lengths: Tensor) -> Tensor:
        """How many tokens of sequences of these lengths lie here."""
        return self.deal.length(lengths, self.place)

    def slots(self, slots: Tensor) -> Tensor:
        """Where rows are stored here, −1 for another rank's: see `Interleave.slots`."""
        return self.deal.slots(slots, self.place)

    def heads(self, q: Tensor) -> Tensor:
        """Every rank's heads, in rank order: `[T, heads, D]` → `[T, ranks · heads, D]`."""
        ranks, (rows, heads, dim) = self.deal.ranks, q.shape
        every = self.gather(q.reshape(rows, heads * dim), (rows,) * ranks)
        return every.view(ranks, rows, heads, dim).transpose(0, 1).reshape(rows, ranks * heads, dim)


def context_group(
    mesh: Mesh,
    rank: int,
    deal: Interleave,
    transports: Mapping[str, Transport],
    offers: Sequence[Offer],
    way: str = "auto",
    prefill: Prefill | Literal["auto"] = "auto",
    tally: Tally | None = None,
) -> ContextGroup | None:
    """The rank's, by the transports' offers; way: to merge, as `Merger` takes it; prefill: auto, whichever is quicker
    for a step. tally: counts what is exchanged. None where no tokens are dealt out.
    """
    if mesh.dcp == 1:
        return None
    group = mesh.peers("dcp", rank)
    tally = tally or Tally()
    merge = Merger(mesh, rank, transports, offers, way, tally)

    def choose(prompts: Prompts) -> Prefill:
        return prompts.quickest(offers, way) if prefill == "auto" else prefill

    return ContextGroup(deal, group.index(rank), Gatherer(group, transports, offers, tally), merge, choose)


class TraceLog:
    """What attention exchanges, in order: how many reads of the stream come before, and bytes of a row that is gathered
    or what is merged. reads: how many there were so far, which who traces sets.
    """

    def __init__(self) -> None:
        self.found: list[tuple[int, int | Merge]] = []
        self.reads: Callable[[], int] = lambda: 0

    def add(self, what: int | Merge) -> None:
        """It is exchanged next."""
        self.found.append((self.reads(), what))


class TraceGatherer:
    """Writes down what attention gathers, as often as it does: gathers by bytes of a row. Carries zero rows.

    note: is told of each.
    """

    def __init__(self, note: Callable[[int], None]):
        self._note = note
        self.rows: Counter[int] = Counter()

    def __call__(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """As `Gathering` says."""
        row_bytes = x.shape[1] * x.element_size()
        self.rows[row_bytes] += 1
        self._note(row_bytes)
        return x


@dataclass(frozen=True)
class TraceGroup(ContextGroup):
    """Of a model's trace: writes down what its attention gathers and merges."""

    gather: TraceGatherer
    merge: TraceMerger
    log: TraceLog


def trace_group(mesh: Mesh) -> TraceGroup | None:
    """For a model's trace on a mesh; None where no tokens are dealt out."""
    if mesh.dcp == 1:
        return None
    log = TraceLog()
    gather, merge = TraceGatherer(log.add), TraceMerger(mesh.dcp, log.add)
    return TraceGroup(Interleave(mesh.dcp, 1, 1), 0, gather, merge, lambda prompts: "gather", log)
