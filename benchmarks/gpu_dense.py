"""The best cuts of products of few rows on this GPU, beside torch's: what `dense.tile_of` is filled from.

    python benchmarks/gpu_dense.py --compile
    python benchmarks/gpu_dense.py --out benchmarks/results/gpu_dense.json

The first fills Triton's cache by several processes, the second times. Each product follows a norm that writes its rows,
as in a decode step, so that it may start while the norm still runs; the router's is timed together with the kernel of
routing, which adds its parts. Times are those of CUDA graphs over weights that take turns, more than the L2 cache
holds (see gpu_kernels.py), less those of the norms alone. Prints for each shape torch's time, what is shipped and the
best five cuts, and one JSON object last.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

from gpu_kernels import BF16, DEVICE, EXPERTS, RULE, error, graph_us, ints, normal, write_json
from weft.kernels.triton import dense, rms_norm, route
from weft.kernels.triton.dense import Tile

SHAPES = {
    "qkv": (2560, 2048),
    "out": (2048, 2048),
    "router": (EXPERTS, 2048),
    "latents": (1024, 4096),
    "shared experts": (2048, 768),
    "wide": (6144, 2048),
    "half a head": (75968, 2048),
}
"""(outputs, inputs) of Qwen3-30B-A3B's products on two ranks, and of others."""
ROWS = (1, 16, 32, 64)
BYTES = 160 << 20
"""Of weights that take turns: several times the L2 cache."""


def tiles_for(name: str, rows: int) -> list[Tile]:
    """Tiles worth trying."""
    width = SHAPES[name][1]
    few = [(16, 1, 2048, 8), (16, 1, 1024, 8), (16, 1, 2048, 16), (16, 1, 2048, 4), (32, 1, 2048, 16)]
    split = [(16, 2, 1024, 8), (16, 4, 512, 4), (32, 2, 1024, 8), (32, 4, 512, 8), (32, 4, 512, 4)]
    by_warp = [(columns, parts, block, warps, warps) for columns, parts, block, warps in (*few, *split)]
    wide = [(64, 4, 512, 8), (64, 4, 512, 4), (64, 4, 256, 8), (64, 3, 256, 8), (64, 2, 256, 8), (64, 2, 512, 8)]
    wide += [(64, 8, 256, 8), (64, 8, 256, 4), (128, 8, 256, 8), (128, 4, 256, 8), (64, 1, 256, 8), (64, 6, 128, 8)]
    together = [(columns, parts, block, 1, warps) for columns, parts, block, warps in wide]
    if name == "router":
        cuts = [(16, 8, 256, 4, 4), (16, 8, 256, 2, 2), (16, 8, 256, 8, 8), (16, 4, 512, 8, 8), (16, 16, 128, 4, 4)]
        cuts += [(16, 2, 1024, 8, 8), (32, 8, 256, 4, 4), (64, 8, 256, 1, 4), (64, 8, 256, 1, 8), (32, 16, 128, 4, 4)]
    elif name in ("qkv", "out"):
        cuts = by_warp + together[:3] if rows <= 16 else by_warp[5:] + together
    else:
        cuts = by_warp[:2] + by_warp[5:8:2] if rows <= 16 else together[:6] + together[10:11]
    held = [Tile(columns, min(parts, -(-width // block)), block, *more) for columns, parts, block, *more in cuts]
    return [t for t in dict.fromkeys(held) if t.columns * -(-width // t.parts) <= 1 << 16]


class Case:
    """A product whose weights take turns, each behind a norm of its rows."""

    def __init__(self, name: str, rows: int, tiny: bool = False):
        self.name, (outputs, width) = name, SHAPES[name]
        turns = 1 if tiny else max(1, min(32, BYTES // (2 * outputs * width)))
        self.weights = [normal(outputs, width, scale=width**-0.5) for _ in range(turns)]
        self.x, self.gain, self.live = normal(rows, width), torch.ones(width, device=DEVICE, dtype=BF16), ints(rows)
        self.out = torch.empty(rows, outputs, device=DEVICE, dtype=BF16)

    def norm(self) -> Tensor:
        return rms_norm.rms_norm(self.x, self.gain, 1e-6)

    def us(self, product: Callable[[Tensor, Tensor], Any], replays: int = 7) -> float:
        """Microseconds of the product behind the norm."""
        return graph_us([lambda w=w: product(self.norm(), w) for w in self.weights], replays)

    def ours(self, tile: Tile | None) -> Callable[[Tensor, Tensor], Any]:
        if self.name == "router":
            return lambda x, w: self._route(dense.linear_parts(x, w, tile=tile))
        return lambda x, w: dense.linear(x, w, self.out, tile=tile)

    def torchs(self, x: Tensor, weight: Tensor) -> Any:
        if self.name == "router":
            return self._route(F.linear(x, weight))
        return torch.mm(x, weight.t(), out=self.out)

    def _route(self, logits: Tensor | dense.Parts) -> Tensor:
        return route.choose(logits, RULE, self.live)[0]


def compile_all(work: list[tuple[str, int, Tile | None]]) -> None:
    """Fills Triton's cache, in a process of its own."""
    cases: dict[tuple[str, int], Case] = {}
    for name, rows, tile in work:
        case = cases.setdefault((name, rows), Case(name, rows, True))
        with suppress(OutOfResources):  # more shared memory than there is
            case.ours(tile)(case.norm(), case.weights[0])


def time_case(name: str, rows: int) -> dict[str, Any]:
    """torch's product, what is shipped, and all tiles."""
    case = Case(name, rows)
    norm = graph_us([case.norm] * len(case.weights), 15)
    found: dict[str, Any] = {"case": name, "rows": rows, "norm_us": round(norm, 2)}
    found["torch_us"] = round(case.us(case.torchs, 15) - norm, 2)
    outputs, width = SHAPES[name]
    shipped = name == "router" or dense.tile_of(rows, outputs, width)
    if shipped:
        found["shipped_us"] = round(case.us(case.ours(None), 15) - norm, 2)
        found["shipped"] = shipped
        x = case.norm()
        if name != "router":
            wanted = x.double() @ case.weights[0].double().t()
            found["error"] = round(error(dense.linear(x, case.weights[0]), wanted), 5)
    times: list[tuple[float, Tile]] = []
    for tile in tiles_for(name, rows):
        try:
            times.append((case.us(case.ours(tile)) - norm, tile))
        except OutOfResources:
            continue
    found["best"] = [(round(us, 2), *tile) for us, tile in sorted(times, key=lambda pair: pair[0])]
    return found


def main() -> None:
    """Compiles, or times and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.compile:
        same = {}  # a kernel is of a depth and a block of rows, whatever the outputs
        for name, rows in itertools.product(SHAPES, ROWS):
            for tile in (None, *tiles_for(name, rows)):
                if tile is not None or name == "router" or dense.tile_of(rows, *SHAPES[name]):
                    same.setdefault((name == "router" or SHAPES[name][1], max(16, rows), tile), (name, rows, tile))
        work = list(same.values())
        with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_all, [work[i :: args.processes] for i in range(args.processes)]))
        print(f"{len(work)} compiled", flush=True)
        return
    found: list[dict[str, Any]] = []
    for name, rows in itertools.product(SHAPES, ROWS):
        found.append(time_case(name, rows))
        print({**found[-1], "best": found[-1]["best"][:5]}, flush=True)
        torch.cuda.empty_cache()
    write_json({"gpu": torch.cuda.get_device_name(), "products": found}, args.out)


if __name__ == "__main__":
    main()
