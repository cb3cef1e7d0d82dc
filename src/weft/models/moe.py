"""The mixture of experts, with the shared expert of some models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.hidden import Hidden
from weft.kernels import float8
from weft.kernels.float8 import Fp8Weight
from weft.kernels.row_ops import gated
from weft.kernels.triton import definitions
from weft.models.expert_sources import EXPERT_STORAGE, ExpertLayout, ExpertStorage, expert_sources, gate_up_biases
from weft.models.layers import Builder, Layer, Linear
from weft.models.mlp import FeedForward, GatedMLP, WholeMLP
from weft.models.routing import Router, Routing, live_rows
from weft.models.source import Source
from weft.place.spec import LayoutError, PlacementError, Rows

if TYPE_CHECKING:
    from weft.kernels.triton.route import Routing as PairRouting


class Experts(Layer):
    """Routed experts: whole experts over `ep`, their inner features over `moe_tp`.

    Rows are gathered or dispatched (`weft.place.experts`). For rows that all ranks hold, the result owes a sum over ep
    and moe_tp, the world. A rank's own rows are dispatched to the ranks of their experts and back: complete.

    forward: x: complete `[T, width]`; probability `[T, k]` and expert int64 `[T, k]` from the router.
    layout: as `ExpertStorage`. limit, alpha: as `weft.kernels.torch_reference.gated` takes them.
    bias: products have biases; only the first rank of moe_tp adds the last one, so that the sum holds it once.

    Both products are in FP8, or neither. The constructor raises LayoutError where the split leaves sizes that grouped
    products do not take.
    """

    gate_up: nn.Parameter
    down: nn.Parameter

    def __init__(
        self,
        b: Builder,
        path: str,
        experts: int,
        width: int,
        inner: int,
        layout: ExpertLayout = "per_expert",
        limit: float | None = None,
        alpha: float | None = None,
        bias: bool = False,
    ):
        super().__init__(path)
        mine = b.share(f"{path} (experts)", experts, "ep")
        cut = b.share(f"{path} (inner features)", inner, "moe_tp")
        size, step = cut.stop - cut.start, 16 // b.dtype.itemsize
        if b.device.type == "cuda" and (size % step or width % step):
            raise LayoutError(
                f"{path}: {size} inner features a rank and {width} wide, but grouped products on GPUs take multiples "
                f"of {step}; choose a smaller moe_tp"
            )
        self.first, self.workspace, self.limit, self.alpha = mine.start, b.workspace, limit, alpha
        self.experts = experts
        found, held = expert_sources(path, layout, experts, width, inner, mine, cut), mine.stop - mine.start
        if b.float8 is not None and not all(b.float8(s.name) for part in found.values() for s in part):
            b = replace(b, float8=None)
        self.declare(b, "gate_up", (held, 2 * size, width), found["gate_up"])
        self.declare(b, "down", (held, width, size), found["down"])
        self.gate_up_bias = self.down_bias = None
        if bias:
            self.gate_up_bias = b.empty(mine.stop - mine.start, 2 * size)
            self.sources["gate_up_bias"] = gate_up_biases(path, experts, inner, mine, cut)
            if cut.start == 0:
                self.down_bias = b.empty(mine.stop - mine.start, width)
                self.sources["down_bias"] = [Source(f"{path}.down_proj_bias", (experts, width), (mine,))]

    def forward(self, x: Hidden, probability: Tensor, expert: Tensor) -> Hidden:
        if self._dispatches(x):
            return self._dispatched(x, probability, expert, lambda rows, *chosen: self._sum(rows, rows, *chosen))
        out = self._sum(self._world_rows(x), x.value, probability, expert)
        return Hidden(out, x.mesh.placement(x.placement.rows, owes="world"), x.mesh, self.path)

    def _sum(self, x: Tensor | float8.Fp8Rows, like: Tensor, probability: Tensor, expert: Tensor) -> Tensor:
        """The sum over this rank's experts for rows, of like's dtype."""
        out = self.workspace(*like.shape, like=like)
        more = (self.limit, self.alpha, self.gate_up_bias, self.down_bias)
        gate_up, down, expert = self.declared("gate_up"), self.declared("down"), expert - self.first
        if isinstance(gate_up, Fp8Weight) or isinstance(down, Fp8Weight):
            here = (expert >= 0) & (expert < self.gate_up.shape[0])
            return out.copy_(definitions.experts(x, probability, expert.where(here, -1), gate_up, down, *more))
        assert isinstance(x, Tensor), "rows in FP8 are for weights in FP8"
        routed(x, probability, expert, gate_up, down, out, *more)
        return out

    def on_gpu(self, x: Hidden, router: Router, shared: Hidden | None) -> Hidden:
        """`forward` by Triton kernels, routing included: rows after x's live ones choose no expert.

        shared: a term of the sum; it is overwritten.
        """
        from weft.kernels.triton import route
        from weft.kernels.triton.experts_tiles import tile_rows_of  # GPUs only: a CPU need not have Triton

        if self._dispatches(x):
            owned = self._dispatched(x, *router.choose(x), self._sum_on_gpu)
            if shared is not None:
                owned += shared
            return owned
        taken, held = self._world_rows(x), self.gate_up.shape[0]
        tile_rows = tile_rows_of(x.value.shape[0], bool(self.units))
        if x.beside is None:
            how = router.routing, live_rows(x), tile_rows, self.first, held, router.bias
            routing = route.route(router.unsummed(x), *how)
        else:
            weight, expert = router.listed(x.beside)
            token = torch.arange(len(expert), dtype=torch.int32, device=expert.device)
            routing = self._sorted(weight, expert.where(token[:, None] < live_rows(x), -1), tile_rows)
        if shared is not None:
            shared.require_placement(x.mesh.placement(x.placement.rows, owes="world"), self.path)
        out = self._sum_routed(taken, x.value, routing, None if shared is None else shared.value)
        return Hidden(out, x.mesh.placement(x.placement.rows, owes="world"), x.mesh, self.path)

    def _sum_on_gpu(self, x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
        """The sum over this rank's experts for rows; expert: counted over all ranks, −1 for none."""
        from weft.kernels.triton.experts_tiles import tile_rows_of

        return self._sum_routed(x, x, self._sorted(weight, expert, tile_rows_of(x.shape[0], bool(self.units))))

    def _sorted(self, weight: Tensor, expert: Tensor, tile_rows: int) -> PairRouting:
        """The routing of rows with chosen experts, which are counted over all ranks; −1 for none."""
        from weft.kernels.triton import route

        held = self.gate_up.shape[0]
        here = (expert >= self.first) & (expert < self.first + held)
        return route.sort_pairs(weight, (expert - self.first).where(here, -1), held, tile_rows)

    def _sum_routed(
        self, x: Tensor | float8.Fp8Rows, like: Tensor, routing: PairRouting, shared: Tensor | None = None
    ) -> Tensor:
        """shared: a term of the sum, overwritten with it. like: as for `_sum`."""
        from weft.kernels.triton import fused_experts

        out = self.workspace(*like.shape, like=like) if shared is None else shared
        return fused_experts.experts(
            x,
            routing,
            self.declared("gate_up"),
            self.declared("down"),
            out,
            limit=self.limit,
            alpha=self.alpha,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            add=shared is not None,
        )

    def _dispatches(self, x: Hidden) -> bool:
        """Whether the rows are this rank's own, to be dispatched to their experts."""
        return x.settler is not None and x.mesh.world > 1 and x.placement == x.mesh.placement(Rows.OWN)

    def _dispatched(self, x: Hidden, weight: Tensor, expert: Tensor, work: Callable[..., Tensor]) -> Hidden:
        assert x.settler is not None
        out = x.settler.dispatch(x.require_complete(self.path), weight, expert, self.experts, work)
        return Hidden(out, x.placement, x.mesh, self.path)

    def _world_rows(self, x: Hidden) -> Tensor | float8.Fp8Rows:
        """The rows, if they are complete and all ranks hold the same; else PlacementError."""
        taken = x.taken(self.declared("gate_up"), self.path)
        if not x.mesh.same_rows(x.placement.rows, "world"):
            wanted = x.mesh.placement(Rows.WORLD)
            raise PlacementError(f"{self.path} needs {wanted}, but {x.origin} is {x.placement}")
        return taken


def routed(
    x: Tensor,
    probability: Tensor,
    expert: Tensor,
    gate_up: Tensor,
    down: Tensor,
    out: Tensor,
    limit: float | None = None,
    alpha: float | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> None:
    """Σ over a token's experts on this rank of probability · down(silu(gate(x)) · up(x)), on CPUs.

    x: `[T, width]`. probability: `[T, k]`. expert: `[T, k]`; an index outside `[0, E)` is an expert of another rank.
    gate_up: `[E, 2·inner, width]`. down: `[E, width, inner]`. limit, alpha: as `gated` takes them. biases:
    `[E, 2·inner]`, `[E, width]`. Fills out `[T, width]`, zero where no expert is on this rank. It takes two products
    for each expert that
    has a row: on CPUs torch's grouped product is a loop over all experts.
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
            first, last = (None if bias is None else bias[e] for bias in (gate_up_bias, down_bias))
            inner = gated(F.linear(x[token], gate_up[e], first), limit, alpha)
            out.index_add_(0, token, F.linear(inner, down[e], last) * probability.flatten()[at, None])


class SparseMoE(FeedForward):
    """Router, routed experts and, where the model has one, a shared expert for all tokens.

    takes: the rows that it may read, by the builder's `experts`: WORLD to gather, OWN to dispatch, or either
    (`weft.place.experts`). A shared expert that may get either is whole on all ranks.

    shared: its inner features; 0: there is none. shared_gate: it has a sigmoid gate. limit, shared_limit, alpha: of
    the routed experts and of the shared one, as `weft.kernels.torch_reference.gated` takes them. expert_bias: the
    routed experts' products have biases.
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
        shared_gate: bool = True,
        stored: ExpertStorage = EXPERT_STORAGE,
        limit: float | None = None,
        shared_limit: float | None = None,
        alpha: float | None = None,
        expert_bias: bool = False,
    ):
        super().__init__(path)
        bias = f"{path}.{stored.bias}" if stored.bias else ""
        self.router = Router(b, f"{path}.{stored.router}", width, experts, routing, bias)
        self.experts = Experts(
            b, f"{path}.{stored.experts}", experts, width, inner, stored.layout, limit, alpha, expert_bias
        )
        self.takes = {"gather": (Rows.WORLD,), "dispatch": (Rows.OWN,), "auto": (Rows.WORLD, Rows.OWN)}[b.experts]
        mlp = GatedMLP if b.experts == "gather" or b.mesh.world == 1 else WholeMLP
        self.shared = mlp(b, f"{path}.{stored.shared}", width, shared, shared_limit) if shared else None
        self.shared_gate = (
            Linear(b, f"{path}.{stored.shared}_gate", width, 1, plain=True) if shared and shared_gate else None
        )

    def beside(self, x: Hidden) -> Tensor:
        return self.router.beside(x)

    def forward(self, x: Hidden) -> Hidden:
        if x.value.is_cuda:  # the gate's scaling and the sum need no kernels of their own
            shared = None if self.shared is None else self.shared(x, self.shared_gate)
            return self.experts.on_gpu(x, self.router, shared)
        weight, expert = self.router.choose(x) if x.beside is None else self.router.listed(x.beside)
        out = self.experts(x, weight.to(x.value.dtype), expert.long())
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = shared.scale(self.shared_gate(x).elementwise(torch.sigmoid, self.shared_gate.path))
            out += shared
        return out
