"""Drawing: distributions by chi-square-like bounds, and independence of the batch."""

from __future__ import annotations

import torch

from weft.engine.messages import Sampling
from weft.engine.sampler import sample

LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]))


def frequencies(draws: int = 4000, **how: float) -> torch.Tensor:
    rows = [Sampling(**dict(temperature=1.0, top_p=1.0, top_k=0, seed=s, index=s % 7) | how) for s in range(draws)]
    drawn = sample(LOGITS.expand(draws, -1), range(draws), rows)
    return torch.bincount(torch.tensor([d.token for d in drawn]), minlength=5) / draws


def test_temperature_one_draws_the_softmax() -> None:
    assert (frequencies() - LOGITS.exp()).abs().max() < 0.03


def test_temperature_flattens() -> None:
    assert (frequencies(temperature=2.0) - torch.softmax(LOGITS / 2, -1)).abs().max() < 0.03


def test_top_k_keeps_k_and_renormalises() -> None:
    assert (frequencies(top_k=2) - torch.tensor([2 / 3, 1 / 3, 0, 0, 0])).abs().max() < 0.03


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert (frequencies(top_p=0.74) - torch.tensor([2 / 3, 1 / 3, 0, 0, 0])).abs().max() < 0.03
    assert frequencies(draws=200, top_p=1e-9).tolist() == [1, 0, 0, 0, 0]


def test_greedy_banned_and_logprobs() -> None:
    rows = [Sampling(0.0, 1.0, 0, 0, 0, logprobs=2), Sampling(0.0, 1.0, 0, 0, 0, banned=(0, 1))]
    first, second = sample(LOGITS.repeat(2, 1), [7, 8], rows)
    assert (first.request, first.token, second.token) == (7, 0, 2)
    assert abs(first.logprob - LOGITS[0]) < 1e-6 and [t for t, _ in first.top] == [0, 1]
    assert second.logprob is None and sample(LOGITS[None][:0], [], []) == ()


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(40, 300)
    rows = [Sampling(1.0, 0.9, 50, seed, 3) for seed in range(40)]
    together = [d.token for d in sample(logits, range(40), rows)]
    alone = [sample(logits[i : i + 1], [i], rows[i : i + 1])[0].token for i in range(40)]
    assert together == alone and len(set(together)) > 10


def test_all_bits_of_a_seed_count_and_a_tiny_temperature_is_greedy() -> None:
    logits = torch.randn(300)
    near, far = (
        [d.token for d in sample(logits.expand(20, -1), range(20), [Sampling(2.0, 1.0, 0, s, i) for i in range(20)])]
        for s in (5, 5 + 2**32)
    )
    assert near != far
    [drawn] = sample(logits[None] * 100, [0], [Sampling(1e-39, 1.0, 0, 3, 0)])
    assert drawn.token == logits.argmax()
