"""Runs for a pull request that Weft grew from: variants of an engine, loads, and the rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
"""Metric of a table.

sequences at once: maximum with their tokens in the cache. MiB: received by the busiest rank
(`weft.stream.step_stat.StepStat`). "of a decode step": means over steps and ranks of a profile; the first excludes
waiting for the slowest rank.
"""
Variant = Mapping[str, Any]
"""Options of `weft.engine.config.config.EngineConfig`."""


@dataclass(frozen=True)
class Load:
    """Load of requests with `input` random tokens and `output` tokens each, `concurrency` at once.

    times: repetitions on one engine; figures are medians.
    """

    requests: int
    input: int
    output: int
    concurrency: int
    times: int = 1

    def __str__(self) -> str:
        return f"{self.input} in, {self.output} out, {self.concurrency} at once"


@dataclass(frozen=True)
class Profile:
    """Profile of `steps` decode steps, each of `batch` sequences with prompts of `context` tokens."""

    steps: int
    batch: int
    context: int


@dataclass(frozen=True)
class TableRow:
    """Line of the table: a metric of a load, by two variants. quoted: the pull request's figures for the two."""

    metric: Metric
    load: int
    before: str
    after: str
    quoted: tuple[float, float] | None = None


@dataclass(frozen=True)
class Setup:
    """Runs on this host.

    Attributes:
        differs: differences from the pull request, a line each.
        profile: run after the loads, with the first load's number of sequences at once; its figures join that load's.
        model: a preset, with `changed` fields of its config.json; None: the embedded model.
    """

    variants: Mapping[str, Variant]
    loads: Sequence[Load]
    rows: Sequence[TableRow]
    differs: Sequence[str]
    profile: Profile | None = None
    model: str | None = None
    changed: Variant = field(default_factory=dict)

    def only(self, texts: Sequence[str]) -> Setup:
        """Return this setup with only the variants that have one of these texts in their names, and rows that compare
        them."""
        variants = {name: options for name, options in self.variants.items() if any(text in name for text in texts)}
        rows = [row for row in self.rows if {row.before, row.after} <= variants.keys()]
        return replace(self, variants=variants, rows=rows)


@dataclass(frozen=True)
class Seed:
    """Pull request. original: setup of its measurements. min_ranks: minimum ranks of its layout.

    small: for CPUs, within a minute or two; large: for a number of GPUs.
    """

    title: str
    source: str
    original: str
    min_ranks: int
    small: Setup
    large: Callable[[int], Setup]
