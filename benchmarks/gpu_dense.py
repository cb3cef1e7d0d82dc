"""The best cuts of products of few rows on this GPU, beside torch's: what `dense.tile_of` is filled from.

    python benchmarks/gpu_dense.py --compile
    python benchmarks/gpu_dense.py --out benchmarks/results/gpu_dense.json

The first fills Triton's cache by several processes, the second times. Each product follows a kernel that writes its
rows, as in a decode step, so that it may start while that one still runs: one that copies them at once, one that takes
as long as an exchange between GPUs, and for attention's output attention. The router's product is timed together with
the kernel of routing, and that of queries, keys and values with the kernel that turns them, as both add parts where
there are. Times are those of CUDA graphs over weights that take turns, more than the L2 cache holds (see
gpu_kernels.py), less those of the kernels before alone. Prints for each shape torch's time, what is shipped and the
best five cuts, and one JSON object last. --rows and --only take some of the rows and shapes.
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

from gpu_kernels import (
    BF16,
    DEVICE,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    PAGES,
    RULE,
    error,
    graph_us,
    ints,
    normal,
    write_json,
)
from weft.kernels.parts import Parts
from weft.kernels.triton import decode_attention as attention
from weft.kernels.triton import dense, norm_rope_cache, overlap, route
from weft.kernels.triton.dense import Tile
from weft.kernels.triton.launch import kernel

SHAPES = {
    "out": (2048, 2048),
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, 2048),
    "router": (EXPERTS, 2048),
    "out, 1 rank": (2048, 4096),
    "out, 4 ranks": (2048, 1024),
    "out of hidden 4096": (4096, 1024),
    "out of hidden 4096, deep": (4096, 2048),
    "latents": (1024, 4096),
    "shared experts": (2048, 768),
    "wide": (6144, 2048),
}
"""(outputs, inputs) of Qwen3-30B-A3B's products on two ranks, and of others."""
ADDED_NEXT = {"qkv", "router"}
"""Of these the next kernel adds the parts."""
ROWS = (1, 8, 16, 32, 64)
BYTES = 160 << 20
"""Of weights that take turns: several times the L2 cache."""
BEFORE = {"at once": 0, "attention": None, "as long as an exchange": 1500}
"""Turns of a loop that the kernel before the product goes through."""
CONTEXT = 1030
"""Tokens that attention goes over."""


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
    """Tiles worth trying: of parts of the depth those that were among the best, of slices of it all that fit."""
    outputs, width = SHAPES[name]
    cuts = [(64, 4, 512, 4), (64, 8, 256, 4), (128, 8, 256, 8), (128, 4, 512, 8)]
    parted = [Tile(columns, min(parts, -(-width // block)), block, warps) for columns, parts, block, warps in cuts]
    found = [t for t in parted if (t.columns + max(16, rows)) * -(-width // t.parts) <= 113 << 10]
    if rows > 32:
        return list(dict.fromkeys(found))
    for columns, (block, warps) in itertools.product((16, 32, 64), ((256, 8), (256, 4), (128, 8), (64, 8))):
        depth = block * warps
        idle = -(-width // depth) * depth / width - 1
        registers = width * (columns + (8 if rows <= 8 else 16)) // (64 * warps)  # a thread's, of weights and x
        most = columns * dense.MULTIPROCESSORS * (192 // registers)  # outputs of programs that are on the GPU at once
        few = most > 8 * outputs and name != "router"
        if idle <= 1 / 3 and outputs <= most and not few and (block > 64 or width / depth <= 4):
            found.append(Tile(columns, 1, block, warps, True))
    return list(dict.fromkeys(found))


class Case:
    """A product whose weights take turns, each behind a kernel that copies its rows."""

    def __init__(self, name: str, rows: int, tiny: bool = False):
        self.name, (outputs, width) = name, SHAPES[name]
        turns = 1 if tiny else max(1, min(32, BYTES // (2 * outputs * width)))
        self.weights = [normal(outputs, width, scale=width**-0.5) for _ in range(turns)]
        self.x, self.live = normal(rows, 4096), ints(rows)
        self.out = torch.empty(rows, outputs, device=DEVICE, dtype=BF16)
        self.shipped = dense.tile_for(self.x[:, :width], self.weights[0], added_next=name in ADDED_NEXT)
        self.slots, self.norm = ints(*range(rows)), normal(HEAD_DIM)
        self.angle, self.cache = normal(rows, HEAD_DIM // 2), normal(2, rows, KV_HEADS, HEAD_DIM)
        heads, pages = width // HEAD_DIM, -(-CONTEXT // PAGE)
        self.q, self.pages = normal(rows, heads, HEAD_DIM), torch.zeros(rows, PAGES, dtype=torch.int32, device=DEVICE)
        self.pages[:, :pages] = torch.arange(rows * pages, device=DEVICE).view(rows, pages)
        self.lengths = torch.full((rows,), CONTEXT, dtype=torch.int32, device=DEVICE)
        self.keys_values = normal(2, rows * pages * PAGE, heads * KV_HEADS // HEADS, HEAD_DIM)

    def before(self, turns: int | None) -> Tensor:
        """x, by the kernels before."""
        if turns is None:
            where = (self.pages, self.lengths, PAGE, HEAD_DIM**-0.5)
            return attention.decode_attention(self.q, *self.keys_values, *where).flatten(1)
        out = torch.empty_like(self.x)
        _copy_late[(len(out),)](self.x, out, turns, WIDTH=out.shape[1], num_warps=4, **overlap.options())
        return out[:, : SHAPES[self.name][1]]

    def us(self, product: Callable[[Tensor, Tensor], Any] | None, before: str, replays: int = 7) -> float:
        """Microseconds of the product with the kernel before, or of that alone."""
        if product is None:
            return graph_us([lambda: self.before(BEFORE[before])] * len(self.weights), replays)
        return graph_us([lambda w=w: product(self.before(BEFORE[before]), w) for w in self.weights], replays)

    def ours(self, tile: Tile) -> Callable[[Tensor, Tensor], Any]:
        if self.name in ADDED_NEXT and not tile.sliced:
            return lambda x, w: self._next(dense.linear_parts(x, w, tile))
        return lambda x, w: self._next(dense.linear(x, w, tile, self.out))

    def torchs(self, x: Tensor, weight: Tensor) -> Any:
        return self._next(F.linear(x, weight) if self.name == "router" else torch.mm(x, weight.t(), out=self.out))

    def wrong(self) -> float:
        """The largest error of any tile that gives a whole product."""
        x, weight = self.before(0), self.weights[0]
        wanted, found = x.double() @ weight.double().t(), 0.0
        for tile in tiles_for(self.name, len(x)):
            with suppress(OutOfResources):
                found = max(found, error(dense.linear(x, weight, tile), wanted))
        return found

    def _next(self, product: Tensor | Parts) -> Any:
        if self.name == "router":
            return route.choose(product, RULE, self.live)[0]
        if self.name != "qkv":
            return product
        more = {"q_weight": self.norm, "k_weight": self.norm, "eps": 1e-6}
        return norm_rope_cache.norm_rope_cache(product, HEADS, self.angle, self.angle, self.slots, *self.cache, **more)


def compile_all(work: list[tuple[str, int, Tile]]) -> None:
    """Fills Triton's cache, in a process of its own."""
    cases: dict[tuple[str, int], Case] = {}
    for name, rows, tile in work:
        case = cases.setdefault((name, rows), Case(name, rows, True))
        if name.startswith("out"):
            case.before(None)
        with suppress(OutOfResources):  # more shared memory than there is
            case.ours(tile)(case.before(0), case.weights[0])


def time_case(name: str, rows: int, before: str) -> dict[str, Any]:
    """torch's product, what is shipped, and all tiles."""
    case = Case(name, rows)
    alone = case.us(None, before, 15)
    found: dict[str, Any] = {"case": name, "rows": rows, "before": before, "before_us": round(alone, 2)}
    found["torch_us"] = round(case.us(case.torchs, before, 15) - alone, 2)
    if case.shipped:
        found["shipped_us"] = round(case.us(case.ours(case.shipped), before, 15) - alone, 2)
        found["shipped"] = case.shipped
    if before == "at once" and name not in ADDED_NEXT:
        found["error"] = round(case.wrong(), 5)
    times: list[tuple[float, Tile]] = []
    for tile in tiles_for(name, rows):
        with suppress(OutOfResources):
            times.append((case.us(case.ours(tile), before) - alone, tile))
    found["best"] = [(round(us, 2), *tile) for us, tile in sorted(times, key=lambda pair: pair[0])]
    return found


def main() -> None:
    """Compiles, or times and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--only", nargs="+", default=list(SHAPES), metavar="SHAPE", choices=list(SHAPES))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.compile:
        same = {}  # a kernel is of a depth, a block of rows and a tile, whatever the outputs
        for name, rows in itertools.product(args.only, args.rows):
            outputs, width = SHAPES[name]
            shipped = dense.tile_of(rows, outputs, width, name in ADDED_NEXT)
            for tile in {*tiles_for(name, rows), *([shipped] if shipped else [])}:
                left = name in ADDED_NEXT and not tile.sliced  # its sum, to what comes next
                same.setdefault((left, width, dense.rows_of_block(rows, tile), tile), (name, rows, tile))
        work = list(same.values())
        with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_all, [work[i :: args.processes] for i in range(args.processes)]))
        print(f"{len(work)} compiled", flush=True)
        return
    found: list[dict[str, Any]] = []
    for name, rows, before in itertools.product(args.only, args.rows, BEFORE):
        if before == "attention" and not name.startswith("out"):
            continue
        found.append(time_case(name, rows, before))
        print({**found[-1], "best": found[-1]["best"][:5]}, flush=True)
        torch.cuda.empty_cache()
    write_json({"gpu": torch.cuda.get_device_name(), "products": found}, args.out)


if __name__ == "__main__":
    main()
