"""Times of every edge of transport shm, of other libraries, and of the floor, in one run.

Before each timed call every rank rewrites its input, as a model would, and all meet at a barrier. A figure is the
slowest rank's median over its calls. Implementations take turns, so a disturbance of the machine affects all.
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from weft.comm.shm import ShmTransport, ShmTuning
from weft.comm.transport import Epilogue, finish
from weft.planner.spec import Mesh
from weft.tune.call_times import DTYPES, MIXED, mesh_of
from weft.tune.ranks import Report, all_cores
from weft_bench.baselines import DeepSpeed, Gloo
from weft_bench.harness import ROUND_S, CpuRank, Implementation, Thunk, Timing

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
EDGES = (
    "all_reduce",
    "reduce_scatterv",
    "all_gatherv",
    "all_to_allv",
    "broadcast",
    "barrier",
    *MIXED,
    "all_reduce+norm",
)
FLOOR = "floor"


@dataclass(frozen=True)
class CpuCase:
    """Case on CPUs. bytes: size of the largest tensor: the input of sums and all_to_allv, the result of gathers."""

    ranks: int
    edge: str
    dtype: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.ranks} ranks  {self.edge:26} {self.dtype} {show_size(self.bytes):>5}"


def measure(
    rank: int, directory: Path, report: Report, cases: list[CpuCase], baselines: list[str], tuning: ShmTuning
) -> None:
    """Run a rank's part; rank 0 reports a Timing for each case."""
    mesh, capacity = mesh_of(cases[0].ranks), max(1 << 20, *(2 * c.bytes for c in cases))
    ranks = CpuRank(mesh, rank, directory, tuning=tuning, block_bytes=capacity)
    others: list[Gloo | DeepSpeed] = []
    if "gloo" in baselines:
        with all_cores():
            others.append(Gloo(mesh, rank, directory))
    if "deepspeed" in baselines:
        others.append(DeepSpeed(mesh.world, rank, directory, lambda: ranks.shm.barrier(ranks.group)))
    gc.disable()
    for case in cases:
        us = _case(ranks, mesh, others, case)
        if rank == 0:
            report(Timing(case, us))
        gc.collect()
    for transport in (*others, ranks):
        transport.close()


def _case(ranks: CpuRank, mesh: Mesh, others: list[Gloo | DeepSpeed], case: CpuCase) -> dict[str, float]:
    """Return µs by implementation. shm has three: any input, zero copy (input in the arena), in place."""
    shm, rank, n = ranks.shm, ranks.shm.rank, mesh.world
    group, dtype = ranks.group, DTYPES[case.dtype]
    elements = case.bytes // dtype.itemsize
    width = max(1, min(2048, elements // 4))
    rows = elements // width
    shares = tuple(rows // n + (i < rows % n) for i in range(n))
    per_group = tuple(rows // mesh.attn_dp + (d < rows % mesh.attn_dp) for d in range(mesh.attn_dp))
    held = {"all_gatherv": shares[rank], MIXED[0]: per_group[mesh.group_of(rank)]}.get(case.edge, rows)
    fresh = torch.randn(held, width).to(dtype)
    private, arena = fresh.clone(), shm.empty(held, width, like=fresh)
    epilogue = Epilogue(torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype), 1e-6)
    rotated = [shares[rank:] + shares[:rank]]  # rank i sends shares[(i + j) mod n] rows to rank j
    receive = tuple(shares[(i + rank) % n] for i in range(n))

    def carry(x: Tensor) -> Thunk:
        return {
            "all_reduce": lambda: shm.all_reduce(x, group),
            "reduce_scatterv": lambda: shm.reduce_scatterv(x, group, shares),
            "all_gatherv": lambda: shm.all_gatherv(x, group, shares),
            "all_to_allv": lambda: shm.all_to_allv(x, group, rotated[0], receive),
            "broadcast": lambda: shm.broadcast(x, group, 0),
            "barrier": lambda: shm.barrier(group),
            MIXED[0]: lambda: shm.all_reduce_all_gatherv(x, group, per_group),
            MIXED[1]: lambda: shm.reduce_scatterv_all_reduce(x, group, per_group),
            "all_reduce+norm": lambda: shm.all_reduce(x, group, epilogue),
        }[case.edge]

    implementations = {"shm": Implementation(private, [carry(private)])}
    if case.edge != "barrier":
        implementations["shm zero copy"] = Implementation(arena, [carry(arena)])
    if case.edge == "all_reduce":
        implementations["shm in place"] = Implementation(arena, [lambda: shm.all_reduce_(arena, group)])
    for other in others:
        plain = case.edge.removesuffix("+norm")
        if (call := other.call(plain, private, shares)) is None:
            continue
        if plain != case.edge:
            call = partial(_normed, call, private, epilogue)
        if other.name != Gloo.name:
            implementations[other.name] = Implementation(private, [call])
            continue
        # Which suits gloo better depends on how many ranks share a core: it gets both, and keeps the better.
        for cores in (False, True):
            implementations[f"{Gloo.name} {cores}"] = Implementation(private, [call], over_gloo=True, all_cores=cores)
    # Below 64 KiB a call takes as long as its Python code; ranks that share a core would time each other.
    if case.bytes >= 1 << 16 and n <= (os.cpu_count() or 1):
        for i, phases in enumerate(_floors(shm, arena, case.edge, mesh, shares, per_group, width)):
            implementations[f"{FLOOR} {i}"] = Implementation(arena, phases)
    us = ranks.medians_us(implementations, fresh, ROUND_S * (3 if case.bytes > 1 << 20 else 1))
    for several in (Gloo.name, FLOOR):
        if found := [us.pop(name) for name in list(us) if name.startswith(several)]:
            us[several] = min(found)
    return us


def _normed(call: Thunk, x: Tensor, epilogue: Epilogue) -> None:
    call()
    finish(x, epilogue)


def _floors(
    shm: ShmTransport,
    arena: Tensor,
    edge: str,
    mesh: Mesh,
    shares: tuple[int, ...],
    per_group: tuple[int, ...],
    width: int,
) -> list[list[Thunk]]:
    """Return calls that move an edge's bytes without a protocol, in one or more orders; the fastest is the floor."""
    rank, n = shm.rank, mesh.world
    group, row_bytes = tuple(range(n)), width * arena.element_size()
    rows = sum(shares)
    out = shm.empty(rows, width, like=arena)
    offsets = torch.tensor([[shm.offset_of(arena), shm.offset_of(out)]])
    places = shm.all_gatherv(offsets, group, (1,) * n).tolist()
    xs, outs = [p[0] for p in places], [p[1] for p in places]
    starts = [sum(shares[:i]) for i in range(n)]

    def sum_of(begin: int, count: int, ranks: tuple[int, ...] = group, base: int = 0) -> Thunk:
        """Add rows begin … begin + count of the inputs of `ranks`; the first row of an input is row `base`."""
        sources = tuple(xs[r] - base * row_bytes for r in ranks)
        return lambda: shm.direct_sum(out, sources, begin * width, count * width)

    def copies(of: list[int], places: list[int] = outs) -> Thunk:
        def run() -> None:
            for r in of:
                shm.direct_sum(out, (places[r],), starts[r] * width, shares[r] * width)

        return run

    elsewhere = [r for r in group if r != rank]
    if edge == "all_reduce":
        return [[sum_of(0, rows)], [sum_of(starts[rank], shares[rank]), copies(elsewhere)]]
    if edge == "reduce_scatterv":
        return [[sum_of(starts[rank], shares[rank])]]
    if edge == "all_gatherv":
        return [[copies(list(group), [xs[r] - starts[r] * row_bytes for r in group])]]
    if edge == "broadcast":
        return [[sum_of(0, rows, (0,))]]
    if edge == "all_reduce+all_gatherv" and len(set(shares)) == 1:
        base = sum(per_group[: mesh.group_of(rank)])
        mine_of = sum_of(starts[rank], shares[rank], mesh.peers("attn_tp", rank), base)
        return [[mine_of, copies(elsewhere)]]
    if edge == "reduce_scatterv+all_reduce":
        mine = [r for r in mesh.peers("attn_tp", rank) if r != rank]
        begin = sum(per_group[: mesh.group_of(rank)])
        whole = sum_of(begin, per_group[mesh.group_of(rank)])
        return [[whole], [sum_of(starts[rank], shares[rank]), copies(mine)]]
    return []


def show_size(size: int) -> str:
    """Format a size: 65536 → `64K`."""
    return next((f"{size // n}{u}" for u, n in reversed(UNITS.items()) if size % n == 0), str(size))
