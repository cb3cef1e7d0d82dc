"""Typed layers. Each layer declares the sharding of its weight and maps placements by rule:

| layer | takes | gives |
|---|---|---|
| `Linear`, `RMSNorm` (replicated) | complete | complete |
| `ColumnLinear` over G | complete | features split over G |
| `RowLinear` over G | features split over G | owes a sum over G |

No layer communicates. A layer raises PlacementError for an input with another placement.
(Column and row parallel as in Megatron-LM, arXiv 1909.08053.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.engine.kernels.ops import embed, logits
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.models.layers.products import product, product_or_partials
from weft.engine.models.weights.source import OffsetFromOne, Source, View
from weft.engine.models.weights.weight_format import KeptWeight, WeightFormat
from weft.kernels.stream_ops import rms_norm
from weft.planner.experts import Forms
from weft.planner.shards import in_groups, replicated, shard
from weft.planner.spec import LayoutError, Mesh, Placement, PlacementError, Rows
from weft.stream.hidden import Hidden


class Workspace(Protocol):
    """Factory of unfilled tensors in memory that ranks can sum fastest, with the dtype and device of `like`."""

    def __call__(self, *shape: int, like: Tensor) -> Tensor: ...


def torch_empty(*shape: int, like: Tensor) -> Tensor:
    """Return an unfilled tensor in torch's own memory."""
    return like.new_empty(shape)


def no_format(name: str) -> None:
    """Keep no weight in the checkpoint's format (`Builder.format_of`)."""


@dataclass(frozen=True)
class Builder:
    """Arguments that all layers are built with: the rank, its weights' dtype and device, and the layout's choices.

    Args:
        workspace: makes tensors that the ranks will sum.
        queries_shared_by: number of neighbouring ranks that each compute the queries of all their heads, for attention
            over sharded tokens.
        shape_only: build weights without memory, for a pass over zero rows.
        experts: allowed exchanges of rows for mixtures of experts.
        format_of: returns the format to keep a weight in, by its name; None: dequantise it.
        share_unit: unit of features for uneven shares.
        whole_unit: unit of features that no share cuts.
    """

    mesh: Mesh
    rank: int
    dtype: torch.dtype
    device: torch.device
    workspace: Workspace = torch_empty
    queries_shared_by: int = 1
    shape_only: bool = False
    experts: Forms = "gather"
    format_of: Callable[[str], WeightFormat | None] = no_format
    share_unit: int = WeightFormat.share_unit
    whole_unit: int = WeightFormat.whole_unit

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return an unfilled weight, of the model's dtype by default."""
        weight = torch.empty(() if self.shape_only else shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(weight.expand(shape) if self.shape_only else weight, requires_grad=False)

    def share(
        self,
        what: str,
        size: int,
        over: str | None,
        unit: int = 1,
        replicate: bool = False,
        shared_by: int = 1,
        cut: bool = False,
        groups: int | None = None,
    ) -> slice:
        """Return this rank's share of `size` features, which a group splits in whole `unit`s (`weft.planner.shards`).
        Raises LayoutError if there are fewer units than ranks.

        Args:
            what: name of the features in the error.
            over: group of ranks; None: the rank alone.
            replicate: with fewer units than ranks, neighbouring ranks hold the same unit (key-value heads).
            shared_by: number of neighbouring ranks that hold the same share.
            cut: features may be cut at `whole_unit`s; if they do not divide, in units of `share_unit`, or fewer if
                there are fewer of these units than ranks.
            groups: groups of neighbouring units with a common key-value head, which the group of ranks splits first.
        """
        ranks = self.mesh.size(self.mesh.canonical(over)) // shared_by
        place = self.mesh.peers(self.mesh.canonical(over), self.rank).index(self.rank) // shared_by
        if cut and (size % ranks or size // ranks % self.whole_unit):
            unit = self.share_unit
            while unit > 1 and -(-size // unit) < ranks:
                unit //= 2
        units = -(-size // unit)
        if units < ranks and not replicate:
            raise LayoutError(f"{what}: {units} are too few for {over}={ranks}; choose {over} of at most {units}")
        own = replicated(units, ranks, place) if groups is None else in_groups(units, groups, ranks, place)
        if not own:
            raise LayoutError(
                f"{what}: {units} in {groups} groups leave a rank of {over}={ranks} without any; choose another {over}"
            )
        return slice(own.start * unit, min(size, own.stop * unit))


class Layer(nn.Module):
    """Module with a qualified name and the sources of each of its weights. kept: weights in the checkpoint's format."""

    def __init__(self, path: str):
        super().__init__()
        self.path = path
        self.sources: dict[str, Iterable[Source]] = {}
        self.kept: dict[str, KeptWeight] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call `forward` without torch's search for hooks: layers have none."""
        return self.forward(*args, **options)

    def declare(self, b: Builder, name: str, shape: tuple[int, ...], sources: Iterable[Source]) -> None:
        """Add an unfilled weight, which stays in a format if all its sources do. Raises LayoutError."""
        self.sources[name] = sources
        kinds = (b.format_of(source.name) for source in sources)
        if (kind := next(kinds)) is None or not all(kinds):
            self.register_parameter(name, b.empty(*shape))
            return
        self.kept[name] = kind.declare(self.path, shape, sources, b.empty)
        for end, parameter in self.kept[name].parameters.items():
            self.register_parameter(name + end, parameter)

    def declared(self, name: str) -> Tensor | KeptWeight:
        """Return the weight in the form that `weft.engine.models.layers.products.product` accepts."""
        weight: Tensor | KeptWeight = self.kept.get(name) or getattr(self, name)
        return weight


class Linear(Layer):
    """y = x Wᵀ, whole on every rank (routers, gates). x, y: complete, `[rows, inputs]` and `[rows, outputs]`. plain:
    never kept in the checkpoint's format."""

    weight: nn.Parameter

    def __init__(self, b: Builder, path: str, inputs: int, outputs: int, plain: bool = False):
        super().__init__(path)
        source = Source(f"{path}.weight", (outputs, inputs), (slice(None),))
        self.declare(replace(b, format_of=no_format) if plain else b, "weight", (outputs, inputs), [source])

    def forward(self, x: Hidden) -> Hidden:
        weight = self.declared("weight")
        value = product(x.taken(weight, self.path), weight, x.value)
        return Hidden(value, x.mesh.placement(x.placement.rows), x.mesh, self.path)


@dataclass(frozen=True, slots=True)
class Out:
    """Output of a ColumnLinear.

    Args:
        name: checkpoint prefix.
        unit: features that are never split (a head).
        views: transformations from the weight to its stored form.
        shared_by: number of neighbouring ranks that hold the same features.
        replicate, cut, groups: as in `Builder.share`.
    """

    name: str
    features: int
    unit: int = 1
    replicate: bool = False
    views: tuple[View, ...] = ()
    shared_by: int = 1
    cut: bool = False
    groups: int | None = None

    def share(self, b: Builder, over: str | None) -> slice:
        """Return a rank's share of the features."""
        return b.share(self.name, self.features, over, self.unit, self.replicate, self.shared_by, self.cut, self.groups)


class ColumnLinear(Layer):
    """Several outputs of one input in one product, each split over a group by features; over None: whole on all ranks.

    x: complete `[rows, inputs]`. Returns `[rows, sum(sizes)]`, the outputs side by side. Raises PlacementError if the
    group's ranks hold different rows. Neighbouring outputs share a product if all or none of their weights are kept.
    """

    weight: nn.Parameter

    def __init__(self, b: Builder, path: str, inputs: int, outs: Sequence[Out], over: str | None, bias: bool = False):
        super().__init__(path)
        self.over = over
        shares = [out.share(b, over) for out in outs]
        self.sizes = [s.stop - s.start for s in shares]
        self.bias = b.empty(sum(self.sizes)) if bias else None
        biases = list[Source]()
        if bias:
            self.sources["bias"] = biases
        self.products: list[tuple[str, slice]] = []
        total = 0
        held = zip(outs, shares, self.sizes, strict=True)
        for _, neighbours in groupby(held, lambda o: b.format_of(f"{o[0].name}.weight")):
            start, sources = total, []
            for out, share, size in neighbours:
                at = (slice(total - start, total - start + size),)
                sources.append(Source(f"{out.name}.weight", (out.features, inputs), (share,), at, out.views))
                if bias:
                    to = (slice(total, total + size),)
                    biases.append(Source(f"{out.name}.bias", (out.features,), (share,), to, out.views))
                total += size
            name = f"weight_{len(self.products)}" if self.products else "weight"
            self.declare(b, name, (total - start, inputs), sources)
            self.products.append((name, slice(start, total)))

    def forward(self, x: Hidden) -> Hidden:
        return Hidden(self._product(x), self._placement(x), x.mesh, self.path)

    def feed(self, x: Hidden, function: Callable[[Tensor | SplitKPartials], Tensor], origin: str) -> Hidden:
        """Return `self(x).elementwise(function, origin)`. If the product has split-K partials, the function gets and
        sums them."""
        placement = self._placement(x)
        if len(self.products) > 1:
            return Hidden(function(self._product(x)), placement, x.mesh, origin)
        weight = self.declared("weight")
        made = product_or_partials(x.taken(weight, self.path), weight, x.value, self.bias)
        return Hidden(function(made), placement, x.mesh, origin)

    def _placement(self, x: Hidden) -> Placement:
        try:
            return x.mesh.placement(x.placement.rows, split=self.over)
        except PlacementError as error:
            raise PlacementError(f"{self.path} reads {x.origin} {x.placement}: {error}") from None

    def _product(self, x: Hidden) -> Tensor:
        like, weights = x.value, [self.declared(name) for name, _ in self.products]
        if len(weights) == 1:
            return product(x.taken(weights[0], self.path), weights[0], like, bias=self.bias)
        out = like.new_empty(like.shape[0], sum(self.sizes))
        for weight, (_, columns) in zip(weights, self.products, strict=True):
            bias = None if self.bias is None else self.bias[columns]
            product(x.taken(weight, self.path), weight, like, out[:, columns], bias)
        return out


class RowLinear(Layer):
    """y = x Wᵀ with input features split over a group: y `[rows, outputs]` owes the sum over it. Only the group's first
    rank adds a bias, so that the sum holds it once."""

    weight: nn.Parameter

    def __init__(
        self,
        b: Builder,
        path: str,
        inputs: int,
        outputs: int,
        over: str,
        unit: int = 1,
        bias: bool = False,
        cut: bool = False,
        groups: int | None = None,
    ):
        super().__init__(path)
        self.over, self.workspace = over, b.workspace
        share = b.share(path, inputs, over, unit, cut=cut, groups=groups)
        source = Source(f"{path}.weight", (outputs, inputs), (slice(None), share))
        self.declare(b, "weight", (outputs, share.stop - share.start), [source])
        self.bias = None
        if bias and share.start == 0:
            self.bias = b.empty(outputs)
            self.sources["bias"] = [Source(f"{path}.bias", (outputs,), (slice(None),))]

    def forward(self, x: Hidden) -> Hidden:
        needs = Placement(x.placement.rows, split=x.mesh.canonical(self.over))
        if x.placement != needs:
            raise PlacementError(f"{self.path} needs {needs}, but {x.origin} is {x.placement}")
        placement = x.mesh.placement(x.placement.rows, owes=self.over)
        out = self.workspace(x.value.shape[0], self.weight.shape[0], like=x.value)
        product(x.value, self.declared("weight"), out, out, self.bias)
        return Hidden(out, placement, x.mesh, self.path)


class NormLayer(Layer):
    """`weft.kernels.torch_reference.rms_norm`, whole on every rank. less_one: checkpoints store the weight minus one.
    One is added in float32, and the weight stays in float32."""

    def __init__(self, b: Builder, path: str, width: int, eps: float, less_one: bool = False):
        super().__init__(path)
        self.eps = eps
        self.weight = b.empty(width, dtype=torch.float32 if less_one else None)
        views = (OffsetFromOne(),) if less_one else ()
        self.sources["weight"] = [Source(f"{path}.weight", (width,), (slice(None),), views=views)]


class RMSNorm(NormLayer):
    """Norm over all features of complete hidden states; else PlacementError."""

    def forward(self, x: Hidden) -> Hidden:
        return x.rowwise(lambda rows: rms_norm(rows, self.weight, self.eps), self.path)


class HeadNorm(NormLayer):
    """Norm of queries or keys `[T, heads, head_dim]`, per head. A rank holds whole heads."""

    def forward(self, heads: Tensor) -> Tensor:
        return rms_norm(heads, self.weight, self.eps)


def vocabulary_share(mesh: Mesh, rank: int, vocabulary: int) -> slice:
    """Return the rank's tokens of a vocabulary split over attn_tp."""
    own = shard(vocabulary, mesh.attn_tp, mesh.peers("attn_tp", rank).index(rank))
    return slice(own.start, own.stop)


class Embedding(Layer):
    """Token embeddings: int64 `[rows]` → `[rows, width]` of the DP group, whole on all ranks and complete. split: shard
    over attn_tp by tokens; the result owes the sum over it, with one nonzero term per token."""

    def __init__(self, b: Builder, path: str, vocabulary: int, width: int, split: bool = False):
        super().__init__(path)
        self.mesh, self.split = b.mesh, split and b.mesh.attn_tp > 1
        self.share = vocabulary_share(b.mesh, b.rank, vocabulary) if self.split else slice(0, vocabulary)
        self.weight = b.empty(self.share.stop - self.share.start, width)
        self.sources["weight"] = [Source(f"{path}.weight", (vocabulary, width), (self.share,))]

    def forward(self, tokens: Tensor) -> Hidden:
        value = embed(tokens, self.weight, self.share.start if self.split else None)
        placement = self.mesh.placement(Rows.GROUP, owes="attn_tp" if self.split else None)
        return Hidden(value, placement, self.mesh, self.path)


class Head(Layer):
    """Logits `[rows, vocabulary]` of complete rows, or of the rank's share of a split vocabulary.

    Args:
        tied: the embedding with the shared weight, split in the same way.
    """

    def __init__(self, b: Builder, path: str, vocabulary: int, width: int, split: bool, tied: Embedding | None):
        super().__init__(path)
        self.split = split and b.mesh.attn_tp > 1
        self._tied = [] if tied is None else [tied]  # in a list, so that it does not become a submodule
        share = vocabulary_share(b.mesh, b.rank, vocabulary) if self.split else slice(0, vocabulary)
        self.source = Source(f"{path}.weight", (vocabulary, width), (share,))
        if tied is None:
            self.weight = b.empty(share.stop - share.start, width)
            self.sources["weight"] = [self.source]

    @property
    def tied(self) -> bool:
        """True if the head uses the embedding's weight."""
        return bool(self._tied)

    def untie(self, weight: Tensor) -> None:
        """Switch to a weight of its own if it differs from the embedding's."""
        other = self._tied[0].weight
        own = weight.to(other)
        if not torch.equal(own, other):
            self._tied.clear()
            self.weight = nn.Parameter(own, requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        weight = self._tied[0].weight if self._tied else self.weight
        return logits(rows, weight)
