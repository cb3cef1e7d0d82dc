"""Decode steps as CUDA graphs: one for each capacity, captured at the start, replayed for every count that fits.

A graph's tensors have its capacity's shape. Live counts, tokens, page tables and lengths are read from device memory,
so that one graph serves all DP groups, also idle ones; padding rows have length 0, are stored nowhere and choose no
expert. Which graph is replayed follows from the counts of all groups, which every rank knows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from weft.attention.batch import Batch, PageTables
from weft.attention.caches import Caches
from weft.comm.rows import PaddedRows
from weft.comm.transport import Transport
from weft.engine.batch import SeqRows
from weft.kv.spec import Rule
from weft.models.decoder import Decoder
from weft.place.plan import Counts, Plan
from weft.place.spec import Mesh
from weft.stream import Stream


def capacities(most: int) -> list[int]:
    """Rows of a DP group that graphs are captured for: powers of two to 64, then steps of 64, the last being `most`."""
    small = [1 << i for i in range(7)]
    return sorted({min(c, most) for c in [*small, *range(128, most + 64, 64)]})


class DecodeGraphs:
    """The graphs of a rank, and the tensors that they read.

    plan: of so many tokens in each DP group. transports: those of the plans; all must take live sizes, but for
    exchanges of one segment. most_rows: of a DP group; max_pages: of a sequence. The model's caches must all be paged.
    """

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        rank: int,
        plan: Callable[[Counts], Plan],
        transports: Mapping[str, Transport],
        caches: Caches,
        rules: Sequence[Rule],
        page_size: int,
        most_rows: int,
        max_pages: int,
    ):
        self._model, self._mesh, self._rank, self._plan = model, mesh, rank, plan
        self._transports, self._caches, self._page_size = transports, caches, page_size
        self._device, self._max_pages, self._rules = model.embed.weight.device, max_pages, rules
        self.capacities = capacities(most_rows)
        # One buffer on either side, so that a step needs one copy: tokens, positions, lengths, and for each group of
        # caches slots and page tables.
        fields = [most_rows] * 3 + [size for _ in rules for size in (most_rows, most_rows * max_pages)]
        self._host = torch.zeros(sum(fields), dtype=torch.int32, pin_memory=True)
        self._inputs = torch.zeros_like(self._host, device=self._device)
        self._host_fields, self._fields = self._host.split(fields), self._inputs.split(fields)
        self._rows: dict[int, PaddedRows] = {}
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._done = torch.cuda.Event()

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Captures every graph, the largest first, so that they share its memory. Collective. progress(done, of)."""
        self._host.zero_()
        for slots in self._host_fields[3::2]:
            slots.fill_(-1)
        self._inputs.copy_(self._host)
        pool = torch.cuda.graph_pool_handle()
        for done, capacity in enumerate(reversed(self.capacities)):
            rows = self._rows[capacity] = PaddedRows(self._mesh, self._rank, capacity, self._device)
            rows.fill((0,) * self._mesh.attn_dp)
            self._forward(capacity, rows)  # compiles what is compiled when first used, which a capture does not allow
            torch.cuda.synchronize()
            gc.collect()  # a tensor that is freed in a capture would be lost to it
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = self._forward(capacity, rows)
            self._graphs[capacity] = (graph, logits)
            if progress:
                progress(done + 1, len(self.capacities))

    def fits(self, counts: Counts) -> bool:
        """Whether steps of so many rows have a graph."""
        return max(counts) <= self.capacities[-1]

    def capacity_of(self, counts: Counts) -> int:
        """Of the graph that serves them."""
        return next(c for c in self.capacities if c >= max(counts))

    @torch.inference_mode()
    def replay(self, tokens: Sequence[int], seqs: Sequence[SeqRows], counts: Counts) -> Tensor:
        """float32 logits `[rows of this group, vocabulary]`: the next replay overwrites them.

        Every sequence has one row. counts: of all groups, the same on every rank.
        """
        for transport in self._transports.values():
            transport.check()
        capacity = self.capacity_of(counts)
        self._done.synchronize()  # the copy before may still read what is written now
        self._write(tokens, seqs, capacity)
        self._inputs.copy_(self._host, non_blocking=True)
        self._rows[capacity].fill(counts)
        self._done.record()
        graph, logits = self._graphs[capacity]
        graph.replay()
        return logits[: len(tokens)]

    def _write(self, tokens: Sequence[int], seqs: Sequence[SeqRows], capacity: int) -> None:
        n, page_size = len(tokens), self._page_size
        token, position, length, *tables = (field.numpy() for field in self._host_fields)
        at = [s.context for s in seqs]
        token[:n], position[:n], length[:n] = tokens, at, [p + 1 for p in at]
        token[n:capacity] = position[n:capacity] = length[n:capacity] = 0
        for group, (slots, pages) in enumerate(zip(tables[::2], tables[1::2], strict=True)):
            slots[n:capacity] = -1
            by_row = pages.reshape(-1, self._max_pages)
            for row, seq in enumerate(seqs):
                table = seq.tables[group]
                by_row[row, : len(table)] = table
                slots[row] = table[at[row] // page_size] * page_size + at[row] % page_size

    def _forward(self, capacity: int, rows: PaddedRows) -> Tensor:
        token, position, length, *tables = self._fields
        batch = Batch(
            tokens=token[:capacity],
            positions=position[:capacity],
            starts=torch.arange(capacity + 1, dtype=torch.int32, device=self._device),
            lengths=length[:capacity],
            tables=tuple(
                PageTables(pages.view(-1, self._max_pages)[:capacity], slots[:capacity])
                for slots, pages in zip(tables[::2], tables[1::2], strict=True)
            ),
            sample_rows=torch.arange(capacity, device=self._device),
            spans=None,
        )
        stream = Stream(self._plan((capacity,) * self._mesh.attn_dp), self._transports, rows)
        self._caches.plan(batch)
        logits: Tensor = self._model(stream, batch, self._caches)
        stream.finish()
        return logits
