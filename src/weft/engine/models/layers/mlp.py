"""Feed-forward blocks without routing: the gated MLP, with features split over ranks or whole on all."""

from __future__ import annotations

from torch import Tensor

from weft.engine.kernels.ops import gated
from weft.engine.models.layers.basic import Builder, ColumnLinear, Layer, Linear, Out, RowLinear
from weft.engine.models.layers.products import product
from weft.engine.models.weights.source import Source
from weft.planner.spec import Rows
from weft.stream.hidden import Hidden


class FeedForward(Layer):
    """Block after a decoder layer's attention. takes: rows that it may read (`weft.stream.stream.Takes`)."""

    takes: tuple[Rows, ...] = (Rows.WORLD,)

    def extra(self, x: Hidden) -> Tensor | None:
        """Compute values of the rows to send with them in another format (`weft.stream.stream.Extra`)."""
        return None


class GatedMLP(FeedForward):
    """down(silu(gate(x)) · up(x)), with features split over the world, evenly or not; owes a sum over it. limit: see
    `weft.engine.kernels.model_reference.gated`. score: a layer of one output; its sigmoid scales each row."""

    def __init__(self, b: Builder, path: str, width: int, inner: int, limit: float | None = None):
        super().__init__(path)
        self.limit = limit
        outs = [Out(f"{path}.{name}_proj", inner, uneven=True) for name in ("gate", "up")]
        self.gate_up = ColumnLinear(b, f"{path}.gate_up", width, outs, over="world")
        self.down = RowLinear(b, f"{path}.down_proj", inner, width, over="world", uneven=True)

    def forward(self, x: Hidden, score: Linear | None = None) -> Hidden:
        by = _score(x, score)
        return self.down(self.gate_up(x).elementwise(lambda both: gated(both, self.limit, score=by), self.path))


class WholeMLP(Layer):
    """Gated MLP with all features on all ranks, for both exchanges of rows (`weft.planner.experts`).

    For rows that all ranks hold, a rank computes its share of the features: the result owes a sum over the world. For
    its own rows it computes all features: complete. gate_up: rank by rank, the rank's features of gate, then of up.
    """

    def __init__(self, b: Builder, path: str, width: int, inner: int, limit: float | None = None):
        super().__init__(path)
        self.limit, self.workspace = limit, b.workspace
        mine = b.share(path, inner, "world")
        self.size, self.ranks = mine.stop - mine.start, b.mesh.world
        self.mine = mine
        self.gate_up, self.down = b.empty(2 * inner, width), b.empty(width, inner)
        self.sources["gate_up"] = [
            Source(f"{path}.{name}.weight", (inner, width), (slice(at, at + self.size),), (slice(to, to + self.size),))
            for at in range(0, inner, self.size)
            for name, to in (("gate_proj", 2 * at), ("up_proj", 2 * at + self.size))
        ]
        self.sources["down"] = [Source(f"{path}.down_proj.weight", (width, inner), (slice(None), slice(None)))]

    def forward(self, x: Hidden, score: Linear | None = None) -> Hidden:
        value, by = x.require_complete(self.path), _score(x, score)
        if not x.mesh.same_rows(x.placement.rows, "world"):
            both = product(value, self.gate_up, value).unflatten(1, (self.ranks, 2 * self.size))
            out = product(gated(both, self.limit, score=by).flatten(1), self.down, value)
            return Hidden(out, x.placement, x.mesh, self.path)
        both = product(value, self.gate_up[2 * self.mine.start : 2 * self.mine.stop], value)
        out = self.workspace(*value.shape, like=value)
        product(gated(both, self.limit, score=by), self.down[:, self.mine], out, out)
        return Hidden(out, x.mesh.placement(x.placement.rows, owes="world"), x.mesh, self.path)


def _score(x: Hidden, score: Linear | None) -> tuple[Tensor, Tensor] | None:
    """Return the score in the form that `weft.engine.kernels.ops.gated` accepts."""
    return None if score is None else (x.require_complete(score.path), score.weight)
