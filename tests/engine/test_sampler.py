"""Drawing: distributions by chi-square-like bounds, and independence of the batch."""

from __future__ import annotations

import random

import pytest
import torch

from weft.engine.messages import Sampling
from weft.engine.request import SamplingParams, Sequence
from weft.engine.sampler import sample
from weft.engine.sampling import bits, sampling

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


def test_min_p_drops_what_is_far_from_the_best() -> None:
    assert (frequencies(min_p=0.29) - torch.tensor([5 / 9, 2.5 / 9, 1.5 / 9, 0, 0])).abs().max() < 0.03
    assert frequencies(draws=200, min_p=1.0).tolist() == [1, 0, 0, 0, 0]


def greedy(logits: list[float], **how: object) -> int:
    [drawn] = sample(torch.tensor([logits]), [0], [Sampling(0.0, 1.0, 0, 0, 0, **how)])
    return drawn.token


def test_logits_are_added_to_and_repeated_tokens_made_less_likely() -> None:
    assert greedy([1.0, 2.0, 3.0]) == 2
    assert greedy([1.0, 2.0, 3.0], added=((0, 2.5), (2, -0.5))) == 0
    assert greedy([1.0, 2.0, 3.0], repetition=2.0, repeated=(2,)) == 1
    assert greedy([-3.0, -1.0, -2.0], repetition=2.5, repeated=(1,)) == 2, "a negative logit must fall, not rise"
    assert greedy([1.0, 2.0, 3.0], mask=bits([0, 1], 3)) == 1
    assert greedy([1.0, 2.0, 3.0], mask=bits([0, 1], 3), banned=(1,)) == 0
    assert greedy([1.0, 2.0, 3.0], mask=bits([1], 3), banned=(1,)) == 1, "nothing was left"


@pytest.mark.parametrize("vocabulary", [1, 8, 9, 151_937])
def test_a_mask_allows_exactly_its_tokens(vocabulary: int) -> None:
    tokens = sorted(random.Random(vocabulary).sample(range(vocabulary), max(1, min(vocabulary // 3, 500))))
    logits = torch.randn(1, vocabulary)
    drawn = {
        sample(logits, [0], [Sampling(50.0, 1.0, 0, seed, 0, mask=bits(tokens, vocabulary))])[0].token
        for seed in range(40)
    }
    assert drawn <= set(tokens) and greedy(logits[0].tolist(), mask=bits(tokens, vocabulary)) == max(
        tokens, key=lambda t: logits[0, t].item()
    )


def test_a_neighbour_with_every_parameter_changes_nothing() -> None:
    logits = torch.randn(2, 300)
    plain = Sampling(1.0, 0.9, 50, 7, 3, logprobs=2)
    loud = Sampling(
        1.0,
        0.5,
        3,
        8,
        3,
        2,
        (5,),
        min_p=0.2,
        added=((3, 50.0),),
        repetition=2.0,
        repeated=(1, 2),
        mask=bits([3, 9], 300),
    )
    alone, beside = sample(logits[:1], [0], [plain]), sample(logits, [0, 1], [plain, loud])
    assert alone[0] == beside[0] and beside[1].token in (3, 9)


def test_what_a_sequence_asks_of_its_next_draw() -> None:
    params = SamplingParams(
        presence_penalty=0.5,
        frequency_penalty=1.0,
        repetition_penalty=1.5,
        logit_bias=((7, 2.0), (4, 1.0)),
        bad_words=((9,), (7, 8), (7, 7, 6)),
        min_tokens=4,
    )
    sequence = Sequence(1, [5, 6], 2, params, 0, 16, frozenset({2}), on_output=lambda output: None)
    assert sampling(sequence).banned == (2, 9) and sampling(sequence).added == ((7, 2.0), (4, 1.0))
    sequence.tokens += [7, 7, 4]
    how = sampling(sequence)
    assert dict(how.added) == {7: 2.0 - 0.5 - 2.0, 4: 1.0 - 0.5 - 1.0} and how.repeated == (4, 5, 6, 7)
    assert (how.banned, how.index) == ((2, 9), 3)
    sequence.tokens[-1] = 7
    assert sampling(sequence).banned == (2, 6, 8, 9)
