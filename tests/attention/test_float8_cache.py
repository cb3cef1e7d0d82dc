"""Caches in FP8: what a vector becomes, and how far attention over it is from attention over the vectors themselves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attention.oracle import NAN, as_held, make_case
from weft.engine.attention.backend import Queries
from weft.engine.attention.backend_registry import TORCH
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent, PagedKV, Window
from weft.kernels.float8 import FLOAT8, MAX_EXPONENT, take, to_vectors


def skewed(*shape: int) -> Tensor:
    """Vectors of very different lengths, some elements of which are much larger than the others."""
    return torch.randn(shape) * torch.randn(*shape[:-1], 1).mul(4).exp() * torch.randn(shape[-1]).mul(2).exp()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_value_is_within_a_sixteenth(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = skewed(200, 3, 64).to(dtype)
    values, exponents = to_vectors(x)
    assert values.dtype == FLOAT8 and exponents.dtype == torch.int8 and exponents.shape == x.shape[:-1]
    held, largest = as_held(x), x.float().abs().amax(-1, keepdim=True)
    # e4m3 has three bits behind the first down to 2⁻⁶; below, steps of 2⁻⁹. The largest is 224 at least.
    bound = (x.float().abs() / 16).maximum(largest / 224 * 2**-10)
    assert ((held - x.float()).abs() <= bound).all()
    assert (values.float().abs().amax(-1) >= 224).all(), "the exponents are the smallest ones"
    again = to_vectors(held)
    assert torch.equal(as_held(held), held) and (again.exponents <= exponents).all()


def test_borders_of_exponents() -> None:
    top = 448 * 2.0**MAX_EXPONENT
    rows = [
        [448.0, 1.0],
        [448.1, 1.0],
        [0.0, 0.0],
        [top, 1.0],
        [3 * top, 1.0],
        [1e-30, 0.0],
        [NAN, 2.0],
        [math.inf, -math.inf],
    ]
    values, exponents = to_vectors(torch.tensor(rows))
    assert exponents.tolist() == [0, 1, -32, 32, 32, -32, -7, 32]
    assert values.float()[:6, 0].tolist() == [448, 224, 0, 448, 448, 0], "what is too large saturates"
    assert values[6, 0].float().isnan() and values[6, 1].float() == 256, "NaN stays, and hides no other value"
    assert values[7].float().tolist() == [448, -448]


@pytest.mark.parametrize("spec", [PagedKV(2, 8), Window(6, 2, 8), Latent(12, 8)], ids=str)
def test_pages_are_copied_with_their_exponents(spec: PagedKV | Window | Latent) -> None:
    torch.manual_seed(1)
    cache = KVCache(spec, 2, 5, 4, FLOAT8)
    rows = skewed(20, *cache.keys.shape[2:])
    for layer in (0, 1):
        cache.write(layer, torch.arange(20), rows * 2**layer, None if isinstance(spec, Latent) else rows * 3)
    before = [x.clone() for x in cache.tensors]
    cache.copy(torch.tensor([0, 3]), torch.tensor([3, 1]))
    for kept, was in zip(cache.tensors, before, strict=True):
        pages, old = (x.unflatten(1, (-1, 4)) for x in (kept, was))
        assert torch.equal(pages[:, [3, 1]], old[:, [0, 3]]) and torch.equal(pages[:, [0, 2, 4]], old[:, [0, 2, 4]])
    keys, values = (take(x, torch.arange(4, 8), torch.float32) for x in cache.of_layer(1))
    assert torch.equal(keys, as_held(rows * 2)[12:16])
    wanted = as_held(rows * 2)[..., :8] if isinstance(spec, Latent) else as_held(rows * 3)
    assert torch.equal(values, wanted[12:16])


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("spec", [PagedKV(2, 64), Window(40, 2, 64), Latent(80, 64)], ids=str)
def test_attention_is_near_that_over_the_vectors_themselves(spec: PagedKV | Window | Latent, uneven: bool) -> None:
    """‖difference‖ / ‖output‖: a value in FP8 is off by 2.6 % in the mean square, one in bfloat16 by 0.16 %.

    Weights have an error by their scores, which here are about 1, too. uneven: vectors of different lengths, and some
    elements eight times as large as the others.
    """
    spans, errors = [(200, 0), (1, 0), (60, 0)], dict[torch.dtype, list[float]]()
    for seed in range(3):
        case = make_case(spans, seed=seed, page=16, spec=spec)
        generator = torch.Generator().manual_seed(seed)
        if uneven:
            for x in {id(x): x for x in (case.k, case.v)}.values():
                x *= torch.randn(*x.shape[:2], 1, generator=generator).exp()
                x[..., torch.randperm(x.shape[-1], generator=generator)[:4]] *= 8
        case.q *= 3 / (case.q @ case.k.flatten(0, 1).mT).std()
        outs = {}
        for dtype in (torch.float32, torch.bfloat16, FLOAT8):
            wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
            backend = TORCH.make(KVCache(spec, 2, case.cache.num_pages, 16, dtype))
            plan = backend.plan(case.batch, case.batch.tables[0])
            backend.cache.write(1, plan.stored, case.k.to(wide), None if isinstance(spec, Latent) else case.v.to(wide))
            outs[dtype] = backend.attend(plan, 1, Queries(case.q.to(wide), 1 / 3))[0].float()
        for dtype, out in outs.items():
            off = (out - outs[torch.float32]).norm() / outs[torch.float32].norm()
            errors.setdefault(dtype, []).append(off.item())
    assert max(errors[FLOAT8]) < (0.08 if uneven else 0.05) and max(errors[torch.bfloat16]) < 0.01
    assert min(errors[FLOAT8]) > 0.01, "it is in FP8"
