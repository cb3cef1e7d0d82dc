"""The ends of a step against their twins."""

from __future__ import annotations

import pytest
import torch

from gpu import definitions
from weft.engine.kernels import step_inputs
from weft.engine.kernels.triton import decode_step as kernels
from weft.planner.vocabulary import MAX_TOKENS

PAGE = 8
GROUPS = {
    "pages": [(5, False)],
    "states between pages": [(5, False), (2, True), (5, False)],
    "states first": [(2, True), (5, False)],
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("capacity, count", [(6, 6), (6, 4), (1, 1), (3, 0), (19, 17)])
def test_inputs(
    capacity: int, count: int, groups: list[tuple[int, bool]], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables in a single part, and in several of which the last is cut."""
    torch.manual_seed(capacity)
    requests, widths = capacity + 5, [width for width, _ in groups]
    last = torch.randint(-9, 99, (requests,), device=device).int().clamp(min=-1)
    length = torch.randint(0, 5 * PAGE - 3, (requests,), device=device).int()
    length[:3] = torch.tensor([0, PAGE, 5 * PAGE - 4])
    wide = torch.randperm(requests * (sum(widths) + 2), device=device).view(requests, -1).int()
    entries = wide[:, 1:-1]
    entries[:, :2].masked_fill_(torch.rand(requests, 2, device=device) < 0.3, -1) if groups[0][1] else None
    rows = torch.randperm(requests, device=device)[:capacity].int()
    places, drafts = (
        torch.arange(capacity, device=device).int() % 4,
        torch.randint(99, (capacity,), device=device).int(),
    )
    rows = rows[torch.arange(capacity, device=device) // 4 * 4]  # a row's last token and three drafts
    rows[count:] = -(1 << 24)  # no request: must not be looked up
    own = rows, places, drafts
    live = torch.tensor([count], dtype=torch.int32, device=device)
    steps = torch.tensor([2], dtype=torch.int32, device=device)
    wanted = step_inputs.StepInputs(*definitions.step_in(*own, count, last, length, entries, steps, groups, PAGE))
    assert steps == 3
    for limit in (1024, 2):
        monkeypatch.setattr(step_inputs, "ENTRIES", limit)
        pieces = step_inputs.table_pieces(widths, [state for _, state in groups], device)
        assert len(pieces.each) == sum(1 if state or limit > 5 else 3 for _, state in groups)
        found = kernels.step_in(*own, live, last, length, entries, steps, pieces, PAGE)
        for name in ("tokens", "positions", "lengths"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name
        known = wanted.entries >= 0
        assert torch.equal(found.entries[known], wanted.entries[known]) and known.any() == (count > 0)
        for group, (_, state) in enumerate(groups):
            used = 2 if state else 1
            assert torch.equal(found.slots[group, :used], wanted.slots[group, :used])
            assert state or (found.slots[group, 0, :count] >= 0).all()
            assert (found.slots[group, :used, count:] == -1).all()
    assert steps == 5


@pytest.mark.parametrize("ranks, shares", [(1, 1), (1, 7), (3, 1), (2, 5)])
@pytest.mark.parametrize("capacity, count, outputs", [(6, 6, 6), (6, 4, 2), (1, 1, 0), (3, 0, 0), (5, 4, 4)])
def test_samples_go_into_the_state(
    capacity: int, count: int, outputs: int, ranks: int, shares: int, device: torch.device
) -> None:
    """Samples of answers, and of prompts behind them, for which none was drawn before."""
    torch.manual_seed(capacity + ranks)
    requests = capacity + 5
    last = torch.randint(-9, 99, (requests,), device=device).int().clamp(min=-1)
    length = torch.randint(0, 4 * PAGE, (requests,), device=device).int()
    rows = torch.randperm(requests, device=device)[:capacity].int()
    rows[count:] = -(1 << 24)
    last[rows[:1].clamp(min=0).long()] = 3
    last[rows[outputs:count].long()] = -1
    last[rows[1:outputs:2].long()] = -1
    lengths = torch.randint(0, 99, (capacity,), device=device).int()
    live, first = (torch.tensor([n], dtype=torch.int32, device=device) for n in (count, outputs))
    score = torch.randint(0, 3, (ranks, capacity, shares), device=device).float()  # some are equal
    token = (MAX_TOKENS - 1 - torch.randperm(score.numel(), device=device)).view(score.shape).float()
    score[:, -1] = float("-inf")
    sampled = torch.stack((score, token), dim=-1)
    sampled[:, count:] = float("nan")
    tokens, steps = torch.full((capacity + 2,), -9).int().to(device), torch.tensor([11]).int().to(device)
    told = torch.full((4, capacity + 1), -9, dtype=torch.int32, pin_memory=device.type == "cuda")
    given = (last, length, tokens, steps, told)
    states = [[x.clone() if x.is_cuda or device.type == "cpu" else x.clone().pin_memory() for x in given] for _ in "ab"]
    kernels.step_out(rows, live, first, sampled, lengths, *states[0])
    definitions.step_out(rows, count, outputs, sampled, lengths, *states[1])
    if device.type == "cuda":
        torch.cuda.synchronize()  # for what is written to the host
    for ours, theirs in zip(*states, strict=True):
        assert torch.equal(ours, theirs)
    tokens, told = states[0][2], states[0][4]
    assert torch.equal(told[11 % 4, :count], tokens[:count].cpu()) and (told == -9).sum() == told.numel() - count
    assert (tokens[capacity:] == -9).all() and (tokens[count:capacity] == -1).all()
    sampled_of = tokens[:count] >= 0
    assert sampled_of[:1].all() and not sampled_of[1:outputs:2].any() and sampled_of[outputs:].all()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    one, table = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((1,), (1, 3)))
    pieces = step_inputs.table_pieces([3], [False], device)
    with pytest.raises(ValueError, match="the same rows"):
        kernels.step_in(
            one, one, one, one, one, torch.zeros(2, dtype=torch.int32, device=device), table, one, pieces, PAGE
        )
    with pytest.raises(ValueError, match="not rows of int32"):
        halves = torch.zeros(1, 6, dtype=torch.int32, device=device)[:, ::2]
        kernels.step_in(one, one, one, one, one, one, halves, one, pieces, PAGE)
    with pytest.raises(ValueError, match="candidates"):
        kernels.step_out(one, one, one, torch.zeros(1, 2, 1, 2, device=device), *[one] * 5, table)
    with pytest.raises(ValueError, match="candidates"):  # the ring has no power of two of rows
        kernels.step_out(one, one, one, torch.zeros(1, 1, 1, 2, device=device), *[one] * 5, table.expand(3, 3))
