"""`weft reproduce`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from weft.planner.show import columns
from weft.serve.cli.command import UserError, check_writable, stop_on_sigterm
from weft.serve.cli.progress import progress_bar
from weft.tune.host import describe_host
from weft_bench.reproduce import Measured, better, measure
from weft_bench.seeds import SEEDS
from weft_bench.setups import Metric, Seed, Setup

Name = Literal["reduce-scatterv", "mixed", "deferred", "cpu-shm", "dcp", "all"]


@dataclass(frozen=True)
class Command:
    """Reproduce the measurements of Weft's original pull requests, as closely as this host allows.

    Prints for each the differences from the original, a table (the pull request's figures, the baseline, Weft's
    figures, and their ratio), and one line of JSON. Every variant has an engine of its own; rounds alternate.

    Examples:
      weft reproduce cpu-shm --small             two CPU ranks, within a minute
      weft reproduce all --small --json all.json
      weft reproduce reduce-scatterv             on all GPUs of this host, made-up weights, all layers that fit
      weft reproduce dcp --variants fa3+triton: --num-layers 6
    """

    seed: Annotated[Name, tyro.conf.Positional]
    """Name of a pull request, or all."""
    small: bool = False
    """Run on CPU ranks, with small models and loads; without it on all GPUs of this host."""
    rounds: int | None = None
    """Measurements of each variant; figures are medians. Omitted: 2, with --small 1."""
    num_layers: int | None = None
    """Layers of the model; omitted: all that fit a GPU."""
    at_once: bool = False
    """Start the engines of all variants at the same time, and measure them in turns, if a GPU has memory for them all;
    without it each variant and round has a fresh engine."""
    variants: tuple[str, ...] = ()
    """Only variants with one of these texts in their names, such as fa3; omitted: all."""
    json: Path | None = None
    """Write the lines of JSON to this file too, updated after each variant."""

    def run(self) -> int:
        """Print tables; return exit code 1 if a variant failed. Raises UserError, LayoutError."""
        rounds = self.rounds if self.rounds is not None else 1 if self.small else 2
        if rounds < 1:
            raise UserError(f"rounds is {rounds}; it must be 1 or more")
        if self.json is not None:
            check_writable(self.json, "--json")
        names = list(SEEDS) if self.seed == "all" else [self.seed]
        gpus = 0 if self.small else torch.cuda.device_count()
        for name in names:
            self._check(name, SEEDS[name], gpus)
        stop_on_sigterm()
        setups = {name: self._setup(SEEDS[name], gpus) for name in names}
        lines: list[str] = []
        failed = False
        for name, setup in setups.items():
            seed, on_gpus = SEEDS[name], not self.small and name != "cpu-shm"
            for measured in self._measure(name, setup, rounds, "cuda" if on_gpus else "cpu"):
                fit = ", all that fit" if self.num_layers is None else ""
                differs = [*setup.differs, *([] if measured.layers is None else [f"{measured.layers} layers{fit}"])]
                found = json.dumps(line(name, seed, setup, differs, measured, rounds))
                if self.json is not None:
                    self.json.write_text("\n".join([*lines, found]) + "\n")
            print(text(name, seed, setup, differs, measured))
            print(found, flush=True)
            lines.append(found)
            failed |= bool(measured.failed)
        return int(failed)

    def _check(self, name: str, seed: Seed, gpus: int) -> None:
        if self.small or name == "cpu-shm":
            return
        if gpus < seed.min_ranks:
            raise UserError(
                f"{name} requires {seed.min_ranks} GPUs or more, but CUDA sees {gpus} here; --small runs on CPUs"
            )

    def _setup(self, seed: Seed, gpus: int) -> Setup:
        """Return the setup with the requested variants. Raises UserError."""
        setup = seed.small if self.small else seed.large(gpus)
        if not self.variants:
            return setup
        if not (found := setup.only(self.variants)).variants:
            raise UserError(f"no variant has {' or '.join(self.variants)} in its name: {', '.join(setup.variants)}")
        return found

    def _measure(self, name: str, setup: Setup, rounds: int, device: str) -> Iterator[Measured]:
        with progress_bar() as bar, tempfile.TemporaryDirectory(prefix="weft-") as folder:
            task = bar.add_task(name, total=rounds * len(setup.variants))
            model = Path(folder) / "model"
            for measured in measure(setup, model, rounds, self.num_layers, device, self.at_once):
                bar.advance(task)
                yield measured


def text(name: str, seed: Seed, setup: Setup, differs: list[str], measured: Measured) -> str:
    """Format the table of a seed."""
    lines = [f"{name}: {seed.title} ({seed.source})", f"  it measured: {seed.original}"]
    lines += [f"  here: {each}" for each in differs]
    lines += [f"  failed: {variant}: {why}" for variant, why in measured.failed.items()]
    lines += [f"  loads: {'; '.join(map(str, setup.loads))}", ""]
    cells: list[tuple[str, ...]] = [("", "pull request", "compared with", "Weft", "times better")]
    for row in setup.rows:
        quoted = "" if row.quoted is None else quote(row.metric, *row.quoted)
        before, after = (measured.value(row, variant) for variant in (row.before, row.after))
        what = f"{row.metric}, {setup.loads[row.load].concurrency} at once: {row.before} → {row.after}"
        cells.append((what, quoted, cell(before), cell(after), cell(measured.ratio(row))))
    return "\n".join([*lines, *columns(cells)]) + "\n"


def cell(figure: float | None) -> str:
    """Format a figure, or note that it was not measured."""
    return "not measured" if figure is None else f"{figure:,.2f}"


def quote(metric: Metric, before: float, after: float) -> str:
    """Format a pull request's figures."""
    return f"{before:,g} → {after:,g} ({cell(better(metric, before, after))})"


def line(name: str, seed: Seed, setup: Setup, differs: list[str], measured: Measured, rounds: int) -> dict[str, Any]:
    """Return the JSON values of a seed, with all figures of all variants."""
    return {
        "what": "weft reproduce",
        "seed": name,
        "source": seed.source,
        "host": describe_host(),
        "rounds": rounds,
        "differs": differs,
        "loads": [vars(load) for load in setup.loads],
        "variants": {variant: dict(options) for variant, options in setup.variants.items()},
        "figures": measured.figures,
        "failed": measured.failed,
        "rows": [
            {
                "metric": row.metric,
                "load": row.load,
                "before": row.before,
                "after": row.after,
                "quoted": row.quoted,
                "times_better": None if (ratio := measured.ratio(row)) is None else round(ratio, 3),
            }
            for row in setup.rows
        ],
    }
