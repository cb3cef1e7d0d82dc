"""Writes that wait in pinned memory for one kernel."""

from __future__ import annotations

from array import array

import pytest
import torch

from weft.engine.worker import staged_writes
from weft.engine.worker.staged_writes import PLACES, PinnedWrites, StagedWrites


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("elements", [staged_writes.ELEMENTS, 64, 7])
def test_tensors_get_what_was_staged(
    elements: int, captured: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tensors, more than a place holds, and more steps than there are places, which nobody waits for."""
    if captured and device.type == "cpu":
        pytest.skip("graphs are of GPUs")
    monkeypatch.setattr(staged_writes, "ELEMENTS", elements)
    found, wanted = ([torch.full((n,), -9).int().to(on) for n in (3000, 8, 40)] for on in (device, "cpu"))
    pinned = PinnedWrites(found[1])
    if captured:
        pinned.capture()
        assert len(pinned._graphs) == PLACES
    generator = torch.Generator().manual_seed(0)
    for step in range(3 * PLACES):
        at = torch.randperm(3000, generator=generator)[: min(200, 3 * elements) * step].tolist()
        for writes, (wide, few, filled) in ((pinned, found), (StagedWrites(), wanted)):
            writes.write(wide, array("q", at), array("i", [step * 10_000 + i for i in range(len(at))]))
            if step % 2:
                writes.fill(filled, tuple(range(step, 30)))
            writes.write(few, array("q", [step % 8]), array("i", [-step]))
            writes.flush()
            writes.flush()  # nothing is left
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert not pinned._counts.any(), "every place may be written to again"


def test_nothing_staged_launches_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    writes = PinnedWrites(torch.zeros(8, dtype=torch.int32, device=device))
    monkeypatch.setattr(writes, "_launch", launched.append)
    writes.flush()
    writes.write(writes._base, array("q"), array("i"))
    writes.flush()
    assert launched == []
    writes.fill(writes._base, (1, 2))
    writes.flush()
    assert launched == [0]
