"""Times of every edge of transport peer and of other libraries on the GPUs of this host, in one run.

Figures are as in `weft.tune.gpu_times`. Implementations take turns, so a disturbance of the host affects all.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import torch
from torch import Tensor

from weft.comm.peer_launch import PeerTuning
from weft.tune.call_times import MIXED
from weft.tune.gpu_times import (
    CALLS,
    GRAPH_ROUNDS,
    INPUTS,
    REPLAYS,
    WARM,
    Case,
    World,
    capture,
    check_result,
    events_us,
    make_inputs,
    peer_graph,
    replays_us,
    slowest_us,
)
from weft.tune.ranks import Report
from weft_bench.gpu_baselines import Baseline, Nccl, NcclWindow, SymmetricMemory, flashinfer_baselines
from weft_bench.harness import Timing

SUMS = ("all_reduce", "reduce_scatterv", *MIXED)
EDGES = (*SUMS, "all_gatherv", "all_to_allv", *(f"{edge}+norm" for edge in SUMS))
RAGGED = ("reduce_scatterv ragged", "all_gatherv ragged")
LIMIT_S = 40.0  # of an implementation in a case: less than the minute after which NCCL ends a rank that waits


def measure(
    rank: int, directory: Path, report: Report, cases: list[Case], tunings: dict[str, PeerTuning], others: list[str]
) -> None:
    """Run a rank's part of the cases; rank 0 reports a Timing for each. tunings: tunings of peer, by their names."""
    world = cases[0].ranks
    sizes = [(c.plain, c.input_bytes) for c in cases]
    largest = max(size for _, size in sizes)
    here = World.open(rank, world, directory, (world + 1) * largest)
    arena_bytes = 2 * (INPUTS + 1) * (largest + 4096)
    baselines: list[Baseline] = []
    reduced = [size for edge, size in sizes if edge == "all_reduce"]
    if "flashinfer" in others and reduced:  # first: their results are checked, and NCCL works in place
        baselines += flashinfer_baselines(world, rank, here.device, max(reduced), INPUTS)
    if "nccl" in others:
        baselines.append(Nccl(here.mesh, rank))
    if "window" in others:
        baselines.append(NcclWindow(here.mesh, rank, here.device, world * arena_bytes))
    if "symm" in others:
        baselines += [SymmetricMemory(shots, rank, here.device, arena_bytes) for shots in ("one", "two")]
    for case in cases:
        us = _measure(case, here, tunings, baselines)
        here.peer.check()
        torch.cuda.empty_cache()
        if rank == 0:
            report(Timing(case, us))
    here.close()


def _measure(
    case: Case, here: World, tunings: dict[str, PeerTuning], baselines: Sequence[Baseline]
) -> dict[str, float]:
    rank, plain = here.rank, case.plain
    given = make_inputs(case, here)
    xs, norm = given.xs, given.norm
    graphs = {name: peer_graph(name, case, here, tuning, given) for name, tuning in tunings.items()}
    eager: dict[str, float] = {}
    own = [x[: case.sizes[rank]] for x in xs] if case.edge == "all_gatherv ragged" else xs
    for other in baselines:
        with _limited(f"rank {rank}: {other.name}, {case}"):
            theirs = other.calls(plain, own, case.sizes, norm)
            if not theirs:
                continue
            if other.gives_result and isinstance(got := theirs[0](), Tensor):
                check_result(case, other.name, got, given)
            graphs[other.name] = capture(theirs, case.calls)
            other.captured()
            if type(other) is Nccl:
                eager["nccl eager"] = _eager_us(theirs)
    with _limited(f"rank {rank}: one of {', '.join(graphs)}, {case}"):
        return dict(zip(graphs, replays_us([*graphs.values()]), strict=True)) | eager


@contextmanager
def _limited(what: str) -> Iterator[None]:
    """End the process with a line that names `what`, if it hangs: a kernel that waits for ever raises nothing."""

    def end() -> None:
        print(f"{what}: no end after {LIMIT_S:.0f} s", file=sys.stderr, flush=True)
        os._exit(1)

    timer = Timer(LIMIT_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _eager_us(calls: Sequence[Callable[[], object]]) -> float:
    def run() -> None:
        for i in range(CALLS):
            calls[i % len(calls)]()

    stream = torch.cuda.current_stream()
    times = [events_us(stream, run) / CALLS for _ in range(WARM + GRAPH_ROUNDS * REPLAYS)]
    return slowest_us([statistics.median(times[WARM:])])[0]
