"""The kernels of prompts on one GPU, old form against new, as ratios.

    python bench/scripts/gpu_prompts.py --out bench/results/gpu_prompts.json

- Gated delta rule: the chunked Triton kernels against plain torch, of Qwen3.5-35B-A3B's heads; and chunks' tiles.
- Attention of queries in groups: over copies of the tokens in a row against over pages, of Qwen3-30B-A3B's heads; and
  tiles.
- Latent attention: prompts with expanded keys and values against absorbed projections, of DeepSeek-V2-Lite's heads; and
  tiles.

Times are of CUDA graphs, in microseconds a layer; those of the delta rule in torch, which waits for the host, are of
calls. `--dry-run` runs each case once in Triton's interpreter (TRITON_INTERPRET=1), in small sizes. Prints one JSON
object last.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_kernels import error, graph_us, write_json
from weft.engine.attention import expansion
from weft.engine.attention.backend import Queries
from weft.engine.attention.backend_registry import TRITON
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.attention.forward_batch import Batch, PageTables
from weft.engine.attention.projections import Absorbed, LatentSplit
from weft.engine.kernels import delta_rule
from weft.engine.kernels.triton import copied_prompts, copy_pages, delta_chunks, latent_prompts, prefill_attention
from weft.engine.kernels.triton.delta_chunks import ChunkTile
from weft.engine.kernels.triton.prefill_attention import PrefillTile
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent
from weft.engine.models.layers import Builder, HeadNorm
from weft.engine.models.rotary import RotaryTable
from weft.planner.spec import Mesh

HEADS, KEY_HEADS, DIM, WINDOW = 32, 16, 128, 4
LATENT, ROTARY, NOPE, VALUE, LATENT_HEADS, PAGE = 512, 64, 128, 128, 16, 16
DELTA_CASES = ((1, 512), (1, 2048), (1, 8192), (4, 2048), (16, 256), (64, 32))
LATENT_CASES = ((1, 512, 0), (1, 2048, 0), (1, 8192, 0), (16, 256, 0), (1, 2048, 6144), (1, 2048, 30720), (1, 64, 8192))
"""(sequences, rows of each, cached tokens of each)."""
CHUNK_TILES = [ChunkTile(64, v, w, s) for v, w, s in ((16, 4, 2), (32, 4, 1), (32, 4, 2), (32, 4, 3), (32, 8, 2))]
CHUNK_TILES += [ChunkTile(64, v, w, s) for v, w, s in ((64, 4, 2), (64, 8, 2), (128, 8, 2))]
EXPANDED_TILES = [PrefillTile(*t) for t in ((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3))]
EXPANDED_TILES += [PrefillTile(*t) for t in ((128, 32, 8, 3), (64, 128, 4, 2), (128, 64, 4, 2))]
GROUPED_TILES = [PrefillTile(*t) for t in ((128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3))]
GROUPED_TILES += [PrefillTile(*t) for t in ((64, 128, 4, 2), (128, 64, 8, 4), (256, 64, 8, 3), (128, 32, 4, 4))]
GROUPED_CASES = ((1, 8192, 0), (4, 2048, 0), (16, 512, 0), (1, 2048, 6144))
ABSORBED_TILES = [PrefillTile(*t) for t in ((64, 16, 8, 2), (64, 32, 8, 2), (64, 32, 8, 1), (128, 32, 8, 1))]


class Bench:
    """Collects rows. dry: in the interpreter, where times mean nothing."""

    def __init__(self, dry: bool):
        self.dry, self.device = dry, torch.device("cpu" if dry else "cuda")
        self.dtype = torch.float16 if dry else torch.bfloat16  # the interpreter has no products in bfloat16
        self.rows: list[dict[str, Any]] = []

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(self.dtype)

    def graph_us(self, call: Callable[[], Any]) -> float:
        if not self.dry:
            return graph_us([call] * 4)
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6

    def eager_us(self, call: Callable[[], Any]) -> float:
        times = []
        for _ in range(1 if self.dry else 4):
            begin = time.perf_counter()
            call()
            if not self.dry:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e6)
        return statistics.median(times[-3:])

    def add(self, **row: Any) -> None:
        self.rows.append({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

    def kernels_us(self, call: Callable[[], Any]) -> dict[str, float]:
        """Microseconds of each kernel of a call, by torch's profiler."""
        if self.dry:
            return {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(3):
                call()
            torch.cuda.synchronize()
        return {
            e.key[:40]: round(e.device_time_total / 3, 1) for e in profile.key_averages() if e.device_time_total > 3
        }


def time_delta(b: Bench, sequences: int, rows: int, tiles: bool) -> None:
    """A layer's prompts. error: of both forms against torch in float32, by output and by state."""
    heads, keys, dim = (2, 1, 16) if b.dry else (HEADS, KEY_HEADS, DIM)
    features, total = (2 * keys + heads) * dim, sequences * rows
    product = b.normal(total, features + heads * dim + 2 * heads)
    starts = torch.arange(0, total + 1, rows, dtype=torch.int32, device=b.device)
    slots = torch.arange(sequences, device=b.device)
    states = torch.randn(sequences, heads, dim, dim, device=b.device) * 0.1
    tails = torch.randn(sequences, features, WINDOW - 1, device=b.device)
    conv, weight = b.normal(features, 1, WINDOW, scale=0.3), b.normal(dim)
    decay, bias = torch.rand(heads, device=b.device).log(), torch.randn(heads, device=b.device)

    def run(form: Callable[..., None], wide: bool = False, **more: Any) -> tuple[Tensor, Tensor]:
        kept, last = states.clone(), tails.clone()
        x, c, w = (t.float() if wide else t for t in (product, conv, weight))
        out = x.new_empty(total, heads * dim)
        form(x, starts, slots, slots, c, decay, bias, w, 1e-6, kept, last, out, **more)
        return out, kept

    truth = run(delta_rule.gated_delta, wide=True)
    ours, theirs = run(delta_chunks.gated_delta), run(delta_rule.gated_delta)
    errors = {f"{name}_{what}": error(x, y.double()) for name, found in (("triton", ours), ("torch", theirs))
              for what, x, y in zip(("out", "state"), found, truth, strict=True)}  # fmt: skip
    kept, last, out = states.clone(), tails.clone(), product.new_empty(total, heads * dim)
    of_layer = (conv, decay, bias, weight, 1e-6, kept, last, out)

    def new(tile: ChunkTile | None = None) -> None:
        delta_chunks.gated_delta(product, starts, slots, slots, *of_layer, tile=tile)

    us = b.graph_us(new)
    old = b.eager_us(lambda: delta_rule.gated_delta(product, starts, slots, slots, *of_layer))
    b.add(what="delta", case=f"{sequences} x {rows}", us=us, old_us=old, ratio=us / old, **errors)
    if tiles:
        print("   ", b.kernels_us(new), flush=True)
        for tile in CHUNK_TILES:
            b.add(what="delta tile", case=f"{sequences} x {rows} {tuple(tile)}", us=b.graph_us(lambda t=tile: new(t)))


def latent_batch(b: Bench, sequences: int, rows: int, context: int) -> tuple[Batch, int]:
    """The batch, and the pages that it takes."""
    pages = -(-(rows + context) // PAGE)
    order = torch.randperm(sequences * pages).view(sequences, -1).tolist()
    seqs = [SeqRows(rows, context, [table], 1) for table in order]
    return build_batch([0] * sequences * rows, seqs, PAGE, device=b.device), sequences * pages


def time_queries_in_groups(b: Bench, sequences: int, rows: int, context: int, tiles: bool) -> None:
    """A layer's attention of 32 query and 4 key-value heads of 128: over pages, and over copies of their tokens. us: of
    the copy, of the attention over it, and of that over pages, which finds nothing to do.
    """
    heads, kv_heads, dim = (4, 2, 16) if b.dry else (32, 4, 128)
    batch, pages = latent_batch(b, sequences, rows, context)
    table = batch.tables[0]
    assert isinstance(table, PageTables) and batch.starts is not None
    total, length = len(batch.tokens), rows + context
    keys, values = b.normal(pages * PAGE, kv_heads, dim), b.normal(pages * PAGE, kv_heads, dim)
    q, out, found = b.normal(total, heads, dim), b.normal(total, heads, dim), b.normal(total, heads, dim)
    of_rows = batch.starts, (batch.positions + 1).int()
    flops = sequences * sum(range(context + 1, length + 1)) * heads * 4 * dim
    taken = -(-length // expansion.ALIGNMENT) * expansion.ALIGNMENT
    bases = torch.arange(0, sequences * taken, taken, dtype=torch.int32, device=b.device)
    live, scale = bases[-1:] + taken, dim**-0.5
    copied = b.normal(2, sequences * taken, kv_heads, dim)
    case = f"{sequences} x {rows} behind {context}"

    def over_pages(bases: Tensor | None = None, tile: PrefillTile | None = None) -> None:
        where = table.pages, *of_rows, PAGE, scale
        prefill_attention.prefill_attention(q, keys, values, *where, out, bases=bases, tile=tile)

    def copy() -> None:
        copy_pages.copy_pages(keys, values, table.pages, bases, batch.lengths, live, PAGE, copied)

    def over_copies(tile: PrefillTile | None = None) -> None:
        copied_prompts.copied_prefill_attention(q, copied, *of_rows, bases, scale, found, tile=tile)

    def all_of_it() -> None:
        copy()
        over_copies()
        over_pages(bases)

    us, old = b.graph_us(all_of_it), b.graph_us(over_pages)
    parts = dict(copy_us=b.graph_us(copy), attend_us=b.graph_us(over_copies))
    parts["pages_us"] = b.graph_us(lambda: over_pages(bases))
    speed = dict(tflops=flops / us / 1e6, old_tflops=flops / old / 1e6, same_bits=torch.equal(out, found))
    b.add(what="grouped", case=case, us=us, old_us=old, ratio=us / old, **parts, **speed)
    for tile in GROUPED_TILES if tiles else ():
        times = dict(us=b.graph_us(lambda t=tile: over_copies(t)), old_us=b.graph_us(lambda t=tile: over_pages(tile=t)))
        b.add(what="grouped tile", case=f"{case} {tuple(tile)}", **times)


def time_latent(b: Bench, sequences: int, rows: int, context: int, tiles: bool) -> None:
    """A layer's attention from the projections' results to the heads' outputs."""
    heads = 2 if b.dry else LATENT_HEADS
    batch, pages = latent_batch(b, sequences, rows, context)
    spec = Latent(LATENT + ROTARY, LATENT)
    backend = TRITON.make(KVCache(spec, 1, pages, PAGE, b.dtype, b.device))
    cache = backend.cache
    cache.keys.normal_()
    total = len(batch.tokens)
    angle = torch.rand(total, 1, ROTARY, device=b.device).to(b.dtype)
    norm = HeadNorm(Builder(Mesh(), 0, b.dtype, torch.device("cpu")), "norm", LATENT, 1e-6)
    norm.weight.data = torch.ones(LATENT, dtype=b.dtype, device=b.device)
    parts = LatentSplit(NOPE + ROTARY, RotaryTable(angle, angle, True), norm)
    up = b.normal(heads, NOPE + VALUE, LATENT, scale=LATENT**-0.5)
    absorbed = Absorbed(up[:, :NOPE], up[:, NOPE:], up)
    q, kv = b.normal(total, heads * (NOPE + ROTARY)), b.normal(total, LATENT + ROTARY)
    found = []
    table = batch.tables[0]
    assert isinstance(table, PageTables)
    for expanded in (None, (NOPE, VALUE)):
        cache.spec = replace(spec, expanded=expanded)
        plan = backend.plan(batch, table)

        def run(plan: Any = plan) -> Tensor:
            query, left = parts.store(cache, 0, plan.stored, q, kv, absorbed, plan.absorbed_rows)
            return backend.attend(plan, 0, Queries(query, 0.07, absorbed=left))[0]

        q_kept = q.clone()  # where prompts are expanded, too, queries are rotated into another tensor
        found.append((b.graph_us(run), run(), plan))
        assert torch.equal(q, q_kept)
    (old, theirs, _), (us, ours, plan) = found
    expands = bool(expansion.pays(cache.spec, rows, rows + context))
    case = f"{sequences} x {rows} behind {context}"
    b.add(
        what="latent", case=case, expands=expands, us=us, old_us=old, ratio=us / old, error=error(ours, theirs.double())
    )
    if not (tiles and expands):
        return
    print("   ", b.kernels_us(run), flush=True)
    pages_, starts, limits, page, made, *_ = plan.prompts
    kept = torch.empty(made.places, heads, NOPE + VALUE, dtype=b.dtype, device=b.device)
    whole, out = b.normal(total, heads, LATENT + ROTARY), b.normal(total, heads, VALUE)
    plain = b.normal(total, heads, NOPE + ROTARY)[..., :NOPE]
    pairs = sequences * sum(range(context + 1, context + rows + 1)) * heads
    tokens = sequences * (rows + context) * heads

    def expand() -> None:
        latent_prompts.expand_latents(cache.keys[0], pages_, made.bases, made.lengths, made.live, page, up, kept)

    for programs in (132, 264, 528):
        latent_prompts.PROGRAMS = programs
        us = b.graph_us(expand)
        b.add(
            what="expand",
            case=f"{case}, {programs} programs",
            us=us,
            tflops=tokens * 2 * LATENT * (NOPE + VALUE) / us / 1e6,
        )
    latent_prompts.PROGRAMS = 264
    where, rest = (pages_, starts, limits), cache.keys[0][..., LATENT:]
    for tile in EXPANDED_TILES:

        def attend(tile: PrefillTile = tile) -> None:
            prefill_attention.expanded_prefill_attention(
                plain, whole[..., LATENT:], kept, rest, *where, made.bases, page, 0.07, out, tile=tile
            )

        us = b.graph_us(attend)
        b.add(what="expanded attention", case=f"{case} {tuple(tile)}", us=us, tflops=pairs * 640 / us / 1e6)
    latents, seen = cache.keys[0], b.normal(total, heads, LATENT)
    for tile in ABSORBED_TILES:

        def absorb(tile: PrefillTile = tile) -> None:
            values = latents[..., :LATENT]
            prefill_attention.prefill_attention(whole, latents, values, *where, page, 0.07, seen, tile=tile)

        us = b.graph_us(absorb)
        b.add(what="absorbed attention", case=f"{case} {tuple(tile)}", us=us, tflops=pairs * 2176 / us / 1e6)


def main() -> None:
    """Checks, times, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the JSON here, too")
    parser.add_argument("--dry-run", action="store_true", help="each case once in the interpreter, in small sizes")
    parser.add_argument("--tiles", action="store_true", help="also other tiles, of some cases")
    parser.add_argument("--grouped", action="store_true", help="attention of queries in groups alone")
    args = parser.parse_args()
    torch.manual_seed(0)
    b = Bench(args.dry_run)
    if not (b.dry or args.grouped):
        time_delta(b, 1, 64, False)  # what is compiled and opened once
        b.rows.clear()
    for sequences, rows in () if args.grouped else [(2, 70)] if b.dry else DELTA_CASES:
        time_delta(b, sequences, rows, args.tiles and (b.dry or (sequences, rows) in ((1, 8192), (4, 2048), (1, 512))))
    for sequences, rows, context in [(2, 40, 8)] if b.dry else GROUPED_CASES:
        time_queries_in_groups(b, sequences, rows, context, args.tiles)
    if args.grouped:
        return
    for sequences, rows, context in [(2, 40, 2)] if b.dry else LATENT_CASES:
        tiles = args.tiles and (b.dry or (sequences, rows, context) in ((1, 8192, 0), (1, 2048, 6144)))
        time_latent(b, sequences, rows, context, tiles)
    gpu = "dry run" if b.dry else torch.cuda.get_device_name()
    write_json({"gpu": gpu, "torch": torch.__version__, "rows": b.rows}, args.out)
    wrong = [row for row in b.rows for k, v in row.items() if "error" in k or k.startswith("triton_") if not v < 3e-2]
    if wrong and not b.dry:
        raise SystemExit(f"too far from what it should be: {wrong}")


if __name__ == "__main__":
    main()
