"""Every Triton kernel, as its launcher cuts it for real shapes, compiles to machine code of its GPU: no GPU needed.

Tensors are on torch's meta device, and launches are turned into compilations.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton, which the extra gpu brings")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.cache import get_cache_manager  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from weft.engine.kernels import step_inputs  # noqa: E402
from weft.engine.kernels.mxfp4 import Mxfp4  # noqa: E402
from weft.engine.kernels.split_k import SplitKPartials  # noqa: E402
from weft.engine.kernels.triton import (  # noqa: E402
    copied_prompts,
    copy_pages,
    copy_rows,
    decode_attention,
    delta_chunks,
    dense,
    embed,
    fused_experts,
    gate_heads,
    latent_prompts,
    multiply_heads,
    norm_rope_cache,
    prefill_attention,
    route,
    sample,
    split_norm,
    write_staged,
)
from weft.engine.kernels.triton import decode_step as step  # noqa: E402
from weft.engine.kernels.triton import float8_linear as float8  # noqa: E402
from weft.engine.kernels.triton.experts_tiles import tile_rows_of  # noqa: E402
from weft.engine.models.layers.routing import Routing  # noqa: E402
from weft.kernels.float8 import FLOAT8, Fp8Vectors, Fp8Weight, Stored, unfilled  # noqa: E402
from weft.kernels.torch_reference import packed_shards  # noqa: E402
from weft.kernels.triton import launch, merge, overlap, rms_norm  # noqa: E402
from weft.kernels.triton import moe_permute as dispatch  # noqa: E402
from weft.kernels.triton.launch import Gpu  # noqa: E402

REGISTERS = 64 << 10
"""Registers of a block."""
GPUS = {
    90: launch.H200,
    80: Gpu(108, 163 << 10),
    89: Gpu(142, 99 << 10),
    100: Gpu(148, 227 << 10),
    120: Gpu(188, 99 << 10),
}
"""GPUs by architecture: H200, A100, L40S, B200, RTX PRO 6000."""
TOOLS = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin"
PTX = {
    "HMMA": r"\bmma\.sync\.\S+\.b?f16\.b?f16\b",
    "HGMMA": r"\bwgmma\.mma_async\.\S+\.b?f16\.b?f16\b",
    "QGMMA": r"\bwgmma\.mma_async\.\S+\.e4m3\.e4m3\b",
    "LDGSTS": r"\bcp\.async\.c[ag]\.shared\.global\b",
    "UTMALDG": r"\bcp\.async\.bulk\.tensor\.2d\.shared\S*\.global\b",
}
"""PTX that becomes an instruction, one of each: disassembling machine code takes long."""
ASKS = r"\b((ld|st|atom|red)(\.\w+)*\.global\S*|cp\.async\S*|prefetch\S*)"
"""PTX instructions on memory of all programs."""
MAY_COME_EARLY = r"ld(\.\w+)*\.global(\.\w+)*\.cg\."
"""PTX loads past L1."""
TOUCHES = r"\b(LDG(?!\S*\.STRONG\.GPU)|LD|ST|STG|LDGSTS|UBLKCP|UTMALDG|UTMASTG|ATOM|ATOMG|RED|REDG)\b.*"
"""Touches memory of all programs: but for loads past L1."""


@dataclass
class Compiled:
    """A kernel's machine code. stack: bytes of local memory, which is where registers are spilled to; overlaps: whether
    it is launched while the kernel before may still run.
    """

    name: str
    shared: int
    threads: int
    registers: int
    stack: int
    overlaps: bool
    ptx: str
    binary: bytes

    @cached_property
    def code(self) -> str:
        """The machine code taken apart, which takes half a second and so is kept next to what Triton has compiled."""
        cache = get_cache_manager(hashlib.sha256(triton.__version__.encode() + self.binary).hexdigest())
        if (kept := cache.get_file("code")) is None:
            code = _tool(self.binary, "nvdisasm", "-c", "-ndf")
            assert code, "nvdisasm prints nothing"
            kept = cache.put(code, "code", binary=False)
        return Path(kept).read_text()


class NoGpu:
    """Stands in for Triton's driver: the GPU that there would be."""

    def get_current_device(self) -> int:
        return self.arch  # a device each: Triton keeps what it has compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def __init__(self, arch: int):
        self.arch = arch

    @property
    def utils(self) -> NoGpu:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        has = GPUS[self.arch]
        return {"multiprocessor_count": has.multiprocessors, "max_shared_mem": has.shared_bytes}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


@pytest.fixture
def arch() -> int:
    """Return the architecture for which the kernels are compiled."""
    return 90


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, arch: int) -> Iterator[list[Compiled]]:
    """Yield the kernels that the test's launches compile."""
    found: list[Compiled] = []
    run = JITFunction.run
    for of_gpu in (launch.gpu, overlap.options):
        of_gpu.cache_clear()

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        assert all(0 < n < 1 << 16 for n in grid[1:]) and 0 < grid[0] < 1 << 31
        tensors = [isinstance(arg, torch.Tensor) for arg in args]
        assert tensors == sorted(tensors, reverse=True), "a launch's tensors come first (launch.Kernel)"
        assert None not in [arg for arg in args if not isinstance(arg, torch.Tensor)], "a launch compares its numbers"
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.metadata.shared > GPUS[arch].shared_bytes:  # as Triton has it where there is a GPU
            raise OutOfResources(kernel.metadata.shared, GPUS[arch].shared_bytes, "shared memory")
        found.append(_read(self.fn.__name__, kernel))
        return kernel

    def fitting(self: launch.Kernel, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self.run_fitting, grid=grid, warmup=False)

    monkeypatch.setattr(driver, "_active", NoGpu(arch))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(launch.Kernel, "__getitem__", fitting)
    yield found
    for of_gpu in (launch.gpu, overlap.options):
        of_gpu.cache_clear()


def _tool(binary: bytes, *command: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([TOOLS / command[0], *command[1:], file.name], capture_output=True, text=True).stdout


def _read(name: str, kernel: Any) -> Compiled:
    usage = _tool(kernel.asm["cubin"], "cuobjdump", "-res-usage")
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    overlaps, threads = kernel.metadata.launch_pdl, 32 * kernel.metadata.num_warps
    shared, asm = kernel.metadata.shared, kernel.asm
    return Compiled(name, shared, threads, registers, stack, overlaps, asm["ptx"], asm["cubin"])


def waits_first(code: str) -> bool:
    """Return whether a kernel waits for the one before (`overlap.begin`), which it must do before it touches memory,
    but for loads past L1.
    """
    before, wait, after = code.partition("ACQBULK")
    early = re.search(TOUCHES, before)
    assert not wait or not early, f"memory is touched before the wait: {early}"
    assert not wait or re.search(TOUCHES, after), "a kernel touches memory"
    return bool(wait)


def early(kernel: Compiled) -> list[str]:
    """Return the accesses to memory of all programs before a kernel waits for the one before, from its PTX."""
    before, wait, _ = kernel.ptx.partition("griddepcontrol.wait")
    found = [match[0] for match in re.finditer(ASKS, before)] if wait else []
    assert all(re.match(MAY_COME_EARLY, each) for each in found), f"{kernel.name}: memory is touched before the wait"
    return found


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


INT, FLOAT, LONG = torch.int32, torch.float32, torch.int64


def cache(slots: int, heads: int, dim: int, in_float8: bool = False) -> Stored:
    if not in_float8:
        return empty(slots, heads, dim)
    return Fp8Vectors(empty(slots, heads, dim, dtype=FLOAT8), empty(slots, heads, dtype=torch.int8))


def attend(rows: int, heads: int, kv_heads: int, dim: int, pages: int, in_float8: bool = False) -> None:
    keys, values = (cache(100_000, kv_heads, dim, in_float8) for _ in range(2))
    page_table, lengths, lse = empty(rows, pages, dtype=INT), empty(rows, dtype=INT), empty(rows, heads, dtype=FLOAT)
    tile = decode_attention.tile_of(dim, heads // kv_heads, float8=in_float8)
    splits = decode_attention.splits_of(lengths, pages * 16, None, dim, kv_heads, tile)
    decode_attention.decode_attention(
        empty(rows, heads, dim), keys, values, page_table, lengths, 16, 0.1, lse=lse, splits=splits
    )


def attend_to_latents(heads: int, in_float8: bool = False, width: int = 512, rest: int = 64) -> None:
    page_table, lengths = empty(16, 2048, dtype=INT), empty(16, dtype=INT)
    latents, q = cache(100_000, 1, width + rest, in_float8), empty(16, heads, width + rest)
    decode_attention.latent_decode_attention(q, latents, width, page_table, lengths, 16, 0.1)


def attend_prompts(heads: int, kv_heads: int, dim: int, value_dim: int, in_float8: bool = False) -> None:
    # Side by side: tensors of no memory of their own would all begin at 0, as latent keys and values do.
    keys, values = empty(2, 100_000, kv_heads, dim, dtype=FLOAT8 if in_float8 else torch.bfloat16)
    values = values if dim == value_dim else keys[..., :value_dim]
    if in_float8:
        exponents = empty(100_000, kv_heads, dtype=torch.int8)
        keys, values = Fp8Vectors(keys, exponents), Fp8Vectors(values, exponents)
    out, limits = empty(2048, heads, value_dim), empty(2048, dtype=INT)
    page_table, starts = empty(16, 2048, dtype=INT), empty(17, dtype=INT)
    prefill_attention.prefill_attention(
        empty(2048, heads, dim), keys, values, page_table, starts, limits, 16, 0.1, out, window=None
    )


def expand_prompts(heads: int) -> None:
    """The absorbed part of such a step, too."""
    rows, page_table, starts, limits = 2048, empty(16, 2048, dtype=INT), empty(17, dtype=INT), empty(2048, dtype=INT)
    latents, up, bases = empty(100_000, 1, 576), empty(heads, 256, 512), empty(16, dtype=INT)
    expanded, whole, plain = empty(65536, heads, 256), empty(rows, heads, 576), empty(rows, heads, 192)
    latent_prompts.expand_latents(latents, page_table, bases, bases, empty(1, dtype=INT), 16, up, expanded)
    where = page_table, starts, limits
    prefill_attention.expanded_prefill_attention(
        plain[..., :128],
        whole[..., 512:],
        expanded,
        latents[..., 512:],
        *where,
        bases,
        16,
        0.1,
        empty(rows, heads, 128),
    )
    out = empty(rows, heads, 512)
    prefill_attention.prefill_attention(whole, latents, latents[..., :512], *where, 16, 0.1, out, bases=bases)
    wanted = empty(rows, dtype=torch.bool)
    latent_prompts.project_heads(plain[..., :128], up[:, :128], wanted, whole[..., :512])
    latent_prompts.project_heads(out, up[:, 128:].transpose(1, 2), wanted, empty(rows, heads, 128))


def attend_to_copies(heads: int, kv_heads: int, dim: int) -> None:
    """Prompts of a step that are copied to a row, and those that are not."""
    rows, page_table, starts, limits = 2048, empty(16, 2048, dtype=INT), empty(17, dtype=INT), empty(2048, dtype=INT)
    (keys, values), bases, q = empty(2, 100_000, kv_heads, dim), empty(16, dtype=INT), empty(rows, heads, dim)
    copied, out = empty(2, 65536, kv_heads, dim), empty(rows, heads, dim)
    copy_pages.copy_pages(keys, values, page_table, bases, bases, empty(1, dtype=INT), 16, copied)
    copied_prompts.copied_prefill_attention(q, copied, starts, limits, bases, 0.1, out)
    prefill_attention.prefill_attention(q, keys, values, page_table, starts, limits, 16, 0.1, out, bases=bases)


def reorder(width: int, dtype: torch.dtype) -> None:
    """Gathered tokens, in the order of their sequences."""
    rows, index = empty(65536, width, dtype=dtype), empty(65536, dtype=INT)
    copy_rows.copy_rows(rows, index, empty(1, dtype=INT), empty(65536, width, dtype=dtype))


def copy_float8(kv_heads: int, dim: int, kinds: int) -> None:
    """Copy vectors in FP8 as dequantised ones."""
    stored, page_table, bases = cache(100_000, kv_heads, dim, True), empty(16, 2048, dtype=INT), empty(16, dtype=INT)
    copied = empty(kinds, 65536, kv_heads, dim)
    copy_pages.copy_pages(stored, stored, page_table, bases, bases, empty(1, dtype=INT), 16, copied)


def parts_of(rows: int, outputs: int, width: int, bias: torch.Tensor | None = None) -> torch.Tensor | SplitKPartials:
    """A product that comes in parts, where it does."""
    x, weight = empty(rows, width), empty(outputs, width)
    tile = dense.tile_for(x, weight, added_next=True)
    return dense.linear_partials(x, weight, tile, bias) if tile else empty(rows, outputs)


def route_rows(rows: int) -> None:
    live, tile_rows = empty(1, dtype=INT), tile_rows_of(rows, 8 * rows, 128)
    logits = parts_of(rows, 128, 2048, empty(128))
    route.route(logits, Routing(8, renormalise=True), live, tile_rows, 64, 64)


def routed(rows: int, held: int, tile_rows: int) -> route.Routing:
    """Return the result of `route.route` for `rows` rows, of which a single one is not sorted."""
    tiles = (8 * rows + held * (tile_rows - 1)) // tile_rows
    order = tuple(empty(n, dtype=INT) for n in (tiles * tile_rows, tiles, 1)) if rows > 1 else (None, None)
    return route.Routing(empty(rows, 8, dtype=FLOAT), empty(rows, 8, dtype=INT), tile_rows, *order)


def mix_experts(
    rows: int,
    held: int = 64,
    inner: int = 768,
    width: int = 2048,
    biased: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    def new(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=dtype or torch.bfloat16)

    routing = routed(rows, held, tile_rows_of(rows, 8 * rows, held))
    gate_up, down = new(held, 2 * inner, width), new(held, width, inner)
    more = dict(limit=7.0, alpha=1.702, gate_up_bias=new(held, 2 * inner), down_bias=new(held, width))
    fused_experts.experts(new(rows, width), routing, gate_up, down, new(rows, width), **more if biased else {})


def route_in_groups(rows: int) -> None:
    rule = Routing(8, "sigmoid", 8, 4, 2, bias=True, renormalise=True, scale=2.5)
    route.choose(empty(rows, 256, dtype=FLOAT), rule, empty(1, dtype=INT), bias=empty(256, dtype=FLOAT))


def gate(rows: int, heads: int, dim: int) -> None:
    lse, sinks = empty(rows, heads, dtype=FLOAT), empty(heads)
    for features in (heads, heads * dim):
        gate_heads.gate_heads(empty(rows, heads, dim), empty(rows, features), lse, sinks)


def in_float8(*shape: int, unit: tuple[int, int] = (128, 128)) -> Fp8Weight:
    blocks = (*shape[:-2], -(-shape[-2] // unit[0]), -(-shape[-1] // unit[1]))
    return Fp8Weight(empty(*shape, dtype=FLOAT8), empty(*blocks, dtype=FLOAT), unit)


def mix_float8_experts(rows: int, held: int, inner: int, width: int, unit: tuple[int, int] = (128, 128)) -> None:
    routing = routed(rows, held, tile_rows_of(rows, 8 * rows, held, float8=True))
    gate_up, down = in_float8(held, 2 * inner, width, unit=unit), in_float8(held, width, inner, unit=unit)
    fused_experts.experts(empty(rows, width), routing, gate_up, down, empty(rows, width))


def mix_packed_experts(rows: int, held: int, inner: int, width: int) -> None:
    def packed(outputs: int, inputs: int) -> Mxfp4:
        return Mxfp4(*(empty(held, outputs, inputs // each, dtype=torch.uint8) for each in (2, 32)))

    routing = routed(rows, held, tile_rows_of(rows, 4 * rows, held))
    more = dict(limit=7.0, alpha=1.702, gate_up_bias=empty(held, 2 * inner), down_bias=empty(held, width))
    x, out = empty(rows, width), empty(rows, width)
    fused_experts.experts(x, routing, packed(2 * inner, width), packed(width, inner), out, **more)


def multiply_float8(rows: int, outputs: int, width: int, unit: tuple[int, int] = (128, 128)) -> None:
    float8.linear(empty(rows, width), in_float8(outputs, width, unit=unit), empty(rows, outputs))


def multiply(rows: int, outputs: int, width: int) -> None:
    x, weight = empty(rows, width), empty(outputs, width)
    if tile := dense.tile_for(x, weight):  # else a library is used
        dense.linear(x, weight, tile, None, empty(outputs))


def multiply_by_heads(rows: int, heads: int) -> None:
    """Both products of latent attention."""
    up, whole, seen = empty(heads, 256, 512), empty(rows, heads, 576), empty(rows, heads, 128)
    multiply_heads.multiply_heads(empty(rows, heads, 192)[..., :128], up[:, :128], whole[..., :512])
    multiply_heads.multiply_heads(whole[..., :512], up[:, 128:].transpose(1, 2), seen)


def norm_and_rotate(rows: int, in_float8: bool = False) -> None:
    kept, angle = cache(1000, 2, 128, in_float8), empty(rows, 64)
    slots, weight = empty(rows, dtype=INT), empty(128)
    qkv = parts_of(rows, 20 * 128, 2048)
    norm_rope_cache.norm_rope_cache(
        qkv, 16, angle, angle, slots, kept, kept, q_weight=weight, k_weight=weight, eps=1e-6
    )


def norm_over_ranks(rows: int, ranks: int) -> None:
    qkv, sizes = empty(rows, 8192 // ranks), (6144 // ranks, 1024 // ranks)
    split_norm.sums_of_squares(qkv, sizes)
    squares = empty(ranks, rows, 2, dtype=FLOAT)
    split_norm.norm_by_squares(qkv, squares, empty(sum(sizes)), sizes, (6144, 1024), (ranks, min(ranks, 8)), 1e-6)


def norm_latents(rows: int, heads: int, in_float8: bool = False) -> None:
    latents = cache(1000, 1, 576, in_float8)
    angle, slots, weight = empty(rows, 64), empty(rows, dtype=LONG), empty(512)
    norm_rope_cache.latent_rope_cache(
        empty(rows, heads, 192), empty(rows, 576), angle, angle, slots, latents, weight, 1e-6,
        interleaved=True,
    )  # fmt: skip


def draw(rows: int) -> None:
    row, table = empty(256, dtype=FLOAT), empty(rows, dtype=INT)
    whole, live = empty(256, dtype=LONG), empty(1, dtype=INT)
    cut = dict(min_p=row, top_k=empty(256, dtype=INT), top_p=row)
    sample.candidates(empty(rows, 151_936), row, whole, table, live, table=table, **cut)
    sample.candidates(empty(rows, 151_936, dtype=FLOAT), row, whole, whole, live, **cut)
    share = sample.candidates(empty(rows, 75_967), row, whole, table, live, first=75_969, table=table)
    sample.best(share, live)


def ends(capacity: int) -> None:
    rows, live, state = empty(capacity, dtype=INT), empty(1, dtype=INT), empty(256, dtype=INT)
    pieces = step_inputs.table_pieces([2560, 2, 2560], [False, True, False], torch.device("meta"))
    step.step_in(rows, rows, rows, live, state, state, empty(256, 5122, dtype=INT), live, pieces, 16)
    reported = empty(8, 256, dtype=INT)
    write_staged.write_staged(live, empty(256, dtype=LONG), rows, state)
    for ranks, shares in ((1, 75), (2, 1)):
        sampled = empty(ranks, capacity, shares, 2, dtype=FLOAT)
        step.step_out(rows, live, live, sampled, rows, state, state, state, live, reported)


def begin_layers(rows: int) -> None:
    tokens = empty(rows, dtype=LONG)
    for first in (None, 75_968):
        embed.embed(tokens, empty(75_968, 2048), first)
    for interleaved in (False, True):
        embed.cos_sin(tokens, empty(64, dtype=FLOAT), 1.0, torch.bfloat16, interleaved)


def delta(rows: int, heads: int, key_heads: int, sequences: int | None = None) -> None:
    """One row of each sequence; or `rows` rows of `sequences` sequences."""
    features, slots = (2 * key_heads + heads) * 128, empty(sequences or rows, dtype=LONG)
    product, vector = empty(rows, features + heads * 130), empty(heads, dtype=FLOAT)
    states, tails = empty(256, heads, 128, 128, dtype=FLOAT), empty(256, features, 3, dtype=FLOAT)
    of_layer = (empty(features, 1, 4), vector, vector, empty(128), 1e-6)
    starts = None if sequences is None else empty(sequences + 1, dtype=INT)
    delta_chunks.gated_delta(product, starts, slots, slots, *of_layer, states, tails, empty(rows, heads * 128))


def merge_shards(ranks: int, heads: int, dim: int) -> None:
    """Launch the kernels around the collectives of a merge."""
    out, lse = empty(32, heads, dim), empty(32, heads, dtype=torch.float32)
    packed = empty(ranks, packed_shards(ranks, 32, heads, dim, out.dtype)[1])
    merge.pack_shard(out, lse, packed)
    merge.merge_packed(packed, 32, heads, dim)
    merge.scale_shard(out, empty(ranks, 32, heads, dtype=torch.float32), 1, empty(ranks, 32 * heads // ranks * dim))


def dispatch_rows(rows: int, ranks: int, width: int) -> None:
    weight, expert = empty(rows, 8, dtype=FLOAT), empty(rows, 8, dtype=INT)
    place, counts = dispatch.places(expert, ranks, 16 * ranks, 1)
    packed = empty(ranks * rows, width + 32)
    dispatch.pack(empty(rows, width), weight, expert, place, counts, packed)
    dispatch.lists(packed, width, 8, counts)
    dispatch.add(empty(ranks * rows, width), place, counts)
    route.choose(empty(rows, 128), Routing(8, renormalise=True), empty(1, dtype=INT))


def norm_and_quantise(rows: int, width: int) -> None:
    x = empty(rows, width)
    rms_norm.rms_norm(x, empty(width, dtype=FLOAT), 1e-6, quantised=unfilled(x, 128))


CASES: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "attention": (lambda: attend(64, 16, 2, 128, 2048), ("HMMA", "LDGSTS")),
    "attention, short table": (lambda: attend(1, 32, 4, 128, 32), ("HMMA", "LDGSTS")),
    "attention, wide heads": (lambda: attend(16, 16, 2, 256, 2048), ("HMMA", "LDGSTS")),
    "latent attention": (lambda: attend_to_latents(128), ("HGMMA", "LDGSTS")),
    "latent attention, few heads": (lambda: attend_to_latents(16), ("HMMA",)),
    "attention, FP8 cache": (lambda: attend(64, 16, 2, 128, 2048, True), ("HMMA", "LDGSTS")),
    "attention, wide heads, FP8 cache": (lambda: attend(16, 16, 1, 256, 2048, True), ("HMMA", "LDGSTS")),
    "latent attention, FP8 cache": (lambda: attend_to_latents(128, True), ("HMMA", "LDGSTS")),
    "short latents, FP8 cache": (lambda: attend_to_latents(20, True, 16, 8), ("HMMA",)),
    "prompts, FP8 cache": (lambda: attend_prompts(16, 2, 128, 128, True), ("HGMMA", "LDGSTS")),
    "prompts, latents, FP8 cache": (lambda: attend_prompts(128, 1, 576, 512, True), ()),
    "copies, FP8 cache": (lambda: copy_float8(4, 128, 2), ()),
    "copies, latents, FP8 cache": (lambda: copy_float8(1, 576, 1), ()),
    "norm, rotary, FP8 cache": (lambda: norm_and_rotate(64, True), ()),
    "latents, rotary, FP8 cache": (lambda: norm_latents(64, 128, True), ()),
    "prompts": (lambda: attend_prompts(16, 2, 128, 128), ("HGMMA", "LDGSTS")),
    "prompts, copied": (lambda: attend_to_copies(32, 4, 128), ("HGMMA", "UTMALDG")),
    "prompts, wide heads": (lambda: attend_prompts(16, 2, 256, 256), ("HGMMA", "LDGSTS")),
    "prompts, latents": (lambda: attend_prompts(128, 1, 576, 512), ("HGMMA",)),
    "prompts, expanded latents": (lambda: expand_prompts(16), ("HGMMA", "LDGSTS")),
    "experts, 1 row": (lambda: mix_experts(1), ("HMMA", "LDGSTS")),
    "experts in float32": (lambda: mix_experts(1, 128, 384, dtype=FLOAT), ("LDGSTS",)),
    "experts in float32, 256 rows": (lambda: mix_experts(256, 8, 384, 512, dtype=FLOAT), ("LDGSTS",)),
    "experts in float32, 4096 rows": (lambda: mix_experts(4096, 8, 384, 512, dtype=FLOAT), ("LDGSTS",)),
    "experts, 64 rows": (lambda: mix_experts(64), ("HMMA", "LDGSTS")),
    "experts, 256 rows": (lambda: mix_experts(256), ("HGMMA", "LDGSTS")),
    "experts, 128 rows": (lambda: mix_experts(128), ("HMMA", "LDGSTS")),
    "experts, 4096 rows": (lambda: mix_experts(4096), ("HGMMA", "LDGSTS", "UTMALDG")),
    "experts with biases": (lambda: mix_experts(4096, 32, 720, 2880, True), ("HGMMA", "LDGSTS")),
    "MXFP4 experts, 1 row": (lambda: mix_packed_experts(1, 128, 1440, 2880), ("HMMA", "LDGSTS")),
    "MXFP4 experts, 64 rows": (lambda: mix_packed_experts(64, 128, 1440, 2880), ("HMMA", "LDGSTS")),
    "MXFP4 experts, 256 rows": (lambda: mix_packed_experts(256, 32, 736, 2880), ("HGMMA", "LDGSTS")),
    "MXFP4 experts, 4096 rows": (lambda: mix_packed_experts(4096, 128, 736, 2880), ("HGMMA", "LDGSTS")),
    "FP8 experts, 1 row": (lambda: mix_float8_experts(1, 64, 768, 2048), ("QGMMA", "LDGSTS")),
    "FP8 experts, 128 rows": (lambda: mix_float8_experts(128, 32, 2048, 7168), ("HMMA", "LDGSTS")),
    "FP8 experts, 256 rows": (lambda: mix_float8_experts(256, 32, 2048, 7168), ("QGMMA", "LDGSTS")),
    "FP8 experts, 4096 rows": (lambda: mix_float8_experts(4096, 64, 768, 2048), ("QGMMA", "LDGSTS")),
    "FP8 experts, cut blocks": (lambda: mix_float8_experts(4096, 64, 96, 2048, (32, 32)), ("QGMMA", "LDGSTS")),
    "FP8 product, 1 row": (lambda: multiply_float8(1, 2560, 2048), ("QGMMA", "LDGSTS")),
    "FP8 product, 64 rows": (lambda: multiply_float8(64, 576, 7168), ("QGMMA", "LDGSTS")),
    "FP8 product, 4096 rows": (lambda: multiply_float8(4096, 7168, 2048), ("QGMMA", "LDGSTS")),
    "FP8 product, cut blocks": (lambda: multiply_float8(64, 320, 1408, (64, 64)), ("QGMMA", "LDGSTS")),
    "product, 1 row": (lambda: multiply(1, 5120, 2048), ("HGMMA",)),
    "product of whole depth": (lambda: multiply(16, 2880, 512), ("HMMA",)),
    "product, 64 rows, deep": (lambda: multiply(64, 1024, 4096), ("HGMMA",)),
    "parts of a deep product": (lambda: parts_of(64, 256, 7168), ("HGMMA",)),
    "products of heads, 1 row": (lambda: multiply_by_heads(1, 16), ("HMMA",)),
    "products of heads, 64 rows": (lambda: multiply_by_heads(64, 32), ("HGMMA",)),
    "norm, rotary, cache": (lambda: norm_and_rotate(64), ()),
    "norms over all heads, one rank": (lambda: norm_over_ranks(64, 1), ()),
    "norms over all heads, four ranks": (lambda: norm_over_ranks(64, 4), ()),
    "norm, rotary, cache, many rows": (lambda: norm_and_rotate(4096), ()),
    "latents, rotary, cache": (lambda: norm_latents(64, 128), ()),
    "routes, 1 row": (lambda: route_rows(1), ("HGMMA",)),
    "routes, 64 rows": (lambda: route_rows(64), ("HGMMA",)),
    "routes, 4096 rows": (lambda: route_rows(4096), ()),
    "routes, 8192 rows": (lambda: route_rows(8192), ()),
    "routes in groups": (lambda: route_in_groups(64), ()),
    "rms norm": (lambda: rms_norm.rms_norm(empty(64, 7168), empty(7168), 1e-6, empty(64, 7168)), ()),
    "rms norm, quantised": (lambda: norm_and_quantise(64, 7168), ()),
    "gated": (lambda: rms_norm.gated(empty(64, 2048), 7.0, None, (empty(64, 2048), empty(1, 2048))), ()),
    "gates and sinks of heads": (lambda: gate(64, 64, 64), ()),
    "sample": (lambda: draw(64), ()),
    "gated delta rule": (lambda: delta(64, 32, 8), ()),
    "gated delta rule, prompts": (lambda: delta(4096, 32, 16, 8), ("HGMMA", "LDGSTS")),
    "embedding and angles": (lambda: begin_layers(64), ()),
    "merge": (lambda: merge_shards(8, 128, 512), ()),
    "latents in another order": (lambda: reorder(576, torch.bfloat16), ()),
    "bytes in another order": (lambda: reorder(144, torch.uint8), ()),
    "dispatch": (lambda: dispatch_rows(64, 8, 7168), ()),
    "dispatch, many rows": (lambda: dispatch_rows(4096, 2, 2048), ()),
    "ends of a step": (lambda: ends(64), ()),
}


@pytest.fixture(scope="module")
def taken_apart() -> set[tuple[str, bool]]:
    """Kernels whose machine code was looked at: by name, and whether they ask for anything before they wait."""
    return set()


BY_DAY_IN_FLOAT8 = ("attention, FP8 cache", "short latents, FP8 cache", "norm, rotary, FP8 cache")
AT_NIGHT = {name for name in CASES if "FP8 cache" in name and name not in BY_DAY_IN_FLOAT8} | {
    *("attention, wide heads", "latent attention, few heads", "prompts, wide heads"),
    *("experts in float32, 256 rows", "experts in float32, 4096 rows", "experts, 64 rows", "experts, 128 rows"),
    *("experts with biases", "FP8 experts, 128 rows", "FP8 experts, 256 rows", "FP8 experts, cut blocks"),
    *("FP8 product, 1 row", "FP8 product, cut blocks", "norm, rotary, cache, many rows", "routes, 8192 rows"),
    *("MXFP4 experts, 64 rows", "MXFP4 experts, 256 rows"),
    *("dispatch, many rows", "products of heads, 1 row", "norms over all heads, one rank"),
}
"""Most forms of caches in FP8, and further sizes of kernels that other cases compile by day."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.nightly] * (name in AT_NIGHT), id=name) for name, case in CASES.items()],
)
def test_kernels_compile_for_hopper(
    case: tuple[Callable[[], None], tuple[str, ...]], compiled: list[Compiled], taken_apart: set[tuple[str, bool]]
) -> None:
    """One of the forms of a kernel is disassembled; the PTX of all shows the accesses before the wait."""
    launch, instructions = case
    launch()
    for kernel in compiled:
        assert kernel.registers * kernel.threads <= REGISTERS, f"{kernel.name}: {kernel.registers} registers a thread"
        assert kernel.stack == 0, f"{kernel.name} spills {kernel.stack} bytes of registers"
        waits, form = "griddepcontrol.wait" in kernel.ptx, (kernel.name, bool(early(kernel)))
        assert kernel.overlaps == waits, f"{kernel.name}: begin and options go together"
        if waits and form not in taken_apart:
            assert waits_first(kernel.code)
            taken_apart.add(form)
    for instruction in instructions:
        assert any(re.search(PTX[instruction], kernel.ptx) for kernel in compiled), f"no {instruction}"


OTHER_GPUS = [gpu for gpu in GPUS if gpu != 90]
BY_DAY = {(89, "experts, 1 row"), (120, "product, 1 row"), (80, "attention")}
"""The first two have tiles that would not fit with as many stages, or as much of the depth, as on an H200."""


@pytest.mark.parametrize(
    ("arch", "case"),
    [
        pytest.param(gpu, case, marks=[pytest.mark.nightly] * ((gpu, name) not in BY_DAY), id=f"sm_{gpu}, {name}")
        for gpu in OTHER_GPUS
        for name, (case, _) in CASES.items()
        if gpu >= 89 or ("FP8" not in name and "quantised" not in name)  # older ones have no FP8
    ],
)
def test_kernels_compile_for_other_gpus(case: Callable[[], None], compiled: list[Compiled], arch: int) -> None:
    """Tiles fit the GPU: more shared memory than it has would be OutOfResources."""
    case()
    assert all(kernel.registers * kernel.threads <= REGISTERS for kernel in compiled)
    assert all(re.search(rf"\.target sm_{arch}a?$", kernel.ptx, re.M) for kernel in compiled)
    assert arch >= 90 or not any(kernel.overlaps for kernel in compiled)


@pytest.mark.parametrize("launch", [lambda: attend(64, 32, 4, 128, 2048, True), lambda: attend_to_latents(16, True)])
def test_caches_in_float8_are_read_in_wide_loads(launch: Callable[[], None], compiled: list[Compiled]) -> None:
    """Loads are of 16 bytes to shared memory, and from there transpose."""
    launch()
    ptx = compiled[-2].ptx  # the last one merges the splits
    assert set(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)) == {"0x10"}
    assert "ldmatrix" in ptx and not re.search(r"\bld\.shared\.\w*8\b", ptx)


@triton.jit
def _read_early(weight, expert, out, CACHE: tl.constexpr):
    mine = tl.load(expert + tl.program_id(0), cache_modifier=CACHE)
    overlap.begin()
    tl.store(out + tl.program_id(0), tl.load(weight + mine))


def test_only_loads_past_l1_may_come_before_the_wait(compiled: list[Compiled]) -> None:
    for cache in (".cg", ""):
        _read_early[(8,)](empty(1000), empty(8, dtype=INT), empty(8), CACHE=cache, **overlap.options())
    past_l1, through_l1 = compiled
    assert waits_first(past_l1.code) and len(early(past_l1)) == 1
    with pytest.raises(AssertionError, match="before the wait"):
        early(through_l1)
    with pytest.raises(AssertionError, match=r"before the wait: .*LDG"):
        waits_first(through_l1.code)


@pytest.mark.parametrize("rows, outputs, width, held", [(16, 2560, 2048, 64 * 512), (64, 2048, 704, 64 * 256)])
def test_products_of_few_rows_read_their_weights_before_the_wait(
    rows: int, outputs: int, width: int, held: int, compiled: list[Compiled]
) -> None:
    multiply(rows, outputs, width)
    kernel = compiled[0]
    before, _, after = kernel.code.partition("ACQBULK")
    early = re.findall(r"\bLDG\.E\.128\.STRONG\.GPU\b", before)
    assert len(early) * 16 * kernel.threads == 2 * held and not re.search(r"\bLDG\S*\.STRONG\.GPU\b", after)


def test_weights_of_whole_depth_are_in_tensor_cores_registers_before_the_wait(compiled: list[Compiled]) -> None:
    for rows in (1, 16):
        multiply(rows, 2048, 2048)
        before, _, after = compiled[-1].code.partition("ACQBULK")
        assert len(re.findall(r"\bLDSM\S*\.M88\.4\b", before)) * 512 * 8 == 2 * 16 * 2048
        assert not re.search(r"\bHMMA\b", before) and not re.search(r"\bLDG\S*\.STRONG\.GPU\b", after)
