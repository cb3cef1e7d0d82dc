"""The ops that have a torch form and a Triton form. Where a tensor lies, this module alone asks.

An op takes the arguments of its torch form, and that form's docstring says what it computes. Where the first argument
lies on a GPU, the Triton form of the table runs instead. It takes the same arguments; its arithmetic is in float32, and
a result is rounded once, when it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from types import ModuleType
from typing import ParamSpec, TypeVar

from torch import Tensor

from weft.kernels import delta_rule, float8, torch_reference
from weft.kernels.float8 import Fp8Rows
from weft.kernels.split_k import SplitKPartials

P = ParamSpec("P")
R = TypeVar("R")


def on_gpu(x: Tensor | Fp8Rows | SplitKPartials) -> bool:
    """Whether Triton forms run for this first argument."""
    return x.is_cuda


@cache
def _triton(module: str) -> ModuleType:
    return import_module(f"weft.kernels.triton.{module}")  # when first needed: a CPU need not have Triton


def _op(torch_form: Callable[P, R], triton_form: str) -> Callable[P, R]:
    """triton_form: `module.function` of `weft.kernels.triton`."""
    module, name = triton_form.split(".")

    @wraps(torch_form)
    def run(*args: P.args, **more: P.kwargs) -> R:
        if not on_gpu(args[0]):  # type: ignore[arg-type]
            return torch_form(*args, **more)
        found: R = getattr(_triton(module), name)(*args, **more)
        return found

    return run


embed = _op(torch_reference.embed, "embed.embed")
cos_sin = _op(torch_reference.cos_sin, "embed.cos_sin")
rms_norm = _op(torch_reference.rms_norm, "rms_norm.rms_norm")
add_rms_norm = _op(torch_reference.add_rms_norm, "rms_norm.add_rms_norm")
sums_of_squares = _op(torch_reference.sums_of_squares, "split_norm.sums_of_squares")
norm_by_squares = _op(torch_reference.norm_by_squares, "split_norm.norm_by_squares")
gated = _op(torch_reference.gated, "rms_norm.gated")
gate_heads = _op(torch_reference.gate_heads, "gate_heads.gate_heads")
quantise = _op(float8.quantise, "float8_rows.quantise")
linear = _op(torch_reference.linear, "dense.linear_of_any_size")
multiply_heads = _op(torch_reference.multiply_heads, "multiply_heads.multiply_heads")
linear_or_partials = _op(torch_reference.linear_or_partials, "dense.linear_or_partials")
linear_float8 = _op(torch_reference.linear_float8, "float8_linear.linear")
gated_delta = _op(delta_rule.gated_delta, "delta_chunks.gated_delta")
choose = _op(torch_reference.choose, "route.choose")
route = _op(torch_reference.route, "fused_experts.route_scored")
route_chosen = _op(torch_reference.route_chosen, "fused_experts.route_chosen")
experts = _op(torch_reference.experts, "fused_experts.experts")
scale_shard = _op(torch_reference.scale_shard, "merge.scale_shard")
pack_shard = _op(torch_reference.pack_shard, "merge.pack_shard")
merge_packed = _op(torch_reference.merge_packed, "merge.merge_packed")
