"""Drafts of running sequences: how many are proposed, and counts of those that were accepted.

Ranks sample a token at the position of each draft as they would without drafts, with the noise of that position, and
accept the draft if it is equal. So outputs do not depend on drafts, and a wrong draft costs only time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from weft.engine.kv.tokens import token_array
from weft.engine.speculation.sources import DraftSource

DRAFT_COST, SEARCH_COST = 0.2, 0.1
"""Estimated cost of a draft, and of a search without result, in decode steps of one token. A draft costs less where the
weights' reads dominate, and more on CPUs with experts."""
WEIGHT = 1 / 8
"""Weight of the last step in a sequence's mean gain."""
FIRST_GAIN, PROBE_GAIN, MIN_GAIN = 1.0, 0.25, 0.0
"""Mean gain of a new sequence, and after a pause; a sequence below the minimum pauses. With three rejected drafts a
step, the first pause begins after 8 steps, and later ones after 3."""
MIN_PAUSE, MAX_PAUSE = 32, 256
"""Tokens of a pause. Each pause is twice as long as the one before, unless drafts paid in between."""


class Speculation:
    """Drafts of an engine. source: None: ranks propose. max_drafts, step_drafts: maximum drafts of a row, and of a DP
    group's step.

    Attributes:
        drafted, accepted: drafts so far by position in their row.
    """

    def __init__(self, source: DraftSource | None, max_drafts: int, step_drafts: int):
        self.source, self.max_drafts, self.step_drafts = source, max_drafts, step_drafts
        self.drafted, self.accepted = [0] * max_drafts, [0] * max_drafts


@dataclass(slots=True)
class Drafting:
    """Drafts of one sequence, which pauses while they do not pay.

    Attributes:
        gain: moving average of saved steps per step.
        resumes: number of the sequence's tokens from which it drafts.
        pause: tokens of its next pause.
        given: drafts of the ranks for the next step alone.
    """

    speculation: Speculation
    gain: float = FIRST_GAIN
    resumes: int = 0
    pause: int = MIN_PAUSE
    given: Sequence[int] = ()

    def propose(self, tokens: array[int], limit: int) -> array[int]:
        """Return up to `limit` drafts."""
        count, source, given, self.given = (
            min(limit, self.speculation.max_drafts),
            self.speculation.source,
            self.given,
            (),
        )
        return token_array((given if source is None or not count else source.propose(tokens, count))[:count])

    def note(self, drafted: int, accepted: int, tokens: int) -> None:
        """Count the drafts of a step.

        Args:
            drafted: number of drafts, perhaps 0 although drafts were sought.
            accepted: number of the first ones that were accepted.
            tokens: tokens of the sequence before the step.
        """
        counts = self.speculation
        for at in range(drafted):
            counts.drafted[at] += 1
            counts.accepted[at] += at < accepted
        self.gain += (accepted - (DRAFT_COST * drafted or SEARCH_COST) - self.gain) * WEIGHT
        if self.gain >= FIRST_GAIN:
            self.pause = MIN_PAUSE
        if self.gain < MIN_GAIN:
            self.gain, self.resumes = PROBE_GAIN, tokens + self.pause
            self.pause = min(2 * self.pause, MAX_PAUSE)
