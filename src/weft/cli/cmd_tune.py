"""`weft tune`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from weft.bench.host import describe_host
from weft.bench.ranks import run_ranks
from weft.bench.tune import find_sizes, price, price_locals
from weft.bench.tune_gpu import measure_gpus
from weft.cli.command import UserError, check_writable, stop_on_sigterm
from weft.cli.progress import progress_bar
from weft.comm.transport_registry import SHM_RANKS, TransportName, automatic, transports
from weft.place.cost import host_table

SIZES = [1 << p for p in range(12, 25, 2)]
GPU_SIZES = [1 << p for p in range(13, 27)]
LEFT_OUT = ", or ".join(" and ".join(e.option for e in automatic(transports(), on, 2)) for on in ("cpu", "cuda"))


@dataclass(frozen=True)
class Command:
    """Measure this host, and write the table by which the planner chooses transports and edges.

    The engine reads the table from then on, unless --cost names another; `weft plan --cost TABLE.json` shows what it
    makes of it. Run it while the machine is idle, with as many ranks as will be served with.

    Examples:
      weft tune                        2 and 4 ranks on CPUs, all transports: about a minute
      weft tune --ranks 8 --out eight.json
      weft tune --device cuda --out gpus.json
    """

    device: Literal["cpu", "cuda"] = "cpu"
    """What to measure: ranks on CPUs, or one on each GPU."""
    ranks: tuple[int, ...] = ()
    """Numbers of ranks to measure; left out, 2 and 4, or all GPUs."""
    transports: Annotated[
        tuple[TransportName, ...],
        tyro.conf.arg(
            help=f"What to measure; left out, {LEFT_OUT}, and those of plugins: what --transport auto of the engine "
            "chooses among."
        ),
    ] = ()
    plugins: tuple[str, ...] = ()
    """Python modules or .py files that add transports; they run, so name only what you trust."""
    out: Path | None = None
    """Where to write the table; left out, where the engine looks for it."""

    def run(self) -> int:
        """Writes the table and says where. Raises UserError."""
        out = self.out or host_table(gpus=self.device == "cuda")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {out}: {error}; choose another file with --out") from error
        check_writable(out, "--out")
        gpus = torch.cuda.device_count() if self.device == "cuda" else 0
        if self.device == "cuda" and gpus < 2:
            raise UserError(f"--device cuda takes two GPUs or more; this machine has {gpus}")
        known, limit = transports(self.plugins), gpus or SHM_RANKS
        if unknown := [n for n in self.transports if n not in known or not known[n].runs_on(self.device)]:
            raise UserError(f"--transports {unknown[0]} does not run on --device {self.device}")
        ranks = sorted(self.ranks or ((gpus,) if gpus else (2, 4)))
        if not all(2 <= n <= limit for n in ranks):
            raise UserError(f"--ranks takes numbers from 2 to {limit}")
        stop_on_sigterm()
        sizes = GPU_SIZES if gpus else SIZES
        named = [str(n) for n in self.transports]
        table = self.measure(ranks, named or [e.option for e in automatic(known, self.device, 2)], sizes)
        out.write_text(json.dumps(table, indent=1) + "\n")
        found = table["transports"]
        print(f"{out}: {sum(map(len, found.values()))} times of {', '.join(found)}")
        return 0

    def measure(self, ranks: list[int], options: list[str], sizes: list[int]) -> dict[str, Any]:
        """The table, of so many ranks, transports and bytes."""
        prices: dict[str, list[dict[str, Any]]] = {}
        table: dict[str, Any] = {"host": describe_host(), "transports": prices}
        with progress_bar() as bar:
            task = bar.add_task("tuning", total=None)
            on = self._on_gpus if self.device == "cuda" else self._on_cpus
            found = on(ranks, options, sizes)
            for world, what, value in found:
                bar.update(task, description=f"{world} ranks")
                if what == "price":
                    prices.setdefault(value.pop("transport"), []).append(value)
                else:
                    table[what] = value
        return table

    def _on_cpus(self, ranks: list[int], options: list[str], sizes: list[int]) -> Iterator[tuple[int, str, Any]]:
        [tuning] = list(run_ranks(min(ranks), find_sizes, min(ranks)))
        yield min(ranks), "shm_tuning", tuning
        [points] = list(run_ranks(1, price_locals, sizes))
        for kind, found in points.items():
            yield 1, kind, found
        for world in ranks:
            for row in run_ranks(world, price, world, options, sizes, tuning, self.plugins):
                yield world, "price", row

    def _on_gpus(self, ranks: list[int], options: list[str], sizes: list[int]) -> Iterator[tuple[int, str, Any]]:
        for world in ranks:  # the widest comes last, and its tuning stays
            for what, value in run_ranks(world, measure_gpus, world, options, sizes, self.plugins):
                yield world, what, value


def tune_first(world: int) -> None:
    """Measures so many GPUs for a start that finds no table of them, with few sizes: seconds. Says where it writes."""
    options = [entry.option for entry in automatic(transports(), "cuda", world)]
    table = Command(device="cuda").measure([world], options, GPU_SIZES[::3])
    path = host_table(gpus=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table, indent=1) + "\n")
    except OSError as error:
        advice = "name a cost model with --cost, such as h200x4"
        raise UserError(f"cannot write {path}: {error.strerror}; {advice}") from error
    print(f"measured what {world} GPUs exchange, once for this host: {path}", file=sys.stderr)
