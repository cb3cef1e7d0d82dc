"""Table of the models' ops that have forms for GPUs and CPUs (see `weft.kernels.stream_ops.op`)."""

from __future__ import annotations

from weft.engine.kernels import cpu_ops, delta_rule, model_reference
from weft.kernels.stream_ops import op

embed = op(model_reference.embed, "weft.engine.kernels.triton.embed.embed", cpu_ops.embed)
cos_sin = op(model_reference.cos_sin, "weft.engine.kernels.triton.embed.cos_sin", cpu_ops.cos_sin)
join = op(model_reference.join, "weft.engine.kernels.model_reference.join", cpu_ops.join)
sums_of_squares = op(model_reference.sums_of_squares, "weft.engine.kernels.triton.split_norm.sums_of_squares")
norm_by_squares = op(model_reference.norm_by_squares, "weft.engine.kernels.triton.split_norm.norm_by_squares")
gated = op(model_reference.gated, "weft.kernels.triton.rms_norm.gated", cpu_ops.gated)
gate_heads = op(model_reference.gate_heads, "weft.engine.kernels.triton.gate_heads.gate_heads")
linear = op(model_reference.linear, "weft.engine.kernels.triton.dense.linear_of_any_size", cpu_ops.linear)
logits = op(model_reference.logits, "weft.engine.kernels.model_reference.logits", cpu_ops.linear)
multiply_heads = op(
    model_reference.multiply_heads, "weft.engine.kernels.triton.multiply_heads.multiply_heads", cpu_ops.multiply_heads
)
linear_or_partials = op(
    model_reference.linear_or_partials,
    "weft.engine.kernels.triton.dense.linear_or_partials",
    cpu_ops.linear_or_partials,
)
linear_float8 = op(
    model_reference.linear_quantised, "weft.engine.kernels.triton.float8_linear.linear", cpu_ops.linear_quantised
)
gated_delta = op(delta_rule.gated_delta, "weft.engine.kernels.triton.delta_chunks.gated_delta")
choose = op(model_reference.choose, "weft.engine.kernels.triton.route.choose", cpu_ops.choose)
route = op(model_reference.route, "weft.engine.kernels.triton.fused_experts.route_scored", cpu_ops.route)
route_chosen = op(model_reference.route_chosen, "weft.engine.kernels.triton.fused_experts.route_chosen")
experts = op(model_reference.experts, "weft.engine.kernels.triton.fused_experts.experts", cpu_ops.experts)
