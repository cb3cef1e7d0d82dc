"""Attention over pages by Weft's kernels for CPUs: no page is copied, no mask is made."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from weft.engine.attention.backend import AttentionInputs, DecodeKernel, DecodeRows
from weft.engine.attention.sdpa import SeenTokens, TorchPrompts
from weft.engine.kernels import ops
from weft.engine.kernels.cpu_ops import attend, attend_prompt
from weft.engine.kv.cache import KVCache
from weft.kernels.build import model_kernels
from weft.kernels.float8 import take


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


class NativePrompts(TorchPrompts):
    """Attends by AMX in bfloat16, and by torch otherwise."""

    linear = staticmethod(ops.linear)

    def attend(self, inputs: AttentionInputs, seen: SeenTokens, slots: Tensor | None) -> None:
        keys, values = inputs.keys, inputs.values
        if slots is not None and not isinstance(keys, Tensor):  # in FP8
            keys, values, slots = (*(take(x, slots, inputs.q.dtype) for x in (keys, values)), None)
        to = inputs.out, inputs.lse
        if not attend_prompt(inputs.q, keys, values, slots, seen.limits, *to, inputs.scale, seen.window, seen.begin):
            super().attend(replace(inputs, keys=keys, values=values), seen, slots)
