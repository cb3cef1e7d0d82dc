"""What passes between ranks that hold runs of a vocabulary: rows of logits, or each rank's best token of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.comm.transport import Transport
from weft.dcp.group import Gatherer
from weft.models.layers import vocabulary_share
from weft.place.cost import Offer
from weft.place.merge import plan_gather
from weft.place.spec import LayoutError, Mesh
from weft.place.vocabulary import BEST_BYTES, MOST_TOKENS


class SplitVocabulary:
    """A rank's end of an attn_tp group whose ranks hold the logits of their runs of the vocabulary for the same rows.

    size: tokens of the whole vocabulary; share: this rank's. Raises LayoutError where there are fewer tokens than
    ranks, or too many to be told apart.
    """

    def __init__(
        self,
        vocabulary: int,
        mesh: Mesh,
        rank: int,
        transports: Mapping[str, Transport],
        offers: Sequence[Offer],
    ):
        group = mesh.peers("attn_tp", rank)
        if not len(group) <= vocabulary <= MOST_TOKENS:
            raise LayoutError(f"a vocabulary of {vocabulary} tokens is not split over attn_tp={len(group)} ranks")
        self.size, self.share = vocabulary, vocabulary_share(mesh, rank, vocabulary)
        shares = [vocabulary_share(mesh, peer, vocabulary) for peer in group]
        self._sizes = [share.stop - share.start for share in shares]
        self._gather, self._offers = Gatherer(group, transports, offers), offers

    def moves(self, rows: int) -> list[tuple[str, str, str, int]]:
        """The gather of so many rows' best tokens, as `ModelRunner.moves` names what a step exchanges."""
        if not rows:
            return []
        ranks, size = len(self._sizes), rows * BEST_BYTES
        by = plan_gather(size, ranks, 1, self._offers).transport
        return [("head", f"all_gatherv best tokens · {by}", "attn_tp", size * (ranks - 1))]

    def whole(self, logits: Tensor) -> Tensor:
        """`[S, vocabulary]` of this rank's `[S, own]`."""
        ranks, widest, rows = len(self._sizes), max(self._sizes), len(logits)
        every = self._gather(F.pad(logits, (0, widest - logits.shape[1])), (rows,) * ranks).view(ranks, rows, widest)
        return torch.cat([part[:, :size] for part, size in zip(every, self._sizes, strict=True)], dim=-1)

    def best(self, score: Tensor, token: Tensor) -> Tensor:
        """int32 `[S]`: of all ranks' tokens the one with the highest score, of equal ones the lowest.

        token `[S]`, score `[S]`: this rank's best token of each row. Nothing here depends on what they hold, so that it
        may be captured in a CUDA graph.
        """
        if not len(score):
            return token.int()
        every = self.every(torch.stack((score.float(), token.float()), dim=-1))
        rank = every[..., 0].argmax(0, keepdim=True)  # the first of equal ones
        return every[..., 1].gather(0, rank)[0].int()

    def every(self, best: Tensor) -> Tensor:
        """float32 `[ranks, S, 2]`: what every rank gives for `[S, 2]`, its best token of each row behind its score."""
        ranks, rows = len(self._sizes), len(best)
        return self._gather(best.view(1, 2 * rows), (1,) * ranks).view(ranks, rows, 2)  # one run of bytes to send
