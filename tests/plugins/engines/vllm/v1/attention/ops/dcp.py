import torch


def mask_dcp_empty_shards_(lse, seq_lens, query_start_loc):
    row = torch.arange(len(lse), dtype=query_start_loc.dtype)
    sequence = torch.searchsorted(query_start_loc[1:], row, right=True).clamp(max=len(seq_lens) - 1)
    lse.masked_fill_((seq_lens[sequence] == 0)[:, None], -float("inf"))


def dcp_a2a_lse_reduce(
    cp_attn_out,
    cp_attn_lse,
    cp_group,
    ctx=None,
    return_lse=False,
    is_lse_base_on_e=True,
    seq_lens=None,
    query_start_loc=None,
):
    return "vLLM's own"


def cp_lse_ag_out_rs(
    cp_attn_out,
    cp_attn_lse,
    cp_group,
    ctx=None,
    return_lse=False,
    is_lse_base_on_e=True,
    seq_lens=None,
    query_start_loc=None,
):
    return "vLLM's own"
