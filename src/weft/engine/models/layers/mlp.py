"""Feed-forward blocks without routing: the gated MLP, with features split over ranks or whole on all."""

from __future__ import annotations

from dataclasses import replace

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
        outs = [Out(f"{path}.{name}_proj", inner, cut=True) for name in ("gate", "up")]
        self.gate_up = ColumnLinear(b, f"{path}.gate_up", width, outs, over="world")
        self.down = RowLinear(b, f"{path}.down_proj", inner, width, over="world", cut=True)

    def forward(self, x: Hidden, score: Linear | None = None) -> Hidden:
        by = _score(x, score)
        return self.down(self.gate_up(x).elementwise(lambda both: gated(both, self.limit, score=by), self.path))


class WholeMLP(Layer):
    """Gated MLP with all features on all ranks, for both exchanges of rows (`weft.planner.experts`).

    For rows that all ranks hold, a rank computes its share of the features: the result owes a sum over the world. For
    its own rows it computes all features: complete. gate_up has each rank's features of gate, then of up, both padded
    with zeros to the largest share.
    """

    def __init__(self, b: Builder, path: str, width: int, inner: int, limit: float | None = None):
        super().__init__(path)
        self.limit, self.workspace = limit, b.workspace
        self.rank, self.ranks = b.rank, b.mesh.world
        shares = [replace(b, rank=rank).share(path, inner, "world", cut=True) for rank in range(self.ranks)]
        self.size = shares[0].stop
        padded = self.size * self.ranks
        self.gate_up, self.down = b.empty(2 * padded, width), b.empty(width, padded)
        if padded > inner and not b.shape_only:
            self.gate_up.zero_(), self.down.zero_()
        gate_up, down = list[Source](), list[Source]()
        self.sources |= {"gate_up": gate_up, "down": down}
        for rank, share in enumerate(shares):
            held, start = share.stop - share.start, rank * self.size
            gate_up += [
                Source(f"{path}.{name}.weight", (inner, width), (share,), (slice(to, to + held),))
                for name, to in (("gate_proj", 2 * start), ("up_proj", 2 * start + self.size))
            ]
            to = slice(None), slice(start, start + held)
            down.append(Source(f"{path}.down_proj.weight", (width, inner), (slice(None), share), to))

    def forward(self, x: Hidden, score: Linear | None = None) -> Hidden:
        value, by = x.require_complete(self.path), _score(x, score)
        if not x.mesh.same_rows(x.placement.rows, "world"):
            both = product(value, self.gate_up, value).unflatten(1, (self.ranks, 2 * self.size))
            out = product(gated(both, self.limit, score=by).flatten(1), self.down, value)
            return Hidden(out, x.placement, x.mesh, self.path)
        mine = slice(self.rank * self.size, (self.rank + 1) * self.size)
        both = product(value, self.gate_up[2 * mine.start : 2 * mine.stop], value)
        out = self.workspace(*value.shape, like=value)
        product(gated(both, self.limit, score=by), self.down[:, mine], out, out)
        return Hidden(out, x.mesh.placement(x.placement.rows, owes="world"), x.mesh, self.path)


def _score(x: Hidden, score: Linear | None) -> tuple[Tensor, Tensor] | None:
    """Return the score in the form that `weft.engine.kernels.ops.gated` accepts."""
    return None if score is None else (x.require_complete(score.path), score.weight)
