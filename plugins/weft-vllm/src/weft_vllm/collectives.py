"""Collectives of one of vLLM's groups: by `weft.Communicator` if it carries the call, and otherwise by vLLM."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import rms_norm
from vllm.config import get_current_vllm_config_or_none

import weft
from weft_vllm import log
from weft_vllm.context_parallel import merge_by_weft
from weft_vllm.options import Options, why_off

GROUPS = ("tp", "dp", "ep", "dcp", "pcp")
"""vLLM's groups that exchange activations, by the first part of their names."""


class WeftCollectives:
    """Base that goes before a `DeviceCommunicatorBase` in a class's bases.

    Whether Weft carries a call follows from values that are equal on all ranks: the dtype, the shapes and the sizes of
    all ranks.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weft: weft.Communicator | None = None
        kind = self.unique_name.split(":")[0]
        if self.world_size == 1 or kind not in GROUPS:
            return
        config = get_current_vllm_config_or_none()
        options = Options.of(config)
        reason = why_off(config, options)
        if reason is None:
            try:
                name = f"vllm:{self.unique_name}"
                self.weft = weft.Communicator(
                    self.cpu_group, device=self.device, max_bytes=options.max_bytes, name=name
                )
            except (RuntimeError, ValueError, OSError) as error:  # all ranks raise: see weft.comm.meeting
                reason = " ".join(str(error).split())
        if reason is not None:
            log.warning("weft-vllm is off for group %s: %s", self.unique_name, reason)
            return
        if kind == "tp":
            options.apply_to(config)
        if kind == "dcp":
            merge_by_weft()
        log.info("weft-vllm carries group %s, calls of up to %d bytes", self.unique_name, options.max_bytes)

    def takes(self, op: str, x: Tensor, rows: int | None = None) -> bool:
        """Return whether Weft carries the op. rows: rows of the result, if it has more than x."""
        if self.weft is None or not self.weft.supports(op, x):
            return False
        return rows is None or rows * x.shape[1:].numel() * x.element_size() <= self.weft.max_bytes

    def all_reduce(self, input_):
        return self.weft.all_reduce(input_) if self.takes("all_reduce", input_) else super().all_reduce(input_)

    def all_gather(self, input_, dim=-1):
        if not input_.dim() or not self.takes("all_gatherv", input_, len(input_) * self.world_size):
            return super().all_gather(input_, dim)
        return self._gathered(input_, dim)

    def gather(self, input_, dst=0, dim=-1):
        if not input_.dim() or not self.takes("all_gatherv", input_, len(input_) * self.world_size):
            return super().gather(input_, dst, dim)
        gathered = self._gathered(input_, dim)
        return gathered if self.rank_in_group == dst else None

    def _gathered(self, x: Tensor, dim: int) -> Tensor:
        """Return all ranks' x one after another along dim."""
        every = self.weft.all_gatherv(x, [len(x)] * self.world_size)
        dim %= x.dim()
        if dim == 0:
            return every
        return every.view(self.world_size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    def all_gatherv(self, input_, dim=0, sizes=None):
        tensors = [input_] if isinstance(input_, Tensor) else input_
        counts = [len(tensors[0])] * self.world_size if sizes is None else sizes
        if dim != 0 or not all(self.takes("all_gatherv", x, sum(counts)) for x in tensors):
            return super().all_gatherv(input_, dim, sizes)
        gathered = [self.weft.all_gatherv(x, counts) for x in tensors]
        return gathered[0] if isinstance(input_, Tensor) else gathered

    def reduce_scatter(self, input_, dim=-1):
        if not self.takes("reduce_scatterv", input_):
            return super().reduce_scatter(input_, dim)
        return self._reduce_scattered(input_, dim, None)

    def reduce_scatterv(self, input_, dim=-1, sizes=None):
        if not self.takes("reduce_scatterv", input_):
            return super().reduce_scatterv(input_, dim, sizes)
        return self._reduce_scattered(input_, dim, sizes)

    def reduce_scatterv_into_output(self, input_, output, dim=-1, sizes=None):
        if not self.takes("reduce_scatterv", input_):
            return super().reduce_scatterv_into_output(input_, output, dim, sizes)
        return output.copy_(self._reduce_scattered(input_, dim, sizes))

    def _reduce_scattered(self, x: Tensor, dim: int, sizes: list[int] | None) -> Tensor:
        """Return this rank's run of the sum along dim; runs are equal if sizes are omitted."""
        x = x.movedim(dim, 0)
        if sizes is None and len(x) % self.world_size:
            raise ValueError(f"{len(x)} rows do not divide by the {self.world_size} ranks of {self.unique_name}")
        counts = [len(x) // self.world_size] * self.world_size if sizes is None else sizes
        return self.weft.reduce_scatterv(x, counts).movedim(0, dim).contiguous()

    def all_reduce_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return `[2, …, width]`: residual plus the sum of every rank's x, then its RMSNorm."""
        if self.takes("all_reduce_add_rms_norm", x):
            return self.weft.stacked_norm(x, residual, weight, eps)
        stacked = x.new_empty(2, *x.shape)
        stacked[0] = residual + self.all_reduce(x)
        stacked[1] = rms_norm(stacked[0], weight.shape, weight.to(x.dtype), eps)
        return stacked

    def destroy(self):
        if self.weft is not None:
            self.weft.close()
            self.weft = None
        super().destroy()
