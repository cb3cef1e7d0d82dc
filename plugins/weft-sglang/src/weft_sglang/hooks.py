"""Hooks that replace SGLang's functions: each calls Weft if Weft carries the call, and otherwise the original."""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import dp_attention, flashinfer_comm_fusion
from sglang.srt.runtime_context import get_parallel
from torch import Tensor
from torch.nn.functional import rms_norm

from weft_sglang.groups import close, comm_of, open_communicator, takes

Hook = tuple[str, Callable]
GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator"
METHOD = "weft"
"""Name of an all_reduce by Weft, next to SGLang's "ca", "pynccl" and others."""


def hooks() -> dict[str, Hook]:
    """Return each target with its kind of hook and the hook."""
    return {
        f"{GROUP}.__init__": ("after", open_communicator),
        f"{GROUP}.destroy": ("before", close),
        f"{GROUP}._resolve_outplace_all_reduce_method": ("around", all_reduce_method),
        f"{GROUP}._all_reduce_out_place": ("around", all_reduce),
        f"{GROUP}._all_gather_into_tensor": ("around", all_gather_into_tensor),
        f"{GROUP}._reduce_scatter_tensor": ("around", reduce_scatter_tensor),
        f"{GROUP}._all_to_all_single": ("around", all_to_all_single),
        f"{GROUP}.all_gatherv": ("around", all_gatherv),
        f"{GROUP}.reduce_scatterv": ("around", reduce_scatterv),
        "sglang.srt.layers.dp_attention._dp_gather_via_all_gather": ("around", dp_gather),
        "sglang.srt.layers.dp_attention.dp_reduce_scatter_tensor": ("around", dp_reduce_scatter),
        "sglang.srt.layers.dcp.comm.dcp_a2a_lse_reduce": ("around", merge),
        "sglang.srt.layers.flashinfer_comm_fusion.flashinfer_allreduce_residual_rmsnorm": ("around", fused_norm),
        "sglang.srt.layers.flashinfer_comm_fusion.pre_initialize_workspaces": ("around", pre_initialize),
        **(
            {f"{GROUP}._can_use_flashinfer_allreduce": ("around", can_use_flashinfer)}
            if hasattr(parallel_state.GroupCoordinator, "_can_use_flashinfer_allreduce")  # of 0.5.23
            else {}
        ),
    }


# --- a group's collectives --------------------------------------------------------------------------------------------


def all_reduce_method(original, self, input_, should_use_pymscclpp_allreduce=None):
    return METHOD if takes(self, "all_reduce", input_) else original(self, input_, should_use_pymscclpp_allreduce)


def all_reduce(original, self, input_, outplace_all_reduce_method):
    if outplace_all_reduce_method in (METHOD, "auto") and takes(self, "all_reduce", input_):
        return comm_of(self).all_reduce(input_)
    return original(self, input_, outplace_all_reduce_method)


def can_use_flashinfer(original, self, input_):
    """Return False if Weft carries the group: SGLang then asks for a method, above."""
    return comm_of(self) is None and original(self, input_)


def all_gather_into_tensor(original, self, output, input):
    if not input.dim() or not takes(self, "all_gatherv", input, len(input) * self.world_size):
        return original(self, output, input)
    gathered = comm_of(self).all_gatherv(input, [len(input)] * self.world_size)
    output.copy_(gathered.view(output.shape))


def reduce_scatter_tensor(original, self, output, input):
    if not takes(self, "reduce_scatterv", input) or len(input) % self.world_size:
        return original(self, output, input)
    own = comm_of(self).reduce_scatterv(input, [len(input) // self.world_size] * self.world_size)
    return output.copy_(own.view(output.shape))


def all_to_all_single(original, self, output, input):
    if not takes(self, "all_to_allv", input) or len(input) % self.world_size:
        return original(self, output, input)
    counts = [len(input) // self.world_size] * self.world_size
    output.copy_(comm_of(self).all_to_allv(input, counts, counts).view(output.shape))


def all_gatherv(original, self, input_, sizes=None, output=None):
    tensors = [input_] if isinstance(input_, Tensor) else input_
    counts = [len(tensors[0])] * self.world_size if sizes is None else sizes
    if not all(takes(self, "all_gatherv", x, sum(counts)) for x in tensors):
        return original(self, input_, sizes, output)
    return [comm_of(self).all_gatherv(x, counts, out=output) for x in tensors]  # a list for one tensor too


def reduce_scatterv(original, self, input_, output=None, sizes=None):
    if not takes(self, "reduce_scatterv", input_) or (sizes is None and len(input_) % self.world_size):
        return original(self, input_, output, sizes)
    counts = [len(input_) // self.world_size] * self.world_size if sizes is None else sizes
    return comm_of(self).reduce_scatterv(input_, counts, out=output)


# --- data-parallel attention: sums within the groups of attention, gathered over all ----------------------------------


def mixed() -> bool:
    """Return whether ranks are groups of neighbours with attention's tensor parallelism, and nothing more."""
    parallel = get_parallel()
    return (
        parallel.attn_tp_size > 1
        and parallel.attn_cp_size == 1
        and parallel.tp_size == parallel.attn_dp_size * parallel.attn_tp_size
        and not dp_attention.world_dp_gather_enabled()
    )


def dp_gather(original, global_tokens, local_tokens, forward_batch, is_partial):
    parallel = get_parallel()
    group, rows = parallel.tp_group, len(local_tokens)
    counts = [rows] * parallel.attn_dp_size
    if not mixed() or not takes(group, "all_reduce_all_gatherv", local_tokens, sum(counts)):
        return original(global_tokens, local_tokens, forward_batch, is_partial)
    if not is_partial and parallel.attn_tp_rank != 0:
        local_tokens.fill_(0)
    global_tokens.copy_(comm_of(group).all_reduce_all_gatherv(local_tokens, counts))


def dp_reduce_scatter(original, output, input):
    parallel = get_parallel()
    group, counts = parallel.tp_group, [len(output)] * parallel.attn_dp_size
    fits = len(input) == sum(counts) and not dp_attention.is_dp_gatherv_active()
    if not mixed() or not fits or not takes(group, "reduce_scatterv_all_reduce", input):
        return original(output, input)
    output.copy_(comm_of(group).reduce_scatterv_all_reduce(input, counts))


# --- fused: the merge of decode context parallelism, all_reduce with add and norm -------------------------------------


def merge(
    original, cp_attn_out, cp_attn_lse, cp_group, is_lse_base_on_e=True, cuda_graph_buffers=None, comm_backend="a2a"
):
    if comm_backend != "a2a" or not takes(cp_group, "lse_reduce_scatter", cp_attn_out):
        return original(cp_attn_out, cp_attn_lse, cp_group, is_lse_base_on_e, cuda_graph_buffers, comm_backend)
    lse = cp_attn_lse.to(torch.float32).contiguous()
    return comm_of(cp_group).lse_reduce_scatter(cp_attn_out, lse, "e" if is_lse_base_on_e else "2")[0]


def norm_group(use_attn_tp_group: bool) -> parallel_state.GroupCoordinator:
    """Return the group whose sum the fused norm reads, as SGLang chooses it."""
    if hasattr(flashinfer_comm_fusion, "resolve_fusion_group"):  # of 0.5.23
        return flashinfer_comm_fusion.resolve_fusion_group(use_attn_tp_group=use_attn_tp_group)[2]
    parallel = get_parallel()
    if use_attn_tp_group:
        return parallel.attn_tp_group
    return parallel.moe_ep_group if parallel.moe_ep_size > 1 else parallel.moe_tp_group


@torch.library.custom_op("weft_sglang::all_reduce_add_rms_norm", mutates_args=())
def all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, use_attn_tp_group: bool) -> Tensor:
    """Return `[2, …]`: residual plus the sum of every rank's x, then its RMSNorm. An op, as compiled code calls it."""
    group = norm_group(use_attn_tp_group)
    if takes(group, "all_reduce_add_rms_norm", x):
        return comm_of(group).stacked_norm(x, residual, weight, eps)
    stacked = x.new_empty(2, *x.shape)
    stacked[0] = residual + group._all_reduce_out_place(x, "auto")
    stacked[1] = rms_norm(stacked[0], weight.shape, weight.to(x.dtype), eps)
    return stacked


@all_reduce_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, use_attn_tp_group: bool) -> Tensor:
    return x.new_empty(2, *x.shape)


def fused_norm(original, input_tensor, residual, weight, eps=1e-6, *args, use_attn_tp_group=True, **kwargs):
    if comm_of(norm_group(use_attn_tp_group)) is None:
        return original(input_tensor, residual, weight, eps, *args, use_attn_tp_group=use_attn_tp_group, **kwargs)
    op = torch.ops.weft_sglang.all_reduce_add_rms_norm
    added, normed = op(input_tensor, residual, weight, eps, use_attn_tp_group).unbind(0)
    return normed, added


def pre_initialize(original, max_token_num, hidden_dim, dtype, use_oneshot=None):
    """Create FlashInfer's workspaces, which need multicast objects, only if Weft does not carry both groups."""
    if any(comm_of(norm_group(attention)) is None for attention in (True, False)):
        original(max_token_num, hidden_dim, dtype, use_oneshot)
