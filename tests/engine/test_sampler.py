"""Drawing: distributions by chi-square-like bounds, and independence of the batch."""

from __future__ import annotations

import random

import pytest
import torch

from gpu import definitions
from weft.engine.kv.cache_spec import Rule
from weft.engine.kv.tokens import token_array
from weft.engine.messages.rank_messages import Adjust, GroupRows, Join, Sampling
from weft.engine.messages.request import SamplingParams, Sequence
from weft.engine.scheduler.sampling_rows import adjust, bits
from weft.engine.worker import sampler
from weft.engine.worker.row_table import RowTable
from weft.engine.worker.sampler import Sampler, sample
from weft.engine.worker.step_output import StepOutput

LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]))
GREEDY = Sampling(temperature=0.0)


def frequencies(trials: int = 4000, **how: float) -> torch.Tensor:
    rows = [Sampling(seed=s, **how) for s in range(trials)]
    sampled = sample(LOGITS.expand(trials, -1), rows, [s % 7 for s in range(trials)], {})
    return torch.bincount(sampled, minlength=5) / trials


def test_temperature_one_samples_the_softmax() -> None:
    assert (frequencies() - LOGITS.exp()).abs().max() < 0.03


def test_temperature_flattens() -> None:
    assert (frequencies(temperature=2.0) - torch.softmax(LOGITS / 2, -1)).abs().max() < 0.03


def test_top_k_keeps_k_and_renormalises() -> None:
    assert (frequencies(top_k=2) - torch.tensor([2 / 3, 1 / 3, 0, 0, 0])).abs().max() < 0.03


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert (frequencies(top_p=0.74) - torch.tensor([2 / 3, 1 / 3, 0, 0, 0])).abs().max() < 0.03
    assert frequencies(trials=200, top_p=1e-9).tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("scale", [0.1, 3.0, 0.0])
def test_rows_are_cut_as_by_a_sort_of_all(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lower of equal logits' tokens stays. If top_p keeps more tokens than the first cut has, more are taken."""
    monkeypatch.setattr(sampler, "LEADING", 7)
    logits = (torch.randn(12, 1000) * scale).bfloat16().float()
    logits[4:8, 5:] = float("-inf")
    how = [Sampling(temperature=t, top_p=p, top_k=k) for t in (0.7, 1.0) for p in (1e-50, 0.5, 0.99) for k in (0, 30)]
    temperature = torch.tensor([h.temperature for h in how])
    top_k, top_p = torch.tensor([h.top_k for h in how]), torch.tensor([h.top_p for h in how])
    kept, before = definitions.cut(logits, temperature, top_k, top_p)
    found = sampler._cut(logits, how, temperature[:, None])
    wrong = (found != logits.masked_fill(~kept, float("-inf"))) & ((before - top_p[:, None]).abs() > 1e-6)
    assert not wrong.any() and found.isfinite().any(-1).all()


def test_greedy_and_banned() -> None:
    assert sample(LOGITS.repeat(2, 1), [GREEDY] * 2, [3, 3], {1: Adjust(banned=(0, 1))}).tolist() == [0, 2]
    assert sample(LOGITS[None][:0], [], [], {}).tolist() == []


def test_logprobs_are_of_the_raw_logits_for_those_who_ask() -> None:
    rows = GroupRows((5, 4, 7), adjust=((1, Adjust(2, banned=(0,))), (2, Adjust(0))))
    output = StepOutput(rows, torch.tensor([0, 1, 2], dtype=torch.int32))
    output.note_logprobs(LOGITS.repeat(3, 1))
    output.copy()
    (none, second, third), scored = output.logprobs()
    assert none is None and abs(second[0] - LOGITS[1]) < 1e-6 and [t for t, _ in second[1]] == [0, 1]
    assert abs(third[0] - LOGITS[2]) < 1e-6 and third[1] == () and scored == []
    with pytest.raises(AssertionError, match="row 4 of the table was stepped without a last token"):
        stale = StepOutput(rows, torch.tensor([0, -1, 2], dtype=torch.int32))
        stale.copy()
        stale.tokens()


def test_sampling_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(40, 300)
    rows = [Sampling(top_p=0.9, top_k=50, seed=seed) for seed in range(40)]
    together = sample(logits, rows, [3] * 40, {}).tolist()
    alone = [sample(logits[i : i + 1], rows[i : i + 1], [3], {}).item() for i in range(40)]
    assert together == alone and len(set(together)) > 10


def test_each_token_of_a_row_has_the_noise_of_its_own_position() -> None:
    """A row of three tokens samples what three steps of one token would; a row behind it is not moved."""
    table, logits = RowTable(2, [Rule()], 4, torch.device("cpu")), torch.randn(300).expand(4, -1)
    table.apply(GroupRows(joins=tuple(Join(row, row, 5, ((row,),), Sampling(seed=9)) for row in (0, 1))))
    table.last_token.fill_(1)
    sampler_, step, alone = Sampler(table), GroupRows((0, 1), decode_tokens=(3, 1)), []
    for position in (6, 7, 8):
        table.rows[0].length = table.rows[1].length = position
        alone.append(sampler_.sample(GroupRows((0,)), logits[:1]).item())
    table.rows[0].length, table.rows[1].length = 5 + 3, 5 + 1
    tokens = sampler_.sample(step, logits)
    assert tokens.tolist() == [*alone, alone[0]] and len(set(alone)) == 3
    table.rows[1].length = 8
    again = sampler_.sample(step, logits[:2], tokens=torch.zeros_like(tokens), again=[1, 3])
    assert again.tolist() == [0, alone[1], 0, alone[2]]


def test_all_bits_of_a_seed_and_the_position_count_and_a_tiny_temperature_is_greedy() -> None:
    logits = torch.randn(300)
    near, far, later = (
        sample(logits.expand(20, -1), [Sampling(temperature=2.0, seed=seed)] * 20, range(at, at + 20), {}).tolist()
        for seed, at in ((5, 0), (5 + 2**32, 0), (5, 20))
    )
    assert near != far and near != later
    assert sample(logits[None] * 100, [Sampling(temperature=1e-39, seed=3)], [0], {}).item() == logits.argmax()


def test_min_p_drops_what_is_far_from_the_best() -> None:
    assert (frequencies(min_p=0.29) - torch.tensor([5 / 9, 2.5 / 9, 1.5 / 9, 0, 0])).abs().max() < 0.03
    assert frequencies(trials=200, min_p=1.0).tolist() == [1, 0, 0, 0, 0]
    # It is of the probabilities that temperature has made: 5, 2.5, 1.5 become √5, √2.5, √1.5, so the third is within.
    assert frequencies(temperature=2.0, min_p=0.5).nonzero().flatten().tolist() == [0, 1, 2]


def greedy(logits: list[float], **how: object) -> int:
    return int(sample(torch.tensor([logits]), [GREEDY], [0], {0: Adjust(**how)}))


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
    mask = {0: Adjust(mask=bits(tokens, vocabulary))}
    sampled = {sample(logits, [Sampling(temperature=50.0, seed=seed)], [0], mask).item() for seed in range(40)}
    assert sampled <= set(tokens) and greedy(logits[0].tolist(), mask=bits(tokens, vocabulary)) == max(
        tokens, key=lambda t: logits[0, t].item()
    )


def test_a_neighbour_with_every_parameter_changes_nothing() -> None:
    logits = torch.randn(2, 300)
    plain, loud = Sampling(top_p=0.9, top_k=50, seed=7), Sampling(top_p=0.5, top_k=3, min_p=0.2, seed=8)
    asked = Adjust(2, (5,), added=((3, 50.0),), repetition=2.0, repeated=(1, 2), mask=bits([3, 9], 300))
    alone, together = sample(logits[:1], [plain], [3], {}), sample(logits, [plain, loud], [3, 3], {1: asked})
    assert alone[0] == together[0] and together[1] in (3, 9)


def test_what_a_sequence_needs_for_its_next_token() -> None:
    params = SamplingParams(
        presence_penalty=0.5,
        frequency_penalty=1.0,
        repetition_penalty=1.5,
        logit_bias=((7, 2.0), (4, 1.0)),
        bad_words=((9,), (7, 8), (7, 7, 6)),
        min_tokens=4,
    )
    sequence = Sequence(1, token_array([5, 6]), 2, params, 0, 16, frozenset({2}))
    assert adjust(sequence).banned == (2, 9) and adjust(sequence).added == ((7, 2.0), (4, 1.0))
    sequence.tokens.extend([7, 7, 4])
    how = adjust(sequence)
    assert dict(how.added) == {7: 2.0 - 0.5 - 2.0, 4: 1.0 - 0.5 - 1.0} and how.repeated == (4, 5, 6, 7)
    assert how.banned == (2, 9)
    sequence.tokens[-1] = 7
    assert adjust(sequence).banned == (2, 6, 8, 9)


def test_the_end_is_banned_for_as_long_as_tokens_are_pending() -> None:
    for params, after in ((dict(), None), (dict(logprobs=1), ())):
        params = SamplingParams(max_tokens=9, min_tokens=3, **params)
        sequence = Sequence(1, token_array([5, 6, 7]), 2, params, 0, 16, frozenset({2}), pending=1)
        assert adjust(sequence).banned == (2,)
        sequence.pending = 2
        asked = adjust(sequence)
        assert (asked and asked.banned) == after
