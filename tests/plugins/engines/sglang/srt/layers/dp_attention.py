from sglang.srt.runtime_context import get_parallel


def world_dp_gather_enabled():
    return False


def is_dp_gatherv_active():
    return False


def _dp_gather_via_all_gather(global_tokens, local_tokens, forward_batch, is_partial):
    parallel = get_parallel()
    if parallel.attn_tp_size == 1:
        parallel.tp_group.all_gather_into_tensor(global_tokens, local_tokens)
        return
    if not is_partial and parallel.attn_tp_rank != 0:
        local_tokens.fill_(0)
    part = local_tokens.tensor_split(parallel.attn_tp_size)[parallel.attn_tp_rank]
    parallel.attn_tp_group.reduce_scatter_tensor(part, local_tokens)
    parallel.tp_group.all_gather_into_tensor(global_tokens, part)


def dp_reduce_scatter_tensor(output, input):
    parallel = get_parallel()
    if parallel.tp_size == parallel.attn_dp_size:
        parallel.tp_group.reduce_scatter_tensor(output, input)
        return
    part = input.tensor_split(parallel.tp_size)[parallel.tp_group.rank_in_group]
    parallel.tp_group.reduce_scatter_tensor(part, input)
    parallel.attn_tp_group.all_gather_into_tensor(output, part)
