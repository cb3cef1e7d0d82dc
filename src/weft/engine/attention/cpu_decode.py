"""Attention of sequences of one row over pages by Weft's kernel for CPUs: no page is copied, no mask is made."""

from __future__ import annotations

from torch import Tensor

from weft.engine.attention.backend import AttentionInputs, DecodeKernel, DecodeRows
from weft.engine.kernels.cpu_ops import attend
from weft.engine.kv.cache import KVCache
from weft.kernels.build import model_kernels


class NativeDecode(DecodeKernel):
    """Splits sequences by key-value heads and parts of 128 tokens among a rank's threads. Raises BuildError."""

    def __init__(self, cache: KVCache):
        model_kernels()
        self.cache = cache

    def plan(self, rows: DecodeRows) -> tuple[Tensor, Tensor]:
        return rows.pages, rows.lengths.contiguous()

    def run(self, plan: tuple[Tensor, Tensor], inputs: AttentionInputs) -> Tensor | None:
        if len(inputs.q):
            at = inputs.q, inputs.keys, inputs.values, *plan, inputs.out, inputs.lse
            attend(*at, inputs.scale, self.cache.window, self.cache.page_size)
        return inputs.lse
