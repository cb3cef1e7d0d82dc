"""Skewed batches on GPUs: what every rank's own number of tokens costs. Needs two GPUs or more.

Each draw gives every rank its share of the tokens by a skewed distribution (lognormal weights). Transport peer captures
one CUDA graph for all draws, with the counts in device memory. The others cannot: they get a graph for each draw, which
no engine could keep. They are NCCL's grouped form (a reduce, or a broadcast, for each rank), and what engines do
instead: all_reduce of everything and a slice of it, and all_gather of as many rows as the largest has, padded.

python benchmarks/gpu_ragged.py [--tokens 256] [--draws 24] [--hidden 7168] [--sigma 1.0] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.bench import cuda as gpu
from weft.bench.gpu_baselines import Nccl
from weft.bench.host import describe_host
from weft.bench.ranks import run_ranks
from weft.comm.transport import CommError, LiveSizes

PEER = "peer, one graph"


def draw(world: int, tokens: int, sigma: float, seed: int) -> list[int]:
    """Tokens of each rank, `tokens` in all."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(world, generator=generator).mul(sigma).exp()
    picks = torch.multinomial(weights / weights.sum(), tokens, replacement=True, generator=generator)
    return torch.bincount(picks, minlength=world).tolist()


def work(rank: int, directory: Path, report: Any, world: int, options: argparse.Namespace) -> None:
    """A rank's part. Rank 0 reports a row a draw and edge."""
    size = options.tokens * options.hidden * 2
    here = gpu.World.open(rank, world, directory, (world + 1) * world * size)
    group, nccl = here.peer.world, Nccl(here.mesh, rank)

    def tensors(rows: int) -> list[torch.Tensor]:
        return [torch.randn(rows, options.hidden, device=here.device).bfloat16() for _ in range(gpu.TURNS)]

    # Any rank may have all tokens; what NCCL gets is as long as there are tokens.
    xs, own = tensors(world * options.tokens), tensors(options.tokens)
    counts = LiveSizes((options.tokens,) * world, torch.zeros(world, dtype=torch.int32, device=here.device))
    graphs = {
        "reduce_scatterv": gpu.capture([partial(here.peer.reduce_scatterv, x, group, counts) for x in xs]),
        "all_gatherv": gpu.capture([partial(here.peer.all_gatherv, x, group, counts) for x in own]),
    }
    for seed in range(options.draws):
        sizes = draw(world, options.tokens, options.sigma, seed)
        counts.live.copy_(torch.tensor(sizes, dtype=torch.int32))
        check(here, xs[0], own[0], counts, sizes)
        found: dict[str, dict[str, float]] = {edge: {PEER: gpu.replays_us([g])[0]} for edge, g in graphs.items()}
        mine, most = slice(sum(sizes[:rank]), sum(sizes[: rank + 1])), max(sizes)
        scatter, given = found["reduce_scatterv"], [x[: sizes[rank]] for x in own]
        if min(sizes) > 0:  # torch.distributed has no empty parts there
            scatter["nccl grouped"] = gpu.graph_us(
                nccl.calls("reduce_scatterv", [x[: options.tokens].clone() for x in xs], sizes)
            )
            found["all_gatherv"]["nccl grouped"] = gpu.graph_us(nccl.calls("all_gatherv", given, sizes))
        scatter["nccl all_reduce + slice"] = gpu.graph_us(
            [partial(slice_of_sum, x[: options.tokens].clone(), mine) for x in xs]
        )
        padded = nccl.calls("all_gatherv", [x[:most] for x in own], [most] * world)
        found["all_gatherv"]["nccl all_gather, padded"] = gpu.graph_us(padded)
        here.peer.check()
        for edge, us in found.items():
            if rank == 0:
                report({"edge": edge, "sizes": sizes, "us": {name: round(t, 2) for name, t in us.items()}})
    here.close()


def slice_of_sum(x: torch.Tensor, mine: slice) -> torch.Tensor:
    """What an engine does without reduce_scatterv."""
    dist.all_reduce(x)
    return x[mine].clone()


def check(here: gpu.World, x: torch.Tensor, own: torch.Tensor, counts: LiveSizes, sizes: list[int]) -> None:
    """Raises CommError where peer and NCCL differ."""
    rank, group, mine = here.rank, here.peer.world, sizes[here.rank]
    total = x.float()
    dist.all_reduce(total)
    wanted = total[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
    got = here.peer.reduce_scatterv(x, group, counts)[:mine].float()
    every = torch.empty(len(sizes) * own.shape[0], own.shape[1], dtype=own.dtype, device=own.device)
    dist.all_gather_into_tensor(every, own)
    rows = torch.cat([part[:n] for part, n in zip(every.chunk(len(sizes)), sizes, strict=True)])
    if not torch.equal(here.peer.all_gatherv(own, group, counts)[: len(rows)], rows):
        raise CommError(f"all_gatherv gave other rows for {sizes}")
    if mine and not (got - wanted).norm() / wanted.norm() < 2e-2:
        raise CommError(f"reduce_scatterv gave a wrong sum for {sizes}")


def main() -> None:
    """Prints a line a draw, and medians; writes JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="of all ranks together")
    parser.add_argument("--draws", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of a rank's weight: 0 is even")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    world = torch.cuda.device_count()
    if world < 2:
        parser.error(f"takes two GPUs or more; this machine has {world}")
    rows = []
    for row in run_ranks(world, work, world, options):
        rows.append(row)
        print(row["edge"], row["sizes"], row["us"], flush=True)
    for edge in ("reduce_scatterv", "all_gatherv"):
        found = [row["us"] for row in rows if row["edge"] == edge]
        for name in dict.fromkeys(name for us in found for name in us):
            ratios = [us[name] / us[PEER] for us in found if name in us]
            median = statistics.median(us[name] for us in found if name in us)
            times = f"{statistics.median(ratios):.2f} times peer's, at least {min(ratios):.2f}"
            print(f"{edge} {name}: median {median:.1f} µs, {times}")
    if options.json:
        head = {"what": "benchmarks/gpu_ragged.py", "tokens": options.tokens, "hidden": options.hidden}
        table = head | {"sigma": options.sigma, "host": describe_host(), "rows": rows}
        options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
