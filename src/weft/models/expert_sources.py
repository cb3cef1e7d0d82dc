"""Where checkpoints keep the weights of a mixture of experts, and which part of them a rank reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.models.source import Fused, Source, Stacked, Transposed

Form = Literal["each", "stacked", "fused", "turns", "plain turns"]


@dataclass(frozen=True, slots=True)
class Stored:
    """Where checkpoints keep the weights of a mixture of experts, behind its path.

    bias: of the router; left out, `e_score_correction_bias` behind it. form: of the experts' weights, a tensor for each
    expert and projection ("each"), one for each projection of all experts ("stacked"), these with gate and up in one
    ("fused"), or with gate and up taking turns, transposed ("turns") or not ("plain turns").
    """

    router: str = "gate"
    bias: str = ""
    experts: str = "experts"
    form: Form = "each"
    shared: str = "shared_expert"


MOSTLY = Stored()


def expert_sources(
    path: str, form: Form, experts: int, width: int, inner: int, mine: slice, cut: slice
) -> dict[str, list[Source]]:
    """Of the experts `mine` and of their inner features `cut`: `gate_up`, gate's rows first, and `down`.

    Their parameters are `[held, 2·size, width]` and `[held, width, size]`, where `mine` holds so many of `experts` and
    `cut` is of that size of `inner`.
    """
    size = cut.stop - cut.start
    gate, up, every = slice(0, size), slice(size, 2 * size), slice(None)
    if form == "each":
        shape, sources = (inner, width), dict[str, list[Source]](gate_up=[], down=[])
        for i, e in enumerate(range(mine.start, mine.stop)):
            name = f"{path}.{e}"
            sources["gate_up"] += [
                Source(f"{name}.gate_proj.weight", shape, (cut,), (i, gate)),
                Source(f"{name}.up_proj.weight", shape, (cut,), (i, up)),
            ]
            sources["down"].append(Source(f"{name}.down_proj.weight", (width, inner), (every, cut), (i,)))
        return sources
    if form in ("turns", "plain turns"):
        transposed = (Transposed(),) if form == "turns" else ()
        sources = dict(gate_up=[], down=[])
        for i, e in enumerate(range(mine.start, mine.stop)):
            last = (*transposed, Stacked(e, experts))
            for turn, rows_at in enumerate((gate, up)):
                views = (Fused(turn, 2 * inner, 2), *last)
                source = Source(f"{path}.gate_up_proj", (inner, width), (cut,), (i, rows_at), views)
                sources["gate_up"].append(source)
            sources["down"].append(Source(f"{path}.down_proj", (width, inner), (every, cut), (i,), last))
        return sources
    end, fused = (".weight", False) if form == "stacked" else ("", True)
    rows, gate_name, up_name = (2 * inner, "gate_up", "gate_up") if fused else (inner, "gate", "up")
    below = slice(inner + cut.start, inner + cut.stop) if fused else cut
    return {
        "gate_up": [
            Source(f"{path}.{gate_name}_proj{end}", (experts, rows, width), (mine, cut), (every, gate)),
            Source(f"{path}.{up_name}_proj{end}", (experts, rows, width), (mine, below), (every, up)),
        ],
        "down": [Source(f"{path}.down_proj{end}", (experts, width, inner), (mine, every, cut))],
    }


def gate_up_biases(path: str, experts: int, inner: int, mine: slice, cut: slice) -> list[Source]:
    """Of the same, for a parameter `[held, 2·size]`: gate's first; in checkpoints the two take turns."""
    size, sources = cut.stop - cut.start, []
    for i, e in enumerate(range(mine.start, mine.stop)):
        for turn in (0, 1):
            views = (Fused(turn, 2 * inner, 2), Stacked(e, experts))
            at = (i, slice(turn * size, (turn + 1) * size))
            sources.append(Source(f"{path}.gate_up_proj_bias", (inner,), (cut,), at, views))
    return sources
