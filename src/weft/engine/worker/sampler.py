"""Sampling of tokens from logits. A request's tokens depend on its own logits, seed and position, never on the batch.

Every rank of a DP group samples for itself: the logits have the same bits on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.engine.kernels.staging import on_device
from weft.engine.messages.rank_messages import Adjust, GroupRows, Sampling
from weft.engine.worker.device_rows import DeviceRows
from weft.engine.worker.row_table import NO_TOKEN, RowTable
from weft.engine.worker.split_vocabulary import SplitVocabulary

LEADING = 512
"""Number of most probable tokens to try first for top_p alone: it rarely keeps more, and a full sort is slow."""


class Sampler:
    """Sampler of a rank's eager steps, and of rows that graphs cannot sample.

    vocabulary: the split vocabulary; None if it is not split.

    Attributes:
        state: table on the device, for sampling by the kernels of graphs; None: sampling by torch.
    """

    state: DeviceRows | None = None

    def __init__(self, table: RowTable, vocabulary: SplitVocabulary | None = None):
        self._table, self._vocabulary = table, vocabulary

    def beyond(self, group_rows: GroupRows, greedy: bool = False) -> list[int]:
        """List the sampled rows that need full logits after a graph or a share; the same on all ranks of a group.
        greedy: the graph samples greedily."""
        adjusted, shaped = {at for at, _ in group_rows.adjust}, self._table.random if greedy else self._table.shaped
        if not (adjusted or shaped):
            return []
        return [at for at, row in enumerate(group_rows.sampled_rows) if at in adjusted or row in shaped]

    def sample(
        self,
        group_rows: GroupRows,
        logits: Tensor,
        full: bool = True,
        tokens: Tensor | None = None,
        again: Sequence[int] = (),
    ) -> Tensor:
        """Sample the tokens of a step, int32 `[S]`, which become the rows' last tokens.

        A row that ran without a last token gets NO_TOKEN, so that every reader of the tokens sees the fault.

        Args:
            group_rows: the step.
            logits: float32 `[S, vocabulary]` of its sampled rows, or this rank's share of them.
            full: False: `logits` are a share, and no row is `beyond` it.
            tokens: tokens sampled by a graph, to be replaced for the sampled rows `again`, the rows of `logits`.
        """
        sampled, last_token, split = group_rows.sampled_rows, self._table.last_token, self._vocabulary
        again = again if tokens is not None else list(range(len(sampled)))
        rows, asked = [sampled[i] for i in again], dict(group_rows.adjust)
        how = [self._table.rows[row].sampling for row in rows]
        behind = dict(enumerate(later for n in group_rows.decode_tokens for later in reversed(range(n))))
        # A row's length is the position of its last token; `behind` counts later tokens of the row.
        positions = [self._table.rows[sampled[i]].length - behind.get(i, 0) for i in again]
        places, table, position = on_device([again, rows, positions], torch.int64, logits.device)
        if tokens is None:
            tokens = last_token.index_select(0, table)
            tokens[group_rows.decode_count :] = 0  # prompts have no last token
        adjust = {i: asked[at] for i, at in enumerate(again) if at in asked}
        if full or split is None:
            logits, state = adjusted(logits, adjust), self.state
            found = state.sample(logits, table, position)[1] if state else sample(logits, how, positions, {})
        elif self.state:
            found = split.best(*self.state.sample(logits, table, position, split.share.start))
        else:
            best = (scores := _scores(logits, how, positions, split)).argmax(-1, keepdim=True)
            found = split.best(scores.gather(-1, best)[:, 0], best[:, 0] + split.share.start)
        found = torch.where(tokens.index_select(0, places) < 0, NO_TOKEN, found.int())
        last_token.index_copy_(0, table, found)  # of rows with drafts, `RowTable.accept` finds the last token
        return tokens.index_copy_(0, places, found)


def adjusted(logits: Tensor, adjust: Mapping[int, Adjust]) -> Tensor:
    """Return logits `[S, vocabulary]` with the adjustments of rows: repetition (arXiv 1909.05858), added values, banned
    and masked tokens."""
    if changed := [row for row, a in adjust.items() if a.repeated or a.added or a.banned or a.mask]:
        logits = logits.clone()
        for row in changed:
            logits[row] = _adjust(logits[row], adjust[row])
    return logits


def sample(logits: Tensor, how: Sequence[Sampling], positions: Sequence[int], adjust: Mapping[int, Adjust]) -> Tensor:
    """Sample one token, int64 `[S]`, for each row of logits by torch, after the adjustments of `adjusted`.

    Temperature comes first, then top_k, top_p (nucleus: the fewest most probable tokens that reach it; arXiv
    1904.09751) and min_p (arXiv 2407.01082). The token is found by Gumbel-max, with noise from (seed, position, token).
    The noise is torch's: faster on CPUs than the noise of `weft.engine.kernels.triton.sample`, so GPUs sample other
    tokens.

    Args:
        logits: float32 `[S, vocabulary]`.
        how: sampling parameters of each row.
        positions: positions of the sampled tokens in their sequences.
        adjust: adjustments by row, for rows that have some.
    """
    return _scores(adjusted(logits, adjust), how, positions).argmax(-1)


def _adjust(logits: Tensor, how: Adjust) -> Tensor:
    """Return a row `[vocabulary]` of logits with its adjustments."""
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
        masked = may.flatten()[: len(logits)].logical_not().to(logits.device)
        logits[masked], raw[masked] = float("-inf"), float("-inf")
    # If bans exclude all tokens allowed by the mask, ignore the bans.
    return torch.where(torch.isfinite(logits).any(), logits, raw)


def _scores(
    logits: Tensor, how: Sequence[Sampling], positions: Sequence[int], split: SplitVocabulary | None = None
) -> Tensor:
    """Return scores of logits; each row's maximum is its token. A token's noise does not depend on its rank."""
    random = [row for row, h in enumerate(how) if h.temperature > 0]
    if not random:
        return logits
    scores, chosen = logits.clone(), [how[row] for row in random]
    temperature, min_p = torch.tensor([[h.temperature, h.min_p] for h in chosen], dtype=torch.float32).split(1, -1)
    temperature = temperature.clamp(min=1e-5)  # below, logits would overflow
    scaled = _cut(logits[random], chosen, temperature) / temperature
    threshold = scaled.amax(-1, keepdim=True) + min_p.log()
    scaled = scaled.masked_fill((min_p > 0) & (scaled < threshold), float("-inf"))
    vocabulary, share = (logits.shape[-1], slice(None)) if split is None else (split.size, split.share)
    noise = [_gumbel(h, positions[row], vocabulary)[share] for h, row in zip(chosen, random, strict=True)]
    scores[random] = scaled + torch.stack(noise)
    return scores


def _cut(logits: Tensor, how: Sequence[Sampling], temperature: Tensor) -> Tensor:
    """Return logits with −inf for tokens excluded by top_k and top_p."""
    cut = logits.clone()
    for row, h in enumerate(how):
        if h.top_k > 0 or h.top_p < 1:
            tokens_kept = _top_tokens(logits[row] / temperature[row], h.top_k, h.top_p)
            cut[row] = float("-inf")
            cut[row, tokens_kept] = logits[row, tokens_kept]
    return cut


def _top_tokens(scaled: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return the tokens of a row `[vocabulary]` kept by top_k and then top_p; among equals, lower tokens first."""
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
        before = probability.cumsum(-1) - probability  # sum of the more probable tokens
        masked = before >= top_p
        masked[0] = False
        if top_k or masked[-1] or count == len(scaled):
            return tokens[~masked]
        count = min(8 * count, len(scaled))


def _gumbel(how: Sampling, position: int, vocabulary: int) -> Tensor:
    # torch's CPU generator uses 32 bits of a seed: hash, so that all bits of the request's seed count.
    seed = hashlib.blake2b(f"{how.seed}/{position}".encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(seed))
    return -torch.empty(vocabulary).exponential_(generator=generator).log()
