"""The best tiles of decode attention on this GPU: what `decode_attention.tile_of` is filled from.

    python benchmarks/gpu_attention_tiles.py --out benchmarks/results/gpu_attention_tiles.json

A tile must serve every number of rows and every length, since a row's bits must not depend on either. So each is timed
in several cases (see gpu_kernels.py), and tiles are ordered by the mean of their times over each case's best. Prints
the best ten for heads of 128 and for DeepSeek-V2-Lite's latents, and one JSON object last.
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

from gpu_kernels import DEVICE, HEAD_DIM, HEADS, KV_HEADS, PAGE, PAGES, graph_us, normal, write_json
from weft.kernels.triton import decode_attention as attention
from weft.kernels.triton.decode_attention import Tile

CASES = ((1, 1024), (16, 1024), (64, 1024), (256, 1024), (1, 32768), (16, 8192))
LATENT_CASES = ((1, 1024), (16, 1024), (64, 1024), (16, 8192))


def tiles(latent: bool) -> list[Tile]:
    """Tiles worth trying."""
    if latent:
        cuts = itertools.product((16,), (16, 32, 64), (4, 8), (2, 3, 4), (132, 264, 528, 1056))
    else:
        cuts = itertools.product((16,), (32, 64, 128), (2, 4, 8), (2, 3, 4), tuple(132 * n for n in (3, 4, 6, 8, 16)))
    row = 2 * (576 if latent else 2 * HEAD_DIM)  # bytes of a token's key and value in a stage
    return [t for t in itertools.starmap(Tile, cuts) if t.tokens * row * (t.stages - 1) + (20 << 10) <= 227 << 10]


def calls_of(latent: bool, rows: int, context: int, layers: int) -> Callable[[Tile], list[Callable[[], Any]]]:
    """By tile, a call for each of several layers' caches."""
    lengths = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
    pages = torch.zeros(rows, PAGES, dtype=torch.int32, device=DEVICE)
    pages[:, : context // PAGE] = torch.randperm(rows * context // PAGE, device=DEVICE).view(rows, -1)
    if latent:
        cache, q = normal(layers, rows * context, 1, 576), normal(rows, 16, 576)
        run = attention.latent_decode_attention
        return lambda tile: [lambda x=x: run(q, x, 512, pages, lengths, PAGE, 0.07, tile=tile) for x in cache]
    cache, q = normal(layers, 2, rows * context, KV_HEADS, HEAD_DIM), normal(rows, HEADS, HEAD_DIM)
    return lambda tile: [
        lambda k=k, v=v: attention.decode_attention(q, k, v, pages, lengths, PAGE, 0.07, tile=tile) for k, v in cache
    ]


def compile_tiles(latent: bool, work: list[Tile]) -> None:
    """Fills Triton's cache, in a process of its own."""
    for (rows, context), tile in itertools.product(((1, 64), (16, 64), (64, 64), (256, 64)), work):
        calls_of(latent, rows, context, 1)(tile)[0]()


def rank(latent: bool, processes: int) -> dict[str, Any]:
    """Times all tiles in all cases."""
    found = tiles(latent)
    once = [t for t in found if t.programs == found[0].programs]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_tiles, [latent] * processes, [once[i::processes] for i in range(processes)]))
    times: dict[Tile, list[float]] = {tile: [] for tile in found}
    shipped = []
    for rows, context in LATENT_CASES if latent else CASES:
        calls = calls_of(latent, rows, context, 4 if rows * context > 60000 else 16)
        for tile in found:
            times[tile].append(graph_us(calls(tile), 5))
        shipped.append(graph_us(calls(attention.tile_of(512 if latent else HEAD_DIM, HEADS // KV_HEADS)), 5))
    best = [min(column) for column in zip(*times.values(), strict=True)]
    score = {t: sum(us / b for us, b in zip(column, best, strict=True)) / len(best) for t, column in times.items()}
    order = sorted(score, key=score.__getitem__)[:10]
    return {
        "best_us": [round(us, 2) for us in best],
        "shipped_us": [round(us, 2) for us in shipped],
        "tiles": [(*t, round(score[t], 3), [round(us, 2) for us in times[t]]) for t in order],
    }


def main() -> None:
    """Times, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name()}
    for name, latent, cases in (("heads of 128", False, CASES), ("latents", True, LATENT_CASES)):
        report[name] = {"cases": cases, **rank(latent, args.processes)}
        print(f"{name}, {cases}: best {report[name]['best_us']}, shipped {report[name]['shipped_us']}")
        for tile in report[name]["tiles"]:
            print("  ", tile, flush=True)
    write_json(report, args.out)


if __name__ == "__main__":
    main()
