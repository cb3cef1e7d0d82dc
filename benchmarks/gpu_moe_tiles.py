"""The best tiles of the expert products on this GPU, by numbers of tokens: what the tables of `moe.py` are filled from.

    python benchmarks/gpu_moe_tiles.py --rows 1 4 16 64 256 4096 --out benchmarks/results/gpu_moe_tiles.json

128 experts, 8 chosen, hidden 2048, inner 768 with half the experts here and 384 with all of them. Every tile that fits
in shared memory is compiled by several processes into Triton's cache, then timed in CUDA graphs (see gpu_kernels.py).
Prints the best five of each product and what the shipped tables take, and one JSON object last.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from gpu_kernels import BF16, DEVICE, HIDDEN, RULE, SPLITS, graph_us, ints, normal, skewed_logits, write_json
from weft.kernels.triton import moe, route
from weft.kernels.triton.moe import Tile

SHARED = 227 << 10
"""Bytes of shared memory that a block can have."""


def tile_rows_for(rows: int) -> tuple[int, ...]:
    """Rows of a tile worth trying."""
    return (16,) if rows <= 32 else (16, 32) if rows <= 128 else (64,) if rows <= 512 else (64, 128)


def tiles_for(rows: int, tile_rows: int, weights: int) -> list[Tile]:
    """Tiles worth trying for a product that reads `weights` weight tiles for each of its input."""
    if rows <= 4:
        cuts = itertools.product((16, 32, 64), (64, 128, 256), (4,), (4, 6))
    elif rows <= 128:
        cuts = itertools.product((16, 32, 64, 128), (64, 128, 256), (4, 8), (3, 4))
    else:
        cuts = itertools.product((64, 128, 256), (64, 128), (4, 8), (3, 4))
    tiles = [Tile(*cut) for cut in cuts]
    area = 128 * 256 if rows > 128 else 64 * 256
    tiles = [t for t in tiles if tile_rows * weights * t.columns <= area]
    return [t for t in tiles if (tile_rows + weights * t.columns) * t.depth * 2 * t.stages <= SHARED]


class Case:
    """A number of tokens under one split of the experts, with inputs that take turns."""

    def __init__(self, split: str, rows: int, tile_rows: int, tiny: bool = False):
        held, inner = (1, SPLITS[split][1]) if tiny else SPLITS[split]
        self.gate_up = normal(held, 2 * inner, HIDDEN, scale=0.02)
        self.down = normal(held, HIDDEN, inner, scale=0.03)
        turns = 1 if tiny else 2 if rows > 1000 else 8
        self.sets = [normal(rows, HIDDEN) for _ in range(turns)]
        live = ints(rows)
        self.routings = [route.route(skewed_logits(rows), RULE, live, tile_rows, 0, held) for _ in range(turns)]
        self.out = torch.empty(rows, HIDDEN, device=DEVICE, dtype=BF16)

    def calls(self, up: Tile | None, down: Tile | None) -> list[Any]:
        return [
            lambda x=x, r=r: moe.experts(x, r, self.gate_up, self.down, self.out, up, down)
            for x, r in zip(self.sets, self.routings, strict=True)
        ]


def compile_tiles(work: list[tuple[str, int, int, Tile | None, Tile | None]]) -> None:
    """Fills Triton's cache, in a process of its own."""
    for split, rows, tile_rows, up, down in work:
        Case(split, 1 if rows <= 4 else 64, tile_rows, tiny=True).calls(up, down)[0]()


def main() -> None:
    """Compiles, times, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 4096])
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    work: dict[tuple[str, int, int], tuple[list[Tile], list[Tile]]] = {}
    for split, rows in itertools.product(SPLITS, args.rows):
        for tile_rows in tile_rows_for(rows):
            work[split, rows, tile_rows] = (tiles_for(rows, tile_rows, 2), tiles_for(rows, tile_rows, 1))
    each = sorted(
        {
            (split, 1 if rows <= 4 else 64, tile_rows, up, down)
            for (split, rows, tile_rows), (ups, downs) in work.items()
            for up, down in itertools.zip_longest(ups, downs)
        },
        key=str,
    )
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_tiles, [each[i :: args.processes * 4] for i in range(args.processes * 4)]))
    print(f"{len(each)} pairs of tiles compiled", flush=True)
    found: list[dict[str, Any]] = []
    for (split, rows, tile_rows), (ups, downs) in work.items():
        case = Case(split, rows, tile_rows)
        shipped = graph_us(case.calls(None, None), 7)
        times: dict[str, list[tuple[float, Tile]]] = {"up": [], "down": []}
        for tile in ups:
            times["up"].append((graph_us(case.calls(tile, None), 5), tile))
        for tile in downs:
            times["down"].append((graph_us(case.calls(None, tile), 5), tile))
        row: dict[str, Any] = {"split": split, "rows": rows, "tile_rows": tile_rows, "shipped_us": round(shipped, 2)}
        for name, measured in times.items():
            measured.sort(key=lambda pair: pair[0])
            row[name] = [(round(us, 2), *tile) for us, tile in measured[:5]]
        best = graph_us(case.calls(times["up"][0][1], times["down"][0][1]), 7)
        row["best_us"] = round(best, 2)
        found.append(row)
        print(row, flush=True)
    write_json({"gpu": torch.cuda.get_device_name(), "tiles": found}, args.out)


if __name__ == "__main__":
    main()
