"""Merge of attention over parts of the keys (decode context parallelism) in one call of Weft."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import torch

MERGES = {
    "dcp_a2a_lse_reduce": ("vllm.v1.attention.ops.dcp", "vllm.v1.attention.ops.dcp_alltoall"),
    "cp_lse_ag_out_rs": ("vllm.v1.attention.ops.dcp", "vllm.v1.attention.ops.common"),
}
"""vLLM's functions that merge, and the modules that define them, by version: the first that exists."""


def merge_by_weft() -> None:
    """Bind the merges in place of vLLM's, wherever one is bound by name. A second call changes nothing."""
    for name, modules in MERGES.items():
        module = _first(modules)
        original = getattr(module, name)
        if hasattr(original, "weft_original"):
            continue
        merge = merging(original, module)
        for other in list(sys.modules.values()):
            if getattr(other, "__name__", "").startswith("vllm.") and vars(other).get(name) is original:
                setattr(other, name, merge)


def _first(modules: tuple[str, ...]) -> ModuleType:
    for name in modules[:-1]:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    return import_module(modules[-1])


def merging(original: Callable, module: ModuleType) -> Callable:
    """Return the merge: by Weft if its group's communicator carries it, otherwise by the original."""

    @functools.wraps(original)
    def merge(
        cp_attn_out,
        cp_attn_lse,
        cp_group,
        ctx=None,
        return_lse=False,
        is_lse_base_on_e=True,
        seq_lens=None,
        query_start_loc=None,
    ):
        mask = {} if seq_lens is None else {"seq_lens": seq_lens, "query_start_loc": query_start_loc}
        communicator = cp_group.device_communicator
        if cp_group.world_size == 1 or not communicator.takes("lse_reduce_scatter", cp_attn_out):
            return original(cp_attn_out, cp_attn_lse, cp_group, ctx, return_lse, is_lse_base_on_e, **mask)
        lse = cp_attn_lse.to(torch.float32).contiguous()
        if mask:  # parts without keys may have any lse
            lse = lse.clone() if lse is cp_attn_lse else lse
            module.mask_dcp_empty_shards_(lse, seq_lens, query_start_loc)
        out, total = communicator.weft.lse_reduce_scatter(cp_attn_out, lse, "e" if is_lse_base_on_e else "2")
        return (out, total) if return_lse else out

    merge.weft_original = original
    return merge
