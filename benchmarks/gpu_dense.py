"""The best cuts of products of few rows on this GPU, beside torch's: what `dense.tile_of` is filled from.

    python benchmarks/gpu_dense.py --compile
    python benchmarks/gpu_dense.py --out benchmarks/results/gpu_dense.json

The first fills Triton's cache by several processes, the second times. Each product follows a kernel that writes its
rows, as in a decode step, so that it may start while that one still runs: one that copies them at once, and one that
takes as long as an exchange between GPUs. The router's product is timed together with the kernel of routing, which adds
its parts; that of queries, keys and values also alone, as attention adds its parts. Times are those of CUDA graphs over
weights that take turns, more than the L2 cache holds (see gpu_kernels.py), less those of the kernels before alone.
Prints for each shape torch's time, what is shipped and the best five cuts, behind either kernel, and one JSON object
last.
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
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

from gpu_kernels import BF16, DEVICE, EXPERTS, RULE, error, graph_us, ints, normal, write_json
from weft.kernels.parts import Parts
from weft.kernels.triton import dense, overlap, route
from weft.kernels.triton.dense import Tile
from weft.kernels.triton.launch import kernel

SHAPES = {
    "qkv": (2560, 2048),
    "qkv in parts": (2560, 2048),
    "out": (2048, 2048),
    "router": (EXPERTS, 2048),
    "latents": (1024, 4096),
    "shared experts": (2048, 768),
    "wide": (6144, 2048),
}
"""(outputs, inputs) of Qwen3-30B-A3B's products on two ranks, and of others."""
ROWS = (1, 16, 32, 64)
BYTES = 160 << 20
"""Of weights that take turns: several times the L2 cache."""
TURNS = {"at once": 0, "as long as an exchange": 1500}
"""Of a loop that the kernel before the product goes through."""


@kernel
def _copy_late(x, out, turns, WIDTH: tl.constexpr):
    """A row, to which something is added that is next to nothing and took so many turns."""
    overlap.begin()
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + at).to(tl.float32)
    little = tl.full([128], 1e-30, tl.float32)
    for _ in range(turns):
        little = little * 1.0000001 + 1e-35
    tl.store(out + at, (value + tl.sum(little, 0)).to(out.dtype.element_ty))


def tiles_for(name: str, rows: int) -> list[Tile]:
    """Tiles worth trying."""
    width = SHAPES[name][1]
    cuts = [(64, 4, 512, 8), (64, 4, 512, 4), (64, 4, 256, 8), (64, 3, 256, 8), (64, 2, 512, 8), (64, 2, 256, 4)]
    cuts += [(64, 8, 256, 8), (64, 8, 256, 4), (64, 8, 512, 8), (128, 8, 256, 8), (128, 4, 512, 8), (128, 4, 256, 8)]
    cuts += [(128, 6, 128, 8), (64, 3, 256, 4)] if rows > 16 else []
    if name == "router":
        cuts = [(64, 8, 256, 4), (64, 8, 256, 8), (64, 4, 512, 4), (64, 4, 512, 8), (64, 16, 128, 4), (128, 8, 256, 8)]
    held = [Tile(columns, min(parts, -(-width // block)), block, warps) for columns, parts, block, warps in cuts]
    most = 113 << 10  # elements in shared memory
    return [t for t in dict.fromkeys(held) if (t.columns + max(16, rows)) * -(-width // t.parts) <= most]


class Case:
    """A product whose weights take turns, each behind a kernel that copies its rows."""

    def __init__(self, name: str, rows: int, tiny: bool = False):
        self.name, (outputs, width) = name, SHAPES[name]
        turns = 1 if tiny else max(1, min(32, BYTES // (2 * outputs * width)))
        self.weights = [normal(outputs, width, scale=width**-0.5) for _ in range(turns)]
        self.x, self.live = normal(rows, 4096), ints(rows)
        self.out = torch.empty(rows, outputs, device=DEVICE, dtype=BF16)

    def before(self, turns: int) -> Tensor:
        """x, by the kernel before."""
        out = torch.empty_like(self.x)
        _copy_late[(len(out),)](self.x, out, turns, WIDTH=out.shape[1], num_warps=4, **overlap.options())
        return out[:, : SHAPES[self.name][1]]

    def us(self, product: Callable[[Tensor, Tensor], Any] | None, turns: int, replays: int = 7) -> float:
        """Microseconds of the product with the kernel before, or of that alone."""
        if product is None:
            return graph_us([lambda: self.before(turns)] * len(self.weights), replays)
        return graph_us([lambda w=w: product(self.before(turns), w) for w in self.weights], replays)

    def ours(self, tile: Tile | None) -> Callable[[Tensor, Tensor], Any]:
        if self.name == "router":
            return lambda x, w: self._route(dense.linear_parts(x, w, tile=tile))
        if self.name == "qkv in parts":
            return lambda x, w: dense.linear_parts(x, w, tile=tile or dense.tile_of(len(x), *w.shape, added_next=True))
        return lambda x, w: dense.linear(x, w, self.out, tile=tile)

    def torchs(self, x: Tensor, weight: Tensor) -> Any:
        if self.name == "router":
            return self._route(F.linear(x, weight))
        return torch.mm(x, weight.t(), out=self.out)

    def _route(self, logits: Tensor | Parts) -> Tensor:
        return route.choose(logits, RULE, self.live)[0]


def compile_all(work: list[tuple[str, int, Tile | None]]) -> None:
    """Fills Triton's cache, in a process of its own."""
    cases: dict[tuple[str, int], Case] = {}
    for name, rows, tile in work:
        case = cases.setdefault((name, rows), Case(name, rows, True))
        with suppress(OutOfResources):  # more shared memory than there is
            case.ours(tile)(case.before(0), case.weights[0])


def time_case(name: str, rows: int, before: str) -> dict[str, Any]:
    """torch's product, what is shipped, and all tiles."""
    case, turns, shape = Case(name, rows), TURNS[before], SHAPES[name]
    alone = case.us(None, turns, 15)
    found: dict[str, Any] = {"case": name, "rows": rows, "before": before, "before_us": round(alone, 2)}
    found["torch_us"] = round(case.us(case.torchs, turns, 15) - alone, 2)
    shipped = name == "router" or dense.tile_of(rows, *shape, added_next=name == "qkv in parts")
    if shipped:
        found["shipped_us"] = round(case.us(case.ours(None), turns, 15) - alone, 2)
        found["shipped"] = shipped
        x, weight = case.before(0), case.weights[0]
        if name not in ("router", "qkv in parts"):
            found["error"] = round(error(dense.linear(x, weight), x.double() @ weight.double().t()), 5)
    times: list[tuple[float, Tile]] = []
    for tile in tiles_for(name, rows):
        with suppress(OutOfResources):
            times.append((case.us(case.ours(tile), turns) - alone, tile))
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
                if tile is not None or name == "router" or dense.tile_of(rows, *SHAPES[name], name == "qkv in parts"):
                    same.setdefault((name == "router" or SHAPES[name][1], max(16, rows), tile), (name, rows, tile))
        work = list(same.values())
        with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_all, [work[i :: args.processes] for i in range(args.processes)]))
        print(f"{len(work)} compiled", flush=True)
        return
    found: list[dict[str, Any]] = []
    for name, rows, before in itertools.product(SHAPES, ROWS, TURNS):
        found.append(time_case(name, rows, before))
        print({**found[-1], "best": found[-1]["best"][:5]}, flush=True)
        torch.cuda.empty_cache()
    write_json({"gpu": torch.cuda.get_device_name(), "products": found}, args.out)


if __name__ == "__main__":
    main()
