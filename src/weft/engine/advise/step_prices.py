"""Prices of steps that no rank has run: the plan's exchanges, and the bytes and products of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.engine.kv.cache import token_bytes
from weft.engine.kv.cache_spec import Latent, PagedKV, Spec
from weft.engine.models.layers.model_config import LanguageModel
from weft.engine.models.layers.moe import SparseMoE
from weft.planner.plan import Planner
from weft.tune.step_table import StepShape


@dataclass(frozen=True)
class Footprint:
    """Weights and cache of a rank.

    Attributes:
        layers: number of layers.
        dense, experts: bytes of weights that all rows use, and of routed experts.
        products: the same as numbers of weights.
        chosen: fraction of the experts that a row uses.
        token: bytes of a cached token.
    """

    layers: int
    dense: int
    experts: int
    products: tuple[int, int]
    chosen: float
    token: int

    @classmethod
    def of(cls, model: LanguageModel, layers: int, specs: Mapping[str, Spec], kv_dtype: torch.dtype) -> Footprint:
        """Return the footprint of a rank's model, which may be on the `meta` device. layers: their number. specs,
        kv_dtype: of its caches."""
        blocks = [module for module in model.modules() if isinstance(module, SparseMoE)]
        routed = {id(weight): weight for block in blocks for weight in block.experts.parameters()}
        others = [weight for weight in model.parameters() if id(weight) not in routed]
        (dense, dense_count), (experts, count) = (
            (sum(w.numel() * w.element_size() for w in weights), sum(w.numel() for w in weights))
            for weights in (others, routed.values())
        )
        chosen = blocks[0].router.routing.k / blocks[0].experts.experts if blocks else 0.0
        token = sum(token_bytes(spec, kv_dtype) for spec in specs.values() if isinstance(spec, PagedKV | Latent))
        return cls(layers, dense, experts, (dense_count, count), chosen, token)

    def bytes_read(self, shape: StepShape, groups: int, dcp: int) -> float:
        """Return the bytes that a step reads, if each of `groups` DP groups has these rows and dcp ranks share tokens.

        Rows choose their experts independently.
        """
        rows = (shape.decode + shape.prompt) * groups
        cached = shape.decode * shape.context + (shape.cached + shape.prompt) * (shape.prompt > 0)
        return self.dense + self.experts * (1 - (1 - self.chosen) ** rows) + cached * self.token / dcp

    def operations(self, shape: StepShape, groups: int) -> float:
        """Return the floating-point operations of a step's products, without attention."""
        rows = shape.decode + shape.prompt
        return 2.0 * rows * (self.products[0] + self.products[1] * self.chosen * groups)


def decode_price(footprint: Footprint, planner: Planner, shape: StepShape, threads: int) -> float:
    """Return the µs of a decode step by the cost table: all ops of its plan, and a pass over the bytes that it reads.

    threads: threads of a rank, which share the pass.
    """
    mesh = planner.mesh
    read = footprint.bytes_read(shape, mesh.attn_dp, mesh.dcp)
    return planner.plan((shape.decode,) * mesh.attn_dp).us + planner.local_us(read) / threads
