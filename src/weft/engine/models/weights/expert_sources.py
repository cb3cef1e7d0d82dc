"""Sources of the weights of a mixture of experts: names in checkpoints, and the part that a rank reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from weft.engine.models.weights.source import Fused, Shape, Slices, Source, Stacked, Transposed, View

ExpertLayout = Literal["per_expert", "per_expert_w123", "stacked", "fused", "interleaved", "interleaved_transposed"]


@dataclass(frozen=True, slots=True)
class ExpertStorage:
    """Names of the weights of a mixture of experts in checkpoints, after the block's path.

    Args:
        router, experts, shared: prefixes of the router's, the experts' and the shared expert's weights.
        block: prefix of the block, after the layer's path.
        bias: the router's bias; empty: `e_score_correction_bias` after the router.
        layout: layout of the experts' weights:
            per_expert: a tensor per expert and projection;
            per_expert_w123: per_expert, with gate, down and up named w1, w2 and w3;
            stacked: a tensor per projection, with all experts;
            fused: stacked, with gate and up in one tensor;
            interleaved: fused, with alternating rows of gate and up;
            interleaved_transposed: interleaved, with outputs as the last dimension.
    """

    router: str = "gate"
    bias: str = ""
    experts: str = "experts"
    layout: ExpertLayout = "per_expert"
    shared: str = "shared_expert"
    block: str = "mlp"


EXPERT_STORAGE = ExpertStorage()
"""Names in most checkpoints."""


@dataclass(frozen=True, slots=True)
class SourcesOnDemand(Iterable[Source]):
    """Sources that are made each time they are read: a model has tens of thousands of them."""

    make: Callable[[], Iterator[Source]]

    def __iter__(self) -> Iterator[Source]:
        return self.make()


def expert_sources(
    path: str, layout: ExpertLayout, experts: int, width: int, inner: int, mine: slice, cut: slice
) -> dict[str, Iterable[Source]]:
    """Return the sources of parameters `gate_up` `[held, 2·size, width]`, gate's rows first, and `down` `[held, width,
    size]`. mine: the `held` experts of this rank. cut: the `size` of their `inner` features on this rank."""
    size = cut.stop - cut.start
    gate, up, everything = slice(0, size), slice(size, 2 * size), slice(None)
    if layout not in ("stacked", "fused"):

        def each(parts: slice, shape: Shape, take: Slices, at: tuple[Slices, ...]) -> Iterator[Source]:
            for i, e in enumerate(range(mine.start, mine.stop)):
                stored = _parts_of_expert(path, layout, e, experts, inner)[parts]
                for (name, views), rows_at in zip(stored, at, strict=True):
                    yield Source(name, shape, take, (i, *rows_at), views)

        gate_up = partial(each, slice(0, 2), (inner, width), (cut,), ((gate,), (up,)))
        down = partial(each, slice(2, 3), (width, inner), (everything, cut), ((),))
        return {"gate_up": SourcesOnDemand(gate_up), "down": SourcesOnDemand(down)}
    end, fused = (".weight", False) if layout == "stacked" else ("", True)
    rows, gate_name, up_name = (2 * inner, "gate_up", "gate_up") if fused else (inner, "gate", "up")
    below = slice(inner + cut.start, inner + cut.stop) if fused else cut
    return {
        "gate_up": [
            Source(f"{path}.{gate_name}_proj{end}", (experts, rows, width), (mine, cut), (everything, gate)),
            Source(f"{path}.{up_name}_proj{end}", (experts, rows, width), (mine, below), (everything, up)),
        ],
        "down": [Source(f"{path}.down_proj{end}", (experts, width, inner), (mine, everything, cut))],
    }


def _parts_of_expert(
    path: str, layout: ExpertLayout, expert: int, experts: int, inner: int
) -> list[tuple[str, tuple[View, ...]]]:
    """Return the names of an expert's gate, up and down in the checkpoint, and views of their stored forms."""
    if layout in ("per_expert", "per_expert_w123"):
        names = ("gate_proj", "up_proj", "down_proj") if layout == "per_expert" else ("w1", "w3", "w2")
        return [(f"{path}.{expert}.{name}.weight", ()) for name in names]
    transposed = (Transposed(),) if layout == "interleaved_transposed" else ()
    views = (*transposed, Stacked(expert, experts))
    both = [(f"{path}.gate_up_proj", (Fused(start, 2 * inner, 2), *views)) for start in (0, 1)]
    return [*both, (f"{path}.down_proj", views)]


def gate_up_biases(path: str, experts: int, inner: int, mine: slice, cut: slice) -> list[Source]:
    """Return the sources of a parameter `[held, 2·size]`, gate's biases first, as `expert_sources`; interleaved."""
    size, sources = cut.stop - cut.start, []
    for i, e in enumerate(range(mine.start, mine.stop)):
        for start in (0, 1):
            views = (Fused(start, 2 * inner, 2), Stacked(e, experts))
            at = (i, slice(start * size, (start + 1) * size))
            sources.append(Source(f"{path}.gate_up_proj_bias", (inner,), (cut,), at, views))
    return sources
