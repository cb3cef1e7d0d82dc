"""The definition of who holds which token against round-robin, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.stream.interleave import Interleave


@st.composite
def interleaves(draw: st.DrawFn) -> Interleave:
    chunk, pages = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    return Interleave(draw(st.integers(1, 6)), chunk, chunk * pages)


def interleaved(interleave: Interleave, tokens: int) -> list[list[int]]:
    """The positions that each rank holds, round-robin, token by token."""
    held: list[list[int]] = [[] for _ in range(interleave.ranks)]
    rank = 0
    for token in range(tokens):
        held[rank].append(token)
        if (token + 1) % interleave.chunk == 0:
            rank = (rank + 1) % interleave.ranks
    return held


@settings(max_examples=150, deadline=None)
@given(interleaves(), st.integers(0, 90))
def test_every_token_has_one_place(interleave: Interleave, tokens: int) -> None:
    held = interleaved(interleave, tokens)
    for place, own in enumerate(held):
        assert [interleave.owner(t) for t in own] == [place] * len(own)
        assert [interleave.local(t) for t in own] == list(range(len(own)))
        assert [interleave.token(j, place) for j in range(len(own))] == own
        assert interleave.length(tokens, place) == len(own) <= interleave.max_length(tokens)
        assert (len(own) == 0) == (tokens <= place * interleave.chunk), "only short sequences leave a rank empty"
        for position in range(tokens):
            assert interleave.length(position + 1, place) == sum(t <= position for t in own)
    assert interleave.max_length(tokens) == max(map(len, held))


@settings(max_examples=150, deadline=None)
@given(interleaves(), st.integers(0, 90), st.randoms(use_true_random=False))
def test_tensors_say_the_same_and_slots_follow(interleave: Interleave, tokens: int, draw) -> None:
    table = draw.sample(range(90), -(-tokens // interleave.span))
    position = torch.arange(tokens)
    whole = torch.tensor(
        [table[t // interleave.span] * interleave.span + t % interleave.span for t in range(tokens)] + [-1]
    )
    for place, own in enumerate(interleaved(interleave, tokens)):
        assert interleave.owner(position).tolist() == [interleave.owner(t) for t in range(tokens)]
        assert interleave.local(position).tolist() == [interleave.local(t) for t in range(tokens)]
        assert interleave.token(torch.arange(len(own)), place).tolist() == own
        assert interleave.length(position, place).tolist() == [interleave.length(t, place) for t in range(tokens)]
        expected = [-1] * (tokens + 1)
        for j, t in enumerate(own):
            expected[t] = table[j // interleave.page_size] * interleave.page_size + j % interleave.page_size
        for dtype in (torch.int32, torch.int64):
            found = interleave.slots(whole.to(dtype), place)
            assert found.dtype == dtype and found.tolist() == expected


@settings(max_examples=80, deadline=None)
@given(interleaves(), st.lists(st.integers(0, 40), max_size=4))
def test_gathered_tokens_are_found_again(interleave: Interleave, lengths: list[int]) -> None:
    held = [interleaved(interleave, n) for n in lengths]
    laid = [[(at, t) for at, own in enumerate(held) for t in own[place]] for place in range(interleave.ranks)]
    sizes, rows = interleave.gathered(lengths)
    assert sizes == tuple(map(len, laid))
    flat = [each for rank in laid for each in rank]
    assert [[flat[row] for row in found.tolist()] for found in rows] == [
        [(at, t) for t in range(n)] for at, n in enumerate(lengths)
    ]


def test_chunks_that_do_not_divide_the_page_are_refused() -> None:
    with pytest.raises(ValueError, match=r"interleaved 3 at a time over 2 rank.*page of 16 tokens a multiple"):
        Interleave(2, 3, 16)
