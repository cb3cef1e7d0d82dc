"""How soon the ranks of transport shm hear that one of them was killed: on idle cores, and with a busy process on each.

    python bench/scripts/dead_rank.py --ranks 2 3 --kills 20 --json dead_rank.json

Prints the median and the longest time from the kill to each survivor's PeerLost, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import random
import signal
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from weft.comm.shm import ShmTransport
from weft.comm.transport import PeerLost
from weft.kernels.build import cpu_kernels
from weft.planner.spec import Mesh

FORK = mp.get_context("fork")


def call_until_lost(rank: int, world: int, path: Path, pipe: Connection) -> None:
    """Calls without a pause; sends 0 once all have met, then when it heard of a loss (CLOCK_MONOTONIC), and of whom."""
    torch.set_num_threads(1)
    transport, x = ShmTransport(Mesh(1, world, world, 1), rank, path), torch.ones(64, 64)
    group = tuple(range(world))
    transport.barrier(group)
    pipe.send((0.0, -1))
    try:
        while True:
            transport.all_reduce_(x, group)
    except PeerLost as lost:
        pipe.send((time.monotonic(), lost.rank))


def spin() -> None:
    while True:
        pass


def kill_one(world: int, draw: random.Random) -> list[float]:
    """Seconds until each survivor heard."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as directory:
        pipes = [FORK.Pipe() for _ in range(world)]
        ranks = [
            FORK.Process(target=call_until_lost, args=(r, world, Path(directory) / "shm", pipes[r][1]))
            for r in range(world)
        ]
        for process in ranks:
            process.start()
        for here, _ in pipes:
            here.recv()
        time.sleep(draw.uniform(0.01, 0.05))
        victim = draw.randrange(world)
        killed = time.monotonic()
        os.kill(ranks[victim].pid or 0, signal.SIGKILL)
        heard = [pipes[r][0].recv() for r in range(world) if r != victim]
        for process in ranks:
            process.join()
        assert all(who == victim for _, who in heard), heard
        return [at - killed for at, _ in heard]


def measure(world: int, busy: int, kills: int) -> dict[str, object]:
    """A row of the result."""
    draw, spinners = random.Random(world), [FORK.Process(target=spin, daemon=True) for _ in range(busy)]
    for process in spinners:
        process.start()
    try:
        ms = sorted(1e3 * s for _ in range(kills) for s in kill_one(world, draw))
    finally:
        for process in spinners:
            process.kill()
    return {"ranks": world, "busy": busy, "median_ms": round(statistics.median(ms), 1), "longest_ms": round(ms[-1], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cpu_kernels()
    rows, cores = [], len(os.sched_getaffinity(0))
    for world in options.ranks:
        for busy in (0, cores, 2 * cores):
            rows.append(measure(world, busy, options.kills))
            print(
                "{ranks} ranks, {busy} busy processes: median {median_ms} ms, longest {longest_ms} ms".format(
                    **rows[-1]
                )
            )
    if options.json:
        options.json.write_text(json.dumps({"cores": cores, "kills": options.kills, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
