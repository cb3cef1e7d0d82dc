"""Feed-forward blocks: the gated MLP, and the mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.hidden import Hidden
from weft.models.layers import Builder, ColumnLinear, Layer, Linear, Out, RowLinear
from weft.models.routing import Router, Routing
from weft.models.source import Source
from weft.place.spec import LayoutError, PlacementError, Rows


class GatedMLP(Layer):
    """down(silu(gate(x)) · up(x)), features split over the whole world; owes a sum over it."""

    def __init__(self, b: Builder, path: str, width: int, inner: int):
        super().__init__(path)
        outs = [Out(f"{path}.gate_proj", inner), Out(f"{path}.up_proj", inner)]
        self.gate_up = ColumnLinear(b, f"{path}.gate_up", width, outs, over="world")
        self.down = RowLinear(b, f"{path}.down_proj", inner, width, over="world")

    def forward(self, x: Hidden) -> Hidden:
        return self.down(self.gate_up(x).elementwise(_silu_and_multiply, self.path))


class Experts(Layer):
    """Routed experts: whole experts over `ep`, their inner features over `moe_tp`; owes a sum over both, the world.

    x: complete `[T, width]`; probability `[T, k]` and expert int64 `[T, k]` from the router. Building raises
    LayoutError where the split leaves sizes that torch's grouped product does not take.
    """

    def __init__(self, b: Builder, path: str, experts: int, width: int, inner: int):
        super().__init__(path)
        mine = b.share(f"{path} (experts)", experts, "ep")
        cut = b.share(f"{path} (inner features)", inner, "moe_tp")
        size, step = cut.stop - cut.start, 16 // b.dtype.itemsize
        if b.device.type == "cuda" and (size % step or width % step):
            raise LayoutError(
                f"{path}: {size} inner features a rank and {width} wide, but grouped products on GPUs take multiples "
                f"of {step}; choose a smaller moe_tp"
            )
        self.first, self.workspace = mine.start, b.workspace
        self.gate_up = b.empty(mine.stop - mine.start, 2 * size, width)
        self.down = b.empty(mine.stop - mine.start, width, size)
        self.sources = {"gate_up": [], "down": []}
        for i, e in enumerate(range(mine.start, mine.stop)):
            name, column = f"{path}.{e}", (inner, width)
            self.sources["gate_up"] += [
                Source(f"{name}.gate_proj.weight", column, (cut,), (i, slice(0, size))),
                Source(f"{name}.up_proj.weight", column, (cut,), (i, slice(size, 2 * size))),
            ]
            self.sources["down"].append(Source(f"{name}.down_proj.weight", (width, inner), (slice(None), cut), (i,)))

    def forward(self, x: Hidden, probability: Tensor, expert: Tensor) -> Hidden:
        value = self._world_rows(x)
        out = self.workspace(*value.shape, like=value)
        routed(value, probability, expert - self.first, self.gate_up, self.down, out)
        return Hidden(out, x.mesh.placement(x.placement.rows, owes="world"), x.mesh, self.path)

    def on_gpu(self, x: Hidden, router: Router) -> Hidden:
        """The same by Triton kernels, routing included: what lies behind x's live rows chooses no expert.

        Plain softmax routing is part of them; other routers choose in torch.
        """
        from weft.kernels.triton import moe, route  # GPUs only: a CPU need not have Triton

        value = self._world_rows(x)
        held, rows = self.gate_up.shape[0], value.shape[0]
        live = x.live if x.live is not None else torch.full((1,), rows, dtype=torch.int32, device=value.device)
        tile_rows = moe.tile_rows_of(rows)
        if router.routing.plain:
            logits = router.logits(x)
            routing = route.route(
                logits, router.routing.k, router.routing.renormalise, live, tile_rows, first=self.first, held=held
            )
        else:
            weight, expert = router.choose(x)
            expert = (expert - self.first).int()
            here = (expert >= 0) & (expert < held) & (torch.arange(rows, device=value.device)[:, None] < live)
            routing = route.sort_pairs(weight.float(), expert.where(here, -1), held, tile_rows)
        out = moe.experts(value, routing, self.gate_up, self.down, self.workspace(*value.shape, like=value))
        return Hidden(out, x.mesh.placement(x.placement.rows, owes="world"), x.mesh, self.path)

    def _world_rows(self, x: Hidden) -> Tensor:
        """The value, if it is complete and every rank holds the same rows; else PlacementError."""
        value = x.require_complete(self.path)
        if not x.mesh.same_rows(x.placement.rows, "world"):
            wanted = x.mesh.placement(Rows.WORLD)
            raise PlacementError(f"{self.path} needs {wanted}, but {x.origin} is {x.placement}")
        return value


def routed(x: Tensor, probability: Tensor, expert: Tensor, gate_up: Tensor, down: Tensor, out: Tensor) -> None:
    """Σ over a token's experts that are here of probability · down(silu(gate(x)) · up(x)), on CPUs.

    x `[T, width]`; probability `[T, k]`; expert `[T, k]`, where an index outside `[0, E)` is an expert held elsewhere;
    gate_up `[E, 2·inner, width]`; down `[E, width, inner]`. Fills out `[T, width]`, zero where no expert is here. Two
    products for each expert that has a row: torch's grouped product is on CPUs a loop over all of them.
    """
    if not x.shape[0]:
        return
    k, held = expert.shape[1], gate_up.shape[0]
    out.zero_()
    expert, order = expert.flatten().sort(stable=True)
    numbers, sizes = expert.unique_consecutive(return_counts=True)
    for e, at in zip(numbers.tolist(), order.split(sizes.tolist()), strict=True):
        if 0 <= e < held:
            token = at // k
            inner = _silu_and_multiply(F.linear(x[token], gate_up[e]))
            out.index_add_(0, token, F.linear(inner, down[e]) * probability.flatten()[at, None])


class SparseMoE(Layer):
    """Router, routed experts and, where the model has one, a shared expert for every token.

    shared: its inner features; 0: there is none. shared_name: as checkpoints name it. gated: it has a sigmoid gate.
    """

    def __init__(
        self,
        b: Builder,
        path: str,
        width: int,
        *,
        experts: int,
        inner: int,
        routing: Routing,
        shared: int = 0,
        shared_name: str = "shared_expert",
        gated: bool = True,
    ):
        super().__init__(path)
        self.router = Router(b, f"{path}.gate", width, experts, routing)
        self.experts = Experts(b, f"{path}.experts", experts, width, inner)
        self.shared = GatedMLP(b, f"{path}.{shared_name}", width, shared) if shared else None
        self.shared_gate = Linear(b, f"{path}.{shared_name}_gate", width, 1) if shared and gated else None

    def forward(self, x: Hidden) -> Hidden:
        out = self.experts.on_gpu(x, self.router) if x.value.is_cuda else self.experts(x, *self.router.choose(x))
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = shared.scale(self.shared_gate(x).elementwise(torch.sigmoid, self.shared_gate.path))
            out += shared
        return out


def _silu_and_multiply(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
