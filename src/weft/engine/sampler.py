"""Drawing tokens from logits. What a request gets depends on its own logits, seed and position, never on the batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.engine.messages import Drawn, Sampling, Score


def sample(logits: Tensor, requests: Sequence[int], how: Sequence[Sampling]) -> tuple[Drawn, ...]:
    """One token for each row of float32 logits `[S, vocabulary]`.

    repetition (arXiv 1909.05858), what is added, banned and masked tokens; then temperature, top_k, top_p (nucleus: the
    fewest most probable tokens that reach it; arXiv 1904.09751), min_p (arXiv 2407.01082). Draws by Gumbel-max,
    with noise from (seed, index). Logprobs are of the raw logits, before all of these.
    """
    if not how:
        return ()
    logprobs = torch.log_softmax(logits, dim=-1) if any(h.logprobs >= 0 for h in how) else None
    if changed := [row for row, h in enumerate(how) if h.repeated or h.added or h.banned or h.mask]:
        logits = logits.clone()
        for row in changed:
            logits[row] = _adjust(logits[row], how[row])
    tokens = logits.argmax(-1)
    random = [row for row, h in enumerate(how) if h.temperature > 0]
    if random:
        tokens[random] = _draw(logits[random], [how[row] for row in random])
    chosen = tokens.tolist()
    return tuple(
        Drawn(request, token)
        if logprobs is None or h.logprobs < 0
        else Drawn(request, token, logprobs[row, token].item(), _best(logprobs[row], h.logprobs))
        for row, (request, token, h) in enumerate(zip(requests, chosen, how, strict=True))
    )


def score(logits: Tensor, wanted: Score) -> tuple[tuple[float, tuple[tuple[int, float], ...]], ...]:
    """The logprob of each wanted token under its row of raw logits `[rows, vocabulary]`, with the best alternatives."""
    logprobs = torch.log_softmax(logits, dim=-1)
    return tuple(
        (row[token].item(), _best(row, wanted.logprobs)) for row, token in zip(logprobs, wanted.tokens, strict=True)
    )


def _adjust(logits: Tensor, how: Sampling) -> Tensor:
    """A row `[vocabulary]`, with what its request does to its logits."""
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
    return logits if torch.isfinite(logits).any() else raw


def _draw(logits: Tensor, how: Sequence[Sampling]) -> Tensor:
    vocabulary = logits.shape[-1]
    temperature = torch.tensor([max(h.temperature, 1e-5) for h in how])[:, None]  # below, logits would overflow
    top_p = torch.tensor([h.top_p for h in how])[:, None]
    top_k = torch.tensor([h.top_k or vocabulary for h in how])[:, None]
    ordered, order = (logits.cpu() / temperature).sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(vocabulary) >= top_k, float("-inf"))
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability  # what the more probable tokens reach already
    ordered = ordered.masked_fill((before >= top_p) & (top_p < 1), float("-inf"))
    min_p = torch.tensor([h.min_p for h in how])[:, None]
    ordered = ordered.masked_fill(probability < min_p * probability[:, :1], float("-inf"))
    noise = torch.stack([_gumbel(h, vocabulary) for h in how])
    # Noise belongs to the token, not to its rank, so that a near tie elsewhere does not change what is drawn.
    at = (ordered + noise.gather(-1, order)).argmax(-1, keepdim=True)
    return order.gather(-1, at)[:, 0].to(logits.device)


def _gumbel(how: Sampling, vocabulary: int) -> Tensor:
    # torch's CPU generator takes 32 bits of a seed: hash, so that all bits of ours count.
    seed = hashlib.blake2b(f"{how.seed}/{how.index}".encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed))
    return -torch.empty(vocabulary).exponential_(generator=generator).log()


def _best(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if not count:
        return ()
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    return tuple(zip(tokens.tolist(), values.tolist(), strict=True))
