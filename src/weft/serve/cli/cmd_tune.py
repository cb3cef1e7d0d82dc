"""`weft tune`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from weft.comm.shm import ShmTuning
from weft.comm.transport_registry import SHM_RANKS, TransportName, automatic, transports
from weft.planner.cost import host_table
from weft.serve.cli.command import UserError, check_writable, stop_on_sigterm, user_errors
from weft.serve.cli.progress import progress_bar
from weft.serve.cli.several_hosts import SeveralHosts, config_over_hosts
from weft.tune.cpu_costs import find_sizes, price, price_locals
from weft.tune.gpu_costs import measure_gpus
from weft.tune.host import describe_host
from weft.tune.host_costs import SIZES as HOST_SIZES
from weft.tune.host_costs import count
from weft.tune.host_costs import price as price_over_hosts
from weft.tune.ranks import run_ranks

SIZES = [1 << p for p in range(12, 25, 2)]
GPU_SIZES = [1 << p for p in range(13, 27)]
OMITTED = ", or ".join(" and ".join(e.option for e in automatic(transports(), on, 2)) for on in ("cpu", "cuda"))


@dataclass(frozen=True)
class Command:
    """Measure this host, and write the cost table by which the planner chooses transports and edges.

    The engine then reads this table unless --cost names another; `weft plan --cost TABLE.json` shows the plans that it
    gives. Run it while the machine is idle, with the number of ranks that will serve.

    With --nnodes, started on each host with its --node-rank and the same --ranks, it measures inside and across hosts,
    with ranks on CPUs. Node 0 writes the table, which it then reads for this number of hosts.

    Examples:
      weft tune                        2 and 4 ranks on CPUs, all transports: about a minute
      weft tune --ranks 8 --out eight.json
      weft tune --device cuda --out gpus.json
      weft tune --ranks 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --cluster-key FILE
    """

    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the ranks to measure; cuda: one rank per GPU."""
    ranks: tuple[int, ...] = ()
    """Numbers of ranks to measure; omitted: 2 and 4, or all GPUs. With --nnodes: one number, the ranks on each host;
    omitted: 2."""
    transports: Annotated[
        tuple[TransportName, ...],
        tyro.conf.arg(
            help=f"Transports to measure; omitted: {OMITTED}, and plugins' transports, as in --transport auto of the "
            "engine."
        ),
    ] = ()
    plugins: tuple[str, ...] = ()
    """Python modules or .py files that add transports; they run, so name only what you trust."""
    out: Path | None = None
    """File to write; omitted: the file that the engine reads."""
    json: bool = False
    """Print the table as JSON instead of the line with its path."""
    cluster: SeveralHosts = field(default_factory=SeveralHosts)

    def run(self) -> int:
        """Write the table, print its path, and return the exit code. Raises UserError, EngineError."""
        hosts = self._hosts()
        out = self.out or host_table(self.device == "cuda", 1 if hosts is None else hosts.mesh.hosts)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {out}: {error}; choose another file with --out") from error
        check_writable(out, "--out")
        gpus = torch.cuda.device_count() if self.device == "cuda" else 0
        if hosts is None and self.device == "cuda" and gpus < 2:
            raise UserError(f"--device cuda requires two GPUs or more; this machine has {gpus}")
        known, limit = transports(self.plugins), gpus or SHM_RANKS
        if unknown := [n for n in self.transports if n not in known or not known[n].runs_on(self.device)]:
            raise UserError(f"--transports {unknown[0]} does not run on --device {self.device}")
        ranks = sorted(self.ranks or ((gpus,) if gpus else (2, 4)))
        if hosts is None and not all(2 <= n <= limit for n in ranks):
            raise UserError(f"--ranks accepts numbers from 2 to {limit}")
        stop_on_sigterm()
        sizes = GPU_SIZES if gpus else SIZES
        options = [str(n) for n in self.transports] or [e.option for e in automatic(known, self.device, 2)]
        if hosts is None:
            on = self._on_gpus if self.device == "cuda" else self._on_cpus
            table = self._collect(on(ranks, options, sizes))
        else:
            cases = count(hosts.mesh, options, HOST_SIZES, self.plugins)
            table = {"hosts": hosts.mesh.hosts} | self._collect(self._over_hosts(hosts, options), cases)
            if hosts.node_rank:
                print(f"node {hosts.node_rank}: measured with node 0, which writes the table", file=sys.stderr)
                return 0
        out.write_text(text := json.dumps(table, indent=1) + "\n")
        entries = table["transports"]
        print(text if self.json else f"{out}: {sum(map(len, entries.values()))} times of {', '.join(entries)}")
        return 0

    def _hosts(self) -> Any:
        """Return the EngineConfig of ranks on several hosts; None for one host. Raises UserError."""
        with user_errors():
            config = config_over_hosts(self.cluster, attn_tp=max(self.ranks or (2,)), plugins=self.plugins)
        if config is not None and (len(self.ranks) > 1 or self.device == "cuda"):
            raise UserError("--nnodes measures ranks on CPUs; give --ranks one number, the ranks on each host")
        return config

    def _collect(self, found: Iterator[tuple[int, str, Any]], cases: int | None = None) -> dict[str, Any]:
        """Return the table of the measured prices. cases: number of prices, if known."""
        prices: dict[str, list[dict[str, Any]]] = {}
        table: dict[str, Any] = {"host": describe_host(), "transports": prices}
        with progress_bar() as bar:
            task = bar.add_task("tuning", total=cases)
            for world, what, value in found:
                bar.update(task, description=f"{world} ranks")
                if what == "price":
                    bar.advance(task)
                    prices.setdefault(value.pop("transport"), []).append(value)
                else:
                    table[what] = value
        return table

    def _on_cpus(self, ranks: list[int], options: list[str], sizes: list[int]) -> Iterator[tuple[int, str, Any]]:
        [tuning] = list(run_ranks(min(ranks), find_sizes, min(ranks)))
        yield min(ranks), "shm_tuning", tuning
        [points] = list(run_ranks(1, price_locals, sizes))
        for kind, entries in points.items():
            yield 1, kind, entries
        for world in ranks:
            for row in run_ranks(world, price, world, options, sizes, tuning, self.plugins):
                yield world, "price", row

    def _over_hosts(self, config: Any, options: list[str]) -> Iterator[tuple[int, str, Any]]:
        from weft.engine.hosts.measurement import run_over_hosts

        world, on_host, local = config.mesh.world, config.ranks_of_host, list[tuple[int, str, Any]]()

        def describe() -> dict[str, Any]:  # while the other ranks wait
            tuning = asdict(ShmTuning()) if on_host == 1 else next(run_ranks(on_host, find_sizes, on_host))
            [points] = list(run_ranks(1, price_locals, SIZES))
            local.extend((world, what, value) for what, value in ({"shm_tuning": tuning} | points).items())
            return {"options": options, "sizes": HOST_SIZES, "tuning": tuning}

        say = partial(print, file=sys.stderr, flush=True)
        for row in run_over_hosts(config, price_over_hosts, describe, say):
            yield world, "price", row
        yield from local

    def _on_gpus(self, ranks: list[int], options: list[str], sizes: list[int]) -> Iterator[tuple[int, str, Any]]:
        for world in ranks:  # the widest comes last, and its tuning stays
            for what, value in run_ranks(world, measure_gpus, world, options, sizes, self.plugins):
                yield world, what, value


def tune_first(world: int) -> None:
    """Measure `world` GPUs in seconds, with few sizes, if a start finds no table for them. Prints the table's path."""
    options = [entry.option for entry in automatic(transports(), "cuda", world)]
    tune = Command(device="cuda")
    table = tune._collect(tune._on_gpus([world], options, GPU_SIZES[::3]))
    path = host_table(gpus=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table, indent=1) + "\n")
    except OSError as error:
        advice = "name a cost model with --cost, such as h200x4"
        raise UserError(f"cannot write {path}: {error.strerror}; {advice}") from error
    print(f"measured what {world} GPUs exchange, once for this host: {path}", file=sys.stderr)
