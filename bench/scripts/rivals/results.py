"""Results of a comparison: JSON and a table, written after each measurement."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.planner.show import columns

Row = dict[str, Any]
POINT = ("clients", "input", "output")


@dataclass(frozen=True)
class Figure:
    """Column of the table: a key of `weft_bench.serving.summary`. smaller: less of it is better."""

    title: str
    key: str
    smaller: bool

    def mean(self, rows: Sequence[Row]) -> float | None:
        """Return the mean over rounds; None if a round has no such figure."""
        values = [row[self.key] for row in rows]
        return None if None in values else statistics.mean(values)


FIGURES = (
    Figure("TPOT ms", "median_tpot_ms", True),
    Figure("ITL ms", "median_itl_ms", True),
    Figure("p99", "p99_itl_ms", True),
    Figure("TTFT ms", "median_ttft_ms", True),
    Figure("p99", "p99_ttft_ms", True),
    Figure("output tokens/s", "output_throughput", False),
    Figure("prompt tokens/s", "input_throughput", False),
)


SHOWN = ("engine", "error", "start_s", "cache_tokens", "round", *POINT, "duration", "completed")
SHOWN += tuple(figure.key for figure in FIGURES)


class Results:
    """compare.json and table.txt in a folder. about: head of the JSON. labels: the engines' labels, in their order."""

    def __init__(self, folder: Path, about: Row, labels: Sequence[str]):
        self._folder, self._about, self._labels = folder, about, labels
        self.starts: list[Row] = []
        self.rows: list[Row] = []

    def add_start(self, row: Row) -> None:
        """Add an engine that has started, or failed to."""
        self._add(self.starts, row)

    def add(self, row: Row) -> None:
        """Add a point that was measured, or failed."""
        self._add(self.rows, row)

    def _add(self, to: list[Row], row: Row) -> None:
        to.append(row)
        values = {name: round(v, 1) if isinstance(v, float) else v for name, v in row.items()}
        print(" ".join(f"{name}={values[name]}" for name in SHOWN if name in row), flush=True)
        text = json.dumps(self._about, indent=1).removesuffix("\n}")
        for name, rows in (("starts", self.starts), ("rows", self.rows)):
            lines = ",\n  ".join(map(json.dumps, rows))
            text += f',\n "{name}": [\n  {lines}\n ]'
        (self._folder / "compare.json").write_text(text + "\n}\n")
        (self._folder / "table.txt").write_text(self.table() + "\n")

    def table(self) -> str:
        """Format means over rounds, and the first engine's multiples of the best other."""
        starts = [f"{start['engine']}: {_start_text(start)}" for start in self.starts]
        rows: list[tuple[str, ...]] = [("engine", *POINT, *(figure.title for figure in FIGURES))]
        for point in dict.fromkeys(tuple(row[name] for name in POINT) for row in self.rows):
            means: dict[str, list[float | None]] = {}
            for label in self._labels:
                if same := [row for row in self.rows if _measured(row, label, point)]:
                    means[label] = [figure.mean(same) for figure in FIGURES]
                    rows.append((label, *map(str, point), *("-" if v is None else f"{v:,.1f}" for v in means[label])))
            mine, others = means.pop(self._labels[0], None), list(means.values())
            if mine and others:
                cells = map(_multiple, FIGURES, mine, zip(*others, strict=True))
                rows.append((f"{self._labels[0]} / best other", *map(str, point), *cells))
        return "\n".join([*starts, "", *columns(rows)])


def _start_text(start: Row) -> str:
    if "error" in start:
        return f"did not start: {start['error'].splitlines()[0]}"
    return f"{start['start_s']:.0f} s to start, {start['cache_tokens']:,} tokens in the cache"


def _measured(row: Row, label: str, point: tuple[int, ...]) -> bool:
    return row["engine"] == label and tuple(row[name] for name in POINT) == point and "error" not in row


def _multiple(figure: Figure, mine: float | None, others: Sequence[float | None]) -> str:
    known = [value for value in others if value]
    if mine is None or not known:
        return "-"
    return f"{mine / (min(known) if figure.smaller else max(known)):.2f}"
