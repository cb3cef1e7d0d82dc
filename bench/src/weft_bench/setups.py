"""What is run of a pull request that Weft grew from: variants of an engine, loads, and the rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Metric = Literal[
    "tokens/s",
    "first token, ms",
    "next token, ms",
    "sequences at once",
    "collectives a step",
    "MiB a step",
    "collectives of a decode step, ms",
    "collectives and waiting of a decode step, ms",
    "collectives a decode step",
]
"""sequences at once: the most that had their tokens in the cache. MiB: that the busiest rank receives
(`weft.stream.stats.StepStat`). Of a decode step: from a profile, in the mean over steps and ranks; the first without
the waiting for the slowest rank."""
Variant = Mapping[str, Any]
"""Of `weft.engine.config.config.EngineConfig`."""


@dataclass(frozen=True)
class Load:
    """requests of input random tokens and output tokens each, `concurrency` at once. times: how often an engine gets
    it, one after the other; figures are medians."""

    requests: int
    input: int
    output: int
    concurrency: int
    times: int = 1

    def __str__(self) -> str:
        return f"{self.input} in, {self.output} out, {self.concurrency} at once"


@dataclass(frozen=True)
class Profile:
    """So many decode steps, each of `batch` sequences with prompts of `context` tokens, are profiled."""

    steps: int
    batch: int
    context: int


@dataclass(frozen=True)
class TableRow:
    """A line of the table: a metric of a load, by two variants. quoted: the pull request's figures for the two."""

    metric: Metric
    load: int
    before: str
    after: str
    quoted: tuple[float, float] | None = None


@dataclass(frozen=True)
class Setup:
    """What is run here. model: a preset, with the fields of its config.json that are changed; None: the embedded model.

    differs: what is not as in the pull request, a line each. profile: is run after the loads, with as many sequences as
    the first load has at once; its figures are among those of that load.
    """

    model: str | None
    changed: Variant
    variants: Mapping[str, Variant]
    loads: Sequence[Load]
    rows: Sequence[TableRow]
    differs: Sequence[str]
    profile: Profile | None = None

    def only(self, texts: Sequence[str]) -> Setup:
        """With the variants alone that have one of these texts in their names, and the rows that compare such."""
        variants = {name: options for name, options in self.variants.items() if any(text in name for text in texts)}
        rows = [row for row in self.rows if {row.before, row.after} <= variants.keys()]
        return replace(self, variants=variants, rows=rows)


@dataclass(frozen=True)
class Seed:
    """A pull request. original: what it measured on. min_ranks: that its layout takes.

    small: for CPUs, within a minute or two; large: for so many GPUs.
    """

    title: str
    source: str
    original: str
    min_ranks: int
    small: Setup
    large: Callable[[int], Setup]
