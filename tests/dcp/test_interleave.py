"""The definition of who holds which token against dealing them out one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.dcp.interleave import Interleave


@st.composite
def deals(draw: st.DrawFn) -> Interleave:
    run, pages = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    return Interleave(draw(st.integers(1, 6)), run, run * pages)


def dealt(deal: Interleave, tokens: int) -> list[list[int]]:
    """The positions that each rank holds, by dealing them out like cards."""
    hands: list[list[int]] = [[] for _ in range(deal.ranks)]
    rank = 0
    for token in range(tokens):
        hands[rank].append(token)
        if (token + 1) % deal.run == 0:
            rank = (rank + 1) % deal.ranks
    return hands


@settings(max_examples=150, deadline=None)
@given(deals(), st.integers(0, 90))
def test_every_token_has_one_place(deal: Interleave, tokens: int) -> None:
    hands = dealt(deal, tokens)
    for place, hand in enumerate(hands):
        assert [deal.owner(t) for t in hand] == [place] * len(hand)
        assert [deal.local(t) for t in hand] == list(range(len(hand)))
        assert [deal.token(j, place) for j in range(len(hand))] == hand
        assert deal.length(tokens, place) == len(hand) <= deal.most(tokens)
        assert (len(hand) == 0) == (tokens <= place * deal.run), "only short sequences leave a rank empty"
        for position in range(tokens):
            assert deal.length(position + 1, place) == sum(t <= position for t in hand)
    assert deal.most(tokens) == max(map(len, hands))


@settings(max_examples=150, deadline=None)
@given(deals(), st.integers(0, 90), st.randoms(use_true_random=False))
def test_tensors_say_the_same_and_slots_follow(deal: Interleave, tokens: int, draw) -> None:
    table = draw.sample(range(90), -(-tokens // deal.span))
    position = torch.arange(tokens)
    whole = torch.tensor([table[t // deal.span] * deal.span + t % deal.span for t in range(tokens)] + [-1])
    for place, hand in enumerate(dealt(deal, tokens)):
        assert deal.owner(position).tolist() == [deal.owner(t) for t in range(tokens)]
        assert deal.local(position).tolist() == [deal.local(t) for t in range(tokens)]
        assert deal.token(torch.arange(len(hand)), place).tolist() == hand
        assert deal.length(position, place).tolist() == [deal.length(t, place) for t in range(tokens)]
        expected = [-1] * (tokens + 1)
        for j, t in enumerate(hand):
            expected[t] = table[j // deal.page_size] * deal.page_size + j % deal.page_size
        for dtype in (torch.int32, torch.int64):
            found = deal.slots(whole.to(dtype), place)
            assert found.dtype == dtype and found.tolist() == expected


@settings(max_examples=80, deadline=None)
@given(deals(), st.lists(st.integers(0, 40), max_size=4))
def test_gathered_tokens_are_found_again(deal: Interleave, lengths: list[int]) -> None:
    hands = [dealt(deal, n) for n in lengths]
    laid = [[(at, t) for at, hand in enumerate(hands) for t in hand[place]] for place in range(deal.ranks)]
    sizes, rows = deal.gathered(lengths)
    assert sizes == tuple(map(len, laid))
    flat = [each for rank in laid for each in rank]
    assert [[flat[row] for row in found.tolist()] for found in rows] == [
        [(at, t) for t in range(n)] for at, n in enumerate(lengths)
    ]


def test_runs_that_do_not_divide_the_page_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dealt out 3 at a time over 2 rank.*page of 16 tokens a multiple"):
        Interleave(2, 3, 16)
