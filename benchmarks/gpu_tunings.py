"""What the numbers of PeerTuning are worth on this host: edges and sizes by tuning. Needs two GPUs or more.

python benchmarks/gpu_tunings.py [--rows 1 16 64 256 1024] [--hidden 7168]
"""

from __future__ import annotations

import argparse

import torch

from weft.bench.cuda import Case, measure
from weft.bench.ranks import run_ranks
from weft.comm.peer_launch import NEVER, PeerTuning, Split

TUNINGS = {
    "peer": PeerTuning(),
    "64 threads": PeerTuning(threads=64),
    "256 threads": PeerTuning(threads=256),
    "64 wide": PeerTuning(wide_blocks=64),
    "256 threads wide": PeerTuning(wide_threads=256),
    "late": PeerTuning(early=0),
    **{f"cluster {n}": PeerTuning(cluster=n) for n in (1, 2, 4)},
    "one shot": PeerTuning(one_shot_bytes=NEVER),
    "two shots": PeerTuning(one_shot_bytes=0),
    "no split": PeerTuning().split_from(NEVER),
    "split from 1 MiB": PeerTuning().split_from(1 << 20),
    "one shot 16-0-112": PeerTuning(split_one_shot=Split(1 << 20, 16, 0, 112, 480)),
    "one shot 64-0-192": PeerTuning(split_one_shot=Split(1 << 20, 64, 0, 192, 480)),
    "two shots 64-112-88": PeerTuning(split_two_shot=Split(2 << 20, 64, 112, 88, 480)),
    "two shots 32-64-32": PeerTuning(split_two_shot=Split(2 << 20, 32, 64, 32, 480)),
    "norm 64-128-320": PeerTuning(split_two_shot_norm=Split(4 << 20, 64, 128, 320, 224)),
    "norm 32-64-160": PeerTuning(split_two_shot_norm=Split(4 << 20, 32, 64, 160, 480)),
    "128 to a norm": PeerTuning(norm_blocks=128),
}


def main() -> None:
    """Prints a line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument(
        "--edges", nargs="+", default=["all_reduce", "all_reduce+norm", "all_gatherv", "reduce_scatterv"]
    )
    options = parser.parse_args()
    world = torch.cuda.device_count()
    cases = [Case(world, edge, "bf16", options.hidden, rows) for edge in options.edges for rows in options.rows]
    for timing in run_ranks(world, measure, cases, TUNINGS, []):
        best = min(timing.us, key=timing.us.__getitem__)
        cells = "  ".join(f"{name} {us:.2f}" for name, us in timing.us.items())
        print(f"{timing.case} best {best}:  {cells}", flush=True)


if __name__ == "__main__":
    main()
