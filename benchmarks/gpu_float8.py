"""Products in FP8 beside bfloat16 on one GPU: each against its definition, then timed.

    python benchmarks/gpu_float8.py --out benchmarks/results/gpu_float8.json

Dense products and experts of Qwen3-30B-A3B on two ranks (attn_tp 2, ep 2), of DeepSeek-V3 on eight (attn_tp 8, ep 8);
weights have a scale for each 128 × 128. Times are those of `gpu_kernels.py`. For bfloat16 they are of cuBLAS, by
torch, and of Weft's expert kernels; `scaled_mm_us` is torch's own block-scaled product (cuBLAS 12.9), where it runs,
of rows that are quantised already. `floor_us` is the largest of what the bytes of FP8 take, what the operations take
at the H200's 1,979 TFLOP/s, and an empty kernel for each launched. Prints one JSON object last.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gpu_kernels import RULE, Report, error, graph_us, ints, normal
from weft.kernels import float8 as definition
from weft.kernels.float8 import FLOAT8, LARGEST, Weight, dequantise
from weft.kernels.triton import float8, moe, plain, rms_norm, route

PEAK, UNIT = 1979e12, (128, 128)
DENSE = {
    "qwen3-30b qkv": (2560, 2048),
    "qwen3-30b o": (2048, 2048),
    "deepseek-v3 q_a": (1536, 7168),
    "deepseek-v3 kv_a": (576, 7168),
    "deepseek-v3 q_b": (3072, 1536),
    "deepseek-v3 o": (7168, 2048),
    "deepseek-v3 dense gate_up": (4608, 7168),
}
"""Outputs and inputs of a rank."""
EXPERTS = {"qwen3-30b ep2": (128, 64, 768, 2048), "deepseek-v3 ep8": (256, 32, 2048, 7168)}
"""Experts, those that are here, their inner size, and the model's width."""
ROWS = (1, 16, 64, 256, 4096)


def in_float8(*shape: int) -> Weight:
    """A random weight, and what bfloat16 makes of it, are as large as a model's."""
    values = torch.empty(shape, dtype=FLOAT8, device="cuda")
    for part in values.view(-1, *shape[-2:]):  # one expert at a time: float32 takes four times as much
        part.copy_(torch.randn(shape[-2:], device="cuda").mul_(LARGEST / 6).clamp_(-LARGEST, LARGEST))
    blocks = (*shape[:-2], *(-(-n // u) for n, u in zip(shape[-2:], UNIT, strict=True)))
    scales = (torch.rand(blocks, device="cuda") + 0.5) * (6 / LARGEST / shape[-1] ** 0.5)
    return Weight(values, scales, UNIT)


def scaled_mm(rows: int, weight: Weight) -> Callable[[], Any] | None:
    """torch's block-scaled product of quantised rows, None where this torch or GPU has none of these sizes.

    Scales of rows lie column by column, those of a weight row by row, padded to four.
    """
    outputs, width = weight.values.shape
    runs, kind = width // UNIT[1], F.ScalingType
    x = definition.quantise(normal(rows, width), UNIT[1])
    by_row = x.scales.t().contiguous().t()
    by_block = torch.ones(-(-outputs // UNIT[0]), -(-runs // 4) * 4, device="cuda")
    by_block[:, :runs] = weight.scales

    def call() -> Tensor:
        scales = by_row, kind.BlockWise1x128, by_block.t(), kind.BlockWise128x128
        return F.scaled_mm(x.values, weight.values.t(), *scales, output_dtype=torch.bfloat16)

    try:
        return call if error(call(), definition.linear(x, weight, torch.float64)) < 1e-2 else None
    except (RuntimeError, ValueError):
        return None


def floors(size: float, flops: float, report: Report) -> dict[str, float]:
    """What bytes and operations take, in microseconds."""
    return {"bytes_us": size / report.bandwidth * 1e6, "flops_us": flops / PEAK * 1e6}


def time_dense(report: Report, name: str, rows: int) -> None:
    """A dense product, the quantising of its rows included."""
    outputs, width = DENSE[name]
    weights = [in_float8(outputs, width) for _ in range(max(2, min(12, (1 << 28) // (outputs * width))))]
    half = [dequantise(w).bfloat16() for w in weights]
    x, out = normal(rows, width), torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
    quantised = float8.quantise(x, UNIT[1])
    wanted = definition.linear(quantised, weights[0], torch.float64)
    wrong = error(float8.linear(x, weights[0], out.fill_(float("nan"))), wanted)
    us = graph_us([lambda w=w: float8.linear(x, w, out) for w in weights])
    ready = graph_us([lambda w=w: float8.linear(quantised, w, out) for w in weights])
    torch_us = graph_us([lambda w=w: torch.mm(x, w.t(), out=out) for w in half])
    calls = [scaled_mm(rows, w) for w in weights]
    ran = [call for call in calls if call is not None]
    more = {"scaled_mm_us": graph_us(ran)} if len(ran) == len(calls) else {}
    size = outputs * width + rows * (width + outputs) * 2
    flops = floors(size, 2 * rows * outputs * width, report)
    kernels = 2 + (float8.tile_of(rows, outputs, width // UNIT[1]).parts > 1)
    report.add(
        "FP8 product", f"{name} {rows}", us, torch_us, size, kernels, quantised_us=ready, error=wrong, **flops, **more
    )


def time_experts(report: Report, name: str, rows: int) -> None:
    """Both products of the experts, routing left out."""
    experts, held, inner, width = EXPERTS[name]
    gate_up, down = in_float8(held, 2 * inner, width), in_float8(held, width, inner)
    out, skew = torch.empty(rows, width, device="cuda", dtype=torch.bfloat16), normal(experts, scale=0.5)

    def routed(logits: Tensor, kept: bool) -> route.Routing:
        return route.route(logits, RULE, ints(rows), moe.tile_rows_of(rows, kept), 0, held)

    # Of one row's few large values between the products a single one may be rounded the other way, which is 1 % of all;
    # so there are several draws.
    found, wanted, few = list[Tensor](), list[Tensor](), min(rows, 64)
    for _ in range(max(1, 16 // rows)):
        x, logits = normal(rows, width), normal(rows, experts) + skew
        eight, sixteen = routed(logits, True), routed(logits, False)
        found.append(moe.experts(x, eight, gate_up, down, out.fill_(float("nan")))[:few].clone())
        wanted.append(plain.experts(x[:few].float(), eight.weight[:few], eight.expert[:few], gate_up, down))
    wrong = error(torch.cat(found), torch.cat(wanted).double())
    us = graph_us([lambda: moe.experts(x, eight, gate_up, down, out)] * 4)
    half = [torch.empty(w.values.shape, dtype=torch.bfloat16, device="cuda") for w in (gate_up, down)]
    for whole, weight in zip(half, (gate_up, down), strict=True):
        for e in range(held):
            whole[e] = dequantise(Weight(weight.values[e], weight.scales[e], UNIT))
    torch_us = graph_us([lambda: moe.experts(x, sixteen, *half, out)] * 4)
    hit = int((eight.expert.unique() >= 0).sum())
    pairs = int((eight.expert >= 0).sum())
    size = hit * 3 * inner * width + rows * width * 4
    flops = floors(size, 2 * pairs * 3 * inner * width, report)
    report.add(
        "FP8 experts",
        f"{name} {rows}",
        us,
        torch_us,
        size,
        4 + (rows <= float8.FEW_ROWS),
        hit=hit,
        error=wrong,
        **flops,
    )


def time_quantise(report: Report, width: int, rows: int) -> None:
    """Rows alone, and behind a norm: in one kernel, or as torch's norm and then a kernel."""
    x, weight = [normal(rows, width) for _ in range(8)], normal(width)
    us = graph_us([lambda y=y: float8.quantise(y, UNIT[1]) for y in x])
    report.add("quantise", f"{width} wide {rows}", us, None, rows * width * 3, 1)
    us = graph_us([lambda y=y: rms_norm.rms_norm(y, weight, 1e-6) for y in x])
    report.add("rms_norm", f"{width} wide {rows}", us, None, rows * width * 4, 1)


def main() -> None:
    """Checks, times, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the JSON here, too")
    args = parser.parse_args()
    torch.manual_seed(0)
    report = Report()
    for rows in ROWS:
        for name in DENSE:
            time_dense(report, name, rows)
        for name in EXPERTS:
            time_experts(report, name, rows)
        for width in (2048, 7168):
            time_quantise(report, width, rows)
    report.write(args.out)


if __name__ == "__main__":
    main()
