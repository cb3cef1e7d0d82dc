"""The ends of a step against their twins."""

from __future__ import annotations

import pytest
import torch

from weft.kernels.triton import plain
from weft.kernels.triton import step as kernels

PAGE = 8


@pytest.mark.parametrize("capacity, count", [(6, 6), (6, 4), (1, 1), (3, 0), (300, 280)])
def check_a_step(capacity: int, count: int, seed: int, device: torch.device) -> None:
    requests = capacity + 5
    last = torch.randint(-9, 99, (requests,), device=device).int().clamp(min=-1)
    length = torch.randint(0, 4 * PAGE, (requests,), device=device).int()
    pages = torch.randperm(requests * 4, device=device).view(requests, 4).int()
    wide = torch.full((requests, 9), -1, dtype=torch.int32, device=device)
    wide[:, 3:7] = pages  # between other groups' tables
    rows = torch.randperm(requests, device=device)[:capacity].int()
    rows[count:] = -(1 << 24)  # no request: must not be looked up
    live = torch.tensor([count], dtype=torch.int32, device=device)
    found = kernels.step_in(rows, live, last, length)
    wanted = plain.step_in(rows, count, last, length)
    for name, ours, theirs in zip(found._fields, found, wanted, strict=True):
        assert ours.tolist() == theirs.tolist(), name
    slots = kernels.new_slots(found.table, found.lengths, wide[:, 3:7], PAGE)
    assert torch.equal(slots, plain.new_slots(found.table, found.lengths, pages, PAGE))
    assert (slots[count:] == -1).all() and (slots[:count] >= 0).all()
    token = torch.randint(0, 99, (capacity,), device=device).int()
    token[count:] = 77
    ring = torch.full((3, capacity + 2), -9, dtype=torch.int32, device=device)
    states = [[x.clone() for x in (last, length, ring)] for _ in range(2)]
    kernels.step_out(rows, live, token, torch.tensor([7], device=device), *states[0])
    plain.step_out(rows, count, token, 7, *states[1])
    for ours, theirs in zip(*states, strict=True):
        assert torch.equal(ours, theirs)
    assert (states[0][2][[0, 2]] == -9).all() and (states[0][2][1, capacity:] == -9).all()


def check_what_does_not_fit_is_refused(device: torch.device) -> None:
    one = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="must be alike"):
        kernels.step_in(one, one, one, torch.zeros(2, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="rows contiguous"):
        kernels.new_slots(one, one, torch.zeros(3, 2, dtype=torch.int32, device=device).T, PAGE)
    with pytest.raises(ValueError, match="the ring"):
        kernels.step_out(one, one, one, one, one, one, torch.zeros(3, 0, dtype=torch.int32, device=device))
