"""Output of a step on the host: its sampled tokens and requested logprobs."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.engine.kernels.staging import on_device, to_host
from weft.engine.kv.tokens import HELD
from weft.engine.messages.rank_messages import GroupRows, Logprobs
from weft.engine.worker.draft_chain import Drafts
from weft.engine.worker.row_table import NO_TOKEN

T = TypeVar("T")


def sampled_logits(rows: GroupRows, logits: Tensor) -> Tensor:
    """Return the logits of sampled rows, from the logits of all wanted rows: only the last row of a scored chunk."""
    if not any(chunk.score for chunk in rows.chunks):
        return logits
    first = rows.decode_count
    at = list(range(first))
    for chunk in rows.chunks:
        first += chunk.count if chunk.score else int(chunk.samples)
        at += [first - 1] * chunk.samples
    return logits.index_select(0, on_device(at, torch.int64, logits.device))


class StepOutput:
    """Output of one step on one rank.

    `note_logprobs` and `note_prompt_logprobs` are for the rank that reports its group's logprobs. Then `copy`
    begins the copies to the host. `tokens` and `logprobs` wait for them, on any thread.

    Args:
        rows: the step.
        tokens: int32 `[S]`, sampled tokens on the device.
        read_tokens: waits for tokens that need no copy, and returns them; None: tokens are copied.
        accepted: `Result.accepted`.

    Attributes:
        drafts: drafts of the draft layer, set before `copy`.
        held: number of drafts of each sampling row that are found later.
        begin: checksum before the tokens'.
    """

    drafts: Drafts | None = None
    held: Sequence[int] = ()
    begin = 0

    def __init__(
        self,
        rows: GroupRows,
        tokens: Tensor,
        read_tokens: Callable[[], np.ndarray] | None = None,
        accepted: tuple[int, ...] = (),
    ):
        self._rows, self._tokens, self._read_tokens, self.accepted = rows, tokens, read_tokens, accepted
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []
        self._counts: list[Sequence[int]] = []
        self._sampled_at: list[int] = []

    def note_prompt_logprobs(self, logits: Tensor) -> None:
        """Note logprobs of the chunks' own tokens. logits: of all wanted rows of the step."""
        first = self._rows.decode_count
        for chunk in self._rows.chunks:
            if chunk.score:
                tokens = on_device(chunk.score.tokens, torch.int64, logits.device)
                self._note(logits[first : first + len(tokens)], tokens, [chunk.score.logprobs] * len(tokens))
            first += chunk.count if chunk.score else int(chunk.samples)

    def note_logprobs(self, logits: Tensor, of: Sequence[int] | None = None) -> None:
        """Note requested logprobs of sampled tokens.

        logits: of all sampled rows, or of the sampled rows `of`, which include all rows with requests.
        """
        limits = {at: adjust.logprobs for at, adjust in self._rows.adjust if adjust.logprobs >= 0}
        self._sampled_at = sorted(limits)
        if self._sampled_at:
            at = on_device(self._sampled_at, torch.int64, logits.device)
            tokens = self._tokens.index_select(0, at).long().clamp(min=0)
            if of is not None:
                at = on_device([of.index(i) for i in self._sampled_at], torch.int64, logits.device)
            self._note(logits.index_select(0, at), tokens, [limits[i] for i in self._sampled_at])

    def _note(self, logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> None:
        logprobs = torch.log_softmax(logits, dim=-1)
        values, best = logprobs.topk(min(max(counts), logits.shape[-1]))
        self._found.append((logprobs.gather(-1, tokens[:, None])[:, 0], values, best))
        self._counts.append(counts)

    def copy(self) -> None:
        """Begin the copies to the host."""
        if self._read_tokens is None:
            copied = to_host([self._tokens])
            self._read_tokens = lambda: copied()[0].numpy()
        if self.drafts is not None:
            self._wait_for_drafts = to_host([self.drafts.tokens])
        if self._found:
            self._wait = to_host([tensor for tensors in self._found for tensor in tensors])

    def tokens(self) -> tuple[tuple[int, ...], int]:
        """Wait for the tokens of `Result`, and the checksum of all sampled ones. Raises AssertionError for a row
        without a last token."""
        assert self._read_tokens is not None, "nothing was copied"
        sampled = self._read_tokens()
        tokens = sampled.tolist()
        if NO_TOKEN in tokens:
            row = self._rows.sampled_rows[tokens.index(NO_TOKEN)]
            raise AssertionError(f"row {row} of the table was stepped without a last token")
        checksum = zlib.crc32(sampled.tobytes(), self.begin)
        if self.drafts is not None:
            checksum = zlib.crc32(self._wait_for_drafts()[0].numpy().tobytes(), checksum)
        return self._kept(tuple(tokens)), checksum

    def proposed(self) -> tuple[tuple[int, ...], ...]:
        """Return `Result.drafts`, after `tokens`."""
        if self.drafts is None:
            return tuple((HELD,) * count for count in self.held)
        each = zip(self._wait_for_drafts()[0].t().tolist(), self.drafts.counts, strict=True)
        return tuple(tuple(drafts[:count]) for drafts, count in each)

    def _kept(self, each: tuple[T, ...]) -> tuple[T, ...]:
        """Return the values of sampled tokens without those after a rejected draft."""
        if not self.accepted:
            return each
        values = iter(each)
        counts = itertools.zip_longest(self.accepted, self._rows.decode_tokens, fillvalue=1)
        return tuple(value for kept, count in counts for value in [*itertools.islice(values, count)][:kept])

    def logprobs(self) -> tuple[tuple[Logprobs | None, ...], list[tuple[Logprobs, ...]]]:
        """Wait for the logprobs of `Result`, and for a tuple of logprobs per scored chunk."""
        if not self._found:
            return (), []
        lists = [tensor.tolist() for tensor in self._wait()]
        read = []
        for *tensors, counts in zip(lists[::3], lists[1::3], lists[2::3], self._counts, strict=True):
            columns = zip(*tensors, counts, strict=True)
            read.append(tuple((v, tuple(zip(best[:n], values[:n], strict=True))) for v, values, best, n in columns))
        if not self._sampled_at:
            return (), read
        sampled: list[Logprobs | None] = [None] * len(self._rows.sampled_rows)
        for at, logprobs in zip(self._sampled_at, read.pop(), strict=True):
            sampled[at] = logprobs
        return self._kept(tuple(sampled)), read
