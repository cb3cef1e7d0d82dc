"""Times of the merge of attention over shards, per algorithm, compared with a bare reduce_scatterv of equal size.

A figure is the slowest rank's median in µs: of calls in a CUDA graph on GPUs (`weft.tune.gpu_times`), of calls from
Python on CPUs, inputs rewritten before each (`weft.tune.call_times`). Transports take turns. Each algorithm's result is
compared with the definition before it is timed.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from weft.comm.shm import ShmTuning
from weft.comm.transport import Ranks, Transport
from weft.kernels.torch_reference import softmax_merge
from weft.planner import exchange
from weft.planner.exchange import merge_scatterv
from weft.planner.spec import Mesh
from weft.stream.block_exchanges import a2a, ag_rs
from weft.tune.call_times import DTYPES
from weft.tune.gpu_times import SMALL, SMALL_CALLS, World, capture, replays_us, require_close
from weft.tune.ranks import Report
from weft_bench.harness import CpuRank, Implementation, Thunk, Timing

MergeShape = Literal["deepseek-v2", "deepseek-v2-projected", "qwen3-235b"]
SHAPES: dict[MergeShape, tuple[int, int]] = {
    "deepseek-v2": (128, 512),
    "deepseek-v2-projected": (128, 128),
    "qwen3-235b": (64, 128),
}
"""Heads of a dcp group that is all of attn_tp, and elements of a head's output: DeepSeek's latent, or projected by
W_UV before the merge."""
BARE = "reduce_scatterv"
INPUTS, CALLS = 4, 20


@dataclass(frozen=True)
class MergeCase:
    """Merge of a layer, `batch` tokens over `ranks` ranks. dtype: bf16 or fp32."""

    ranks: int
    shape: MergeShape
    batch: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.ranks} ranks  {self.shape:22} {self.dtype} batch {self.batch:4}"

    @property
    def bytes(self) -> int:
        """Bytes of a rank's outputs."""
        heads, dim = SHAPES[self.shape]
        return self.batch * heads * dim * DTYPES[self.dtype].itemsize


def given(case: MergeCase, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a rank's outputs and log-sum-exps, skewed."""
    heads, dim = SHAPES[case.shape]
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(case.batch, heads, dim, generator=generator)
    lse = 8 * torch.randn(case.batch, heads, generator=generator)
    return out.to(device, DTYPES[case.dtype]), lse.to(device)


def calls_of(transport: Transport, out: Tensor, lse: Tensor, group: Ranks) -> dict[str, Thunk]:
    """Return each algorithm over a transport, and the bare sum, by name: `fused peer`."""
    n = len(group)
    found: dict[str, Thunk] = {}
    if transport.entry.offers(merge_scatterv(n)):
        found["fused"] = partial(transport.merge_scatterv, out, lse, group)
    found["a2a"] = partial(a2a, transport, out, lse, group)
    found["ag_rs"] = partial(ag_rs, transport, out, lse, group)
    rows = out.reshape(n, -1)
    found[BARE] = partial(transport.exchange, rows, exchange.reduce_scatterv(n), group, (1,) * n)
    return {f"{algorithm} {transport.entry.name.removeprefix('torchdist/')}": call for algorithm, call in found.items()}


def check(name: str, got: object, case: MergeCase, rank: int, device: torch.device) -> None:
    """Compare an algorithm's result with the definition on all ranks' parts. Raises CommError."""
    if name.startswith(BARE):
        return
    parts = [given(case, r, device) for r in range(case.ranks)]
    outs, lses = (torch.stack([part[i].float() for part in parts]) for i in range(2))
    wanted = softmax_merge(outs, lses)[0].unflatten(1, (case.ranks, -1))[:, rank]
    assert isinstance(got, tuple)
    require_close(case, name, got[0], wanted)


def measure_gpus(rank: int, directory: Path, report: Report, cases: Sequence[MergeCase]) -> None:
    """Run a rank's part on GPUs; rank 0 reports a Timing for each case."""
    here = World.open(rank, cases[0].ranks, directory, 2 * max(case.bytes for case in cases))
    group = here.peer.on_host
    for case in cases:
        parts = [given(case, rank + 100 * i, here.device) for i in range(INPUTS)]
        by_name: dict[str, list[Thunk]] = {}
        for transport in (here.peer, here.torchdist):
            for out, lse in parts:
                for name, call in calls_of(transport, out, lse, group).items():
                    by_name.setdefault(name, []).append(call)
        for name, calls in by_name.items():
            check(name, calls[0](), case, rank, here.device)
        count = SMALL_CALLS if case.bytes <= SMALL else CALLS
        graphs = [capture(calls, count) for calls in by_name.values()]
        us = dict(zip(by_name, replays_us(graphs), strict=True))
        here.peer.check()
        if rank == 0:
            report(Timing(case, us, {"bytes": case.bytes}))
        del graphs
        torch.cuda.empty_cache()
    here.close()


def measure_cpus(rank: int, directory: Path, report: Report, cases: Sequence[MergeCase], tuning: ShmTuning) -> None:
    """Run a rank's part on CPUs; rank 0 reports a Timing for each case."""
    world = cases[0].ranks
    largest = max(case.bytes for case in cases)
    ranks = CpuRank(Mesh(1, world, world, 1), rank, directory, gloo=True, tuning=tuning, block_bytes=4 * largest)
    assert ranks.gloo is not None
    gc.disable()
    for case in cases:
        fresh, lse = given(case, rank, torch.device("cpu"))
        out = fresh.clone()
        calls = calls_of(ranks.shm, out, lse, ranks.group) | calls_of(ranks.gloo, out, lse, ranks.group)
        for name, call in calls.items():
            check(name, call(), case, rank, fresh.device)
        over_gloo = {name: name.endswith("gloo") for name in calls}
        implementations = {
            name: Implementation(out, [call], over_gloo[name], over_gloo[name]) for name, call in calls.items()
        }
        us = ranks.medians_us(implementations, fresh)
        if rank == 0:
            report(Timing(case, us, {"bytes": case.bytes}))
        gc.collect()
    ranks.close()
