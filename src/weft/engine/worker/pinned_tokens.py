"""Pinned host memory, to which a graph's last kernel writes its sampled tokens.

A copy after each graph would cost a switch to the GPU's copy engine and back before the next graph, and on the host a
launch, memory and an event per step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from weft.engine.worker.row_table import NO_TOKEN

STEPS = 8
"""Length of the ring, a power of two. The controller sends a step once it has the tokens of the step before the last,
so a place is read long before it is overwritten."""


class PinnedTokenRing:
    """A ring of pinned host memory for the tokens of the last STEPS graphs.

    rows: int32 `[STEPS, max_rows]`, pinned if kernels run on a GPU. Graph number n by `DeviceRows.steps` writes row n
    modulo STEPS.
    """

    def __init__(self, max_rows: int, on_gpu: bool):
        self.rows = torch.full((STEPS, max_rows), NO_TOKEN, dtype=torch.int32, pin_memory=on_gpu)
        self._tokens = self.rows.numpy()  # slicing an array is much cheaper than slicing a tensor
        # Events are recorded on the stream of graphs; looking it up costs more than a launch.
        self._stream = torch.cuda.current_stream() if on_gpu else None
        # blocking: a waiting thread sleeps instead of spinning.
        self._written = [torch.cuda.Event(blocking=True) for _ in range(STEPS)] if on_gpu else []
        self._unread = [False] * STEPS
        self._step = 0

    def next(self) -> None:
        """Advance to the next place. Call it once a graph is queued."""
        self._step += 1

    def wait(self, sampled: int) -> Callable[[], np.ndarray]:
        """Return a function that waits, on any thread, for the first `sampled` tokens of the last queued graph.

        Call this once nothing else changes them. Raises AssertionError if the place's earlier tokens were not read.
        """
        place = self._step % STEPS
        assert not self._unread[place], f"nobody read the tokens of {STEPS} steps"
        self._unread[place] = True
        if self._written:
            self._written[place].record(self._stream)

        def read() -> np.ndarray:
            if self._written:
                self._written[place].synchronize()
            self._unread[place] = False
            return self._tokens[place, :sampled]

        return read
