"""Bytes that a decode step reads from a rank's memory: at the memory's bandwidth, the minimum time of a step."""

from __future__ import annotations

import torch

from weft.engine.attention.caches import cached_layers
from weft.engine.kv.cache import token_bytes
from weft.engine.kv.cache_spec import Recurrent, Window
from weft.engine.models.layers.basic import Embedding, Head, Layer
from weft.engine.models.layers.model_config import ModelConfig
from weft.engine.models.layers.moe import Experts, SparseMoE
from weft.engine.models.load import build_model
from weft.planner.spec import Mesh


def decode_step_bytes(
    config: ModelConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    sequences: int,
    context: int,
    kv_dtype: torch.dtype | None = None,
) -> int:
    """Return the bytes that rank 0 reads for a decode step.

    It reads every weight once, except for experts: only the expected number of chosen ones, if all are equally likely.
    It also reads the cached tokens, and reads and writes recurrent states. Activations are omitted.

    Args:
        sequences: number of sequences over all DP groups, a token each.
        context: tokens of each sequence before the step.
        dtype: of weights.
        kv_dtype: of keys and values, as of `KVCache`; defaults to dtype.
    """
    model = build_model(config, mesh, 0, dtype, torch.device("meta"))
    total, mine = 0.0, -(-sequences // mesh.attn_dp)
    chosen = {id(moe.experts): moe.router.routing.k for moe in model.modules() if isinstance(moe, SparseMoE)}
    tied = any(isinstance(head, Head) and head.tied for head in model.modules())
    for layer in model.modules():
        size = float(sum(w.numel() * w.element_size() for w in layer.parameters(recurse=False)))
        if isinstance(layer, Experts):
            size *= 1 - (1 - chosen[id(layer)] / layer.experts) ** sequences
        if isinstance(layer, Layer) and not (isinstance(layer, Embedding) and not tied):
            total += size
    for spec in cached_layers(model).values():
        if isinstance(spec, Recurrent):
            total += mine * 2 * 4 * sum(torch.Size(shape).numel() for shape in spec.shapes)
            continue
        tokens = min(context, spec.size) if isinstance(spec, Window) else context / mesh.dcp
        total += mine * tokens * token_bytes(spec, kv_dtype or dtype)
    return round(total)
