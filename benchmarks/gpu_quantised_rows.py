"""Rows quantised by the norm or the exchange that makes them, or by a kernel of their own. Needs two GPUs or more.

    python benchmarks/gpu_quantised_rows.py --out benchmarks/results/gpu_quantised_rows.json

µs a call in a CUDA graph, as `weft bench collectives` has them: of a norm and of an all_reduce with residual add and
norm over transport peer, each alone, with rows in FP8 besides, and with the kernel `quantise` behind it. What is
quantised is compared with that kernel's, bit for bit. Prints one JSON object last.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gpu_kernels import write_json
from weft.bench.cuda import TURNS, Case, World, capture, replays_us
from weft.bench.ranks import Report, run_ranks
from weft.comm.transport import Epilogue
from weft.kernels.float8 import Rows, unfilled
from weft.kernels.triton import float8
from weft.kernels.triton.rms_norm import rms_norm

RUN, EPS = 128, 1e-6


def then_quantised(call: Callable[[], Tensor]) -> None:
    """The call, whose last rows a kernel of its own quantises."""
    out = call()
    float8.quantise(out[-1] if out.dim() == 3 else out, RUN)


def same(found: Rows, normed: Tensor) -> bool:
    """Whether they are what the kernel makes of the rows."""
    wanted = float8.quantise(normed, RUN)
    return torch.equal(found.values.view(torch.uint8), wanted.values.view(torch.uint8)) and torch.equal(
        found.scales, wanted.scales
    )


def measure(rank: int, directory: Path, report: Report, world: int, cases: list[tuple[int, int]]) -> None:
    """A rank's part. cases: (width, rows)."""
    most = max(width * rows for width, rows in cases) * 2
    here = World.open(rank, world, directory, (world + 1) * most)
    for width, rows in cases:
        torch.manual_seed(rank)
        xs = [torch.randn(rows, width, device=here.device).bfloat16() for _ in range(TURNS)]
        torch.manual_seed(7)  # the same on every rank
        plain = Epilogue(torch.randn_like(xs[0]), torch.randn_like(xs[0][0]), EPS)
        quantised = unfilled(xs[0], RUN)
        both = replace(plain, quantised=quantised)
        sums = {
            name: [partial(here.peer.all_reduce, x, here.peer.world, epilogue) for x in xs]
            for name, epilogue in (("norm", plain), ("norm and FP8", both))
        }
        norms = {
            "norm": [partial(rms_norm, x, plain.weight, EPS) for x in xs],
            "norm and FP8": [partial(rms_norm, x, plain.weight, EPS, quantised=quantised) for x in xs],
        }
        for kind, calls in (("all_reduce", sums), ("local", norms)):
            normed = calls["norm and FP8"][0]()
            right = same(quantised, normed[-1] if kind == "all_reduce" else normed)
            calls["norm, then quantise"] = [partial(then_quantised, call) for call in calls["norm"]]
            often = Case(world, kind, "bf16", width, rows).calls
            times = replays_us([capture(found, often) for found in calls.values()])
            here.peer.check()
            if rank == 0:
                us = dict(zip(calls, (round(time, 2) for time in times), strict=True))
                report({"kind": kind, "width": width, "rows": rows, "us": us, "same": right})
    here.close()


def main() -> None:
    """Prints a line a case, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 7168])
    parser.add_argument("--out", type=Path, help="write the JSON here, too")
    options = parser.parse_args()
    world = torch.cuda.device_count()
    found = []
    for row in run_ranks(world, measure, world, [(width, rows) for width in options.hidden for rows in options.rows]):
        found.append(row)
        cells = "  ".join(f"{name} {us:.2f}" for name, us in row["us"].items())
        print(f"{row['kind']:10} {row['width']} × {row['rows']:<5} {cells}", flush=True)
    host = {"gpus": world, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    write_json({**host, "rows": found}, options.out)
    if wrong := [row for row in found if not row["same"]]:
        raise SystemExit(f"not what the kernel quantise makes of the same rows: {wrong}")


if __name__ == "__main__":
    main()
