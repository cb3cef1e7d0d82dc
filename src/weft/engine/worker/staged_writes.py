"""Staging of the host's changes on the device between two replays of graphs, with one launch for all changes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

PLACES = 4
"""Buffers of pinned memory. The controller sends a step once it has the tokens of the step before the last, so two
buffers are in use."""
ELEMENTS = 16384
"""Elements of a buffer; larger changes need several."""


class StagedWrites:
    """Writes of int32s to tensors: staged by `write` and `fill`, carried out by `flush` in no fixed order."""

    def __init__(self) -> None:
        self._writes: list[tuple[Tensor, Tensor, Tensor]] = []

    def write(self, to: Tensor, at: array[int], values: array[int]) -> None:
        """Stage `to[at] = values`. at: int64. values: int32."""
        if at:
            where, what = torch.frombuffer(at, dtype=torch.int64), torch.frombuffer(values, dtype=torch.int32)
            self._writes.append((to, where, what))

    def fill(self, to: Tensor, values: Sequence[int]) -> None:
        """Stage to[:len(values)] = values."""
        self.write(to, array("q", range(len(values))), array("i", values))

    def flush(self) -> None:
        """Carry out the staged writes, before all later work on the device."""
        for to, at, values in self._writes:
            to.index_copy_(0, at, values)
        self._writes = []

    def capture(self) -> None:
        """Prepare `flush` for use with graphs."""


class PinnedWrites(StagedWrites):
    """`StagedWrites` on a GPU, through pinned memory that one kernel reads, captured as a graph.

    Copies would cost the host, per tensor, pinned memory, an event and two or three launches: tens of µs each if the
    thread has just woken up.

    base: an int32 tensor on the device of all written tensors.
    """

    def __init__(self, base: Tensor):
        super().__init__()
        self._base, pinned = base, base.is_cuda
        counts = torch.zeros(PLACES, 4, dtype=torch.int32, pin_memory=pinned)  # aligned to 16 bytes each
        offsets = torch.zeros(PLACES, ELEMENTS, dtype=torch.int64, pin_memory=pinned)
        values = torch.zeros(PLACES, ELEMENTS, dtype=torch.int32, pin_memory=pinned)
        self._tensors = [(counts[i], offsets[i], values[i], base) for i in range(PLACES)]
        self._counts, self._offsets, self._values = counts.numpy(), offsets.numpy(), values.numpy()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._place = self._staged = 0

    def write(self, to: Tensor, at: array[int], values: array[int]) -> None:
        """See `StagedWrites.write`."""
        self._stage(to, np.frombuffer(at, np.int64), np.frombuffer(values, np.int32))

    def fill(self, to: Tensor, values: Sequence[int]) -> None:
        """See `StagedWrites.fill`."""
        self._stage(to, np.arange(len(values)), np.array(values, np.int32))

    def flush(self) -> None:
        """See `StagedWrites.flush`. The kernel runs on torch's current stream, as the graphs do."""
        if not self._staged:
            return
        self._counts[self._place, 0] = self._staged
        if self._graphs:
            self._graphs[self._place].replay()
        else:
            self._launch(self._place)
        self._place, self._staged = (self._place + 1) % PLACES, 0

    def capture(self) -> None:
        """See `StagedWrites.capture`."""
        self._launch(self._place)  # compile the kernel; nothing is staged
        torch.cuda.synchronize()
        for place in range(PLACES):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._launch(place)
            self._graphs.append(graph)

    def _launch(self, place: int) -> None:
        from weft.engine.kernels.triton.write_staged import write_staged  # a CPU need not have Triton

        write_staged(*self._tensors[place])

    def _stage(self, to: Tensor, at: np.ndarray, values: np.ndarray) -> None:
        first = (to.data_ptr() - self._base.data_ptr()) // 4
        while len(at):
            if not self._staged and self._counts[self._place, 0]:  # the kernel has not read it yet
                torch.cuda.current_stream().synchronize()
            end = min(self._staged + len(at), ELEMENTS)
            staged, now = slice(self._staged, end), end - self._staged
            self._offsets[self._place, staged] = at[:now] + first
            self._values[self._place, staged] = values[:now]
            at, values, self._staged = at[now:], values[now:], end
            if end == ELEMENTS:
                self.flush()
