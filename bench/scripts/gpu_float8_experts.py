"""Measure the experts of prompts in FP8 by Hopper's kernels and by Triton's, and in bfloat16, on made-up weights.

They take turns. Prints a line of JSON per shape: medians in ms, and TFLOP/s of the three products. `equal` is the share
of elements of the FP8 results that are the same.

    python bench/scripts/gpu_float8_experts.py --rows 8192
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch

from weft.engine.kernels.triton import fused_experts
from weft.engine.kernels.triton.experts_tiles import float8_tiles_of
from weft.engine.kernels.triton.route import sort_pairs
from weft.kernels.float8 import FLOAT8, Fp8Weight
from weft.kernels.triton import float8_rows

SHAPES = {"qwen3-30b-a3b": (128, 8, 2048, 768), "qwen3.5-397b-a17b, a quarter of its experts": (128, 10, 4096, 1024)}
"""Experts, choices, width and inner width."""
UNIT = (128, 128)


def milliseconds(call: Callable[[], object]) -> float:
    """Return the time of a call on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def weight(*shape: int) -> Fp8Weight:
    """Return made-up values with scales of about 1."""
    values = (torch.randn(shape, device="cuda") / shape[-1] ** 0.5).to(FLOAT8)
    return Fp8Weight(values, torch.rand(shape[0], shape[1] // 128, shape[2] // 128, device="cuda") + 0.5, UNIT)


def measure(name: str, token_rows: int, turns: int) -> None:
    """Print the line of a shape."""
    count, k, width, inner = SHAPES[name]
    x = torch.randn(token_rows, width, device="cuda", dtype=torch.bfloat16)
    gate_up, down = weight(count, 2 * inner, width), weight(count, width, inner)
    expert = torch.rand(token_rows, count, device="cuda").topk(k).indices.int()
    weights = torch.rand(token_rows, k, device="cuda")
    routings, rows = [sort_pairs(weights, expert, count, n) for n in (64, 128)], float8_rows.quantise(x, 128)
    outs = torch.empty(3, *x.shape, device="cuda", dtype=x.dtype)
    plain = [w.values.to(x.dtype) for w in (gate_up, down)]
    calls = {
        "hopper": lambda: fused_experts.experts(rows, routings[1], gate_up, down, outs[0]),
        "triton": lambda: fused_experts.experts(
            rows, routings[0], gate_up, down, outs[1], *float8_tiles_of(token_rows)
        ),
        "bfloat16": lambda: fused_experts.experts(x, routings[1], *plain, outs[2]),
    }
    times: dict[str, list[float]] = {case: [] for case in calls}
    for _ in range(turns + 1):
        for case, call in calls.items():
            times[case].append(milliseconds(call))
    medians = {case: statistics.median(each[1:]) for case, each in times.items()}
    rates = {case: round(6 * token_rows * k * width * inner / ms / 1e9) for case, ms in medians.items()}
    equal = (outs[0] == outs[1]).float().mean().item()
    print(json.dumps({"shape": name, "rows": token_rows, "ms": medians, "tflops": rates, "equal": equal}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    for name in SHAPES:
        measure(name, args.rows, args.turns)


if __name__ == "__main__":
    main()
