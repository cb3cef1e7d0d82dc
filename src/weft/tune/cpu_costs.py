"""Measurement of this host: the cost of every edge on every transport, and the best sizes for transport shm."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.comm.shm import ShmTransport, ShmTuning
from weft.comm.torchdist import TorchDistTransport
from weft.comm.transport import Epilogue, Ranks, Transport
from weft.comm.transport_registry import SHM, Opening, transports
from weft.planner.edges import Edge, legal_edges, rows_received
from weft.planner.exchange import Exchange, all_to_allv, merge_scatterv
from weft.planner.spec import Mesh
from weft.stream.step_rows import StepRows
from weft.tune.call_times import mesh_of, time_phases
from weft.tune.ranks import Report, all_cores, slowest

WIDTH, DTYPE = 1024, torch.float32
ROW_BYTES = WIDTH * DTYPE.itemsize
HEAD = 128
"""Elements of a head's output."""
PricedCall = tuple[Exchange, Tensor, Callable[[Transport, Tensor], object], dict[str, str | float]]
"""Exchange to price: an input, the call with one like it, and the table's row without its time."""
NEVER = 1 << 30
BUDGET_S, ROUNDS = 0.02, 3


def opening_of(
    mesh: Mesh,
    rank: int,
    directory: Path,
    device: torch.device,
    largest: int,
    tunings: Mapping[str, object],
    store: tuple[str, int] | None = None,
) -> Opening:
    """Return the arguments of a measurement for opening transports. largest: bytes of a tensor.

    tunings: by keys. store: host and port of a TCPStore, over several hosts.
    """
    arena = 64, 2 * largest
    return Opening(
        mesh, rank, directory, device, lambda: largest, lambda: arena, lambda key, _: tunings.get(key), store
    )


def find_sizes(rank: int, directory: Path, report: Report, world: int) -> None:
    """Run a rank's part of finding the ShmTuning; rank 0 reports it, as a dictionary."""
    mesh, group = Mesh(1, world, world, 1), tuple(range(world))
    plain = ShmTuning(two_shot_bytes=NEVER, stream_slot_bytes=NEVER, stream_out_bytes=NEVER)
    two_shots = replace(plain, two_shot_bytes=0)
    variants = {
        "plain": plain,
        "two shots": two_shots,
        "stream slot": replace(two_shots, stream_slot_bytes=0),
        "stream out": replace(two_shots, stream_out_bytes=0),
    }
    transports = {}
    for name, tuning in variants.items():
        transports[name] = ShmTransport(mesh, rank, directory / name.replace(" ", "-"), tuning=tuning)
    meeting = transports["plain"]

    def threshold(before: str, after: str, in_arena: bool, sizes: list[int]) -> int:
        """Return the largest size at which `before` is still the faster, or NEVER."""
        best = [0] * len(sizes)
        for at, size in enumerate(sizes):
            found: dict[str, list[float]] = {before: [], after: []}
            for _ in range(ROUNDS):
                for name in (before, after):
                    shm = transports[name]
                    fresh = torch.ones(size // 2, dtype=torch.bfloat16)
                    x = shm.empty(*fresh.shape, like=fresh) if in_arena else torch.empty_like(fresh)
                    call = partial(shm.all_reduce, x, group)
                    found[name] += time_phases(meeting, group, x, fresh, [call], BUDGET_S)[0]
            times = slowest(map(statistics.median, found.values()), meeting, group)
            best[at] = times.index(min(times))
        last = max((at for at in range(len(sizes)) if best[at] == 0), default=-1)
        return 0 if last < 0 else NEVER if last == len(sizes) - 1 else sizes[last]

    powers = [1 << p for p in range(10, 27)]
    tuning = ShmTuning(
        two_shot_bytes=threshold("plain", "two shots", True, [s for s in powers if 2048 <= s <= 1 << 18]),
        stream_slot_bytes=threshold("two shots", "stream slot", False, [s for s in powers if 1 << 12 <= s <= 1 << 22]),
        stream_out_bytes=threshold("two shots", "stream out", True, [s for s in powers if s >= 1 << 16]),
    )
    if rank == 0:
        report(asdict(tuning))
    for shm in transports.values():
        shm.close()


def calls_to_price(mesh: Mesh, rank: int, sizes: list[int], like: Tensor) -> Iterator[PricedCall]:
    """Yield the calls that a plan may use, at each size in bytes. like: `[0, width]`: width, dtype, device of rows."""
    yield from edges_to_price(mesh, rank, sizes, like)
    yield from merges_to_price(mesh, rank, sizes, like)


def edges_to_price(mesh: Mesh, rank: int, sizes: list[int], like: Tensor) -> Iterator[PricedCall]:
    """Yield an edge of each kind, number of ranks and number of hosts."""
    edges: dict[tuple[str, int, int], Edge] = {}
    for edge in (e for times in legal_edges(mesh).values() for e in times if e.moves):
        edges.setdefault((edge.kind, mesh.size(edge.group), mesh.hosts_of(edge.group)), edge)
    width, row_bytes = like.shape[1], like.shape[1] * like.element_size()
    for (kind, ranks, hosts), edge in edges.items():
        assert edge.exchange is not None
        for size in sizes:
            counts = (max(1, size // row_bytes // mesh.attn_dp),) * mesh.attn_dp
            moved = max(rows_received(edge, mesh, r, counts) for r in range(mesh.world)) * row_bytes
            rows = StepRows(mesh, rank, counts)

            def carry(transport: Transport, x: Tensor, edge: Edge = edge, rows: StepRows = rows) -> object:
                return rows.carry(edge, x, transport)

            x = like.new_ones(mesh.row_count(edge.src.rows, rank, counts), width)
            yield edge.exchange, x, carry, _row(kind, ranks, mesh, hosts) | {"bytes": moved}


def merges_to_price(mesh: Mesh, rank: int, sizes: list[int], like: Tensor) -> Iterator[PricedCall]:
    """Yield the merges of attention over shards: over a group of each size and number of hosts."""
    times = [group for group in mesh.groups if rank in group and len(group) > 1]
    groups = {(len(group), len({mesh.host_of(r) for r in group})): group for group in times}
    for (ranks, hosts), group in groups.items():
        for size in sizes:
            tokens = max(1, size // (ranks * HEAD * like.element_size()))
            out = like.new_ones(tokens, ranks, HEAD)
            lse = torch.zeros(tokens, ranks, device=like.device)

            def merge(transport: Transport, x: Tensor, lse: Tensor = lse, group: Ranks = group) -> object:
                return transport.merge_scatterv(x, lse, group)

            def permute(transport: Transport, x: Tensor, n: int = ranks, group: Ranks = group) -> object:
                return transport.exchange(x, all_to_allv(n), group, (1,) * n**2)

            for exchange, x, call, moved in (
                (merge_scatterv(ranks), out, merge, out.nbytes + lse.nbytes),
                (all_to_allv(ranks), out.view(ranks, -1), permute, out.nbytes),
            ):
                row = _row(exchange.kind, ranks, mesh, hosts)
                yield exchange, x, call, row | {"bytes": moved * (ranks - 1) / ranks}


def _row(kind: str, ranks: int, mesh: Mesh, hosts: int) -> dict[str, str | float]:
    """Return the beginning of a table's row; on a mesh of one host it omits the hosts."""
    row: dict[str, str | float] = {"kind": kind, "ranks": ranks, "world": mesh.world}
    return row if mesh.hosts == 1 else row | {"hosts": hosts}


def price(
    rank: int,
    directory: Path,
    report: Report,
    world: int,
    options: Sequence[str],
    sizes: list[int],
    tuning: dict[str, int],
    plugins: Sequence[str] = (),
) -> None:
    """Run a rank's part of pricing every edge and every merge of attention, at these `sizes` in bytes.

    Rank 0 reports a row for each: transport, kind, ranks, world, bytes, us. options: of the table of transports, with
    the `plugins`'. tuning: fields of a ShmTuning.
    """
    mesh = mesh_of(world)
    shm = ShmTransport(mesh, rank, directory / "shm", tuning=ShmTuning(**tuning), block_bytes=2 * max(sizes))
    patient = ShmTransport(mesh, rank, directory / "patient", spins=0)  # gloo's thread must get onto the core
    opening, known = opening_of(mesh, rank, directory, torch.device("cpu"), max(sizes), {}), transports(plugins)
    with all_cores():
        opened = [shm if known[o] is SHM else known[o].open(opening) for o in options]
    group = tuple(range(world))
    gc.disable()
    for exchange, fresh, call, row in calls_to_price(mesh, rank, sizes, torch.empty(0, WIDTH, dtype=DTYPE)):
        for transport in (t for t in opened if t.entry.offers(exchange)):
            us = call_us(shm if transport is shm else patient, transport, fresh, partial(call, transport), group)
            if rank == 0:
                report({"transport": transport.entry.name} | row | {"us": round(us, 2)})
        gc.collect()
    for transport in {id(t): t for t in (*opened, patient, shm)}.values():
        transport.close()


def call_us(
    meeting: ShmTransport | TorchDistTransport,
    transport: Transport,
    fresh: Tensor,
    call: Callable[[Tensor], object],
    group: tuple[int, ...],
) -> float:
    """Return a group's slowest rank's median µs of `call` with a tensor like `fresh` in the transport's fastest memory.

    meeting: transport by which the group meets before each call.
    """
    x = transport.empty(*fresh.shape, like=fresh)
    times: list[float] = []
    for _ in range(ROUNDS):
        with nullcontext() if transport.entry.name == SHM.name else all_cores():
            times += time_phases(meeting, group, x, fresh, [partial(call, x)], BUDGET_S)[0]
    return slowest([statistics.median(times) * 1e6], meeting, group)[0]


def price_locals(rank: int, directory: Path, report: Report, sizes: list[int]) -> None:
    """Price a rank's own steps, on one rank: report {"local": points, "epilogue": points} by bytes touched."""
    shm = ShmTransport(Mesh(1, 1, 1, 1), rank, directory / "shm", block_bytes=2 * max(sizes))
    points: dict[str, Any] = {"local": [], "epilogue": []}
    for size in sizes:
        rows = max(1, size // ROW_BYTES)
        a, b, weight = torch.ones(rows, WIDTH), torch.ones(rows, WIDTH), torch.ones(WIDTH)
        size = rows * ROW_BYTES
        epilogue = Epilogue(b, weight, 1e-6)
        plain = _median_us(partial(shm.all_reduce, a, (0,)))
        fused = _median_us(partial(shm.all_reduce, a, (0,), epilogue))
        points["local"].append((3 * size, round(_median_us(partial(torch.add, a, b)), 2)))
        points["epilogue"].append((4 * size, round(max(0.1, fused - plain), 2)))
    points["epilogue"] = median_filtered(points["epilogue"])
    report(points)
    shm.close()


def median_filtered(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return points (bytes, µs), each time the median of itself and its neighbours.

    Differences of two times have outliers, which would change the choice of a plan.
    """
    times = [us for _, us in points]
    return [(size, round(statistics.median(times[max(0, i - 1) : i + 2]), 2)) for i, (size, _) in enumerate(points)]


def _median_us(call: Callable[[], object]) -> float:
    times: list[float] = []
    end = time.perf_counter() + BUDGET_S * ROUNDS
    while time.perf_counter() < end or len(times) < 5:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6
