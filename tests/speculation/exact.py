"""Exact distribution of sampled tokens, written apart from the sampler, and chi-square against it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LEAST_EXPECTED = 5.0
"""Minimum expected samples of a cell of chi-square. Rarer outcomes are one cell together."""


def probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Return the probabilities, float64 `[vocabulary]`, of a row of logits with its penalties and bias."""
    scaled = logits.double() / temperature
    order = scaled.argsort(descending=True)
    p = scaled.softmax(-1)
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    p[order[p[order].cumsum(0) - p[order] >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


class Fit(NamedTuple):
    """Chi-square of samples. chance: of a larger one, if they have the distribution."""

    chi_square: float
    freedom: int
    chance: float


def fit(counts: Tensor, p: Tensor) -> Fit:
    """Compare counts of outcomes, int64, with their probabilities `p`, float64 of the same shape."""
    assert not counts[p == 0].any(), "an outcome without probability was sampled"
    expected, order = (counts.sum() * p)[p > 0].sort()
    found, rare = counts[p > 0][order].double(), int((expected < LEAST_EXPECTED).sum())
    while rare and rare < len(expected) and expected[:rare].sum() < LEAST_EXPECTED:
        rare += 1
    first = max(rare - 1, 0)  # cell of all rare outcomes
    expected[first], found[first] = expected[: first + 1].sum(), found[: first + 1].sum()
    chi_square = ((found - expected) ** 2 / expected)[first:].sum()
    freedom = len(expected) - first - 1
    chance = torch.special.gammaincc(torch.tensor(freedom / 2).double(), chi_square / 2).item() if freedom else 1.0
    return Fit(chi_square.item(), freedom, chance)
