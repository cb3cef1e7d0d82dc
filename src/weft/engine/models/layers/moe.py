"""Mixture of experts, with the shared expert of some models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from weft.engine.kernels import ops
from weft.engine.kernels.model_reference import Chosen
from weft.engine.kernels.side_stream import nothing, on_side_stream
from weft.engine.models.layers.basic import Builder, Layer, Linear, no_format
from weft.engine.models.layers.mlp import FeedForward, GatedMLP, WholeMLP
from weft.engine.models.layers.routing import Router, Routing
from weft.engine.models.weights.expert_sources import EXPERT_STORAGE, ExpertStorage, expert_sources, gate_up_biases
from weft.engine.models.weights.source import Source
from weft.planner.spec import LayoutError, PlacementError, Rows
from weft.stream.hidden import Hidden


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts. Raises ModelError for a routing that cannot choose among `experts`.

    Args:
        inner: inner features of each expert.
        shared: inner features of the shared expert; 0: there is none.
        shared_gate: the shared expert has a sigmoid gate.
        limit, shared_limit, alpha: limits and alpha of `weft.engine.kernels.model_reference.gated`, routed and shared.
        bias: the routed experts' products have biases.
    """

    experts: int
    inner: int
    routing: Routing
    shared: int = 0
    shared_gate: bool = True
    stored: ExpertStorage = EXPERT_STORAGE
    limit: float | None = None
    shared_limit: float | None = None
    alpha: float | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        self.routing.check(self.experts)


class Experts(Layer):
    """Routed experts: whole experts over `ep`, their inner features over `moe_tp`.

    Rows are gathered or dispatched (`weft.planner.experts`). For rows that all ranks hold, the result owes a sum over
    ep and moe_tp, which is the world. A rank's own rows are dispatched to the ranks of their experts and back:
    complete.

    Of products with biases, only the first rank of moe_tp adds the last bias, so that the sum holds it once.

    Both weights are kept in the checkpoint's format, or neither. Raises LayoutError for sizes that grouped products
    do not support.
    """

    gate_up: nn.Parameter
    down: nn.Parameter

    def __init__(self, b: Builder, path: str, width: int, c: MoEConfig):
        super().__init__(path)
        mine = b.share(f"{path} (experts)", c.experts, "ep")
        cut = b.share(f"{path} (inner features)", c.inner, "moe_tp", cut=True)
        size, step = cut.stop - cut.start, 16 // b.dtype.itemsize
        if b.device.type == "cuda" and (size % step or width % step):
            raise LayoutError(
                f"{path}: {size} inner features a rank and {width} wide, but grouped products on GPUs take multiples "
                f"of {step}; choose a smaller moe_tp"
            )
        self.mine, self.experts = range(mine.start, mine.stop), c.experts
        self.workspace, self.limit, self.alpha = b.workspace, c.limit, c.alpha
        found, held = expert_sources(path, c.stored.layout, c.experts, width, c.inner, mine, cut), len(self.mine)
        if not all(b.format_of(s.name) for part in found.values() for s in part):
            b = replace(b, format_of=no_format)
        self.declare(b, "gate_up", (held, 2 * size, width), found["gate_up"])
        self.declare(b, "down", (held, width, size), found["down"])
        self._quantised = any(weight.format is not None for weight in self.kept.values())
        self.gate_up_bias = self.down_bias = None
        if c.bias:
            self.gate_up_bias = b.empty(held, 2 * size)
            self.sources["gate_up_bias"] = gate_up_biases(path, c.experts, c.inner, mine, cut)
            if cut.start == 0:
                self.down_bias = b.empty(held, width)
                self.sources["down_bias"] = [Source(f"{path}.down_proj_bias", (c.experts, width), (mine,))]

    def forward(self, x: Hidden, router: Router, shared: Callable[[], Hidden] | None = None) -> Hidden:
        """Return the sum over the experts that the router chooses for x, complete rows. Rows after x's live ones are
        undefined. shared: computes another term of the sum, which is overwritten."""
        if self._dispatches(x):
            assert x.exchanges is not None
            added, wait = on_side_stream(shared, x.value) if shared else (None, nothing)
            chosen = router.choose(x)
            out = x.exchanges.dispatch(x.require_complete(self.path), *chosen, self.experts, self._sum_of_chosen)
            owned = Hidden(out, x.placement, x.mesh, self.path)
            wait()
            if added is not None:
                owned += added
            return owned
        taken, placement = self._world_rows(x), x.mesh.placement(x.placement.rows, owes="world")
        added, wait = on_side_stream(shared, x.value) if shared else (None, nothing)
        if added is not None:
            Hidden(x.value, placement, x.mesh, self.path).require_same(added)
        if x.extra is None:
            routed = ops.route(router.logits(x), router.routing, x.live, self.mine, self._quantised, router.bias)
        else:
            routed = ops.route_chosen(*router.listed(x.extra), x.live, self.mine, self._quantised)
        out = self._sum(taken, x.value, routed, None if added is None else added.value, wait)
        return Hidden(out, placement, x.mesh, self.path)

    def _sum_of_chosen(self, x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
        """Return the sum over this rank's experts. expert: counted over all ranks, −1 for none."""
        return self._sum(x, x, ops.route_chosen(weight, expert, None, self.mine, self._quantised))

    def _sum(
        self, x: Any, like: Tensor, chosen: Chosen, added: Tensor | None = None, wait: Callable[[], None] = nothing
    ) -> Tensor:
        """Return the sum over this rank's experts, of like's dtype. added: another term, overwritten by the result; it
        may be read after a call of `wait`."""
        gate_up, down = self.declared("gate_up"), self.declared("down")
        return (ops.experts if isinstance(gate_up, Tensor) else gate_up.experts)(
            x,
            chosen,
            gate_up,
            down,
            self.workspace(*like.shape, like=like) if added is None else added,
            limit=self.limit,
            alpha=self.alpha,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            add=added is not None,
            wait=wait,
        )

    def _dispatches(self, x: Hidden) -> bool:
        """Check if the rows are this rank's own, to be dispatched to their experts."""
        return x.exchanges is not None and x.mesh.world > 1 and x.placement == x.mesh.placement(Rows.OWN)

    def _world_rows(self, x: Hidden) -> Any:
        """Return the rows if they are complete and equal on all ranks; else raise PlacementError."""
        taken = x.taken(self.declared("gate_up"), self.path)
        if not x.mesh.same_rows(x.placement.rows, "world"):
            wanted = x.mesh.placement(Rows.WORLD)
            raise PlacementError(f"{self.path} needs {wanted}, but {x.origin} is {x.placement}")
        return taken


class SparseMoE(FeedForward):
    """Router, routed experts and an optional shared expert for all tokens.

    Attributes:
        takes: rows that it may read, by the builder's `experts`: WORLD to gather, OWN to dispatch, or either
            (`weft.planner.experts`). With either, a shared expert is whole on all ranks.
    """

    def __init__(self, b: Builder, path: str, width: int, c: MoEConfig):
        super().__init__(path)
        stored, shared = c.stored, c.shared
        bias = f"{path}.{stored.bias}" if stored.bias else ""
        self.router = Router(b, f"{path}.{stored.router}", width, c.experts, c.routing, bias)
        self.experts = Experts(b, f"{path}.{stored.experts}", width, c)
        self.takes = {"gather": (Rows.WORLD,), "dispatch": (Rows.OWN,), "auto": (Rows.WORLD, Rows.OWN)}[b.experts]
        mlp = GatedMLP if b.experts == "gather" or b.mesh.world == 1 else WholeMLP
        self.shared = mlp(b, f"{path}.{stored.shared}", width, shared, c.shared_limit) if shared else None
        self.shared_gate = (
            Linear(b, f"{path}.{stored.shared}_gate", width, 1, plain=True) if shared and c.shared_gate else None
        )

    def extra(self, x: Hidden) -> Tensor:
        return self.router.extra(x)

    def forward(self, x: Hidden) -> Hidden:
        shared = None if self.shared is None else partial(self.shared, x, self.shared_gate)
        return self.experts(x, self.router, shared)
