"""`weft profile` as a picture: what a step of each rank is made of, and one step of all ranks on one clock."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib import pyplot

from weft_bench.breakdown import KINDS, Event

COLOURS = {kind: f"C{i}" for i, kind in enumerate([*KINDS, "other"])} | {"waiting": "0.75"}
"""C0 to C9 are matplotlib's."""


def draw(ranks: Sequence[Sequence[Event]], step_us: float, title: str, out: Path) -> None:
    """Write a picture in the format that out's suffix names. ranks: events of each rank, on one clock."""
    matplotlib.use("Agg")
    figure, (bars, line) = pyplot.subplots(2, 1, figsize=(11, 2.5 + 0.9 * len(ranks)), layout="constrained")
    names = [f"rank {rank}" for rank in range(len(ranks))]
    left = [0.0] * len(ranks)
    for kind, colour in COLOURS.items():
        widths = [_us_of(events, kind) for events in ranks]
        if max(widths) > 0:
            bars.barh(names, widths, left=left, color=colour, label=kind)
            left = [at + width for at, width in zip(left, widths, strict=True)]
    bars.axvline(step_us, color="black", linestyle=":")
    bars.set_xlabel("µs of a step, in the mean; dotted: the whole step, the rest is idle")
    bars.legend(fontsize=7, ncols=len(COLOURS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    bars.invert_yaxis()

    step = _median_step(ranks[0])
    shown = [[e for e in events if e.step == step] for events in ranks]
    first = min(e.begin for events in shown for e in events)
    for rank, events in enumerate(shown):
        for kind, colour in COLOURS.items():
            spans = [span for e in events for span in _spans(e, kind, first)]
            if spans:
                line.broken_barh(spans, (rank - 0.4, 0.8), color=colour, linewidth=0)
    line.set_yticks(range(len(ranks)), names)
    line.set_xlabel(f"µs since the beginning of step {step}")
    line.invert_yaxis()
    figure.suptitle(title, fontsize=10)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def _us_of(events: Sequence[Event], kind: str) -> float:
    steps = len({e.step for e in events})
    return sum(width for e in events for _, width in _spans(e, kind, 0.0)) / steps


def _spans(event: Event, kind: str, first: float) -> list[tuple[float, float]]:
    """Return beginning and length of an event's part of this kind: a collective waits first."""
    if kind == "waiting":
        return [(event.begin - first, event.waiting)] if event.waiting else []
    if event.kind != kind:
        return []
    return [(event.begin + event.waiting - first, event.end - event.begin - event.waiting)]


def _median_step(events: Sequence[Event]) -> int:
    """Return the number of the step of median length."""
    length = {
        step: max(e.end for e in events if e.step == step) - min(e.begin for e in events if e.step == step)
        for step in {e.step for e in events}
    }
    middle = statistics.median_low(length.values())
    return next(step for step, us in length.items() if us == middle)
