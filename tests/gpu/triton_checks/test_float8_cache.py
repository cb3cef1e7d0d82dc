"""Caches in FP8: what kernels write is what torch makes of the same vectors, bit by bit; what they read, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpu import definitions
from gpu.triton_checks.test_decode_attention import PAGE, close, paged
from gpu.triton_checks.test_prefill_attention import SPANS, Step, attend
from gpu.triton_checks.worker import INTERPRETED
from weft.engine.attention.expansion import _places
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.kernels.triton import decode_attention as decode
from weft.engine.kernels.triton import norm_rope_cache as kernels
from weft.engine.kernels.triton.copy_pages import copy_pages
from weft.engine.kernels.triton.prefill_attention import PrefillTile
from weft.kernels.float8 import FLOAT8, Fp8Vectors, take, to_vectors

NAN = float("nan")
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Tolerance per dtype: in 16 bits that of the rounded output alone, as products have more bits. The interpreter cuts
bfloat16 off.
"""


def unfilled(slots: int, heads: int, dim: int, device: torch.device) -> Fp8Vectors:
    values = torch.full((slots, heads, dim), NAN, device=device).to(FLOAT8)
    return Fp8Vectors(values, torch.full((slots, heads), 99, dtype=torch.int8, device=device))


def widened(x: Fp8Vectors) -> Tensor:
    return torch.ldexp(x.values.double(), x.exponents[..., None])


def same(found: Fp8Vectors, vectors: Tensor, slots: Tensor) -> None:
    """AssertionError unless these are the rows' vectors in FP8, and the other slots as they were."""
    wanted, kept = to_vectors(vectors), slots >= 0
    at = slots[kept].long()
    assert torch.equal(found.values[at].float().nan_to_num(999.0), wanted.values[kept].float().nan_to_num(999.0))
    assert torch.equal(found.exponents[at], wanted.exponents[kept])
    others = torch.ones(len(found.values), dtype=torch.bool, device=slots.device)
    others[at] = False
    assert found.values[others].float().isnan().all() and (found.exponents[others] == 99).all()


def spread(rows: int, features: int, device: torch.device) -> Tensor:
    """Rows of all magnitudes: also such that need the largest or the smallest exponent; zeros, infinity, NaN."""
    x = torch.randn(rows, features) * torch.linspace(-34, 38, rows)[:, None].exp2()
    x[0], x[1, ::9], x[2, ::11] = 0, float("inf"), NAN
    return x.to(device)


@pytest.mark.parametrize(
    "rows, rotary_dim, dtype",
    [
        (9, 8, torch.float32),
        (9, 24, torch.float16),
        pytest.param(259, 16, torch.float32, marks=pytest.mark.nightly),
    ],
)
def test_keys_and_values(rows: int, rotary_dim: int, dtype: torch.dtype, seed: int, device: torch.device) -> None:
    """Keys and values equal those that the same kernel stores in the activations' dtype, then quantised."""
    heads, kv_heads, dim = 3, 2, 24
    qkv = spread(rows, (heads + 2 * kv_heads) * dim, device).to(dtype)
    slots = torch.randperm(rows + 4, device=device)[:rows].int()
    slots[3::5] = -1
    angle = torch.rand(rows, rotary_dim // 2, device=device) * 9
    weight = torch.rand(dim, device=device) + 0.5
    for more in ({}, dict(q_weight=weight, k_weight=weight, eps=1e-3)):
        plain = torch.zeros(2, rows + 4, kv_heads, dim, dtype=dtype, device=device)
        cache = [unfilled(rows + 4, kv_heads, dim, device) for _ in range(2)]
        given = (heads, angle.cos(), angle.sin(), slots)
        q = kernels.norm_rope_cache(qkv, *given, *plain, **more)
        found = kernels.norm_rope_cache(SplitKPartials(qkv.float()[None], None, dtype), *given, *cache, **more)
        assert torch.equal(found.nan_to_num(9.0), q.nan_to_num(9.0))
        for vectors, here in zip(plain, cache, strict=True):
            same(here, vectors[slots.clamp(min=0).long()], slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_latents(dtype: torch.dtype, device: torch.device) -> None:
    rows, heads, dim, latent, rotary_dim = 9, 5, 20, 24, 12
    q, kv = torch.randn(rows, heads, dim, device=device).to(dtype), spread(rows, latent + rotary_dim, device).to(dtype)
    slots = torch.randperm(rows + 4, device=device)[:rows].int()
    slots[4:6] = -1
    weight, angle = torch.rand(latent, device=device), torch.rand(rows, rotary_dim, device=device) * 9
    plain = torch.zeros(rows + 4, 1, latent + rotary_dim, dtype=dtype, device=device)
    cache = unfilled(rows + 4, 1, latent + rotary_dim, device)
    for to in (plain, cache):
        kernels.latent_rope_cache(q.clone(), kv, angle.cos(), angle.sin(), slots, to, weight, 1e-3)
    same(cache, plain[slots.clamp(min=0).long()], slots)


def in_float8(x: Tensor, packed: bool = False) -> Fp8Vectors:
    """A cache in FP8. packed: as ranks gather tokens, values and exponents of a slot side by side."""
    made = to_vectors(x)
    if not packed:
        return made
    heads, dim = x.shape[1:]
    rows = torch.cat((made.values.view(torch.uint8).flatten(1), made.exponents.view(torch.uint8)), 1)
    rows = torch.nn.functional.pad(rows, (0, 7))
    values, exponents, _ = rows.split([heads * dim, heads, 7], dim=1)
    return Fp8Vectors(values.view(FLOAT8).unflatten(1, (heads, dim)), exponents.view(torch.int8))


@pytest.mark.parametrize(
    "dtype, dim, window",
    [
        (torch.float32, 48, None),
        pytest.param(torch.float16, 144, 130, marks=pytest.mark.nightly),
        (torch.bfloat16, 48, 20),
    ],
    ids=str,
)
def test_decode_rows(dtype: torch.dtype, dim: int, window: int | None, device: torch.device) -> None:
    """Splits alone and several of an item; queries of any magnitude; values of very different ones."""
    torch.manual_seed(0)
    lengths = (0, 1, 16, 129, 300, 5)
    cache, pages, length = paged(lengths, 4, dim, torch.float32, device)
    cache[:, 2:] *= torch.randn(len(cache), 2, 1, device=device).mul(2).exp()
    keys, values = in_float8(cache[:, :2]), in_float8(cache[:, 2:])
    q = torch.randn(len(lengths), 6, dim, device=device) * torch.tensor([1, 1e-3, 1, 0.1, 3, 1e-30])[:, None, None].to(
        device
    )
    q = q.to(dtype)
    q[length == 0] = NAN  # a row that is only there to fill the graph
    lse = torch.full((len(lengths), 6), NAN, device=device)
    out = torch.full((len(lengths), 6, dim), NAN, dtype=dtype, device=device)
    more = dict(window=window, out=out, lse=lse)
    decode.decode_attention(q, keys, values, pages, length, PAGE, 0.3, **more)
    wide = (q.double(), widened(keys), widened(values))
    wanted, wanted_lse = definitions.decode_attention(*wide, pages, length, PAGE, 0.3, window)
    for row in range(1, len(lengths)):
        assert close(out[row], wanted[row], TOLERANCE[dtype]), row
    assert (out[0] == 0).all() and (lse[0] == float("-inf")).all()
    assert torch.allclose(lse[1:].double(), wanted_lse[1:], rtol=1e-5, atol=1e-5)
    alone = decode.decode_attention(q[3:4], keys, values, pages[3:4], length[3:4], PAGE, 0.3, window=window)
    assert torch.equal(alone, out[3:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latent_decode_rows(dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    latents, pages, length = paged((140, 0, 33), 1, 40, torch.float32, device)
    cache, q = in_float8(latents), torch.randn(3, 20, 40, device=device).to(dtype)
    found = decode.latent_decode_attention(q, cache, 32, pages, length, PAGE, 0.2)
    wide = widened(cache)
    wanted, _ = definitions.decode_attention(q.double(), wide, wide[..., :32], pages, length, PAGE, 0.2)
    assert close(found, wanted, TOLERANCE[dtype]) and (found[1] == 0).all()


@pytest.mark.parametrize(
    "dtype, window, packed",
    [(torch.float32, None, True), (torch.float32, 20, False), (torch.float16, 20, True), (torch.bfloat16, None, False)],
    ids=str,
)
def test_prompts(dtype: torch.dtype, window: int | None, packed: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    if INTERPRETED and dtype == torch.bfloat16:
        dtype = torch.float16  # the interpreter has no products in bfloat16
    step = Step(SPANS, 4, 24, torch.float32, device)
    cache = step.cache
    cache[:, 2:] *= torch.randn(len(cache), 2, 1, device=device).mul(2).exp()
    keys, values = in_float8(cache[:, :2], packed), in_float8(cache[:, 2:], packed)
    q = torch.randn(len(step.limits), 6, 24, device=device).to(dtype)
    out, lse = attend(step, q, keys, values, window, PrefillTile(64, 32, 4, 2))
    wide = (q.double(), widened(keys), widened(values))
    wanted, wanted_lse = definitions.decode_attention(*wide, step.pages[step.sequence], step.limits, PAGE, 0.3, window)
    several = step.several
    assert close(out[several], wanted[several], TOLERANCE[dtype])
    assert torch.allclose(lse[several].double(), wanted_lse[several], rtol=1e-5, atol=1e-5)
    assert (out[~several] == -7).all(), "a sequence of one row was touched"


def test_latent_prompts(device: torch.device) -> None:
    torch.manual_seed(0)
    step = Step(((5, 20), (1, 2), (4, 0)), 1, 24, torch.float32, device)
    cache, q = in_float8(step.cache), torch.randn(len(step.limits), 20, 24, device=device)
    values = Fp8Vectors(cache.values[..., :16], cache.exponents)
    out, _ = attend(step, q, cache, values, None, PrefillTile(16, 16, 4, 1))
    wide = widened(cache)
    of_rows = (step.pages[step.sequence], step.limits, PAGE, 0.3)
    wanted, _ = definitions.decode_attention(q.double(), wide, wide[..., :16], *of_rows)
    assert close(out[step.several], wanted[step.several], 2e-6)


@pytest.mark.parametrize("heads, dim, dtype", [(2, 24, torch.float32), (2, 160, torch.float16)], ids=str)
def test_copies_are_what_the_vectors_stand_for(heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    step = Step(SPANS, 2 * heads, dim, torch.float32, device)
    keys, values = in_float8(step.cache[:, :heads], True), in_float8(step.cache[:, heads:], True)
    lengths = torch.tensor([rows + context for rows, context in SPANS], dtype=torch.int32, device=device)
    chosen = torch.arange(len(SPANS), device=device) % 2 == 0
    bases, live = _places(chosen, lengths, 1024)
    latent = in_float8(step.cache[:, :1])
    for stored in ((keys, values), (latent, Fp8Vectors(latent.values[..., : dim - 8], latent.exponents))):
        kinds = 1 if stored[0] is latent else 2
        copied = torch.full((kinds, 1024, *stored[0].shape[1:]), NAN, dtype=dtype, device=device)
        copy_pages(*stored, step.pages, bases, lengths, live, PAGE, copied)
        for kind, wanted in zip(copied, stored, strict=False):
            for sequence in range(0, len(SPANS), 2):
                n, base = int(lengths[sequence]), int(bases[sequence])
                slots = step.pages[sequence].long()[:, None] * PAGE + torch.arange(PAGE, device=device)
                assert torch.equal(kind[base : base + n], take(wanted, slots.flatten()[:n], dtype))
                assert not kind[base + n : base + n + -n % 128].any()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    cache, pages, length = paged((3,), 2, 32, torch.float32, device)
    q, made = torch.randn(1, 4, 32, device=device), in_float8(cache)
    with pytest.raises(ValueError, match="both in FP8, or neither"):
        decode.decode_attention(q, made, cache, pages, length, PAGE, 1.0)
    with pytest.raises(ValueError, match="exponents are"):
        wrong = Fp8Vectors(made.values, made.exponents[:, :1])
        decode.decode_attention(q, wrong, wrong, pages, length, PAGE, 1.0)
    with pytest.raises(ValueError, match="e4m3"):
        wrong = Fp8Vectors(made.values.view(torch.float8_e5m2), made.exponents)
        decode.decode_attention(q, wrong, wrong, pages, length, PAGE, 1.0)
