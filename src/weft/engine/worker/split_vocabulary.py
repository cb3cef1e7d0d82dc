"""Exchanges of ranks with shares of a vocabulary: rows of logits, or each rank's best token of a row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.engine.models.layers.basic import vocabulary_share
from weft.planner.chain import bucket
from weft.planner.spec import LayoutError, Mesh
from weft.planner.vocabulary import MAX_TOKENS, best_tokens, logit_rows
from weft.stream.block_exchanges import BlockExchanges


class SplitVocabulary:
    """A rank's exchanges in an attn_tp group; each rank has the logits of its share of the vocabulary, for equal rows.

    size: tokens of the whole vocabulary; share: this rank's range. Raises LayoutError for fewer tokens than ranks, or
    more than float32 can number.
    """

    def __init__(self, vocabulary: int, mesh: Mesh, rank: int, exchanges: BlockExchanges):
        ranks = mesh.peers("attn_tp", rank)
        if not len(ranks) <= vocabulary <= MAX_TOKENS:
            raise LayoutError(f"a vocabulary of {vocabulary} tokens is not split over attn_tp={len(ranks)} ranks")
        self.size, self.share = vocabulary, vocabulary_share(mesh, rank, vocabulary)
        shares = [vocabulary_share(mesh, peer, vocabulary) for peer in ranks]
        self._sizes = [share.stop - share.start for share in shares]
        self._exchanges = exchanges

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Gather logits `[S, vocabulary]` from each rank's `[S, own]`."""
        ranks, widest, rows = len(self._sizes), max(self._sizes), len(logits)
        padded, what = F.pad(logits, (0, widest - logits.shape[1])), logit_rows(self.size, ranks)
        gathered = self._exchanges.gather(what, "attn_tp", padded, (rows,) * ranks).view(ranks, rows, widest)
        return torch.cat([part[:, :size] for part, size in zip(gathered, self._sizes, strict=True)], dim=-1)

    def best(self, score: Tensor, token: Tensor) -> Tensor:
        """Return int32 `[S]`: each row's token with the highest score on all ranks; among equals, the lowest token.

        token `[S]`, score `[S]`: this rank's best token of each row. The code does not depend on their values, so a
        CUDA graph can capture it.
        """
        if not len(score):
            return token.int()
        gathered = self.gather_best(torch.stack((score.float(), token.float()), dim=-1))
        rank = gathered[..., 0].argmax(0, keepdim=True)  # among equals the first
        return gathered[..., 1].gather(0, rank)[0].int()

    def gather_best(self, best: Tensor) -> Tensor:
        """Gather float32 `[ranks, S, 2]` from each rank's `[S, 2]`: score and number of each row's best token."""
        ranks, rows = len(self._sizes), len(best)
        what = best_tokens(max(bucket((rows,))))  # as planned
        return self._exchanges.gather(what, "attn_tp", best.view(1, 2 * rows), (1,) * ranks).view(ranks, rows, 2)
