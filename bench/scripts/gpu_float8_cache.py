"""Attention over caches in FP8 beside those in bfloat16, on one GPU: each against float64, then timed.

    python bench/scripts/gpu_float8_cache.py --out bench/results/gpu_float8_cache.json

Keys and values have 4 heads of 128 for 32 query heads, in decode rows those of `--heads` (64/8x64: 8 of 64 for 64);
latent vectors 512 + 64 elements for 16 heads, or with `--latent-heads 128` for as many. Prompts are one chunk behind a
context, over pages, as only those attend that are not copied (`weft.engine.kernels.triton.copy_pages`). Times are of
CUDA graphs of several calls on different caches, as in `gpu_kernels.py`: the median of the replays, in microseconds a
call. `share` is what the cache's bytes at the bandwidth of a large copy would take, as a part of that. `--parts`
leaves out others. `--tiles` times other tiles of decode attention over FP8 instead. Prints one JSON object last.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu_kernels import BF16, DEVICE, PAGE, Report, error, graph_us, normal
from weft.engine.kernels.triton import decode_attention as decode
from weft.engine.kernels.triton import norm_rope_cache
from weft.engine.kernels.triton.prefill_attention import prefill_attention
from weft.kernels.float8 import Fp8Vectors, Stored, to_vectors

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from gpu import definitions

HEADS, KV_HEADS, DIM = 32, 4, 128
WIDTH, LATENT = 576, 512
L2_BYTES = 200 << 20
"""The caches of a graph's calls are larger than this together, where there are several."""
PARTS = ("decode", "latent", "prompts", "writes")
Case = tuple[Tensor, Tensor, int]
"""Page tables, lengths, slots."""


def tables(rows: int, context: int) -> Case:
    """Rows of as many tokens each, in pages that lie anywhere."""
    each = -(-context // PAGE)
    pages = torch.randperm(rows * each, device=DEVICE).view(rows, each).int()
    return pages, torch.full((rows,), context, dtype=torch.int32, device=DEVICE), rows * each * PAGE


def cache(slots: int, heads: int, dim: int, float8: bool) -> Stored:
    """Random vectors, a million at a time."""
    if not float8:
        return torch.randn(slots, heads, dim, device=DEVICE, dtype=BF16)
    values = torch.empty(slots, heads, dim, device=DEVICE, dtype=torch.float8_e4m3fn)
    exponents = torch.empty(slots, heads, device=DEVICE, dtype=torch.int8)
    for part in torch.arange(slots, device=DEVICE).split(1 << 20):
        at = slice(int(part[0]), int(part[-1]) + 1)
        made = to_vectors(torch.randn(len(part), heads, dim, device=DEVICE, dtype=BF16))
        values[at], exponents[at] = made
    return Fp8Vectors(values, exponents)


def wide(x: Stored) -> Tensor:
    return torch.ldexp(x.values.double(), x.exponents[..., None]) if isinstance(x, Fp8Vectors) else x.double()


def caches(slots: int, heads: int, dim: int, float8: bool, kinds: int) -> list[list[Stored]]:
    """For each call of a graph one cache, or keys and values."""
    size = kinds * slots * heads * dim * (1 if float8 else 2)
    return [[cache(slots, heads, dim, float8) for _ in range(kinds)] for _ in range(max(1, min(16, L2_BYTES // size)))]


class Heads(NamedTuple):
    heads: int
    kv_heads: int
    dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.dim}"


QWEN3 = Heads(HEADS, KV_HEADS, DIM)


def heads_of(text: str) -> Heads:
    """Raises ValueError, as argparse expects it."""
    heads, rest = text.split("/")
    kv_heads, dim = rest.split("x")
    return Heads(int(heads), int(kv_heads), int(dim))


def time_decode(
    report: Report,
    rows: int,
    context: int,
    float8: bool,
    tile: decode.DecodeTile | None = None,
    shape: Heads = QWEN3,
) -> None:
    """Keys and values."""
    heads, kv_heads, dim = shape
    pages, lengths, slots = tables(rows, context)
    q, scale, each = normal(rows, heads, dim), dim**-0.5, caches(slots, kv_heads, dim, float8, 2)
    splits = decode.splits_of(lengths, context, None, dim, kv_heads, tile, float8=float8)
    more: dict[str, Any] = dict(splits=splits, tile=tile)

    def ours(kv: Sequence[Stored]) -> Tensor:
        return decode.decode_attention(q, *kv, pages, lengths, PAGE, scale, **more)

    wrong, some = None, slice(-4, None)
    if rows * context <= 1 << 20:
        wanted, _ = definitions.decode_attention(
            q[some].double(), *map(wide, each[0]), pages[some], lengths[some], PAGE, scale
        )
        wrong = error(ours(each[0])[some], wanted)
    us = graph_us([partial(ours, kv) for kv in each])
    size = rows * context * 2 * kv_heads * (dim + 1 if float8 else 2 * dim)
    what = f"{rows} rows × {context}, {shape}"
    add(report, f"decode {name_of(float8)}", what, us, size, 2, wrong, tile)


def time_latent(
    report: Report, rows: int, context: int, heads: int, float8: bool, tile: decode.DecodeTile | None = None
) -> None:
    """Latent vectors."""
    pages, lengths, slots = tables(rows, context)
    q, each = normal(rows, heads, WIDTH), caches(slots, 1, WIDTH, float8, 1)
    splits = decode.splits_of(lengths, context, None, LATENT, 1, tile)
    more: dict[str, Any] = dict(splits=splits, tile=tile)

    def ours(kv: Sequence[Stored]) -> Tensor:
        return decode.latent_decode_attention(q, kv[0], LATENT, pages, lengths, PAGE, 0.04, **more)

    wrong, some = None, slice(-4, None)
    if rows * context <= 1 << 20:
        x = wide(each[0][0])
        of = (pages[some], lengths[some], PAGE, 0.04)
        wanted, _ = definitions.decode_attention(q[some].double(), x, x[..., :LATENT], *of)
        wrong = error(ours(each[0])[some], wanted)
    us = graph_us([partial(ours, kv) for kv in each])
    size = rows * context * (WIDTH + 1 if float8 else 2 * WIDTH)
    what = f"{rows} rows × {context}, {heads} heads"
    add(report, f"latent {name_of(float8)}", what, us, size, 2, wrong, tile)


def time_prompt(report: Report, rows: int, context: int, latent: bool, float8: bool) -> None:
    """One prompt's rows behind a context."""
    pages, _, slots = tables(1, rows + context)
    heads, kv_heads, dim, value_dim = (16, 1, WIDTH, LATENT) if latent else (HEADS, KV_HEADS, DIM, DIM)
    q, out = normal(rows, heads, dim), torch.empty(rows, heads, value_dim, device=DEVICE, dtype=BF16)
    keys = cache(slots, kv_heads, dim, float8)
    values: Stored = cache(slots, kv_heads, dim, float8)
    if latent:
        values = (
            Fp8Vectors(keys.values[..., :LATENT], keys.exponents)
            if isinstance(keys, Fp8Vectors)
            else keys[..., :LATENT]
        )
    starts = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
    limits = torch.arange(context + 1, context + rows + 1, dtype=torch.int32, device=DEVICE)

    def ours() -> None:
        prefill_attention(q, keys, values, pages, starts, limits, PAGE, dim**-0.5, out)

    ours()
    some = torch.arange(0, rows, max(1, rows // 4), device=DEVICE)
    of = (pages.expand(len(some), -1), limits[some], PAGE, dim**-0.5)
    wanted, _ = definitions.decode_attention(q[some].double(), wide(keys), wide(values), *of)
    us = graph_us([ours] * 3)
    flops = 2 * heads * (dim + value_dim) * int(limits.sum())
    name = f"prompt {'latent ' if latent else ''}{name_of(float8)}"
    what = f"{rows} rows behind {context}"
    report.add(name, what, us, None, 0, 1, tflops=flops / us / 1e6, error=error(out[some], wanted))


def time_store(report: Report, rows: int, float8: bool) -> None:
    """Norms, rotary and the cache's write."""
    qkv, angle = normal(rows, (HEADS + 2 * KV_HEADS) * DIM), torch.rand(rows, DIM // 2, device=DEVICE).to(BF16)
    slots, weight = torch.randperm(rows + 9, device=DEVICE)[:rows].int(), normal(DIM)
    keys, values = (cache(rows + 9, KV_HEADS, DIM, float8) for _ in range(2))
    given = (qkv, HEADS, angle.cos(), angle.sin(), slots, keys, values)
    us = graph_us([partial(norm_rope_cache.norm_rope_cache, *given, q_weight=weight, k_weight=weight, eps=1e-6)] * 8)
    report.add(f"store {name_of(float8)}", f"{rows} rows", us, None, 0, 1)


def name_of(float8: bool) -> str:
    return "fp8" if float8 else "bf16"


def add(
    report: Report, name: str, what: str, us: float, size: int, kernels: int, wrong: float | None, tile: Any
) -> None:
    more: dict[str, Any] = {} if wrong is None else {"error": wrong}
    if tile is not None:
        more["tile"] = list(tile)
    report.add(name, what, us, None, size, kernels, share=size / report.bandwidth * 1e6 / us, **more)


def ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Prints FP8's time as a part of bfloat16's."""
    us = {(row["kernel"], row["case"]): row["us"] for row in rows if "tile" not in row}
    for (kernel, case), found in us.items():
        if kernel.endswith("fp8") and (kernel[:-3] + "bf16", case) in us:
            print(f"{kernel:18}{case:32}{found / us[kernel[:-3] + 'bf16', case]:6.2f} of bfloat16's time")


def tiles_of(dim: int) -> list[decode.DecodeTile]:
    """The default first."""
    default = decode.tile_of(dim, 8 if dim == DIM else 16, float8=True, latent=dim != DIM)
    others = itertools.product((32, 64), (2, 3, 4), (1, 2, 3, 4))
    return [default, *(default._replace(tokens=n, stages=s, programs=132 * p) for n, s, p in others)]


def try_tiles(report: Report) -> None:
    """Decode attention over FP8 by other tiles; those that do not fit are left out."""
    cases: list[tuple[Callable[..., None], tuple[Any, ...], int]] = [
        (time_decode, (64, 8192), DIM),
        (time_latent, (64, 8192, 16), LATENT),
    ]
    for run, case, dim in cases:
        for tile in tiles_of(dim):
            if decode.cut_of(dim).tokens % tile.tokens == 0:
                try:
                    run(report, *case, True, tile)
                except Exception as failed:
                    print(f"{tile}: {type(failed).__name__}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--heads", type=heads_of, nargs="+", default=[QWEN3], metavar="HEADS/KV_HEADSxDIM")
    parser.add_argument("--latent-heads", type=int, nargs="+", default=[16])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report = Report()
    if args.tiles:
        try_tiles(report)
    else:
        for rows, context, float8 in itertools.product(args.rows, args.contexts, (False, True)):
            for shape in args.heads if "decode" in args.parts else ():
                time_decode(report, rows, context, float8, shape=shape)
            for heads in args.latent_heads if "latent" in args.parts else ():
                time_latent(report, rows, context, heads, float8)
        for (rows, context), latent, float8 in itertools.product(
            ((2048, 0), (2048, 6144), (16384, 0)) if "prompts" in args.parts else (), (False, True), (False, True)
        ):
            time_prompt(report, rows, context, latent, float8)
        for rows, float8 in itertools.product((1, 64, 2048) if "writes" in args.parts else (), (False, True)):
            time_store(report, rows, float8)
        ratios(report.rows)
    report.write(args.out)


if __name__ == "__main__":
    main()
