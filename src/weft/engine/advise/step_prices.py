"""Prices of steps that no rank has run: the plan's exchanges, and the bytes and products of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.comm.transport import offer_of
from weft.comm.transport_registry import automatic, transports
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import dtype_of
from weft.engine.kv.cache import token_bytes
from weft.engine.kv.cache_spec import Latent, PagedKV, Spec
from weft.engine.models.layers.model_config import LanguageModel, ModelConfig
from weft.engine.models.layers.moe import SparseMoE
from weft.engine.worker.planning import plan_model
from weft.planner.cost import INFINIBAND, costs, over_network
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
    def of(
        cls, layers: LanguageModel, model: ModelConfig, specs: Mapping[str, Spec], kv_dtype: torch.dtype
    ) -> Footprint:
        """Return the footprint of a rank's `layers` of a `model`, which may be on the `meta` device.

        specs, kv_dtype: of its caches.

        Steps read a row of the embedding per token, so it counts only where it is the head, too.
        """
        blocks = [module for module in layers.modules() if isinstance(module, SparseMoE)]
        routed = {id(weight): weight for block in blocks for weight in block.experts.parameters()}
        unread = set(routed) if model.tie_embeddings else {*routed, id(layers.embed.weight)}
        others = [weight for weight in layers.parameters() if id(weight) not in unread]
        (dense, dense_count), (experts, count) = (
            (sum(w.numel() * w.element_size() for w in weights), sum(w.numel() for w in weights))
            for weights in (others, routed.values())
        )
        chosen = blocks[0].router.routing.k / blocks[0].experts.experts if blocks else 0.0
        token = sum(token_bytes(spec, kv_dtype) for spec in specs.values() if isinstance(spec, PagedKV | Latent))
        return cls(model.num_layers, dense, experts, (dense_count, count), chosen, token)

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


@dataclass(frozen=True)
class PublishedGpu:
    """Figures of a GPU from its data sheet, and constants that fit published figures of serving.

    Attributes:
        memory: bytes.
        gb_s, tflops: peaks of memory, and of bfloat16 products.
        efficiency: fraction of both that steps reach.
        layer_us: µs of a layer's kernels and launches that depend on no size.
        error: relative error that these figures do not exceed.
        cost: cost model of exchanges.
        per_host: GPUs of a host.
    """

    memory: int
    gb_s: float
    tflops: float
    efficiency: float
    layer_us: float
    error: float
    cost: str
    per_host: int = 8

    def planner(self, config: EngineConfig, model: ModelConfig) -> Planner:
        """Return the planner of ranks on these GPUs. Raises LayoutError, PlacementError."""
        mesh, table = config.mesh, over_network(costs(self.cost), INFINIBAND)
        entries = automatic(transports(), "cuda", config.ranks_of_host)
        offers = [offer_of(entry, mesh, table.of(entry.name, mesh.world)) for entry in entries]
        return plan_model(model, mesh, dtype_of(config), offers, slices_copy=True)


GPUS = {"h200": PublishedGpu(int(141e9), 4800.0, 989.0, 0.82, 21.0, 0.35, "h200x4")}
"""Published GPUs by name. H200: the constants give Weft's four ITLs of Qwen3-30B-A3B (docs/log/rivals.md) with errors
of 7 %, and with 0.62 and 75 µs the nine of GPT-OSS-120B by another engine (docs/guide/advise.md) with errors of 11 %.
One pair of constants for all of them errs by up to 34 %, which is the interval."""


@dataclass(frozen=True)
class PricedSteps:
    """Prices of a layout's steps on a GPU that is not here, instead of measured times.

    spread: as in `StepTable`; a price has none.
    """

    gpu: PublishedGpu
    footprint: Footprint
    planner: Planner
    spread: tuple[float, ...] = (1.0,)

    @property
    def error(self) -> float:
        """Relative error of the prices."""
        return self.gpu.error

    def us(self, shape: StepShape) -> float:
        """Return the µs of a step."""
        mesh, held = self.planner.mesh, self.footprint
        moved_us = held.bytes_read(shape, mesh.attn_dp, mesh.dcp) / (self.gpu.gb_s * 1e3)
        products_us = held.operations(shape, mesh.attn_dp) / (self.gpu.tflops * 1e6)
        plan = self.planner.plan((shape.decode + shape.prompt,) * mesh.attn_dp)
        exchanges_us = sum(op.us for _, op in plan.ops(optional=False) if op.collectives)
        return held.layers * self.gpu.layer_us + max(moved_us, products_us) / self.gpu.efficiency + exchanges_us
