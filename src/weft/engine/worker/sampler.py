"""Samples tokens from logits. A request's tokens depend on its own logits, seed and position, never on the batch.

Every rank of a DP group samples for itself: the logits are the same bits on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.engine.kernels.staging import on_device
from weft.engine.messages.rank_messages import Adjust, Sampling
from weft.engine.worker.split_vocabulary import SplitVocabulary

LEADING = 512
"""Of so many tokens, the most probable, top_p alone is tried first. It rarely keeps more, and sorting all is slow."""


def sample(logits: Tensor, how: Sequence[Sampling], positions: Sequence[int], adjust: Mapping[int, Adjust]) -> Tensor:
    """Samples one token, int64 `[S]`, for each row of float32 logits `[S, vocabulary]`.

    `adjust` comes first: repetition (arXiv 1909.05858), added values, banned and masked tokens. Then come
    temperature, top_k, top_p (nucleus: the fewest most probable tokens that reach it; arXiv 1904.09751) and min_p
    (arXiv 2407.01082). The token is found by Gumbel-max, with noise from (seed, position, token): on GPUs by
    `weft.engine.kernels.triton.sample`, on CPUs by torch's generator, which is faster there. So a CPU samples
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
        return _best_on_gpu(logits, how, positions)[1].long()
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
    """Whether top_k or top_p leaves out tokens."""
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


def _best_on_gpu(
    logits: Tensor, how: Sequence[Sampling], positions: Sequence[int], split: SplitVocabulary | None = None
) -> tuple[Tensor, Tensor]:
    """(score, token) `[S]`, by the kernel that CUDA graphs use. split: the vocabulary, where the logits are a share."""
    from weft.engine.kernels.triton.sample import sample as sample_best  # a CPU need not have Triton

    device = logits.device
    columns = [[h.temperature for h in how], [h.top_p for h in how], [h.min_p for h in how]]
    temperature, top_p, min_p = on_device(columns, torch.float32, device)
    seed, position, top_k = on_device([[h.seed for h in how], positions, [h.top_k for h in how]], torch.int64, device)
    live = torch.full((1,), len(how), dtype=torch.int32, device=device)
    whole: dict[str, Any] = dict(min_p=min_p, top_k=top_k.int(), top_p=top_p)
    if split is not None:
        whole = dict(first=split.share.start)
    return sample_best(logits.contiguous(), temperature, seed, position, live, **whole)


def _cut(logits: Tensor, how: Sequence[Sampling], temperature: Tensor) -> Tensor:
    """Logits with −inf for what top_k and top_p leave out."""
    cut = logits.clone()
    for row, h in enumerate(how):
        if cuts(h):
            kept = _kept(logits[row] / temperature[row], h.top_k, h.top_p)
            cut[row] = float("-inf")
            cut[row, kept] = logits[row, kept]
    return cut


def _kept(scaled: Tensor, top_k: int, top_p: float) -> Tensor:
    """The tokens of a row `[vocabulary]` that top_k and then top_p keep: of equal ones, the lower first."""
    scaled = scaled.where(scaled == scaled, float("-inf"))
    count = min(top_k or LEADING, len(scaled))
    while True:
        threshold = scaled.topk(count, sorted=False).values.amin()
        tokens = (scaled >= threshold).nonzero()[:, 0]
        ordered, order = scaled[tokens].sort(descending=True, stable=True)
        ordered, tokens = ordered[:count], tokens[order[:count]]
        if top_p >= 1:
            return tokens
        probability = ordered.softmax(-1) if top_k else (ordered - scaled.logsumexp(-1)).exp()
        before = probability.cumsum(-1) - probability  # what the more probable tokens reach already
        gone = before >= top_p
        gone[0] = False
        if top_k or gone[-1] or count == len(scaled):
            return tokens[~gone]
        count = min(8 * count, len(scaled))


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return on_device(values, torch.float32, like.device)[:, None]


def _gumbel(how: Sampling, position: int, vocabulary: int) -> Tensor:
    # torch's CPU generator takes 32 bits of a seed: hash, so that all bits of ours count.
    seed = hashlib.blake2b(f"{how.seed}/{position}".encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed))
    return -torch.empty(vocabulary).exponential_(generator=generator).log()
