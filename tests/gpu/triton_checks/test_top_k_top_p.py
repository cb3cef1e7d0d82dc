"""Cuts by bisection against a sort of the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpu import definitions
from weft.engine.kernels.triton import sample, top_k_top_p

VOCABULARY = 813
NAN = float("nan")
HOW = [
    (1.0, 50, 1.0), (0.6, 0, 0.9), (1.3, 7, 0.9), (1e-6, 50, 0.5), (1.0, 1, 0.3), (100.0, 5000, 0.7), (1.0, 0, 1e-9),
    (1.0, 600, 0.99), (0.8, 0, 0.999), (0.0, 3, 0.1), (1.0, 0, 0.5), (0.7, VOCABULARY - 1, 1.0), (1.0, 0, 1.0),
]  # fmt: skip
"""(temperature, top_k, top_p) of rows: greedy and plain ones among those that are cut."""


def one_outlier(rows: int) -> Tensor:
    logits = torch.randn(rows, VOCABULARY)
    logits[:, 500] = float("inf")
    return logits


KINDS: dict[str, Callable[[int], Tensor]] = {
    "flat": lambda rows: torch.randn(rows, VOCABULARY) * 0.05,
    "skewed": lambda rows: torch.randn(rows, VOCABULARY) * 2 + 20 * (torch.arange(VOCABULARY) % 97 == 5),
    "bfloat16": lambda rows: (torch.randn(rows, VOCABULARY) * 2).bfloat16(),
    "ties": lambda rows: torch.randint(0, 4, (rows, VOCABULARY)).float(),
    "zeros of both signs": lambda rows: torch.where(torch.rand(rows, VOCABULARY) < 0.5, 0.0, -0.0),
    "tiny": lambda rows: -torch.rand(rows, VOCABULARY) * 1e-30,
    "most excluded": lambda rows: torch.where(torch.rand(rows, VOCABULARY) < 0.99, float("-inf"), torch.ones(1)),
    "infinite": one_outlier,
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that a row of the tests fills several times."""
    for module, name, value in (
        (sample, "BLOCK", 256), (sample, "PROGRAMS", 26), (top_k_top_p, "BLOCK", 512), (top_k_top_p, "CAPACITY", 64),
        (top_k_top_p, "SHARE_BLOCK", 256), (top_k_top_p, "PROGRAMS", 26),
        (top_k_top_p, "WARPS", 4),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Return the list in which the cuts of each call are noted."""
    found: list[tuple[Tensor, Tensor]] = []

    def noted(*args: Tensor) -> tuple[Tensor, Tensor]:
        found.append(top_k_top_p.cutoffs(*args))
        return found[-1]

    monkeypatch.setattr(sample, "cutoffs", noted)
    return found


def how(device: torch.device, rows: list[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    temperature, top_k, top_p = zip(*(HOW[row] for row in rows or range(len(HOW))), strict=True)
    return (
        torch.tensor(temperature, device=device),
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor(top_p, device=device),
    )


def live(count: int, device: torch.device) -> Tensor:
    return torch.tensor([count], dtype=torch.int32, device=device)


def sampled(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, **more: Tensor) -> Tensor:
    """int32 `[rows]`, by the seeds and positions of `numbers`."""
    seed, position = numbers(logits)
    options = dict(top_k=top_k, top_p=top_p) | more
    return sample.sample(logits, temperature, seed, position, live(len(logits), logits.device), **options)[1]


def numbers(logits: Tensor) -> tuple[Tensor, Tensor]:
    row = torch.arange(len(logits), device=logits.device)
    return row * 7 + 3, row + 40


def kept(logits: Tensor, temperature: Tensor, cut: tuple[Tensor, Tensor]) -> Tensor:
    """bool `[rows, vocabulary]`: by the rule of `keeps`, in torch."""
    scaled = logits.float() / temperature.clamp(min=1e-5)[:, None]
    bits = torch.where(scaled == 0, 0.0, scaled).view(torch.int32)
    keys, (key, token) = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits), (x[:, None] for x in cut)
    return (keys > key) | ((keys == key) & (torch.arange(logits.shape[1], device=logits.device) <= token))


AT_NIGHT = KINDS.keys() - {"ties", "most excluded"}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.nightly] * (k in AT_NIGHT)) for k in KINDS])
def test_keeps_what_a_sort_keeps(kind: str, seed: int, device: torch.device, cuts: list[tuple[Tensor, Tensor]]) -> None:
    """But for tokens whose place is at top_p to float32's rounding."""
    logits, given = KINDS[kind](len(HOW)).to(device), how(device)
    token = sampled(logits, *given)
    wanted, before = definitions.cut(logits, *given)
    found, top_p = kept(logits, given[0], cuts[0]), given[2][:, None]
    near = (top_p < 1) & ((before - top_p).abs() < 1e-6)
    assert not ((found != wanted) & ~near).any(), f"rows {((found != wanted) & ~near).any(-1).nonzero().tolist()}"
    assert found.any(-1).all()
    masked = torch.where(found, logits.float(), float("-inf"))
    noise = definitions.sample(masked, given[0], *numbers(logits), len(HOW))[1]
    assert token.tolist() == noise.tolist()


@pytest.mark.parametrize("kind", ["bfloat16", pytest.param("flat", marks=pytest.mark.nightly)])
def test_a_cut_depends_on_its_row_alone(
    kind: str, device: torch.device, cuts: list[tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the batch, nor on the tiles, nor on how many programs share a row; its parameters are its request's."""
    torch.manual_seed(4)
    logits, given = KINDS[kind](len(HOW)).to(device), how(device)
    together = sampled(logits, *given)
    table = torch.arange(len(HOW), device=device).int().flip(0)
    seed, position = numbers(logits)
    more = dict(top_k=given[1].flip(0), top_p=given[2].flip(0), table=table)
    again = sample.sample(logits, given[0].flip(0), seed.flip(0), position, live(9, device), **more)[1]
    assert again[:9].equal(together[:9]) and (again[9:] == -1).all()
    for row in (2, 8):
        seed, position = (x[row : row + 1] for x in numbers(logits))
        one = [x[row : row + 1] for x in given]
        own = sample.sample(logits[row : row + 1], one[0], seed, position, live(1, device), top_k=one[1], top_p=one[2])[
            1
        ]
        assert own.item() == together[row].item()
        assert [x.item() for x in cuts[-1]] == [x[row].item() for x in cuts[0]]
    for block, capacity, programs in ((256, 64, 1000), (2048, 2048, 1))[: 1 if device.type == "cpu" else 2]:
        monkeypatch.setattr(top_k_top_p, "BLOCK", block)
        monkeypatch.setattr(top_k_top_p, "CAPACITY", capacity)
        monkeypatch.setattr(sample, "PROGRAMS", programs)
        assert sampled(logits, *given).equal(together)
        assert all(x.equal(y) for x, y in zip(cuts[-1], cuts[0], strict=True))


def test_min_p_is_of_what_is_left_and_nan_is_left_out(device: torch.device, cuts: list[tuple[Tensor, Tensor]]) -> None:
    logits, (_, top_k, top_p) = KINDS["skewed"](6).to(device), how(device, [0, 1, 2, 10, 12, 12])
    logits[1, ::3], logits[5] = NAN, float("-inf")
    heat, min_p = torch.full((6,), 3.0, device=device), torch.full((6,), 0.3, device=device)
    token = sampled(logits, heat, top_k, top_p, min_p=min_p)
    wanted, _ = definitions.cut(logits, heat, top_k, top_p)
    masked = torch.where(wanted, logits, float("-inf"))
    assert token.tolist() == definitions.sample(masked, heat, *numbers(logits), 6, min_p=min_p)[1].tolist()
