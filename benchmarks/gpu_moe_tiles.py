"""The best tiles of the expert products on this GPU, by numbers of tokens: what the tables of `moe.py` are filled from.

    python benchmarks/gpu_moe_tiles.py --rows 1 4 16 64 --out benchmarks/results/gpu_moe_tiles.json

128 experts, 8 chosen at random, hidden 2048: half of them here with inner 768 (ep2), or all with 384 (tp2). A CUDA
graph holds several layers, each with weights and routing of its own, so that weights come from memory and each kernel
starts while the one before ends, as in a decode step. Every tile that fits in shared memory is compiled by several
processes into Triton's cache. Then come, in microseconds a layer: what ships, and the same with the routing before it;
tiles of the second product, then of the first with the best of these. As ceilings a kernel that does nothing but read
as many bytes, and a copy of half as many. Prints a line for each number of tokens, and one JSON object last.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_kernels import BF16, CHOSEN, DEVICE, EXPERTS, HIDDEN, RULE, SPLITS, graph_us, ints, normal, write_json
from weft.kernels.triton import moe, overlap, route
from weft.kernels.triton.moe import Tile

SHARED = 227 << 10
"""Bytes of shared memory that a block can have."""


LAYERS = 8


def tiles_for(rows: int, product: str) -> list[Tile]:
    """Tiles worth trying for the product."""
    if rows <= 4:
        cuts = [*itertools.product((16, 32, 64), (128, 256), (4,), (4, 6)), (16, 512, 4, 4)]
    elif rows <= 128:
        cuts = [*itertools.product((32, 64, 128), (128, 256), (4,), (3, 4)), (16, 512, 4, 3), (32, 512, 8, 3)]
    else:
        cuts = [*itertools.product((64, 128, 256), (64, 128), (4, 8), (3, 4))]
    weights, tile_rows = (2 if product == "up" else 1), moe.tile_rows_of(rows)
    tiles = [Tile(*cut) for cut in cuts]
    tiles = [t for t in tiles if tile_rows * weights * t.columns <= (128 if rows > 128 else 64) * 256]
    held = [(tile_rows + weights * t.columns) * t.depth * 2 * (t.stages - 1) for t in tiles]
    return [t for t, size in zip(tiles, held, strict=True) if size <= SHARED]


def shipped_of(split: str, rows: int, product: str) -> Tile:
    """What ships for the product."""
    size = BF16.itemsize
    return moe.up_tile_of(rows, size) if product == "up" else moe.down_tile_of(rows, SPLITS[split][1], size)


@triton.jit
def _read(x, out, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """Reads BLOCK · ROUNDS int32 a program, and writes nothing that anybody expects."""
    overlap.begin()
    at = x + tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS) + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(ROUNDS):
        total += tl.load(at + i * BLOCK)
    if tl.sum(total, 0) == 123456789:
        tl.store(out, 1)


class Case:
    """A number of tokens under one split of the experts: layers with weights and a routing each."""

    def __init__(self, split: str, rows: int, weights: Tensor):
        held, inner = SPLITS[split]
        self.weights = weights.view(LAYERS, -1)
        gate_up, down = self.weights.split((held * 2 * inner * HIDDEN, held * HIDDEN * inner), 1)
        self.gate_up = [w.view(held, 2 * inner, HIDDEN) for w in gate_up]
        self.down = [w.view(held, HIDDEN, inner) for w in down]
        live, tile_rows = ints(rows), moe.tile_rows_of(rows)
        self.x = [normal(rows, HIDDEN) for _ in range(LAYERS)]
        self.logits = [normal(rows, EXPERTS) for _ in range(LAYERS)]
        self.route = lambda i: route.route(self.logits[i], RULE, live, tile_rows, 0, held)
        self.routings = [self.route(i) for i in range(LAYERS)]
        self.out = torch.empty(rows, HIDDEN, device=DEVICE, dtype=BF16)
        self.hit = statistics.mean((r.expert.unique() >= 0).sum().item() for r in self.routings)
        self.bytes = int(self.hit * 3 * inner * HIDDEN * 2)
        self.turns = 4 if rows <= 16 else 2

    def us(self, up: Tile | None = None, down: Tile | None = None, routed: bool = False) -> float:
        """Microseconds a layer; routed: with the routing."""

        def call(i: int) -> None:
            routing = self.route(i) if routed else self.routings[i]
            moe.experts(self.x[i], routing, self.gate_up[i], self.down[i], self.out, up, down)

        return round(graph_us([lambda i=i: call(i) for i in range(LAYERS)] * self.turns, 9), 2)

    def ceilings(self) -> dict[str, float]:
        """Microseconds to read as many bytes as the experts that are hit have, and to copy half as many."""
        words, block, rounds = self.weights.view(torch.int32), 4096, 4
        programs = self.bytes // 4 // (block * rounds)
        half = self.bytes // 8
        to = torch.empty(half, dtype=torch.int32, device=DEVICE)

        def read(x: Tensor) -> None:
            _read[(programs,)](x, to, BLOCK=block, ROUNDS=rounds, num_warps=4, **overlap.options())

        each = list(words) * self.turns
        return {
            "read_us": round(graph_us([lambda x=x: read(x) for x in each], 9), 2),
            "copy_us": round(graph_us([lambda x=x: to.copy_(x[:half]) for x in each], 9), 2),
        }


def compile_tiles(work: list[tuple[str, int, Tile, Tile]]) -> None:
    """Fills Triton's cache, in a process of its own: tokens that choose nothing."""
    for split, rows, up, down in work:
        held, inner = SPLITS[split]
        tile_rows, none = moe.tile_rows_of(rows), torch.full((rows, CHOSEN), -1, dtype=torch.int32, device=DEVICE)
        routing = route.Routing(normal(rows, CHOSEN).float(), none, tile_rows, None, None)
        if rows * CHOSEN * 4 > EXPERTS:
            routing = route.sort_pairs(routing.weight, none, held, tile_rows)
        x, gate_up, down_weight = normal(rows, HIDDEN), normal(1, 2 * inner, HIDDEN), normal(1, HIDDEN, inner)
        moe.experts(x, routing, gate_up, down_weight, torch.empty_like(x), up, down)


def measure(case: Case, split: str, rows: int) -> dict[str, Any]:
    """All figures of one number of tokens."""
    found: dict[str, Any] = {"hit": case.hit, "bytes": case.bytes, **case.ceilings()}
    found["shipped_us"], found["routed_us"] = case.us(), case.us(routed=True)
    best = {product: shipped_of(split, rows, product) for product in ("up", "down")}
    for product in ("down", "up"):
        times = sorted((case.us(*(best | {product: tile}).values()), tile) for tile in tiles_for(rows, product))
        found[f"{product}_tiles"] = [(us, *tile) for us, tile in times[:6]]
        best[product] = times[0][1]
    found["best"], found["best_us"] = best, case.us(best["up"], best["down"])
    found["tb_s"] = round(case.bytes / found["best_us"] / 1e6, 3)
    return found


def main() -> None:
    """Compiles, times, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 4096])
    parser.add_argument("--splits", nargs="+", default=list(SPLITS), choices=list(SPLITS))
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    work = set()
    for split, rows in itertools.product(args.splits, args.rows):
        ups, downs = (tiles_for(rows, product) for product in ("up", "down"))
        own = {product: shipped_of(split, rows, product) for product in ("up", "down")}
        pairs = itertools.zip_longest(ups, downs)
        work |= {(split, rows, up or own["up"], down or own["down"]) for up, down in pairs}
    each = sorted(work, key=str)
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_tiles, [each[i :: args.processes * 4] for i in range(args.processes * 4)]))
    print(f"{len(each)} pairs of tiles compiled", flush=True)
    found: list[dict[str, Any]] = []
    for split in args.splits:
        held, inner = SPLITS[split]
        weights = torch.stack([normal(held * 3 * inner * HIDDEN, scale=0.02) for _ in range(LAYERS)])
        for rows in args.rows:
            row = {"split": split, "rows": rows, **measure(Case(split, rows, weights), split, rows)}
            found.append(row)
            print(row, flush=True)
    write_json({"gpu": torch.cuda.get_device_name(), "layers": found}, args.out)


if __name__ == "__main__":
    main()
