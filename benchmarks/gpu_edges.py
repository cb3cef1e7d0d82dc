"""GPU edges by CUDA-graph replay: Weft's peer transport beside NCCL and torch symmetric memory. A process a GPU.

    torchrun --nproc-per-node 4 benchmarks/gpu_edges.py [--json FILE] [--hidden 4096 7168] [--rows 1 4 16 64 256 1024]

µs a call, median over replays, the slowest rank's; a graph holds 20 calls on inputs that take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from weft.comm.peer import PeerTransport
from weft.comm.transport import Epilogue
from weft.place.spec import Mesh

CALLS, REPLAYS = 20, 50


def timed(call: Callable[[int], object], rank: int) -> float:
    """Median µs of a call; every rank replays the same graph as often."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(3):
            call(i)
        stream.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(CALLS):
                call(i)
        times = []
        for turn in range(REPLAYS + 5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            if turn >= 5:
                times.append(start.elapsed_time(end) * 1e3 / CALLS)
    took = torch.tensor([statistics.median(times)], device="cuda")
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 7168])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--sweep", action="store_true", help="also numbers of blocks and where two hops begin")
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    mesh = Mesh(2, world // 2, 2, world // 2) if world >= 4 else Mesh(1, world, world, 1)
    group, tp = tuple(range(world)), mesh.attn_tp
    tp_ranks, dp_ranks = mesh.peers("attn_tp", rank), mesh.peers("attn_dp", rank)
    variants = {"peer": {}}
    if options.sweep:
        variants |= {f"peer {b} blocks": {"blocks": b} for b in (4, 8, 16, 32)}
        variants |= {"peer one hop": {"one_hop_bytes": 1 << 40}, "peer two hops": {"one_hop_bytes": 0}}
    peers = {
        name: PeerTransport(mesh, rank, f"{folder[0]}/{i}", device, inbox_bytes=128 << 20, **choice)
        for i, (name, choice) in enumerate(variants.items())
    }
    rows_out = []
    for hidden in options.hidden:
        for rows in options.rows:
            xs = [torch.randn(rows, hidden, device=device).bfloat16() for _ in range(4)]
            wide = [torch.randn(world * rows, hidden, device=device).bfloat16() for _ in range(4)]
            mixed = [torch.randn(mesh.attn_dp * rows, hidden, device=device).bfloat16() for _ in range(4)]
            out, gathered = torch.empty_like(xs[0]), torch.empty_like(wide[0])
            epilogue = Epilogue(torch.randn_like(xs[0]), torch.randn(hidden, device=device).bfloat16(), 1e-6)
            groups_of_rows = (rows,) * mesh.attn_dp
            calls: dict[str, dict[str, Callable[[int], object]]] = {e: {} for e in ("all_reduce", "all_reduce+norm")}
            calls |= {e: {} for e in ("reduce_scatterv", "all_gatherv")}
            calls["all_reduce"]["nccl"] = lambda i, x=xs: dist.all_reduce(x[i % 4])
            calls["reduce_scatterv"]["nccl"] = lambda i, x=wide, o=out: dist.reduce_scatter_tensor(o, x[i % 4])
            calls["all_gatherv"]["nccl"] = lambda i, x=xs, o=gathered: dist.all_gather_into_tensor(o, x[i % 4])
            for name, peer in peers.items():
                calls["all_reduce"][name] = lambda i, p=peer, x=xs: p.all_reduce(x[i % 4], group)
                calls["all_reduce+norm"][name] = lambda i, p=peer, x=xs, e=epilogue: p.all_reduce(x[i % 4], group, e)
                equal = (rows,) * world
                calls["reduce_scatterv"][name] = lambda i, p=peer, x=wide, s=equal: p.reduce_scatterv(
                    x[i % 4], group, s
                )
                calls["all_gatherv"][name] = lambda i, p=peer, x=xs, s=equal: p.all_gatherv(x[i % 4], group, s)
                if tp > 1 and mesh.attn_dp > 1:
                    calls.setdefault("all_reduce+all_gatherv", {})[name] = lambda i, p=peer, x=xs, s=groups_of_rows: (
                        p.all_reduce_all_gatherv(x[i % 4], tp_ranks, dp_ranks, s)
                    )
                    calls.setdefault("reduce_scatterv+all_reduce", {})[name] = (
                        lambda i, p=peer, x=mixed, s=groups_of_rows: p.reduce_scatterv_all_reduce(
                            x[i % 4], dp_ranks, tp_ranks, s
                        )
                    )
            for edge, by in calls.items():
                us = {name: round(timed(call, rank), 2) for name, call in by.items()}
                if rank == 0:
                    rows_out.append({"edge": edge, "hidden": hidden, "rows": rows, "us": us})
                    print(
                        f"{edge:28} {hidden:5} × {rows:4}  " + "  ".join(f"{k} {v:.2f}" for k, v in us.items()),
                        flush=True,
                    )
    for peer in peers.values():
        peer.check()
        peer.close()
    if rank == 0 and options.json:
        head = {"gpu": torch.cuda.get_device_name(), "world": world, "torch": torch.__version__}
        head |= {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        options.json.write_text(json.dumps(head | {"rows": rows_out}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
