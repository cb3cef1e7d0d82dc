"""FlashAttention 3 and FlashInfer as their packages present them, computed in plain torch on CPUs.

Operators have the schema of vLLM 0.25.1's library, wrappers the signatures of flashinfer-python 0.6.13; both check
shapes and dtypes as the packages do. Calls are noted, so that a test sees what was asked for.
"""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

FORWARD = (
    "fwd(Tensor(a!) q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(b!)? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, "
    "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
    "int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
METADATA = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, "
    "bool is_causal, int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, "
    "int sm_margin) -> Tensor"
)
SHARED = ("num_splits", "max_seqlen_q", "max_seqlen_k", "is_causal", "window_size_left", "window_size_right")
"""Arguments that a step's metadata and the calls of its layers must have alike."""
SIGNATURES = {
    "BatchDecodeWithPagedKVCacheWrapper": {
        "__init__": "self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, use_tensor_cores=False, "
        "paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, "
        "backend='auto', jit_args=None",
        "plan": "self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, "
        "pos_encoding_mode='NONE', window_left=-1, logits_soft_cap=None, q_data_type='float16', kv_data_type=None, "
        "o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, "
        "block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False, q_len_per_req=1",
        "run": "self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, "
        "return_lse=False, enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None, "
        "skip_softmax_threshold_scale_factor=None, kv_cache_sf=None",
    },
    "BatchPrefillWithPagedKVCacheWrapper": {
        "__init__": "self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, "
        "paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None, "
        "mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None",
        "plan": "self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, "
        "num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, "
        "causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, "
        "logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None, "
        "o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, "
        "token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, "
        "max_token_per_sequence=None, max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False",
        "run": "self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, "
        "return_lse=False, enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None, "
        "skip_softmax_threshold_scale_factor=None",
    },
    "BatchMLAPagedAttentionWrapper": {
        "__init__": "self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, "
        "kv_indices=None, kv_len_arr=None, backend='auto'",
        "plan": "self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, "
        "causal, sm_scale, q_data_type, kv_data_type, use_profiler=False",
        "run": "self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False, profiler_buffer=None, "
        "kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None",
    },
}


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window_left: int) -> tuple[Tensor, Tensor]:
    """q `[rows, heads, D]` over k, v `[tokens, kv_heads, …]`, the last row at the last token: output, natural lse."""
    rows, tokens, group = len(q), len(k), q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    score = torch.einsum("rhd,thd->hrt", q.float(), keys) * scale
    at, token = torch.arange(tokens - rows, tokens)[:, None], torch.arange(tokens)
    hidden = token > at if causal else torch.zeros(rows, tokens, dtype=torch.bool)
    if window_left >= 0:
        hidden = hidden | (token < at - window_left)
    score = score.masked_fill(hidden, float("-inf"))
    out = torch.einsum("hrt,thd->rhd", score.softmax(-1), values)
    return (
        (out, score.logsumexp(-1).T) if tokens else (torch.zeros_like(out), torch.full((rows, q.shape[1]), -torch.inf))
    )


class Calls(list[tuple[str, dict[str, Any]]]):
    """The names and arguments of calls."""

    def of(self, name: str) -> list[dict[str, Any]]:
        return [given for called, given in self if called == name]


class FlashAttention3Library:
    """Registers the operators for CPUs, under the library's namespace."""

    def __init__(self) -> None:
        self.calls = Calls()
        self._library = torch.library.Library("_vllm_fa3_C", "FRAGMENT")
        for schema, implementation in ((FORWARD, self._forward), (METADATA, self._metadata)):
            name = schema.partition("(")[0]
            self._library.define(schema)
            arguments = [a.name for a in getattr(torch.ops._vllm_fa3_C, name).default._schema.arguments]

            def call(*given: Any, name: str = name, run: Any = implementation, names: Any = arguments) -> Any:
                named = SimpleNamespace(**dict(zip(names, given, strict=True)))
                self.calls.append((name, vars(named)))
                return run(named)

            self._library.impl(name, call, "CompositeExplicitAutograd")

    def _metadata(self, x: SimpleNamespace) -> Tensor:
        assert x.seqused_k.shape == (x.batch_size,) and x.seqused_k.dtype == torch.int32
        return torch.zeros(5, dtype=torch.int32)

    def _forward(self, x: SimpleNamespace) -> list[Tensor]:
        q, k, v, out = x.q, x.k, x.v, x.out
        assert q.dtype == k.dtype == v.dtype == out.dtype == torch.bfloat16
        assert all(t.stride(-1) == 1 for t in (q, k, v, out, x.page_table))
        whole = [t for t in (x.seqused_k, x.seqused_q, x.cu_seqlens_q, x.page_table) if t is not None]
        assert all(t.dtype == torch.int32 for t in whole) and all(t.is_contiguous() for t in whole[:-1])
        assert x.cp_world_size == 1 and x.cp_rank == 0 and x.s_aux is None and x.is_causal and x.softcap == 0.0
        (_, page_size, kv_heads, dim), width, heads = k.shape, v.shape[-1], q.shape[-2]
        assert v.shape[:3] == k.shape[:3] and heads % kv_heads == 0 and dim % 8 == width % 8 == 0
        if width == dim:
            assert x.q_v is None and dim <= 256
        else:
            assert dim <= 64 and 256 <= width <= 512 and x.q_v.shape == (*q.shape[:-1], width)
            q, k = torch.cat((x.q_v, q), -1), torch.cat((v, k), -1)
        sequences, packed = len(x.page_table), x.cu_seqlens_q is not None
        if not packed:
            assert q.shape[:2] == (sequences, 1) and x.max_seqlen_q == 1 and out.shape == (*q.shape[:3], width)
            q, out = q[:, 0], out[:, 0]
        starts = torch.arange(sequences + 1) if not packed else x.cu_seqlens_q
        counts = starts.diff() if x.seqused_q is None else x.seqused_q
        assert out.shape == (*q.shape[:2], width) and len(x.seqused_k) == len(counts) == sequences
        if x.scheduler_metadata is not None:
            plan = self.calls.of("get_scheduler_metadata")[-1]
            assert all(plan[name] == getattr(x, name) for name in SHARED)
            assert (plan["batch_size"], plan["num_heads"], plan["num_heads_k"]) == (sequences, heads, kv_heads)
            assert (plan["headdim"], plan["headdim_v"], plan["page_size"]) == (dim, width, page_size)
        lse = torch.full((heads, len(q)), torch.nan)
        for i, (count, tokens) in enumerate(zip(counts.tolist(), x.seqused_k.tolist(), strict=True)):
            assert count <= x.max_seqlen_q and tokens <= x.max_seqlen_k == x.page_table.shape[1] * page_size
            table = x.page_table[i, : -(-tokens // page_size)].long()
            begin = max(0, tokens - count - x.window_size_left) if x.window_size_left >= 0 else 0
            assert bool((table[begin // page_size :] >= 0).all())
            keys, values = (t[table].flatten(0, 1)[:tokens] for t in (k, v))
            rows = slice(int(starts[i]), int(starts[i]) + count)
            out[rows], found = attention(q[rows], keys, values, x.softmax_scale, True, x.window_size_left)
            lse[:, rows] = found.T
        return [out, lse if packed else lse.T[..., None].contiguous(), q.new_empty(0), q.new_empty(0)]


class _Wrapper:
    """A paged wrapper: every call is bound to the real one's signature."""

    def __init__(self, calls: Calls, *given: Any, **named: Any):
        self._calls = calls
        self._created = self._bound("__init__", *given, **named)
        assert self._created["float_workspace_buffer"].dtype == torch.uint8

    def _bound(self, name: str, *given: Any, **named: Any) -> dict[str, Any]:
        scope: dict[str, Any] = {}
        exec(f"def f({SIGNATURES[type(self).__name__][name]}): pass", scope)
        bound = inspect.signature(scope["f"]).bind(self, *given, **named)
        bound.apply_defaults()
        found = dict(bound.arguments)
        self._calls.append((f"{type(self).__name__}.{name}", found))
        return found

    def plan(self, *given: Any, **named: Any) -> None:
        self._plan = self._bound("plan", *given, **named)
        for key, value in self._plan.items():
            if isinstance(value, Tensor):
                assert value.dtype == torch.int32 and value.dim() == 1, key
                assert "indices" in key or not value.is_cuda, f"{key}: planning would wait for a copy"

    def _over(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float, window: int) -> Tensor:
        """Fill out; return natural log-sum-exps."""
        plan = self._plan
        begins = next(plan[key] for key in ("indptr", "paged_kv_indptr", "kv_indptr") if key in plan)
        pages = next(plan[key] for key in ("indices", "paged_kv_indices", "kv_indices") if key in plan)
        starts = plan.get("qo_indptr", torch.arange(len(begins)))
        page_size = plan["page_size"]
        assert q.dtype == k.dtype == v.dtype == out.dtype == torch.bfloat16 and k.shape[1] == page_size
        assert len(q) == len(out) == starts[-1] and len(pages) == begins[-1]
        lse = torch.empty(q.shape[:2])
        for i in range(len(begins) - 1):
            table = pages[begins[i] : begins[i + 1]].long()
            last = next((plan[key] for key in ("last_page_len", "paged_kv_last_page_len") if key in plan), None)
            tokens = int(plan["kv_len_arr"][i]) if last is None else (len(table) - 1) * page_size + int(last[i])
            assert tokens > 0 and len(table) == math.ceil(tokens / page_size)
            keys, values = (t[table].flatten(0, 1)[:tokens] for t in (k, v))
            rows = slice(int(starts[i]), int(starts[i + 1]))
            causal = plan.get("causal", False)
            out[rows], lse[rows] = attention(q[rows], keys, values, scale, causal, window)
        return lse


class _Paged(_Wrapper):
    def run(self, *given: Any, **named: Any) -> Any:
        x, plan = self._bound("run", *given, **named), self._plan
        q, (k, v), out = x["q"], x["paged_kv_cache"], x["out"]
        assert q.shape[1:] == (plan["num_qo_heads"], plan.get("head_dim", plan.get("head_dim_qk")))
        assert k.shape[2] == plan["num_kv_heads"] and plan["q_data_type"] == q.dtype and out.shape == q.shape
        lse = self._over(q, k, v, out, plan["sm_scale"], plan["window_left"]) / math.log(2)
        return (out, lse) if x["return_lse"] else out


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    pass


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    pass


class BatchMLAPagedAttentionWrapper(_Wrapper):
    def run(self, *given: Any, **named: Any) -> Any:
        x, plan = self._bound("run", *given, **named), self._plan
        nope, rope, ckv, kpe = (x[key] for key in ("q_nope", "q_pe", "ckv_cache", "kpe_cache"))
        assert nope.shape[1:] == (plan["num_heads"], plan["head_dim_ckv"]) and x["out"].shape == nope.shape
        assert rope.shape[-1] == kpe.shape[-1] == plan["head_dim_kpe"] and ckv.dim() == kpe.dim() == 3
        q, k = torch.cat((nope, rope), -1), torch.cat((ckv, kpe), -1)[:, :, None]
        lse = self._over(q, k, ckv[:, :, None], x["out"], plan["sm_scale"], -1)
        lse = lse if x["return_lse_base_on_e"] else lse / math.log(2)
        return (x["out"], lse) if x["return_lse"] else x["out"]


def flashinfer(calls: Calls) -> Any:
    """A module with the paged wrappers."""

    def maker(kind: type[_Wrapper]) -> Any:
        return lambda *given, **named: kind(calls, *given, **named)

    return SimpleNamespace(
        decode=SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=maker(BatchDecodeWithPagedKVCacheWrapper)),
        prefill=SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=maker(BatchPrefillWithPagedKVCacheWrapper)),
        mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=maker(BatchMLAPagedAttentionWrapper)),
    )
