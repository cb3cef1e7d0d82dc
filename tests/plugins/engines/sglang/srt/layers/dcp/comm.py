def dcp_a2a_lse_reduce(
    cp_attn_out, cp_attn_lse, cp_group, is_lse_base_on_e=True, cuda_graph_buffers=None, comm_backend="a2a"
):
    return "SGLang's own"
