"""Measures the GPUs of this host: what every edge costs on every transport, and which PeerTuning suits them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from weft.bench.cuda import World, graph_us
from weft.bench.ranks import Report
from weft.bench.tune import edges_to_price
from weft.comm.peer import PeerTuning, spared_by_two_hops
from weft.comm.transport import Epilogue, Transport, carry_out

WIDTH, DTYPE = 4096, torch.bfloat16
ROW_BYTES = WIDTH * DTYPE.itemsize
NEVER = 1 << 40
Measured = Callable[[PeerTuning, int], float]  # µs by bytes
SMALL, MIDDLE, LARGE = (1 << 13, 1 << 16), (1 << 19, 1 << 21), (1 << 24, 1 << 26)


def measure_gpus(rank: int, directory: Path, report: Report, world: int, names: list[str], sizes: list[int]) -> None:
    """A rank's part. Rank 0 reports a pair a finding: ("peer_tuning", PeerTuning as a dictionary), ("local" and
    "epilogue", µs by bytes touched), and for each edge ("price", a row of transport, kind, ranks, world, bytes, us).
    """
    here = World.open(rank, world, directory, 2 * world * max(*sizes, LARGE[-1]))
    here.peer.tuning = _find_tuning(here)
    if rank == 0:
        report(("peer_tuning", asdict(here.peer.tuning)))
    for kind, points in _price_locals(here, sizes).items():
        if rank == 0:
            report((kind, points))
    opened: list[Transport] = [t for t in (here.peer, here.torchdist) if t.name in names]
    for edge, counts, row in edges_to_price(here.mesh, sizes, ROW_BYTES):
        for transport in opened:
            if edge.kind not in transport.kinds:
                continue
            rows = here.mesh.row_count(edge.src.rows, rank, counts)
            xs = [torch.ones(rows, WIDTH, dtype=DTYPE, device=here.device) for _ in range(4)]
            us = graph_us([partial(carry_out, edge, x, here.mesh, transport, counts) for x in xs])
            if rank == 0:
                report(("price", {"transport": transport.name} | row | {"us": round(us, 2)}))
    here.close()


def _find_tuning(here: World) -> PeerTuning:
    """The PeerTuning for this host: a number at a time, each with those found before.

    Found by all_reduce; what concerns large calls in one hop by all_gatherv. Two hops must pay for the mixed edge too.
    """
    peer, group, mesh = here.peer, here.peer.world, here.mesh
    n, dp, tp = len(group), here.mesh.peers("attn_dp", here.rank), here.mesh.peers("attn_tp", here.rank)

    def tensors(size: int) -> list[torch.Tensor]:
        return [torch.ones(size // ROW_BYTES, WIDTH, device=here.device, dtype=DTYPE) for _ in range(4)]

    def sum_us(tuning: PeerTuning, size: int, epilogue: Epilogue | None = None) -> float:
        peer.tuning = tuning
        return graph_us([partial(peer.all_reduce, x, group, epilogue) for x in tensors(size)])

    def norm_us(tuning: PeerTuning, size: int) -> float:
        residual, weight = tensors(size)[0], tensors(ROW_BYTES)[0][0]
        return sum_us(tuning, size, Epilogue(residual, weight, 1e-6))

    def gather_us(tuning: PeerTuning, size: int) -> float:
        peer.tuning = tuning
        return graph_us([partial(peer.all_gatherv, x, group, (x.shape[0],) * n) for x in tensors(size // n)])

    def mixed_us(tuning: PeerTuning, size: int) -> float:
        peer.tuning = tuning
        sizes = (size // ROW_BYTES // mesh.attn_dp,) * mesh.attn_dp
        return graph_us([partial(peer.reduce_scatterv_all_reduce, x, dp, tp, sizes) for x in tensors(size)])

    def best(found: Sequence[PeerTuning], us: Measured, sizes: Sequence[int]) -> PeerTuning:
        return min(found, key=lambda t: sum(us(t, size) / size**0.25 for size in sizes))

    def threshold(low: PeerTuning, high: PeerTuning, us: Measured, sizes: Sequence[int]) -> int:
        """The largest size at which `low` wins; NEVER if it is the last."""
        found = max((size for size in sizes if us(low, size) <= us(high, size)), default=0)
        return NEVER if found == sizes[-1] else found

    one = PeerTuning(one_hop_bytes=NEVER, split_bytes=NEVER, split_sums_bytes=NEVER)
    one = best([replace(one, threads=t) for t in (64, 128, 256)], sum_us, SMALL)
    two = replace(one, one_hop_bytes=0)
    two = best([replace(two, wide_threads=t, wide_blocks=b) for t in (256, 480) for b in (64, 128)], sum_us, MIDDLE)
    two = best([replace(two, norm_blocks=b) for b in (128, 256)], norm_us, MIDDLE)
    one, sizes = replace(two, one_hop_bytes=NEVER), [1 << p for p in range(15, 22)]
    hops = spared_by_two_hops((1, n, 0), n, threshold(one, two, sum_us, sizes))
    if mesh.attn_dp > 1 and mesh.attn_tp > 1:
        segment = threshold(one, two, mixed_us, sizes) // mesh.attn_dp
        hops = max(hops, spared_by_two_hops((mesh.attn_dp, mesh.attn_tp, 1), n, segment))
    copies = [replace(two, split_bytes=0, push_blocks=p, write_blocks=w) for p, w in ((32, 96), (16, 112), (64, 192))]
    found = best(copies, gather_us, LARGE)
    unsplit = threshold(one, found, gather_us, [1 << p for p in range(18, 27)])
    shapes = ((64, 112, 88), (24, 56, 48), (32, 64, 32), (64, 64, 128))
    sums = best(
        [
            replace(found, split_sums_bytes=0, sums_push_blocks=p, sums_blocks=s, sums_write_blocks=w)
            for p, s, w in shapes
        ],
        sum_us,
        LARGE,
    )
    unsplit_sums = threshold(two, sums, sum_us, [1 << p for p in range(20, 27)])
    return replace(sums, one_hop_bytes=int(hops), split_bytes=unsplit + 1, split_sums_bytes=unsplit_sums + 1)


def _price_locals(here: World, sizes: list[int]) -> dict[str, list[tuple[int, float]]]:
    """What a rank's own steps cost, as points (bytes touched, µs): local kernels, and epilogues."""
    points: dict[str, list[tuple[int, float]]] = {"local": [], "epilogue": []}
    group = here.peer.world
    for size in sizes:
        rows = max(1, size // ROW_BYTES)
        a, b = (torch.ones(rows, WIDTH, dtype=DTYPE, device=here.device) for _ in range(2))
        epilogue = Epilogue(b, torch.ones(WIDTH, dtype=DTYPE, device=here.device), 1e-6)
        plain = graph_us([partial(here.peer.all_reduce, a, group)])
        fused = graph_us([partial(here.peer.all_reduce, a, group, epilogue)])
        size = rows * ROW_BYTES
        points["local"].append((3 * size, round(graph_us([partial(torch.add, a, b)]), 2)))
        points["epilogue"].append((4 * size, round(max(0.1, fused - plain), 2)))
    return points
