"""`weft bench collectives`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from weft.comm.peer_launch import PeerTuning
from weft.comm.shm import ShmTuning
from weft.comm.transport_registry import SHM_RANKS
from weft.planner.cost import host_table, read_tuning
from weft.serve.cli.command import UserError, check_writable, stop_on_sigterm, user_errors
from weft.serve.cli.progress import progress_bar
from weft.serve.cli.several_hosts import SeveralHosts, config_over_hosts
from weft.tune.call_times import MIXED
from weft.tune.gpu_times import Case as GpuCase
from weft.tune.ranks import run_ranks
from weft_bench import collectives as cpu
from weft_bench import collectives_hosts as over
from weft_bench import cuda as gpu
from weft_bench.baselines import build_deepspeed
from weft_bench.gpu_baselines import INSTALL_FLASHINFER, has_flashinfer
from weft_bench.harness import results_file

OURS = ("shm", "peer")
Measurement = tuple[str, int | None, Iterator[Any]]
"""Name of a piece of work, its number of cases (None: no measurement), and the Timing of each."""
LABEL = 13
"""Width of the column with a row's case."""


@dataclass(frozen=True)
class Command:
    """Time every edge of Weft's own transport next to others, in one run: shm on CPUs, peer on GPUs.

    CPU figures are the slowest rank's median over whole calls from Python; inputs are rewritten before each call. `shm`
    reads an input anywhere in memory, `zero copy` one in the shared arena, as in the engine. `floor` is the time to
    read, add and write the same bytes without a protocol. GPU figures are the median over replays of a CUDA graph of 20
    calls. Compare ratios: hosts are noisy.

    With --nnodes, started on each host with its --node-rank and the same --ranks, it times the exchanges of plans over
    hosts, with shm inside a host and gloo across, next to flat collectives of gloo and the cost model's predictions.

    Examples:
      weft bench collectives                                        everything on CPUs: some minutes
      weft bench collectives --ranks 2 --sizes 1K 64K 1M --edges all_reduce
      weft bench collectives --baselines gloo deepspeed --json results.json
      weft bench collectives --device cuda --hidden 7168 --rows 1 64 1024 --json gpu.json
      weft bench collectives --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --cluster-key FILE --sizes 64K 4M
    """

    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the ranks: processes on this machine's cores, or one on each of its GPUs."""
    ranks: tuple[int, ...] = ()
    """Numbers of ranks; omitted: 2 and 4, or all GPUs. With four or more, the mixed edges are measured too. With
    --nnodes: one number, of ranks on each host; omitted: 2."""
    sizes: tuple[str, ...] = ("1K", "4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M")
    """Bytes of the exchange, on CPUs."""
    hidden: tuple[int, ...] = (4096, 7168)
    """Elements of a row, on GPUs."""
    rows: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    """Rows that a rank contributes (gathers, all_reduce) or gets (scatters), on GPUs."""
    dtypes: tuple[Literal["bf16", "fp32"], ...] = ()
    """Data types; omitted: both on CPUs, bf16 on GPUs."""
    edges: tuple[str, ...] = ()
    """Exchanges to time; omitted: all."""
    baselines: tuple[Literal["gloo", "deepspeed", "nccl", "window", "symm", "flashinfer"], ...] = ()
    """Implementations to compare with. On CPUs gloo and deepspeed, to be installed (docs/design/shared-memory.md); on
    GPUs NCCL, NCCL over registered windows, torch's symmetric memory, and FlashInfer's kernels (TensorRT-LLM's and
    vLLM's), which must be installed. Omitted: all but deepspeed, and FlashInfer's if they are installed."""
    json: Path | None = None
    """Write the figures, and a description of the hardware and software, to this file."""
    cost: str = "auto"
    """Cost model that plans and predicts, with --nnodes; as the engine's --cost."""
    cluster: SeveralHosts = field(default_factory=SeveralHosts)

    def run(self) -> int:
        """Print a table; write JSON if requested. Raises UserError, EngineError."""
        if self.json is not None:
            check_writable(self.json, "--json")
        with user_errors():
            hosts = config_over_hosts(self.cluster, attn_tp=max(self.ranks or (2,)), cost=self.cost)
        stop_on_sigterm()
        if hosts is not None:
            return self._over_hosts(hosts)
        work = self._on_gpus() if self.device == "cuda" else self._on_cpus()
        measured_by = f"weft bench collectives --device {self.device}"
        with results_file(self.json, measured_by) as timings, progress_bar() as bar:
            for what, cases, results in work:
                task = bar.add_task(what, total=cases)
                if not cases and bar.disable:
                    print(what, file=sys.stderr, flush=True)
                for timing in results:
                    if not timings or heading(timing) != heading(timings[-1]):
                        print(heading(timing))
                    timings.append(timing)
                    print(line(timing), flush=True)
                    bar.advance(task)
                bar.update(task, total=cases or 1, completed=cases or 1)
        return 0

    def _over_hosts(self, config: Any) -> int:
        from weft.engine.hosts.measurement import run_over_hosts

        if self.device == "cuda" or self.baselines or len(self.ranks) > 1:
            raise UserError(
                "--nnodes times ranks on CPUs, the same number on each host: one number with --ranks, no --baselines"
            )
        exchanges = self._edges(over.EXCHANGES)
        cases = [(exchange, parse_size(size)) for exchange in exchanges for size in self.sizes]
        what = f"weft bench collectives --nnodes {config.mesh.hosts}"
        with results_file(self.json, what) as timings, progress_bar() as bar:
            task = bar.add_task(f"{config.mesh.world} ranks on {config.mesh.hosts} hosts", total=2 * len(cases))
            say = partial(print, file=sys.stderr, flush=True)
            for timing in run_over_hosts(config, over.measure, lambda: over.described(config, cases), say):
                timings.append(timing)
                bar.advance(task)
                if len(timings) % 2 == 0:
                    print(over.line(*timings[-2:]), flush=True)
        return 0

    def _on_cpus(self) -> Iterator[Measurement]:
        baselines = self._baselines(("gloo",), ("gloo", "deepspeed"))
        edges = self._edges(cpu.EDGES)
        sizes = [parse_size(s) for s in self.sizes]
        dtypes = self.dtypes or ("bf16", "fp32")
        tuning = read_tuning(host_table(), "shm_tuning", ShmTuning)
        numbers = self._ranks((2, 4), SHM_RANKS)
        if "deepspeed" in baselines:
            what = "compiling DeepSpeed's kernel, which takes minutes the first time"
            yield what, None, run_ranks(1, build_deepspeed)
        for ranks in numbers:
            mixed = ranks >= 4 and ranks % 2 == 0
            cases = [
                cpu.CpuCase(ranks, edge, dtype, size)
                for edge in edges
                if mixed or edge not in MIXED
                for dtype in (dtypes if edge != "barrier" else dtypes[:1])
                for size in (sizes if edge != "barrier" else sizes[:1])
            ]
            yield f"{ranks} ranks", len(cases), run_ranks(ranks, cpu.measure, cases, baselines, tuning)

    def _on_gpus(self) -> Iterator[Measurement]:
        have, known = torch.cuda.device_count(), ("nccl", "window", "symm", "flashinfer")
        if have < 2:
            raise UserError(f"--device cuda requires two GPUs or more; this machine has {have}")
        baselines = self._baselines(known if has_flashinfer() else known[:-1], known)
        if "flashinfer" in baselines and not has_flashinfer():
            raise UserError(f"--baselines flashinfer takes FlashInfer, which is not installed: {INSTALL_FLASHINFER}")
        edges = self._edges((*gpu.EDGES, *gpu.RAGGED))
        for ranks in self._ranks((have,), have):
            mixed = ranks >= 4 and ranks % 2 == 0
            cases = [
                GpuCase(ranks, edge, dtype, hidden, rows)
                for edge in edges
                if mixed or not edge.startswith(MIXED)
                for dtype in self.dtypes or ("bf16",)
                for hidden in self.hidden
                for rows in self.rows
            ]
            tunings = {"peer": read_tuning(host_table(gpus=True), "peer_tuning", PeerTuning)}
            yield f"{ranks} ranks", len(cases), run_ranks(ranks, gpu.measure, cases, tunings, baselines)

    def _ranks(self, default: tuple[int, ...], limit: int) -> tuple[int, ...]:
        if not all(2 <= n <= limit for n in self.ranks):
            raise UserError(f"--ranks accepts numbers from 2 to {limit}")
        return self.ranks or default

    def _edges(self, known: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := set(self.edges) - set(known):
            raise UserError(f"no edge {min(unknown)!r}; one of {', '.join(known)}")
        return self.edges or known

    def _baselines(self, default: tuple[str, ...], known: tuple[str, ...]) -> list[str]:
        if unknown := set(self.baselines) - set(known):
            wrong = f"--baselines {min(unknown)} does not run on --device {self.device}"
            raise UserError(f"{wrong}; one of {', '.join(known)}")
        return list(self.baselines or default)


def heading(timing: Any) -> str:
    """Return the heading of rows with the same ranks, exchange and implementations."""
    names = "".join(f"{_short(name):>{_width(name)}}" for name in timing.us)
    ranks = str(timing.case).partition("  ")[0]
    return f"\n{timing.case.edge}, {ranks}: µs a call, and how many times the best of ours\n{'':{LABEL}}{names}"


def line(timing: Any) -> str:
    """Return one row of the table: the case, and µs of each implementation."""
    best = min(us for name, us in timing.us.items() if name.startswith(OURS))
    label = str(timing.case).partition(timing.case.edge)[2].strip()
    cells = ""
    for name, us in timing.us.items():
        ratio = "" if name.startswith(OURS) else f" {us / best:.1f}×" if us < 10 * best else f" {us / best:.0f}×"
        cells += f"{f'{us:,.1f}' if us < 1e3 else f'{us:,.0f}'}{ratio}".rjust(_width(name))
    return f"{label:{LABEL}}{cells}"


def _short(name: str) -> str:
    return name.removeprefix("shm ").removeprefix("peer ")


def _width(name: str) -> int:
    return max(len(_short(name)) + 2, 9 if name.startswith(OURS) else 14)


def parse_size(text: str) -> int:
    """Parse a size: `64K` → 65536. Raises UserError."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in cpu.UNITS else (text, "")
    if not number.isdigit() or not (size := int(number) * cpu.UNITS.get(unit, 1)) or size % 16:
        raise UserError(f"size {text!r} is not a number of bytes such as 1K, 64K or 4M, in multiples of 16")
    return size
