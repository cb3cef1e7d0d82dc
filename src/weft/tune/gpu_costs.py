"""Measurement of this host's GPUs: the cost of every edge on every transport, and the best PeerTuning."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from weft.comm.peer_launch import NEVER, PeerTuning, Split, two_shot_savings
from weft.comm.transport import Epilogue, Transport
from weft.comm.transport_registry import NCCL, PEER, TransportEntry, transports
from weft.planner.exchange import all_reduce, reduce_scatterv_all_reduce
from weft.tune.call_times import DTYPES, MIXED
from weft.tune.cpu_costs import calls_to_price, median_filtered, opening_of
from weft.tune.gpu_times import Case, World, graph_us, peer_us
from weft.tune.ranks import Report

WIDTH, DTYPE = 4096, "bf16"
ROW_BYTES = WIDTH * DTYPES[DTYPE].itemsize
SMALL, MIDDLE, LARGE = (1 << 13, 1 << 16), (1 << 19, 1 << 20, 1 << 21), (1 << 24, 1 << 26)


def measure_gpus(
    rank: int,
    directory: Path,
    report: Report,
    world: int,
    options: Sequence[str],
    sizes: list[int],
    plugins: Sequence[str] = (),
) -> None:
    """Run a rank's part, with `options` of the table of transports and of `plugins`, at `sizes` in bytes.

    Rank 0 reports a pair per finding: ("peer_tuning", PeerTuning as a dictionary), ("local" and "epilogue", µs by bytes
    touched), and for each edge ("price", a row of transport, kind, ranks, world, bytes, us).
    """
    largest = world * max(*sizes, LARGE[-1])
    here = World.open(rank, world, directory, largest)
    here.peer.tuning = _find_tuning(here)
    if rank == 0:
        report(("peer_tuning", asdict(here.peer.tuning)))
    for kind, points in _price_locals(here, sizes).items():
        if rank == 0:
            report((kind, points))
    known = transports(plugins)
    ours: dict[TransportEntry, Transport] = {PEER: here.peer, NCCL: here.torchdist}
    opening = opening_of(here.mesh, rank, directory, here.device, largest, {"peer_tuning": here.peer.tuning})
    others = [known[option].open(opening) for option in options if known[option] not in ours]
    opened: list[Transport] = [ours[known[o]] for o in options if known[o] in ours] + others
    like = torch.empty(0, WIDTH, dtype=DTYPES[DTYPE], device=here.device)
    for exchange, x, call, row in calls_to_price(here.mesh, rank, sizes, like):
        for transport in (t for t in opened if t.entry.offers(exchange)):
            us = graph_us([partial(call, transport, torch.ones_like(x)) for _ in range(4)])
            if rank == 0:
                report(("price", {"transport": transport.entry.name} | row | {"us": round(us, 2)}))
    for transport in others:
        transport.close()
    here.close()


def _find_tuning(here: World) -> PeerTuning:
    """Return the PeerTuning for this host: one number at a time, each with the numbers found before."""
    mesh, world = here.mesh, here.mesh.world
    mixed = MIXED if mesh.attn_dp > 1 and mesh.attn_tp > 1 else ()
    copies, sums = ("all_gatherv", "reduce_scatterv"), ("all_reduce", *mixed)
    normed = tuple(f"{edge}+norm" for edge in sums)

    def us(edge: str, found: Sequence[PeerTuning], size: int) -> list[float]:
        """size: bytes of the call's larger tensor."""
        parts = mesh.attn_dp if edge.startswith(MIXED) else world if edge.startswith(copies) else 1
        return peer_us(Case(world, edge, DTYPE, WIDTH, max(1, size // ROW_BYTES // parts)), here, found)

    def best(found: Sequence[PeerTuning], edges: Sequence[str], sizes: Sequence[int]) -> PeerTuning:
        """Return the first that is within a fiftieth of the best, in the mean: smaller differences are noise."""
        times = [us(edge, found, size) for edge in edges for size in sizes]
        means = [statistics.mean(row[i] / min(row) for row in times) for i in range(len(found))]
        return next(t for t, mean in zip(found, means, strict=True) if mean <= min(means) + 0.02)

    def threshold(low: PeerTuning, high: PeerTuning, edges: Sequence[str], sizes: Sequence[int]) -> int:
        """Return the largest size at which `low` wins; NEVER if it is the last."""
        wins = 0
        for size in sizes:
            times = [us(edge, [low, high], size) for edge in edges]
            if sum(one / other for one, other in times) <= len(edges):
                wins = size
        return NEVER if wins == sizes[-1] else wins

    one = PeerTuning(one_shot_bytes=NEVER).split_from(NEVER)
    one = best([replace(one, threads=t) for t in (128, 64, 256)], ["all_reduce"], SMALL)
    two = replace(one, one_shot_bytes=0)
    wide = [replace(two, wide_threads=t, wide_blocks=b) for t in (480, 256) for b in (128, 64)]
    two = best(wide, sums, MIDDLE)
    two = best([replace(two, norm_blocks=b) for b in (256, 128)], normed, MIDDLE)
    one, sizes = replace(two, one_shot_bytes=NEVER), [1 << p for p in range(15, 22)]
    spared = two_shot_savings(all_reduce(world), threshold(one, two, ["all_reduce"], sizes))
    if mixed:
        segment = threshold(one, two, [MIXED[1]], sizes) // mesh.attn_dp
        mixed_edge = reduce_scatterv_all_reduce(mesh.attn_dp, mesh.attn_tp)
        spared = max(spared, two_shot_savings(mixed_edge, segment))
    for name, edges, shapes in (
        ("split_one_shot", copies, ((32, 0, 96, 480), (16, 0, 112, 480), (64, 0, 192, 480))),
        ("split_two_shot", sums, ((128, 224, 176, 224), (64, 112, 88, 480), (32, 64, 32, 480), (48, 112, 104, 480))),
        ("split_one_shot_norm", ["reduce_scatterv+norm"], ((32, 0, 96, 480), (64, 0, 192, 480), (64, 0, 192, 224))),
        ("split_two_shot_norm", normed, ((64, 96, 368, 224), (64, 128, 320, 224), (32, 64, 160, 480))),
    ):
        splits = [replace(two, **{name: Split(0, *shape)}) for shape in shapes]  # type: ignore[arg-type]
        found = best(splits, edges, LARGE)
        unsplit = threshold(two, found, edges, [1 << p for p in range(18, 27)])
        two = replace(two, **{name: replace(getattr(found, name), from_bytes=unsplit + 1)})
    return replace(two, one_shot_bytes=int(spared))


def _price_locals(here: World, sizes: list[int]) -> dict[str, list[tuple[int, float]]]:
    """Return the costs of a rank's own steps, as points (bytes touched, µs): local kernels, and epilogues."""
    points: dict[str, list[tuple[int, float]]] = {"local": [], "epilogue": []}
    group = here.peer.on_host
    for size in sizes:
        rows = max(1, size // ROW_BYTES)
        a, b = (torch.ones(rows, WIDTH, dtype=DTYPES[DTYPE], device=here.device) for _ in range(2))
        epilogue = Epilogue(b, torch.ones(WIDTH, dtype=DTYPES[DTYPE], device=here.device), 1e-6)
        plain = graph_us([partial(here.peer.all_reduce, a, group)])
        fused = graph_us([partial(here.peer.all_reduce, a, group, epilogue)])
        size = rows * ROW_BYTES
        points["local"].append((3 * size, round(graph_us([partial(torch.add, a, b)]), 2)))
        points["epilogue"].append((4 * size, round(max(0.1, fused - plain), 2)))
    points["epilogue"] = median_filtered(points["epilogue"])
    return points
