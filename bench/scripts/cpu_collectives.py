"""Weft's collectives over gloo against gloo's own, on this machine's CPUs.

    python bench/scripts/cpu_collectives.py --ranks 4 --out bench/results/cpu_collectives_4.json

Each row is an edge of the layout attn_dp=2 attn_tp=ranks/2; the peer is what an engine would otherwise call for it:
gloo's all_reduce, and for a fused edge all_reduce and the padded all_gather or a slice. Both run in turns in one
process group, `--rounds` times; figures are medians over rounds of the slowest rank's time. Absolute times on a shared
machine are noise: read the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from weft.comm.torchdist import TorchDistTransport
from weft.planner.spec import Mesh

WIDTH = 256
ROWS = (1, 4, 16, 64, 256, 1024)
"""Rows of each DP group; a row is 1 KiB of float32."""


def cases(t: TorchDistTransport, mesh: Mesh, rows: int) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """By edge: (Weft's call, the peer's)."""
    world, tp, dp = tuple(range(mesh.world)), mesh.peers("attn_tp", t.rank), mesh.peers("attn_dp", t.rank)
    groups = {g: dist.new_group(list(g)) for name in ("attn_tp", "attn_dp") for g in mesh.partitions[name]}
    group, whole = torch.randn(rows, WIDTH), torch.randn(mesh.attn_dp * rows, WIDTH)
    sizes, start = (rows,) * mesh.attn_dp, mesh.group_of(t.rank) * rows

    def reduced(x: Tensor, over: Any = None) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=over)
        return out

    def reduce_then_gather() -> Tensor:
        out = [torch.empty_like(group) for _ in dp]
        dist.all_gather(out, reduced(group, groups[tp]), group=groups[dp])
        return torch.cat(out)

    return {
        "all_reduce over attn_tp": (lambda: t.all_reduce(group, tp), lambda: reduced(group, groups[tp])),
        "all_reduce over world": (lambda: t.all_reduce(whole, world), lambda: reduced(whole)),
        "all_reduce+all_gatherv": (lambda: t.all_reduce_all_gatherv(group, world, sizes), reduce_then_gather),
        "reduce_scatterv+all_reduce": (
            lambda: t.reduce_scatterv_all_reduce(whole, world, sizes),
            lambda: reduced(whole)[start : start + rows],
        ),
    }


def rank_main(rank: int, mesh: Mesh, rounds: int, calls: int, directory: str) -> None:
    """Times every case in turns; rank 0 writes the medians."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    t = TorchDistTransport(mesh, rank, f"file://{directory}/rendezvous")
    results = []
    for rows in ROWS:
        for edge, (ours, theirs) in cases(t, mesh, rows).items():
            assert torch.allclose(ours(), theirs(), rtol=1e-4, atol=1e-4), f"{edge}: another result than the peer's"
            times: dict[str, list[float]] = {"weft": [], "gloo": []}
            for index in range(rounds):
                pair = [("weft", ours), ("gloo", theirs)]
                for name, call in pair[:: 1 if index % 2 else -1]:  # neither is always first
                    dist.barrier()
                    began = time.perf_counter()
                    for _ in range(calls):
                        call()
                    slowest = torch.tensor((time.perf_counter() - began) / calls)
                    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                    times[name].append(slowest.item() * 1e6)
            weft_us, gloo_us = (statistics.median(times[n]) for n in ("weft", "gloo"))
            results.append({"edge": edge, "group_rows": rows, "weft_us": weft_us, "gloo_us": gloo_us, "raw": times})
            if rank == 0:
                ratio = f"{gloo_us / weft_us:5.2f}×"
                print(f"{edge:28}{rows:5} KiB a group  weft {weft_us:8.0f} µs  gloo {gloo_us:8.0f} µs  {ratio}")
    if rank == 0:
        Path(directory, "results.json").write_text(json.dumps(results))
    t.close()


def main() -> None:
    """Parses the command line, runs the ranks, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="even; half of them are one DP group")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20, help="calls timed together")
    parser.add_argument("--out", type=Path, help="write raw times and the host's description here")
    args = parser.parse_args()
    if args.ranks < 4 or args.ranks % 2:
        parser.error(f"--ranks is {args.ranks}; it must be even and 4 or more")
    mesh = Mesh(2, args.ranks // 2, 2, args.ranks // 2)
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(rank_main, (mesh, args.rounds, args.calls, directory), nprocs=mesh.world)
        results = json.loads(Path(directory, "results.json").read_text())
    host = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__, "ranks": args.ranks}
    if args.out:
        args.out.write_text(json.dumps({"host": host, "layout": str(mesh), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
