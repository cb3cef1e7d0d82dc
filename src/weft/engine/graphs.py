"""Decode steps as CUDA graphs: one for each capacity, captured at the start, replayed for every count that fits.

A graph's tensors have its capacity's shape. Live counts, and of each row its last token, length, page tables and
states' slots, are read from device memory, so that one graph serves all DP groups, also idle ones; padding rows have
length 0, are stored nowhere and choose no expert. The tokens that it draws are written where the next one reads them:
between two replays nothing is copied but which rows take part, where that has changed, new pages, and slots of states
that are to be kept for others. Which graph is replayed follows from the counts of all groups, which every rank knows.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.attention.batch import Batch, PageTables, StateSlots
from weft.attention.caches import Caches
from weft.comm.rows import CapturedRows, captured_rows
from weft.comm.transport import Transport
from weft.engine.device import on_device
from weft.engine.rows import DeviceRows
from weft.engine.vocabulary import SplitVocabulary
from weft.kv.spec import Rule
from weft.models.decoder import Decoder
from weft.place.plan import Counts, Plan
from weft.place.spec import Mesh, Rows
from weft.stream import Stream

if TYPE_CHECKING:
    from weft.kernels.triton.step import Parts


def capacities(most: int) -> list[int]:
    """Rows of a DP group that graphs are captured for: powers of two to 64, then steps of 64, the last being `most`."""
    small = [1 << i for i in range(7)]
    return sorted({min(c, most) for c in [*small, *range(128, most + 64, 64)]})


class DecodeGraphs:
    """The graphs of a rank, and the tensors that they read.

    plan: of so many tokens in each DP group. transports: those of the plans. rows: what graphs are captured for up to
    as many answers of. rules, page_size: of the caches. vocabulary: where it is split; its exchanges are captured too.
    Layers are given batches whose `spans` are None.
    """

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        rank: int,
        plan: Callable[[Counts], Plan],
        transports: Mapping[str, Transport],
        caches: Caches,
        rows: DeviceRows,
        rules: Sequence[Rule],
        page_size: int,
        vocabulary: SplitVocabulary | None = None,
    ):
        self._model, self._mesh, self._rank, self._plan = model, mesh, rank, plan
        self._transports, self._caches, self._rules, self._page_size = transports, caches, rules, page_size
        self._vocabulary = vocabulary
        self._device, self._rows = model.embed.weight.device, rows
        most = len(rows.length)
        self.capacities = capacities(most)
        self._answers = torch.zeros(most, dtype=torch.int32, device=self._device)  # which rows of the table take part
        self._copied: tuple[int, ...] = ()  # what that holds
        self._tokens = torch.zeros(most, dtype=torch.int32, device=self._device)
        # What is the same in every step is made once, outside of the graphs.
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=self._device)
        self._counts: dict[int, CapturedRows] = {}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._drawn: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # what `replay` gives, by capacity and rows

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Captures every graph, the largest first, so that they share its memory. Collective. progress(done, of)."""
        pool = torch.cuda.graph_pool_handle()
        for done, capacity in enumerate(reversed(self.capacities)):
            carriers = self._transports.values()
            counts = captured_rows(carriers, self._mesh, self._rank, capacity, self._device)
            self._counts[capacity] = counts
            counts.fill((0,) * self._mesh.attn_dp)
            self._step(capacity, counts)  # compiles what is compiled when first used, which a capture does not allow
            torch.cuda.synchronize()
            gc.collect()  # a tensor that is freed in a capture would be lost to it
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = self._step(capacity, counts)
            self._graphs[capacity] = (graph, logits)
            if progress:
                progress(done + 1, len(self.capacities))

    def fits(self, counts: Counts) -> bool:
        """Whether steps of so many rows have a graph."""
        return max(counts) <= self.capacities[-1]

    def capacity_of(self, counts: Counts) -> int:
        """Of the graph that serves them."""
        return self.capacities[bisect.bisect_left(self.capacities, max(counts))]

    def replay(self, answers: tuple[int, ...], counts: Counts) -> tuple[Tensor, Tensor]:
        """(logits `[rows of this group, vocabulary]` as the model gives them, the tokens drawn from them, int32).

        Logits are of this rank's share where the vocabulary is split. min_p is then left out of the draw, which would
        take the whole. The next replay overwrites both. answers: rows of the table, of this group. counts: of all
        groups, the same on every rank. The host waits for nothing. A row without a last token gives −1.
        """
        for transport in self._transports.values():
            transport.check()
        capacity, n = self.capacity_of(counts), len(answers)
        if self._copied[:n] != answers:
            self._answers[:n].copy_(on_device(answers, torch.int32, self._device))
            self._copied = answers
        self._counts[capacity].fill(counts)
        graph, logits = self._graphs[capacity]
        graph.replay()
        if (drawn := self._drawn.get((capacity, n))) is None:
            drawn = self._drawn[capacity, n] = logits[:n], self._tokens[:n]
        return drawn

    @cached_property
    def _parts(self) -> Parts:
        from weft.kernels.triton.step import parts  # a CPU need not have Triton

        return parts(self._rows.widths, [rule.state for rule in self._rules], self._device)

    def _step(self, capacity: int, counts: CapturedRows) -> Tensor:
        from weft.kernels.triton.sample import best, candidates
        from weft.kernels.triton.step import step_in, step_out

        rows, answers, live = self._rows, self._answers[:capacity], counts.live(Rows.GROUP)
        inputs = step_in(answers, live, rows.last_token, rows.length, rows.entries, self._parts, self._page_size)
        tables: list[PageTables | StateSlots] = []
        for rule, pages, slots in zip(self._rules, inputs.entries.split(rows.widths, 1), inputs.slots, strict=True):
            tables.append(StateSlots(*slots) if rule.state else PageTables(pages, slots[0]))
        batch = Batch(
            tokens=inputs.tokens,
            positions=inputs.positions,
            starts=self._starts[: capacity + 1],
            lengths=inputs.lengths,
            tables=tuple(tables),
            sample_rows=slice(None),
            spans=None,
        )
        stream = Stream(self._plan((capacity,) * self._mesh.attn_dp), self._transports, counts)
        self._caches.plan(batch)
        logits: Tensor = self._model(stream, batch, self._caches)
        stream.finish()
        how, split = (rows.temperature, rows.seed, inputs.lengths, live), self._vocabulary
        if split is None:
            drawn = candidates(logits, *how, table=answers, min_p=rows.min_p)[None]
        else:
            drawn = split.every(best(candidates(logits, *how, table=answers, first=split.share.start), live))[
                :, :, None
            ]
        step_out(answers, live, drawn, rows.last_token, rows.length, self._tokens)
        return logits
