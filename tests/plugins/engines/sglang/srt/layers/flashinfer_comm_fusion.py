from sglang.srt.runtime_context import get_parallel


def flashinfer_allreduce_residual_rmsnorm(
    input_tensor,
    residual,
    weight,
    eps=1e-06,
    max_token_num=2048,
    use_oneshot=None,
    trigger_completion_at_end=False,
    fp32_acc=True,
    use_attn_tp_group=True,
):
    return None, None


def pre_initialize_workspaces(max_token_num, hidden_dim, dtype, use_oneshot=None):
    raise AssertionError("FlashInfer's workspace takes multicast objects")


def resolve_fusion_group(*, use_attn_tp_group):
    group = get_parallel().attn_tp_group if use_attn_tp_group else get_parallel().tp_group
    return group.world_size, group.rank_in_group, group
