"""The best tiles of decode attention on this GPU: what `decode_attention.tile_of` and `cut_of` are filled from.

    python benchmarks/gpu_attention_tiles.py --out benchmarks/results/gpu_attention_tiles.json

A tile must serve every number of rows and every length, since a row's bits must not depend on either. So each is timed
in several cases, and tiles are ordered by the mean of their times over each case's best. A case is a CUDA graph of many
layers, each with a cache and weights of its own, so that they come from memory: a kernel that reads as many bytes as
the queries', keys' and values' weights, a short one that stores a token, and attention; what the graph takes without
attention is taken off. Processes of their own compile every tile first and compare it with its twin; those that fail
are named and left out. Searches one thing after the
other: blocks, then splits and programs. Prints each step's best, and one JSON object last.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from gpu_kernels import DEVICE, HEAD_DIM, HEADS, KV_HEADS, PAGE, PAGES, error, graph_us, normal, write_json
from weft.kernels.triton import decode_attention as attention
from weft.kernels.triton import overlap, plain
from weft.kernels.triton.decode_attention import Tile
from weft.kernels.triton.splits import Cut, order_splits

CASES = ((1, 1024), (16, 1024), (64, 1024), (64, 8192))
LATENT_CASES = ((1, 1024), (16, 1024), (64, 1024), (16, 8192))
BEHIND = 6
"""Tokens on top of a case's context: a step is rarely a whole number of splits long."""
WEIGHTS = (HEADS + 2 * KV_HEADS) * HEAD_DIM * 2048
"""Elements of the product before attention."""
BLOCK = 8192


class Variant(NamedTuple):
    """What is timed."""

    tile: Tile
    cut: Cut


@triton.jit
def _read_weights(weight, out, BLOCK: tl.constexpr):
    overlap.begin()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(weight + i).to(tl.float32), 0))


@triton.jit
def _store_token(new, cache, slots, row_elements, slot_elements, BLOCK: tl.constexpr):
    overlap.begin()
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    x = tl.load(new + row * row_elements + i, mask=i < slot_elements)
    tl.store(cache + tl.load(slots + row).to(tl.int64) * slot_elements + i, x, mask=i < slot_elements)


class Case:
    """Some layers' caches, and the calls of a step."""

    def __init__(self, latent: bool, rows: int, context: int, layers: int) -> None:
        self.layers = layers
        length = context + BEHIND
        width = triton.cdiv(length, PAGE)
        self.lengths = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)
        self.pages = torch.zeros(rows, PAGES, dtype=torch.int32, device=DEVICE)
        self.pages[:, :width] = torch.randperm(rows * width, device=DEVICE).view(rows, -1)
        self.slots = self.pages[:, (length - 1) // PAGE] * PAGE + (length - 1) % PAGE
        kinds, heads, dim = (1, 1, 576) if latent else (2, KV_HEADS, HEAD_DIM)
        self.latent, self.dim = latent, 512 if latent else dim
        self.cache = normal(self.layers, kinds, rows * width * PAGE, heads, dim)
        self.new = normal(rows, heads * dim)
        self.q = normal(rows, HEADS, dim)
        self.weights = normal(self.layers, WEIGHTS)
        self.sums = torch.empty(WEIGHTS // BLOCK, device=DEVICE)
        self.before: float | None = None

    def calls(self, variant: Variant | None) -> list[Callable[[], Any]]:
        """A call for each layer; the first also orders the splits."""
        splits = []

        def layer(at: int) -> None:
            _read_weights[(len(self.sums),)](self.weights[at], self.sums, BLOCK, **overlap.options())
            size = self.new.shape[1]
            _store_token[(len(self.q),)](
                self.new, self.cache[at, 0], self.slots, size, size, triton.next_power_of_2(size),
                num_warps=1, **overlap.options(),
            )  # fmt: skip
            if variant is None:
                return
            if at == 0:
                blocks = 1 if self.latent else KV_HEADS
                at_once = variant.tile.programs // blocks if variant.tile.runs else None
                splits[:] = [order_splits(self.lengths, PAGES * PAGE, None, at_once, variant.cut)]
            where: tuple[Any, ...] = (self.pages, self.lengths, PAGE, 0.07)
            options: dict[str, Any] = {"tile": variant.tile, "splits": splits[0]}
            if self.latent:
                attention.latent_decode_attention(self.q, self.cache[at, 0], self.dim, *where, **options)
            else:
                attention.decode_attention(self.q, *self.cache[at], *where, **options)

        return [lambda at=at: layer(at) for at in range(self.layers)]

    def us(self, variant: Variant) -> float:
        """Microseconds that a layer's attention adds."""
        if self.before is None:
            self.before = graph_us(self.calls(None), 9)
        return graph_us(self.calls(variant), 9) - self.before


def blocks(latent: bool) -> Iterable[Tile]:
    """How a tile may be cut."""
    tokens = (16, 32, 64) if latent else (32, 64)
    row = 2 * (576 if latent else 2 * HEAD_DIM)  # bytes of a token's key and value in a stage
    for warps, n, stages in itertools.product((4, 8) if latent else (4, 2, 8), tokens, (3, 2, 4)):
        if n * row * (stages - 1) <= (150 if latent else 100) << 10 and 16 <= n * 16 // warps <= 1024:
            yield Tile(16, n, warps, stages, 264 if latent else 528, not latent)


def faults(latent: bool, tiles: list[Tile]) -> list[tuple[Tile, str]]:
    """Compiles, in a process of its own, and compares with the twin; gives the tiles that are wrong."""
    lengths = torch.tensor([1030, 0, 700, 129, 5, 1024], dtype=torch.int32, device=DEVICE)
    pages = torch.randperm(6 * 65, device=DEVICE).view(6, 65).int()
    heads, dim = (1, 576) if latent else (KV_HEADS, HEAD_DIM)
    keys, values, q = normal(6 * 65 * PAGE, heads, dim), normal(6 * 65 * PAGE, heads, dim), normal(6, HEADS, dim)
    values = keys[..., :512] if latent else values
    wide = (x.double() for x in (q, keys, values))
    wanted = plain.decode_attention(*wide, pages, lengths, PAGE, 0.07)[0]
    found = []
    for tile, programs in itertools.product(tiles, (528, 5)):
        cut = tile._replace(programs=programs)
        try:
            if latent:
                out = attention.latent_decode_attention(q, keys, 512, pages, lengths, PAGE, 0.07, tile=cut)
            else:
                out = attention.decode_attention(q, keys, values, pages, lengths, PAGE, 0.07, tile=cut)
            if not (wrong := error(out, wanted)) < 1e-2:
                found.append((tile, f"error {wrong} by {programs} programs"))
        except (RuntimeError, triton.runtime.errors.OutOfResources) as fault:
            found.append((tile, f"{str(fault).splitlines()[0]}, {programs} programs"))
    return found


class Search:
    """Times variants, each once."""

    def __init__(self, latent: bool, pool: ProcessPoolExecutor, processes: int, until: float) -> None:
        self.latent, self.pool, self.processes, self.until = latent, pool, processes, until
        wanted = LATENT_CASES if latent else CASES
        self.cases = [Case(latent, *case, layers=3 if case[0] * case[1] > 100_000 else 16) for case in wanted]
        self.times: dict[Variant, list[float]] = {}
        self.tried: set[Tile] = set()
        self.faulty: set[Tile] = set()

    def run(self, variants: Iterable[Variant]) -> None:
        """Compiles and compares side by side, then times."""
        new = [v for v in dict.fromkeys(variants) if v not in self.times]
        tiles = dict.fromkeys(v.tile._replace(programs=528) for v in new)
        untried = [tile for tile in tiles if tile not in self.tried]
        self.tried.update(untried)
        work = [untried[i :: self.processes] for i in range(min(self.processes, len(untried)))]
        for tile, why in itertools.chain(*self.pool.map(faults, [self.latent] * len(work), work)):
            print("fault:", *tile, why, flush=True)
            self.faulty.add(tile)
        new = [v for v in new if v.tile._replace(programs=528) not in self.faulty]
        for variant in new:
            if time.monotonic() > self.until:
                return print(f"no time for {len(new)} more", flush=True)
            self.times[variant] = [case.us(variant) for case in self.cases]

    def best(self, count: int) -> list[Variant]:
        """Those of the least mean of times over each case's best."""
        return sorted(self.times, key=self.score)[:count]

    def score(self, variant: Variant) -> float:
        least = [min(column) for column in zip(*self.times.values(), strict=True)]
        return sum(us / b for us, b in zip(self.times[variant], least, strict=True)) / len(least)

    def show(self, name: str, count: int = 6) -> None:
        print(name, flush=True)
        for v in self.best(count):
            print("  ", *v.tile, "|", *v.cut, round(self.score(v), 3), [round(us, 2) for us in self.times[v]])


def search(latent: bool, pool: ProcessPoolExecutor, processes: int, until: float) -> dict[str, Any]:
    """One thing after the other."""
    found = Search(latent, pool, processes, until)
    shipped = attention.tile_of(512 if latent else HEAD_DIM, HEADS // KV_HEADS)
    cut = attention.cut_of(512 if latent else HEAD_DIM)
    found.run([Variant(tile, cut) for tile in (shipped, shipped._replace(runs=not shipped.runs), *blocks(latent))])
    found.show("blocks")
    for v in found.best(2):
        programs = [132 * n for n in ((1, 2, 4) if latent else (1, 2, 3, 4, 6))]
        cuts = [Cut(tokens, 64, spare) for tokens in (64, 128, 256) for spare in (0, 2)]
        cuts += [Cut(tokens, 32, 2) for tokens in (64, 128)]
        found.run([v._replace(tile=v.tile._replace(programs=n)) for n in programs])
        found.run([v._replace(cut=cut) for cut in cuts])
    found.show("programs, splits", 12)
    return {
        "before_us": [case.before for case in found.cases],
        "shipped_us": found.times.get(Variant(shipped, cut)),
        "times": [(*v.tile, *v.cut, [round(us, 2) for us in times]) for v, times in found.times.items()],
    }


def main() -> None:
    """Times, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=("heads", "latents"), default=("heads", "latents"))
    parser.add_argument("--seconds", type=float, default=1e9, help="for each kind")
    args = parser.parse_args()
    torch.manual_seed(0)
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name()}
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        for kind in args.kinds:
            latent = kind == "latents"
            found = search(latent, pool, args.processes, time.monotonic() + args.seconds)
            report[kind] = {"cases": LATENT_CASES if latent else CASES, **found}
    write_json(report, args.out)


if __name__ == "__main__":
    main()
