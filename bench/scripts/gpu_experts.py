"""Measure routed experts in a quantised format by their kernels, and in bfloat16, on made-up weights, in CUDA graphs.

float8: by Hopper's kernels and by Triton's; `equal` is the share of elements of both results that are the same.
mxfp4: with --tiles also by other tiles of one product next to the usual tile of the other, from a second line on,
the fastest first. `equal` compares with bfloat16, which has tiles of another depth for some numbers of rows. From 256
pairs an expert on, weights are dequantised first, so that tiles are of bfloat16's kernels.

Cases take turns, but for tiles. Prints a line of JSON per shape and number of rows: medians in µs, and TFLOP/s of the
three products.

    python bench/scripts/gpu_experts.py float8 --rows 8192
    python bench/scripts/gpu_experts.py mxfp4 --rows 1 16 64 1024 --tiles
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from weft.engine.kernels.mxfp4 import Mxfp4, dequantise
from weft.engine.kernels.triton import fused_experts
from weft.engine.kernels.triton.experts_tiles import ExpertsTile, float8_tiles_of, tile_rows_of
from weft.engine.kernels.triton.route import Routing, sort_pairs
from weft.kernels.float8 import FLOAT8, Fp8Weight
from weft.kernels.triton import float8_rows

SHAPES = {
    "float8": {
        "qwen3-30b-a3b": (128, 8, 2048, 768),
        "qwen3.5-397b-a17b, a quarter of its experts": (128, 10, 4096, 1024),
    },
    "mxfp4": {"gpt-oss-20b": (32, 4, 2880, 2880), "gpt-oss-120b": (128, 4, 2880, 2880)},
}
"""Experts, choices, width and inner width."""
CALLS = 4
"""Calls in a graph."""
Calls = dict[str, Callable[[], object]]


def microseconds(calls: Calls, turns: int) -> dict[str, float]:
    """Return the median time of each call on the GPU."""
    graphs = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(CALLS):
                call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns + 1):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1000 / CALLS)
    return {name: round(statistics.median(each[1:]), 2) for name, each in times.items()}


def float8(x: Tensor, routing: Callable[[int], Routing], count: int, inner: int, outs: Tensor) -> tuple[Calls, Calls]:
    """Return the calls of each kernel, and no others. routing: pairs in tiles of a number of rows."""

    def made_up(*shape: int) -> Fp8Weight:
        values = (torch.randn(shape, device="cuda") / shape[-1] ** 0.5).to(FLOAT8)
        scales = torch.rand(shape[0], shape[1] // 128, shape[2] // 128, device="cuda") + 0.5
        return Fp8Weight(values, scales, (128, 128))

    width = x.shape[1]
    gate_up, down, rows = made_up(count, 2 * inner, width), made_up(count, width, inner), float8_rows.quantise(x, 128)
    plain, (narrow, wide) = [w.values.to(x.dtype) for w in (gate_up, down)], map(routing, (64, 128))
    tiles = float8_tiles_of(len(x))
    return {
        "hopper": lambda: fused_experts.experts(rows, wide, gate_up, down, outs[0]),
        "triton": lambda: fused_experts.experts(rows, narrow, gate_up, down, outs[1], *tiles),
        "bfloat16": lambda: fused_experts.experts(x, wide, *plain, outs[2]),
    }, {}


def mxfp4(x: Tensor, routing: Callable[[int], Routing], count: int, inner: int, outs: Tensor) -> tuple[Calls, Calls]:
    """Return the calls of each kernel, and of each tile of a product, with biases and a limit as GPT-OSS has them."""

    def made_up(outputs: int, inputs: int) -> Mxfp4:
        values = torch.randint(256, (count, outputs, inputs // 2), device="cuda", dtype=torch.uint8)
        scales = torch.randint(118, 122, (count, outputs, inputs // 32), device="cuda", dtype=torch.uint8)
        return Mxfp4(values, scales)

    packed = made_up(2 * inner, x.shape[1]), made_up(x.shape[1], inner)
    plain = [torch.stack([dequantise(Mxfp4(*one), x.dtype) for one in zip(*weight, strict=True)]) for weight in packed]
    rest = 7.0, 1.702, *(torch.randn(count, n, device="cuda").to(x.dtype) for n in (2 * inner, x.shape[1]))
    found = routing(tile_rows_of(len(x), len(x) * 4, count))
    calls: Calls = {
        "mxfp4": lambda: fused_experts.experts(x, found, *packed, outs[0], None, None, *rest),
        "bfloat16": lambda: fused_experts.experts(x, found, *plain, outs[1], None, None, *rest),
    }
    tiles: Calls = {}
    for columns, depth, warps, stages in itertools.product((16, 32, 64, 128), (64, 128, 256), (4, 8), (2, 3, 4)):
        tile = ExpertsTile(columns, depth, warps, stages)
        tiles |= {
            f"up {tuple(tile)}": partial(fused_experts.experts, x, found, *packed, outs[2], tile, None, *rest),
            f"down {tuple(tile)}": partial(fused_experts.experts, x, found, *packed, outs[2], None, tile, *rest),
        }
    return calls, tiles


FORMATS = {"float8": float8, "mxfp4": mxfp4}


def measure(kind: str, name: str, token_rows: int, turns: int, tiles: bool) -> None:
    """Print the line of a shape."""
    count, k, width, inner = SHAPES[kind][name]
    x = torch.randn(token_rows, width, device="cuda", dtype=torch.bfloat16)
    expert = torch.rand(token_rows, count, device="cuda").topk(k).indices.int()
    weights, outs = torch.rand(token_rows, k, device="cuda"), torch.empty(3, *x.shape, device="cuda", dtype=x.dtype)
    calls, others = FORMATS[kind](x, partial(sort_pairs, weights, expert, count), count, inner, outs)
    medians = microseconds(calls, turns)
    rates = {case: round(6 * token_rows * k * width * inner / us / 1e6) for case, us in medians.items()}
    line = {"shape": name, "rows": token_rows, "us": medians, "tflops": rates}
    print(json.dumps(line | {"equal": (outs[0] == outs[1]).float().mean().item()}), flush=True)
    if tiles:
        for case, call in others.items():
            with contextlib.suppress(OutOfResources):  # a tile that needs more than the GPU's shared memory
                medians |= microseconds({case: call}, 3)
        print(json.dumps(line | {"us": dict(sorted(medians.items(), key=lambda item: item[1]))}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--tiles", action="store_true")
    args = parser.parse_args()
    for name in SHAPES[args.format]:
        for rows in args.rows:
            measure(args.format, name, rows, args.turns, args.tiles)


if __name__ == "__main__":
    main()
