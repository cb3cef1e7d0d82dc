"""Norms, rotary and the cache's write against their twins."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from gpu import definitions
from weft.engine.attention.projections import LatentSplit
from weft.engine.kernels.model_reference import gate_heads as gate_heads_of_torch
from weft.engine.kernels.model_reference import gated
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.kernels.triton import gate_heads, split_norm
from weft.engine.kernels.triton import norm_rope_cache as kernels
from weft.engine.models.layers.rotary import RotaryTable
from weft.kernels import float8
from weft.kernels.torch_reference import rms_norm as rms_norm_of_torch
from weft.kernels.triton import rms_norm
from weft.planner.shards import replicated

NAN = float("nan")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 24], ids="rotary_dim{}".format)
def test_norm_rope_cache(interleaved: bool, norm: bool, rotary_dim: int, seed: int, device: torch.device) -> None:
    rows, heads, kv_heads, dim = 5, 3, 2, 24
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=device) * 3
    slots = torch.tensor([6, -1, 0, 3, -1], dtype=torch.int32, device=device)
    qkv[-1] = NAN  # a row that is only there to fill the graph
    angle = torch.rand(rows, rotary_dim // 2, device=device) * 9
    weights = {"q_weight": torch.randn(dim, device=device), "k_weight": torch.randn(dim, device=device), "eps": 1e-3}
    options = {**(weights if norm else {}), "interleaved": interleaved}
    cache = torch.full((2, 8, kv_heads, dim), NAN, device=device)
    wanted_cache = cache.double()
    found = kernels.norm_rope_cache(qkv, heads, angle.cos(), angle.sin(), slots, cache[0], cache[1], **options)
    wanted = definitions.norm_rope_cache(
        qkv.double(), heads, angle.cos().double(), angle.sin().double(), slots, *wanted_cache, **options
    )
    assert torch.allclose(found[:-1].double(), wanted[:-1], rtol=1e-5, atol=1e-5)
    assert torch.allclose(cache.double(), wanted_cache, rtol=1e-5, atol=1e-5, equal_nan=True)
    untouched = [slot for slot in range(8) if slot not in slots.tolist()]
    assert cache[:, untouched].isnan().all() and not cache[:, [6, 0, 3]].isnan().any()


@pytest.mark.parametrize("rotary_dim, biased", [(8, True), (24, False)])
def test_a_product_that_comes_as_partials(rotary_dim: int, biased: bool, device: torch.device) -> None:
    """Added in their order, then to the bias, and rounded before anything else is done."""
    torch.manual_seed(rotary_dim)
    rows, heads, kv_heads, dim, dtype = 3, 3, 2, 24, torch.float16
    values = torch.randn(4, rows, (heads + 2 * kv_heads) * dim, device=device)
    bias = torch.randn(values.shape[2], device=device).to(dtype) * 30 if biased else None
    product = SplitKPartials(values, bias, dtype)
    slots, weight = torch.tensor([2, -1, 0], device=device).int(), torch.randn(dim, device=device)
    angle = torch.rand(rows, rotary_dim // 2, device=device) * 9
    given = (heads, angle.cos(), angle.sin(), slots)
    caches = torch.full((2, 2, 4, kv_heads, dim), NAN, device=device, dtype=dtype)
    more = dict(q_weight=weight, k_weight=weight, eps=1e-3) if biased else {}
    found = [
        kernels.norm_rope_cache(x, *given, *c, **more) for x, c in zip((product, product.total()), caches, strict=True)
    ]
    assert found[0].dtype == dtype and torch.equal(found[0], found[1])
    assert torch.equal(caches[0].nan_to_num(7.0), caches[1].nan_to_num(7.0)) and caches[0, :, 2].isfinite().all()


@pytest.mark.parametrize("rows", [259, 1030])
def test_many_rows(rows: int, device: torch.device) -> None:
    """More than a program's rows, and no multiple of them."""
    qkv, angle = torch.randn(rows, 3 * 8, device=device), torch.rand(rows, 4, device=device)
    slots = torch.randperm(rows + 4, device=device)[:rows]
    slots[::5] = -1
    cache = torch.full((2, rows + 4, 1, 8), NAN, device=device)
    wanted_cache = cache.double()
    found = kernels.norm_rope_cache(qkv, 1, angle.cos(), angle.sin(), slots, cache[0], cache[1])
    wide = (x.double() for x in (angle.cos(), angle.sin()))
    wanted = definitions.norm_rope_cache(qkv.double(), 1, *wide, slots, *wanted_cache)
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.allclose(cache.double(), wanted_cache, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    qkv, cache, slots = torch.randn(2, 40, device=device), torch.zeros(2, 4, 1, 8, device=device), torch.arange(2)
    angle = torch.rand(2, 4, device=device)
    with pytest.raises(ValueError, match="for 2 heads"):
        kernels.norm_rope_cache(qkv, 2, angle, angle, slots, *cache)
    with pytest.raises(ValueError, match="or neither"):
        kernels.norm_rope_cache(qkv, 3, angle, angle, slots, *cache, q_weight=angle[0])
    with pytest.raises(ValueError, match="a row for each"):
        kernels.norm_rope_cache(qkv, 3, angle[:1], angle[:1], slots, *cache)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", [3, 33])
def test_latent_rope_cache(interleaved: bool, heads: int, seed: int, device: torch.device) -> None:
    rows, dim, latent, rotary_dim = 5, 20, 24, 12
    q, kv = torch.randn(rows, heads, dim, device=device), torch.randn(rows, latent + rotary_dim, device=device) * 3
    slots = torch.tensor([6, -1, 0, 3, -1], device=device)
    q[-1], kv[-1] = NAN, NAN  # a row that is only there to fill the graph
    weight, cache = torch.randn(latent, device=device), torch.full((8, 1, latent + rotary_dim), NAN, device=device)
    angle = torch.rand(rows, rotary_dim // 2, device=device) * 9
    angle = angle.repeat_interleave(2, 1) if interleaved else torch.cat((angle, angle), 1)
    table = (angle.cos(), angle.sin())
    wanted, wanted_cache = q.double(), cache.double()
    wide = (t.double() for t in table)
    definitions.latent_rope_cache(
        wanted, kv.double(), *wide, slots, wanted_cache, weight, 1e-3, interleaved=interleaved
    )
    untouched = q[..., : dim - rotary_dim].clone()
    around = torch.full((rows, heads, rotary_dim + 5), NAN, device=device)
    given, to = q.clone(), around[..., 5:]
    kernels.latent_rope_cache(q, kv, *table, slots, cache, weight, 1e-3, interleaved=interleaved, q_rotated=to)
    assert torch.equal(q[:-1], given[:-1]) and around[..., :5].isnan().all()
    kernels.latent_rope_cache(q, kv, *table, slots, cache, weight, 1e-3, interleaved=interleaved)
    assert torch.equal(to[:-1], q[:-1, :, dim - rotary_dim :])
    assert torch.allclose(q[:-1].double(), wanted[:-1], rtol=1e-5, atol=1e-5)
    assert torch.equal(q[:-1, :, : dim - rotary_dim], untouched[:-1])
    assert torch.allclose(cache.double(), wanted_cache, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert cache[[1, 2, 4, 5, 7]].isnan().all() and not cache[[6, 0, 3]].isnan().any()
    index = LatentSplit(dim, RotaryTable(*(t[:, None] for t in table), interleaved), Norm(weight, 1e-3))
    again, key = index.split(untouched_q := torch.randn(rows, heads * dim, device=device), kv)
    kernels.latent_rope_cache(
        untouched_q.unflatten(1, (-1, dim)), kv, *table, slots, cache, weight, 1e-3, interleaved=interleaved
    )
    assert torch.allclose(untouched_q.view_as(again), again, rtol=1e-5, atol=1e-5), "as without the kernel"
    assert torch.allclose(cache[slots[slots >= 0]], key[slots >= 0], rtol=1e-5, atol=1e-5), "as without the kernel"


@dataclass(frozen=True)
class Norm:
    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm.rms_norm(x.flatten(0, -2), self.weight, self.eps).view_as(x)


def test_latents_that_do_not_fit_are_refused(device: torch.device) -> None:
    q, kv, slots = torch.zeros(2, 3, 8, device=device), torch.zeros(2, 10, device=device), torch.zeros(2, device=device)
    cache, weight, angle = (torch.zeros(*s, device=device) for s in ((4, 1, 10), (6,), (2, 4)))
    for wrong, text in (
        (dict(kv=kv[:1]), "kv"),
        (dict(cos=angle[:, :2]), "norm 6"),
        (dict(sin=angle[:1]), "a row for each"),
        (dict(latents=cache.half()), "must be alike"),
        (dict(q_rotated=q[..., :3]), "q_rotated"),
        (dict(q=q.transpose(1, 2).contiguous().transpose(1, 2)), "contiguous"),
    ):
        given = dict(q=q, kv=kv, cos=angle, sin=angle, slots=slots, latents=cache, weight=weight, eps=0.0)
        with pytest.raises(ValueError, match=text):
            kernels.latent_rope_cache(**given | wrong)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rms_norm(add: bool, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = torch.randn(3, 50, device=device).mul(20).to(dtype), torch.randn(50, device=device).to(dtype)
    residual = torch.randn(3, 50, device=device).to(dtype)
    ours, theirs = residual.clone(), residual.clone()
    found = rms_norm.rms_norm(x, weight, 1e-3, ours if add else None)
    wanted = definitions.rms_norm(x, weight, 1e-3, theirs if add else None)
    assert torch.equal(ours, theirs)
    assert torch.allclose(found, wanted, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-5)
    if add:
        total, kept = torch.full_like(x, NAN), residual.clone()
        again = rms_norm.rms_norm(x, weight.float(), 1e-3, residual, total=total)
        assert torch.equal(total, theirs) and torch.equal(residual, kept)
        assert torch.allclose(again, wanted, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width, group_size", [(256, 128), (200, 64), (96, 128)])
def test_rms_norm_quantises(width: int, group_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Bit by bit what is made of its result afterwards; the result as it is without, but for the order of a sum."""
    x, weight = torch.randn(4, width + 8, device=device).to(dtype)[:, 4:-4], torch.randn(width, device=device)
    x[1], x[2, width // 2] = 0, 1e4
    rows = float8.unfilled(x, group_size)
    rows.values.view(torch.uint8).fill_(255)
    rows.scales.fill_(float("nan"))
    found = rms_norm.rms_norm(x, weight, 1e-3, quantised=rows)
    wanted = float8.quantise(found, group_size)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(found, rms_norm.rms_norm(x, weight, 1e-3), rtol=4 * step, atol=0)
    assert torch.equal(rows.values.view(torch.uint8), wanted.values.view(torch.uint8))
    assert torch.equal(rows.scales, wanted.scales)
    with pytest.raises(ValueError, match="quantised"):
        rms_norm.rms_norm(x[1:], weight, 1e-3, quantised=rows)


@pytest.mark.parametrize("limit, alpha, scored", [(None, None, False), (2.0, None, True), (2.0, 1.7, False)])
def test_gated(limit: float | None, alpha: float | None, scored: bool, device: torch.device) -> None:
    x = torch.randn(6, 2 * 1100 + 1, device=device)[:, 1:] * 5
    score = (torch.randn(3, 70, device=device)[:, 1:], torch.randn(1, 69, device=device)) if scored else None
    wide = None if score is None else tuple(part.double() for part in score)
    wanted = gated(x.double().unflatten(0, (3, 2) if scored else (6, 1)), limit, alpha, wide).flatten(0, 1)
    assert torch.allclose(rms_norm.gated(x, limit, alpha, score).double(), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="weight"):
        rms_norm.gated(x, score=(x[:4], x[:1]))


@pytest.mark.parametrize("gate", ["head", "element", None])
@pytest.mark.parametrize("sinks", [False, True])
def test_gate_heads(gate: str | None, sinks: bool, device: torch.device) -> None:
    out = torch.randn(5, 3, 2, 24, device=device)[:, :, 1].transpose(0, 1)
    behind = torch.randn(3, 5 * 24 + 7, device=device)
    gates = None if gate is None else behind[:, 7 : 12 if gate == "head" else None]
    more = (torch.randn(3, 5, device=device) * 3, torch.randn(5, device=device)) if sinks else ()
    if sinks:
        more[0][1] = float("-inf")  # a row that sees nothing
    found = gate_heads.gate_heads(out, gates, *more)
    wanted = gate_heads_of_torch(out.double(), None if gates is None else gates.double(), *(t.double() for t in more))
    assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="gate, lse and sinks"):
        gate_heads.gate_heads(out, behind, *more)


@pytest.mark.parametrize("shares", [6, 3, 4, 1])
def test_norms_of_parts_that_are_split_over_ranks(shares: int, seed: int, device: torch.device) -> None:
    """Together the ranks have the norm of the whole parts; several ranks may have the same share of the second."""
    rows, ranks, sizes, behind = 3, 6, (20, 12), 12
    whole = [torch.randn(rows, n, device=device) for n in (ranks * sizes[0], shares * sizes[1])]
    weights = [torch.randn(part.shape[1], device=device) for part in whole]
    wanted = [rms_norm_of_torch(part.double(), w.double(), 1e-3) for part, w in zip(whole, weights, strict=True)]
    parts = [part.shape[1] for part in whole], (ranks, shares)

    def of_rank(parts: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
        share = replicated(shares, ranks, rank).start
        return [parts[0][..., rank * 20 :][..., :20], parts[1][..., share * 12 :][..., :12]]

    rest = torch.randn(rows, behind, device=device)
    given = [torch.cat((*of_rank(whole, rank), rest), dim=1) for rank in range(ranks)]
    squares = torch.stack([split_norm.sums_of_squares(x, sizes) for x in given])
    for rank, x in enumerate(given):
        split_norm.norm_by_squares(x, squares, torch.cat(of_rank(weights, rank)), sizes, *parts, 1e-3)
        assert torch.allclose(x[:, :32].double(), torch.cat(of_rank(wanted, rank), dim=1), rtol=1e-5, atol=1e-5)
        assert torch.equal(x[:, 32:], rest)
    with pytest.raises(ValueError, match="squares"):
        split_norm.norm_by_squares(x, squares[:, 1:], torch.cat(of_rank(weights, 0)), sizes, *parts, 1e-3)
    with pytest.raises(ValueError, match="for parts of 20 and 40"):
        split_norm.sums_of_squares(x, (20, 40))
