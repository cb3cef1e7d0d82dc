"""Samples tokens from logits. A request's tokens depend on its own logits, seed and position, never on the batch.

Every rank of a DP group samples for itself: the logits are the same bits on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.engine.device import on_device
from weft.engine.messages import Adjust, Sampling
from weft.engine.worker.split_vocabulary import SplitVocabulary


def sample(logits: Tensor, how: Sequence[Sampling], positions: Sequence[int], adjust: Mapping[int, Adjust]) -> Tensor:
    """Samples one token, int64 `[S]`, for each row of float32 logits `[S, vocabulary]`.

    `adjust` comes first: repetition (arXiv 1909.05858), added values, banned and masked tokens. Then come
    temperature, top_k, top_p (nucleus: the fewest most probable tokens that reach it; arXiv 1904.09751) and min_p
    (arXiv 2407.01082). The token is found by Gumbel-max, with noise from (seed, position, token): on GPUs by
    `weft.kernels.triton.sample`, on CPUs by torch's generator, which is faster there. So a CPU samples
    other tokens than a GPU.

    Args:
        logits: of the rows.
        how: the sampling parameters of each row.
        positions: of the sampled tokens in their sequences.
        adjust: by row, for rows that need it.
    """
    if changed := [row for row, a in adjust.items() if a.repeated or a.added or a.banned or a.mask]:
        logits = logits.clone()
        for row in changed:
            logits[row] = _adjust(logits[row], adjust[row])
    if logits.is_cuda:
        return _sample_on_gpu(logits, how, positions)
    tokens = logits.argmax(-1)
    if random := [row for row, h in enumerate(how) if h.temperature > 0]:
        tokens[random] = _sample_rows(logits[random], [how[row] for row in random], [positions[row] for row in random])
    return tokens


def sample_share(logits: Tensor, how: Sequence[Sampling], positions: Sequence[int], split: SplitVocabulary) -> Tensor:
    """The same, int32 `[S]`, by temperature alone, from this rank's share `[S, own]` of the vocabulary.

    Of each row only the rank's best token and its score travel. Noise belongs to the token, whichever rank has it.
    """
    if logits.is_cuda:
        return split.best(*_best_on_gpu(logits, how, positions, split))
    return split.best(*_best_of_share(logits, how, positions, split))


def cuts(how: Sampling) -> bool:
    """Whether sampling needs a sort: for top_k or top_p."""
    return how.temperature > 0 and (how.top_k > 0 or how.top_p < 1)


def _adjust(logits: Tensor, how: Adjust) -> Tensor:
    """A row `[vocabulary]` of logits with its adjustments."""
    if how.repeated:
        at = torch.tensor(how.repeated, device=logits.device)
        values = logits[at]
        logits[at] = torch.where(values > 0, values / how.repetition, values * how.repetition)
    if how.added:
        at = torch.tensor([token for token, _ in how.added], device=logits.device)
        logits[at] += torch.tensor([value for _, value in how.added], device=logits.device)
    raw = logits.clone()
    logits[list(how.banned)] = float("-inf")
    if how.mask:
        packed = torch.frombuffer(bytearray(how.mask), dtype=torch.uint8)
        may = (packed[:, None] >> torch.arange(8)) & 1
        gone = may.flatten()[: len(logits)].logical_not().to(logits.device)
        logits[gone], raw[gone] = float("-inf"), float("-inf")
    # Where bans leave nothing of what the mask allows, the mask counts.
    return torch.where(torch.isfinite(logits).any(), logits, raw)


def _sample_rows(logits: Tensor, how: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    temperature, min_p = _column([h.temperature for h in how], logits), _column([h.min_p for h in how], logits)
    temperature = temperature.clamp(min=1e-5)  # below, logits would overflow
    if any(map(cuts, how)):
        logits = _cut(logits, how, temperature)
    scaled = logits / temperature
    threshold = scaled.amax(-1, keepdim=True) + min_p.log()
    scaled = scaled.masked_fill((min_p > 0) & (scaled < threshold), float("-inf"))
    noise = torch.stack([_gumbel(h, at, logits.shape[-1]) for h, at in zip(how, positions, strict=True)])
    return (scaled + noise).argmax(-1)


def _best_of_share(
    logits: Tensor, how: Sequence[Sampling], positions: Sequence[int], split: SplitVocabulary
) -> tuple[Tensor, Tensor]:
    """(score, token) `[S]`: each row's best token of a share."""
    scores = logits.clone()
    for row, (h, at) in enumerate(zip(how, positions, strict=True)):
        if h.temperature > 0:
            scores[row] = logits[row] / max(h.temperature, 1e-5) + _gumbel(h, at, split.size)[split.share]
    token = scores.argmax(-1)
    return scores.gather(-1, token[:, None])[:, 0], token + split.share.start


def _sample_on_gpu(logits: Tensor, how: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    if any(map(cuts, how)):
        logits = _cut(logits, how, _column([h.temperature for h in how], logits).clamp(min=1e-5))
    return _best_on_gpu(logits, how, positions)[1].long()


def _best_on_gpu(
    logits: Tensor, how: Sequence[Sampling], positions: Sequence[int], split: SplitVocabulary | None = None
) -> tuple[Tensor, Tensor]:
    """(score, token) `[S]`, by the kernel that CUDA graphs use. split: the vocabulary, where the logits are a share."""
    from weft.kernels.triton.sample import sample as sample_best  # a CPU need not have Triton

    device = logits.device
    temperature, min_p = on_device([[h.temperature for h in how], [h.min_p for h in how]], torch.float32, device)
    seed, position = on_device([[h.seed for h in how], positions], torch.int64, device)
    live = torch.full((1,), len(how), dtype=torch.int32, device=device)
    whole: dict[str, Any] = dict(min_p=min_p) if split is None else dict(first=split.share.start)
    return sample_best(logits.contiguous(), temperature, seed, position, live, **whole)


def _cut(logits: Tensor, how: Sequence[Sampling], temperature: Tensor) -> Tensor:
    """Logits with −inf for what top_k and top_p leave out."""
    vocabulary = logits.shape[-1]
    top_k, top_p = _column([h.top_k or vocabulary for h in how], logits), _column([h.top_p for h in how], logits)
    ordered, order = (logits / temperature).sort(dim=-1, descending=True, stable=True)
    behind = torch.arange(vocabulary, device=logits.device) >= top_k
    probability = ordered.masked_fill(behind, float("-inf")).softmax(-1)
    before = probability.cumsum(-1) - probability  # what the more probable tokens reach already
    gone = behind | ((before >= top_p) & (top_p < 1))
    return logits.masked_fill(torch.zeros_like(gone).scatter_(-1, order, gone), float("-inf"))


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return on_device(values, torch.float32, like.device)[:, None]


def _gumbel(how: Sampling, position: int, vocabulary: int) -> Tensor:
    # torch's CPU generator takes 32 bits of a seed: hash, so that all bits of ours count.
    seed = hashlib.blake2b(f"{how.seed}/{position}".encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed))
    return -torch.empty(vocabulary).exponential_(generator=generator).log()
