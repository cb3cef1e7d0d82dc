"""One DP group's part of a step on the controller: its message, and who gets its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain, islice, repeat

from weft.engine.kv.manager import CacheAllocation
from weft.engine.messages.rank_messages import GroupRows, Logprobs, Result, Scored
from weft.engine.messages.request import Sequence


@dataclass(eq=False, slots=True)
class Scheduled:
    """One DP group's part of a step.

    Allocations tell whether a sequence ended or was preempted meanwhile: it then has another one, or none.

    Attributes:
        sampled: sequences that get tokens, in the order of `Result.tokens`, with their allocations.
        scores: sequences that get prompt logprobs, in the order of `Result.scored`, with their allocations.
    """

    rows: GroupRows
    sampled: list[tuple[Sequence, CacheAllocation]]
    scores: list[tuple[Sequence, CacheAllocation]]

    def take_tokens(self, result: Result) -> Iterator[tuple[Sequence, int, Logprobs | None]]:
        """Yield (sequence, token, its logprobs) of sequences that still run; the tokens are no longer pending."""
        logprobs = result.logprobs or repeat(None, len(result.tokens))
        for (sequence, allocation), drafts in zip(self.sampled, result.drafts, strict=bool(result.drafts)):
            if sequence.allocation is allocation and sequence.drafting is not None:
                sequence.drafting.given = drafts
        if result.accepted:
            yield from self._take_accepted(result.accepted, zip(result.tokens, logprobs, strict=True))
            return
        for (sequence, allocation), token, known in zip(self.sampled, result.tokens, logprobs, strict=True):
            if sequence.allocation is allocation:
                sequence.pending -= 1
                if sequence.drafts is not None:
                    sequence.note_drafts(0)
                yield sequence, token, known

    def _take_accepted(
        self, accepted: Seq[int], values: Iterator[tuple[int, Logprobs | None]]
    ) -> Iterator[tuple[Sequence, int, Logprobs | None]]:
        """Yield the `values` of a step with drafts. Rejected drafts no longer count as computed."""
        ran = chain(self.rows.decode_tokens, repeat(1))
        for (sequence, allocation), tokens, count in zip(self.sampled, ran, accepted, strict=False):
            own = [*islice(values, count)]
            if sequence.allocation is allocation:
                sequence.pending -= tokens
                sequence.computed -= tokens
                if sequence.drafts is not None:
                    sequence.note_drafts(count - 1)
            for token, known in own:
                if sequence.allocation is allocation:  # else it ended with the token before
                    sequence.computed += 1
                    yield sequence, token, known

    def scored(self, result: Result) -> Iterator[tuple[Sequence, Scored]]:
        """Yield (sequence, prompt logprobs) of sequences that still run."""
        for (sequence, allocation), scored in zip(self.scores, result.scored, strict=True):
            if sequence.allocation is allocation:
                yield sequence, scored
