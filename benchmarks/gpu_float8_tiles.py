"""The best cuts of products in FP8 on this GPU: what the tables of `float8.py` and `moe.py` are filled from.

    python benchmarks/gpu_float8_tiles.py --out benchmarks/results/gpu_float8_tiles.json

Dense products of rows that are quantised already and experts of up to 64 rows, in the shapes of `gpu_float8.py`.
Kernels are compiled by several processes into Triton's cache, then timed in CUDA graphs. Prints for each shape the best
five cuts and what the shipped tables take, and one JSON object last. Where rows are many, `library_us` is torch's
block-scaled product and the copy of what it returns to where the product is wanted, `library_out_us` the same written
there directly.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gpu_float8 import DENSE, EXPERTS, UNIT, in_float8
from gpu_kernels import BF16, DEVICE, RULE, error, graph_us, ints, normal, write_json
from weft.kernels.float8 import Rows, Weight
from weft.kernels.triton import float8, moe, route

SHAPES = [name for name in DENSE if name not in ("qwen3-30b o", "deepseek-v3 q_b")]
DENSE_ROWS, EXPERT_ROWS, LIBRARY_ROWS = (1, 64, 256, 4096), (1, 4, 16, 64), (128, 256, 512, 1024, 4096)


def tiles_for(rows: int) -> list[float8.Tile]:
    """Tiles worth trying for a dense product, in one part."""
    if rows <= 64:
        block = 16 if rows <= 16 else 64
        cuts = list(itertools.product((block,), (64, 128), (1,), (4,), (3, 5, 8)))
    elif rows < 1024:
        cuts = [(64, 64, 1, 4, 4), (64, 128, 1, 4, 3), (64, 128, 1, 4, 4), (128, 128, 1, 8, 3), (128, 64, 1, 4, 4)]
    else:
        cuts = [(128, 128, 1, 8, 3), (128, 128, 1, 8, 4), (128, 128, 1, 4, 3), (64, 128, 1, 4, 4), (128, 64, 1, 4, 4)]
    return [float8.Tile(*cut) for cut in cuts]


def parts_for(rows: int, runs: int) -> list[int]:
    """Parts of the depth worth trying."""
    return [n for n in (1, 2, 3, 4, 7, 14) if n == 1 or (rows < 1024 and runs // n >= 2)]


EXPERT_CUTS = [moe.Tile(columns, 0, 4, stages) for columns, stages in itertools.product((64, 128), (3, 5, 8))]
"""Without their depth, which is that of a part."""


class Dense:
    """A product with weights that take turns, so that they are not found in the L2 cache."""

    def __init__(self, name: str, rows: int, tiny: bool = False):
        outputs, width = (128 if tiny else DENSE[name][0]), DENSE[name][1]
        turns = 1 if tiny else max(2, min(8, (1 << 27) // (outputs * width)))
        self.weights = [in_float8(outputs, width) for _ in range(turns)]
        self.x = float8.quantise(normal(rows, width), UNIT[1])
        self.out = torch.empty(rows, outputs, device=DEVICE, dtype=BF16)

    def calls(self, tile: float8.Tile | None) -> list[Callable[[], Tensor]]:
        return [lambda w=w: float8.linear(self.x, w, self.out, tile) for w in self.weights]


class Experts:
    """The experts of a model, of which random ones are chosen."""

    def __init__(self, name: str, rows: int, tiny: bool = False):
        experts, held, inner, width = EXPERTS[name]
        held = 2 if tiny else held
        self.gate_up, self.down = in_float8(held, 2 * inner, width), in_float8(held, width, inner)
        self.runs = width // UNIT[1], inner // UNIT[1]
        self.sets = [float8.quantise(normal(rows, width), UNIT[1]) for _ in range(1 if tiny else 4)]
        tile_rows, live = moe.tile_rows_of(rows, True), ints(rows)
        logits = [normal(rows, experts) + normal(experts, scale=0.5) for _ in self.sets]
        self.routings = [route.route(each, RULE, live, tile_rows, 0, held) for each in logits]
        self.out = torch.empty(rows, width, device=DEVICE, dtype=BF16)

    def calls(self, up: moe.Tile | None, down: moe.Tile | None) -> list[Callable[[], Tensor]]:
        return [
            lambda x=x, r=r: moe.experts(x, r, self.gate_up, self.down, self.out, up, down)
            for x, r in zip(self.sets, self.routings, strict=True)
        ]


def library(x: Rows, weight: Weight, out: Tensor) -> dict[str, Callable[[], Any]]:
    """torch's block-scaled product: behind a copy, and by the operator beneath it, which writes where it is told."""
    kind = F.ScalingType
    by_row, by_block = x.scales.t().contiguous().t(), weight.scales.t()
    recipes = kind.BlockWise1x128, kind.BlockWise128x128

    def copied() -> Tensor:
        found = F.scaled_mm(
            x.values, weight.values.t(), by_row, recipes[0], by_block, recipes[1], output_dtype=out.dtype
        )
        return out.copy_(found)

    def direct() -> Tensor:
        given = [by_row], [recipes[0].value], [0], [by_block], [recipes[1].value], [0], None, out.dtype
        return torch.ops.aten._scaled_mm_v2.out(x.values, weight.values.t(), *given, out=out)

    return {"library_us": copied, "library_out_us": direct}


def compile_all(work: list[tuple[str, int, Any]]) -> None:
    """Fills Triton's cache, in a process of its own."""
    for name, rows, tile in work:
        (Dense(name, rows, True).calls(tile) if name in DENSE else Experts(name, rows, True).calls(tile, tile))[0]()


def best(times: list[tuple[float, Any]]) -> list[Any]:
    """The five quickest."""
    return [(round(us, 2), *cut) for us, cut in sorted(times, key=lambda pair: pair[0])[:5]]


def time_dense(name: str, rows: int) -> dict[str, Any]:
    """All tiles and parts, and what is shipped."""
    case, runs = Dense(name, rows), DENSE[name][1] // UNIT[1]
    cuts = [tile._replace(parts=n) for tile in tiles_for(rows) for n in parts_for(rows, runs)]
    times = [(graph_us(case.calls(cut), 3), cut) for cut in cuts]
    shipped = float8.tile_of(rows, DENSE[name][0], runs)
    return {"shipped": (round(graph_us(case.calls(None), 3), 2), *shipped), "best": best(times)}


def time_library(name: str, rows: int) -> dict[str, Any]:
    """torch's product beside the shipped one."""
    case = Dense(name, rows)
    found: dict[str, Any] = {"shipped": round(graph_us(case.calls(None), 3), 2)}
    wanted = float8.linear(case.x, case.weights[0], torch.empty_like(case.out)).double()
    for way in ("library_us", "library_out_us"):
        calls = [library(case.x, w, case.out)[way] for w in case.weights]
        try:
            calls[0]()
            wrong = error(case.out, wanted)
            found[way] = round(graph_us(calls, 3), 2) if wrong < 1e-2 else f"error {wrong}"
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as refused:
            found[way] = str(refused)[:200]
    return found


def time_experts(name: str, rows: int) -> dict[str, Any]:
    """Both products, each with the other's shipped cut."""
    case = Experts(name, rows)
    found: dict[str, Any] = {"shipped": round(graph_us(case.calls(None, None), 3), 2)}
    for which, runs in zip(("up", "down"), case.runs, strict=True):
        cuts = [
            cut._replace(depth=-(-runs // n) * UNIT[1])
            for cut in EXPERT_CUTS
            for n in (1, 2, 4)
            if n == 1 or runs // n >= 2
        ]
        times = [(graph_us(case.calls(*((cut, None) if which == "up" else (None, cut))), 3), cut) for cut in cuts]
        found[which] = best(times)
    return found


def main() -> None:
    """Compiles, times, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    work: list[tuple[str, int, Any]] = []
    for rows in DENSE_ROWS:  # a kernel is of a depth, not of a number of columns
        work += [(name, rows, tile) for name in ("qwen3-30b qkv", "deepseek-v3 q_a") for tile in tiles_for(rows)]
    work += [(name, rows, cut) for name in EXPERTS for rows in (1, 16) for cut in EXPERT_CUTS]
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_all, [work[i :: args.processes] for i in range(args.processes)]))
    print(f"{len(work)} compiled", flush=True)
    found: list[dict[str, Any]] = []

    def add(name: str, rows: int, times: dict[str, Any]) -> None:
        found.append({"case": name, "rows": rows, **times})
        print(found[-1], flush=True)
        torch.cuda.empty_cache()

    for rows in DENSE_ROWS:
        for name in SHAPES:
            add(name, rows, time_dense(name, rows))
    for name in EXPERTS:
        for rows in EXPERT_ROWS:
            add(name, rows, time_experts(name, rows))
    for rows in LIBRARY_ROWS:
        for name in SHAPES:
            add(name, rows, time_library(name, rows))
    write_json({"gpu": torch.cuda.get_device_name(), "cuts": found}, args.out)


if __name__ == "__main__":
    main()
