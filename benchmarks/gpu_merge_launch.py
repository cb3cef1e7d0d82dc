"""How many blocks and threads suit the merge's kernel on transport peer: µs a call in a CUDA graph, by launch.

python benchmarks/gpu_merge_launch.py --json merge_launch.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from weft.bench.cuda import World, capture, replays_us
from weft.bench.dcp_merge import Case, Shape, given
from weft.bench.host import describe_host
from weft.bench.ranks import Report, run_ranks
from weft.comm.peer_launch import PeerTuning

LAUNCHES = [(blocks, threads) for blocks in (64, 128, 256) for threads in (64, 128, 256, 480)]


def measure(rank: int, directory: Path, report: Report, cases: Sequence[Case]) -> None:
    """A rank's part; rank 0 reports a row for each case."""
    here = World.open(rank, cases[0].ranks, directory, 2 * max(case.bytes for case in cases))
    for case in cases:
        parts = [given(case, rank + 100 * turn, here.device) for turn in range(4)]
        graphs = []
        for blocks, threads in LAUNCHES:
            here.peer.tuning = replace(
                PeerTuning(), threads=threads, merge_threads=threads, wide_threads=threads, merge_blocks=blocks
            )
            graphs.append(capture([partial(here.peer.merge_scatterv, *part, here.peer.world) for part in parts], 40))
        us = replays_us(graphs)
        here.peer.check()
        if rank == 0:
            times = {f"{b}×{t}": round(u, 2) for (b, t), u in zip(LAUNCHES, us, strict=True)}
            report({"shape": case.shape, "batch": case.batch, "us": times})
        torch.cuda.empty_cache()
    here.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ranks = torch.cuda.device_count()
    shapes: tuple[Shape, ...] = ("deepseek-v2", "qwen3-235b")
    batches = (1, 8, 32, 128)
    cases = [Case(ranks, shape, batch, "bf16") for shape in shapes for batch in batches]
    rows = []
    for row in run_ranks(ranks, measure, cases):
        rows.append(row)
        best = sorted(row["us"].items(), key=lambda item: item[1])
        print(f"{row['shape']:14} {row['batch']:4}  " + "  ".join(f"{name} {us}" for name, us in best), flush=True)
    if args.json:
        head = {"what": "benchmarks/gpu_merge_launch.py", "host": describe_host(), "rows": rows}
        args.json.write_text(json.dumps(head, indent=1) + "\n")


if __name__ == "__main__":
    main()
