"""`weft bench dcp`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from weft.comm.peer import MAX_RANKS as PEER_RANKS
from weft.comm.shm import ShmTuning
from weft.comm.transport_registry import SHM_RANKS
from weft.planner.cost import host_table, read_tuning
from weft.serve.cli.command import UserError, check_writable, stop_on_sigterm
from weft.tune.ranks import run_ranks
from weft_bench.dcp_merge import SHAPES, MergeCase, MergeShape, measure_cpus, measure_gpus
from weft_bench.harness import Timing, results_file


@dataclass(frozen=True)
class Command:
    """Time the merge of one layer's attention over the shards of a dcp group: each algorithm on each transport.

    fused is one call of Weft's own transport; a2a one all_to_all of outputs with their log-sum-exps, and a combine;
    ag_rs a gather of the log-sum-exps, a scaling, and a reduce-scatter. For comparison, reduce_scatterv is a bare sum
    of equal size. Figures are the slowest rank's median: calls from Python on CPUs, calls in a CUDA graph on GPUs.

    Examples:
      weft bench dcp                                        shm and gloo on two ranks
      weft bench dcp --device cuda --json dcp.json          peer and NCCL on all GPUs
      weft bench dcp --shapes qwen3-235b --batches 1 32
    """

    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the ranks: processes on this machine's cores, or one on each of its GPUs."""
    ranks: tuple[int, ...] = ()
    """Sizes of a dcp group; omitted: 2, or all GPUs."""
    shapes: tuple[MergeShape, ...] = ()
    """Heads of the group and elements of a head: 128 × 512, 128 × 128 and 64 × 128; omitted: all."""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Tokens of a step."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: fp32 on CPUs, bf16 on GPUs."""
    json: Path | None = None
    """Write the figures, and a description of the hardware and software, to this file."""

    def run(self) -> int:
        """Print a table; write JSON if requested. Raises UserError."""
        if self.json is not None:
            check_writable(self.json, "--json")
        on_gpus, have = self.device == "cuda", torch.cuda.device_count()
        if on_gpus and have < 2:
            raise UserError(f"--device cuda requires two GPUs or more; this machine has {have}")
        limit = min(have, PEER_RANKS) if on_gpus else SHM_RANKS
        ranks = self.ranks or ((limit,) if on_gpus else (2,))
        if not all(2 <= n <= limit and 64 % n == 0 for n in ranks):
            raise UserError(f"--ranks takes powers of two from 2 to {limit}, which divide the heads")
        if not self.batches or min(self.batches) < 1:
            raise UserError("--batches takes numbers of 1 or more")
        stop_on_sigterm()
        with results_file(self.json, f"weft bench dcp --device {self.device}") as timings:
            for timing in (timing for n in ranks for timing in self._measure(n, on_gpus)):
                print("\n".join(lines(timing, timings[-1] if timings else None)), flush=True)
                timings.append(timing)
        return 0

    def _measure(self, ranks: int, on_gpus: bool) -> Iterator[Timing]:
        dtype = self.dtype if self.dtype != "auto" else "bf16" if on_gpus else "fp32"
        cases = [
            MergeCase(ranks, shape, batch, dtype) for shape in self.shapes or tuple(SHAPES) for batch in self.batches
        ]
        if on_gpus:
            return run_ranks(ranks, measure_gpus, cases)
        return run_ranks(ranks, measure_cpus, cases, read_tuning(host_table(), "shm_tuning", ShmTuning))


def lines(timing: Timing, before: Timing | None) -> list[str]:
    """Return a row of the table, after headings that differ from the previous row's."""
    case, found = timing.case, []
    if before is None or (before.case.ranks, before.case.shape) != (case.ranks, case.shape):
        heads, dim = SHAPES[case.shape]
        found += [f"\n{case.shape}: {heads} heads × {dim}, {case.dtype}, over {case.ranks} ranks: µs a call"]
        found.append(f"{'batch':>6}" + "".join(f"{name:>{len(name) + 2}}" for name in timing.us))
    cells = "".join(f"{f'{us:,.1f}':>{len(name) + 2}}" for name, us in timing.us.items())
    return [*found, f"{case.batch:6}{cells}"]
