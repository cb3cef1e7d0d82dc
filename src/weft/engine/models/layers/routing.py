"""Routers: the choice of each token's experts and their weights, as in published models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from weft.engine.kernels import ops
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.layers.basic import Builder, Linear
from weft.engine.models.weights.source import Source
from weft.stream.hidden import Hidden


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of k experts by their scores: a softmax or a sigmoid of the router's logits in float32.

    Args:
        groups: number of groups of consecutive experts. A token's experts are in its best `top_groups` groups.
        group_best: number of a group's best scores that are summed to rank it (DeepSeek-V2: 1, arXiv 2405.04434; V3: 2,
            arXiv 2412.19437).
        bias: add a learnt bias to each score to choose experts, but not to weight them.
        offset: add a learnt bias to the logits.
        renormalise: divide the chosen weights by their sum, then multiply them by `scale`.
        wide: compute the logits themselves in float32.
    """

    k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    bias: bool = False
    renormalise: bool = False
    scale: float = 1.0
    wide: bool = False
    offset: bool = False

    def check(self, experts: int) -> None:
        """Raise ModelError if this routing cannot choose among `experts`."""
        if experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ModelError(
                f"topk_group={self.top_groups} of n_group={self.groups} cannot be chosen: {experts} experts need equal "
                "groups, of which 1 or more are chosen"
            )
        size = experts // self.groups
        if self.groups > 1 and size < self.group_best:
            raise ModelError(f"n_group={self.groups} leaves {size} experts in a group; routing ranks {self.group_best}")
        if not 1 <= self.k <= self.top_groups * size:
            raise ModelError(
                f"num_experts_per_tok={self.k} cannot be chosen: a token may go to 1 … {self.top_groups * size} experts"
            )


class Router(Linear):
    """Scores all experts for each token, and chooses. bias: name of the experts' biases; empty: the default."""

    def __init__(self, b: Builder, path: str, width: int, experts: int, routing: Routing, bias: str = ""):
        super().__init__(b, path, width, experts, plain=True)
        self.routing = routing
        self.bias = self.offset = None
        if routing.offset:
            self.offset = b.empty(experts)
            self.sources["offset"] = [Source(f"{path}.bias", (experts,), (slice(None),))]
        if routing.bias:
            self.bias = b.empty(experts, dtype=torch.float32)
            self.sources["bias"] = [Source(bias or f"{path}.e_score_correction_bias", (experts,), (slice(None),))]

    def logits(self, x: Hidden) -> Tensor | SplitKPartials:
        """Return logits `[T, E]`, in x's dtype, or in float32 if the routing is wide; on GPUs maybe as split-K
        partials."""
        value = x.require_complete(self.path)
        return ops.linear_or_partials(value, self.weight, self.offset, torch.float32 if self.routing.wide else None)

    def choose(self, x: Hidden) -> tuple[Tensor, Tensor]:
        """Return (weight float32 `[T, k]`, expert int32 or int64 `[T, k]`; on GPUs −1 for padding rows)."""
        return ops.choose(self.logits(x), self.routing, x.live, bias=self.bias)

    def extra(self, x: Hidden) -> Tensor:
        """Return the chosen experts and weights of x as int32 `[T, 2k]`, to send with rows
        (`weft.stream.stream.Extra`)."""
        weight, expert = self.choose(x)
        return torch.cat((weight.view(torch.int32), expert.int()), dim=1)

    def listed(self, extra: Tensor) -> tuple[Tensor, Tensor]:
        """Return (weight float32, expert int32 `[T, k]`) of received rows."""
        weight, expert = extra.split(self.routing.k, dim=1)
        return weight.contiguous().view(torch.float32), expert.contiguous()
