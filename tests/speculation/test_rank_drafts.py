"""Rows with drafts on a rank: the tokens and logprobs of steps of one token, and the same rows after them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from weft.comm.reference import ReferenceWorld
from weft.engine.config.config import EngineConfig
from weft.engine.kv.tokens import token_bytes
from weft.engine.messages.rank_messages import Adjust, Chunk, GroupRows, Join, Result, Sampling, Step
from weft.engine.worker.worker import Worker
from weft.planner.cost import costs

PROMPTS = [list(range(5, 14)), [7, 3, 9, 250]]
HOW = [Sampling(temperature=0.0), Sampling(temperature=1.3, top_p=0.9, min_p=0.01, seed=5)]
STEPS = 8
ADJUST = Adjust(logprobs=1)


class Rank:
    """A rank with both prompts in its table, and the tokens that each has sampled."""

    def __init__(self, **options: object) -> None:
        values = dict(executor="thread", max_running=4, kv_tokens=1024, page_size=4, speculative="ngram") | options
        config = EngineConfig(**values)  # type: ignore[arg-type]
        self.worker = Worker(config, [ReferenceWorld(1).transports()[0]], costs("cpu"), lambda message: None)
        self.number = 0
        joins = tuple(Join(row, row, 0, (tuple(range(20 * row, 20 * row + 20)),), how) for row, how in enumerate(HOW))
        chunks = tuple(Chunk(row, token_bytes(prompt), True) for row, prompt in enumerate(PROMPTS))
        self.tokens = [[token] for token in self.step(GroupRows(chunks=chunks, joins=joins)).tokens]
        self.logprobs: list[list[object]] = [[], []]

    @torch.inference_mode()
    def step(self, rows: GroupRows) -> Result:
        self.number += 1
        return self.worker.step(Step(self.number, (rows,)))()

    def decode(self, drafts: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Run both rows with their drafts, with logprobs of each token. Return the accepted tokens of each."""
        counts = tuple(len(each) + 1 for each in drafts)
        plain = max(counts) == 1
        adjust = tuple((at, ADJUST) for at in range(sum(counts)))
        sent = b"".join(map(token_bytes, drafts))
        result = self.step(GroupRows((0, 1), adjust=adjust, decode_tokens=() if plain else counts, drafts=sent))
        accepted = (1, 1) if plain else result.accepted
        tokens, logprobs = iter(result.tokens), iter(result.logprobs)
        for row, count in enumerate(accepted):
            self.tokens[row] += [next(tokens) for _ in range(count)]
            self.logprobs[row] += [next(logprobs) for _ in range(count)]
        assert next(tokens, None) is None and next(logprobs, None) is None
        return accepted


@pytest.fixture(scope="module")
def plain() -> Rank:
    rank = Rank()
    for _ in range(STEPS + 4):
        rank.decode(((), ()))
    return rank


@pytest.mark.parametrize("recorded", [True, False])
def test_drafts_are_accepted_up_to_the_first_that_is_not_sampled(
    plain: Rank, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, wrong = Rank(cuda_graphs=recorded), 1
    if recorded:
        monkeypatch.setattr(rank.worker.runner, "forward", None)  # no step is eager
    right = [list(tokens) for tokens in plain.tokens]
    assert rank.tokens == [tokens[:1] for tokens in right] and wrong not in right[0] + right[1]
    assert rank.decode((right[0][1:3], ())) == (3, 1)
    assert rank.decode(((), ())) == (1, 1)
    assert rank.decode(((wrong, right[0][5]), right[1][3:4])) == (1, 2), "a draft after a rejected one is none"
    assert rank.decode(((), (right[1][5], wrong, right[1][7]))) == (1, 2), "the rejected drafts' keys are overwritten"
    while min(map(len, rank.tokens)) < STEPS:
        rank.decode(((), ()))
    for row, tokens in enumerate(rank.tokens):
        assert tokens == right[row][: len(tokens)]
        assert rank.worker.table.rows[row].length == len(PROMPTS[row]) + len(tokens) - 1
        for found, wanted in zip(rank.logprobs[row], plain.logprobs[row], strict=False):
            assert abs(found[0] - wanted[0]) < 1e-4 and [t for t, _ in found[1]] == [t for t, _ in wanted[1]]  # type: ignore[index]


def test_each_position_has_its_own_adjustments(plain: Rank) -> None:
    """A token that is banned at the second position of a row alone is not accepted there, and stays possible before."""
    right, rank = plain.tokens[0], Rank()
    drafts = token_bytes(right[1:4])
    result = rank.step(
        GroupRows((0, 1), adjust=((1, Adjust(banned=(right[2],))),), decode_tokens=(4, 1), drafts=drafts)
    )
    assert result.accepted == (2, 1) and result.tokens[0] == right[1] and result.tokens[1] != right[2]
    assert result.tokens[2] == plain.tokens[1][1]
