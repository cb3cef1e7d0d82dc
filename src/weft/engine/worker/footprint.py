"""Bytes that a step reads from a rank's memory, and operations of its products: at the peaks of the memory and the
cores, the minimum time of a step."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from weft.engine.attention.caches import cached_layers
from weft.engine.kv.cache import state_bytes, token_bytes
from weft.engine.kv.cache_spec import Latent, Recurrent, Spec, Window
from weft.engine.models.layers.basic import Embedding, Head
from weft.engine.models.layers.mlp import FeedForward
from weft.engine.models.layers.model_config import LanguageModel, ModelConfig
from weft.engine.models.layers.moe import Experts, SparseMoE
from weft.engine.models.load import model_shape
from weft.planner.spec import Mesh
from weft.tune.step_table import StepShape


class Products(NamedTuple):
    """Numbers of weights.

    Attributes:
        group: weights that multiply the rows of a DP group: attention.
        world: weights that multiply the rows of all groups: feed-forward blocks without routed experts.
        experts: weights of routed experts, chosen by the rows of all groups.
        head: weights that multiply the rows that are sampled.
    """

    group: int
    world: int
    experts: int
    head: int


@dataclass(frozen=True)
class Footprint:
    """Weights and caches of a rank.

    Attributes:
        layers: number of layers.
        dense, experts: bytes of weights that all rows use, and of routed experts.
        products: numbers of weights by the rows that they multiply.
        chosen: fraction of the experts that a row uses.
        heads: query heads of a rank.
        caches: each kind of cache, and the number of its layers.
        kv_dtype: dtype of keys and values, as in `KVCache`.
        dcp: ranks that share the tokens of whole sequences.
        uneven: how far the expert-parallel rank with the most chosen experts exceeds the mean, as a fraction of its
            experts, where one expert is chosen or not with a standard deviation of 1.
    """

    layers: int
    dense: int
    experts: int
    products: Products
    chosen: float
    heads: int
    caches: tuple[tuple[Spec, int], ...]
    kv_dtype: torch.dtype
    dcp: int = 1
    uneven: float = 0.0

    @classmethod
    def of(cls, model: LanguageModel, config: ModelConfig, mesh: Mesh, kv_dtype: torch.dtype) -> Footprint:
        """Return the footprint of a rank's model.

        Steps read a row of the embedding per token, so it counts only where it is the head, too.

        Args:
            model: layers of a rank of `mesh`.
            kv_dtype: as in `Footprint`.
        """

        def held(kind: type[Module]) -> dict[int, Tensor]:
            return {id(w): w for each in model.modules() if isinstance(each, kind) for w in each.parameters()}

        blocks = [module for module in model.modules() if isinstance(module, SparseMoE)]
        mlps, routed, last, embedding = map(held, (FeedForward, Experts, Head, Embedding))
        if any(isinstance(head, Head) and head.tied for head in model.modules()):
            last, embedding = embedding, {}
        unread = routed.keys() | embedding.keys()
        read = {id(weight): weight for weight in model.parameters() if id(weight) not in unread}
        world = mlps.keys() - routed.keys()
        group, rest, head = (
            sum(read[at].numel() for at in part) for part in (read.keys() - world - last.keys(), world, last.keys())
        )
        kept = [block.experts.declared(name) for block in blocks for name in ("gate_up", "down")]
        products = Products(group, rest, sum(math.prod(weight.shape) for weight in kept), head)
        dense, experts = (sum(w.numel() * w.element_size() for w in part.values()) for part in (read, routed))
        of = blocks[0].experts.experts if blocks else 1
        chosen = blocks[0].router.routing.k / of if blocks else 0.0
        # Expected maximum of ep normal values (G. Blom, Statistical estimates and transformed beta-variables, 1958)
        maximum = NormalDist().inv_cdf((mesh.ep - 0.375) / (mesh.ep + 0.25))
        caches = tuple(Counter(cached_layers(model).values()).items())
        own, uneven = -(-config.num_heads // mesh.attn_tp), maximum / math.sqrt(of / mesh.ep)
        return cls(config.num_layers, dense, experts, products, chosen, own, caches, kv_dtype, mesh.dcp, uneven)

    def bytes_read(self, shape: StepShape, rows: int) -> float:
        """Return the bytes that a step with these rows of a DP group, and `rows` of all groups, reads.

        It reads every weight once, except for experts: only the expected number of chosen ones, if all are equally
        likely, on the rank with the most. It also reads the cached tokens, and reads and writes recurrent states.
        Activations are omitted.
        """
        likely = 1 - (1 - self.chosen) ** rows
        total = self.dense + self.experts * min(1.0, likely + self.uneven * math.sqrt(likely * (1 - likely)))
        chunks = shape.prompts if shape.prompt else 0  # rows of one prompt share a pass over its tokens
        for spec, layers in self.caches:
            if isinstance(spec, Recurrent):
                total += layers * (shape.decode + chunks) * 2 * state_bytes(spec)
                continue
            size, ranks = (spec.size, 1) if isinstance(spec, Window) else (math.inf, self.dcp)
            tokens = shape.decode * min(shape.context, size) + chunks * min(shape.cached, size) + shape.prompt
            total += layers * tokens * token_bytes(spec, self.kv_dtype) / ranks
        return total

    def operations(self, shape: StepShape, rows: int) -> float:
        """Return the floating-point operations of a step's products, and of attention in prompts. Arguments as above.

        Attention of decode rows is bound by the bytes that it reads, and omitted.
        """
        of, sampled = self.products, shape.decode + (shape.prompts if shape.prompt else 0)
        total = rows * (of.world + of.experts * self.chosen)
        total += (shape.decode + shape.prompt) * of.group + sampled * of.head
        for spec, layers in self.caches:
            if isinstance(spec, Recurrent):
                continue
            tokens = shape.cached + shape.prompt / shape.prompts / 2  # the mean of what a row attends to
            if isinstance(spec, Window):
                tokens = min(tokens, spec.size)
            if isinstance(spec, Latent):
                key, value = spec.expanded or (spec.value_width, spec.value_width)
                width = key + spec.width - spec.value_width + value
            else:
                width = 2 * spec.dim
            total += layers * shape.prompt * tokens * self.heads * width
        return 2.0 * total


def decode_step_bytes(
    config: ModelConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    sequences: int,
    context: int,
    kv_dtype: torch.dtype | None = None,
) -> int:
    """Return the bytes that rank 0 reads for a decode step.

    Args:
        sequences: number of sequences over all DP groups, a token each.
        context: tokens of each sequence before the step.
        dtype: of weights.
        kv_dtype: of keys and values, as of `KVCache`; defaults to dtype.
    """
    model = model_shape(config, mesh, dtype)
    footprint = Footprint.of(model, config, mesh, kv_dtype or dtype)
    return round(footprint.bytes_read(StepShape(-(-sequences // mesh.attn_dp), context), sequences))
