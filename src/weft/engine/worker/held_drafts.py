"""Drafts that a rank holds for its next step. Their passes run while the controller schedules it: on a CPU after the
step's result is sent, on a GPU from before. The controller knows their number, and encodes each as HELD.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from weft.engine.kv.tokens import HELD, token_array
from weft.engine.messages.rank_messages import GroupRows
from weft.engine.worker.draft_chain import Drafts


class HeldDrafts:
    """Passes of a draft layer that are due, and the drafts that they find.

    queues: the device runs passes while the host goes on.

    Attributes:
        checksum: of the drafts of the last passes; ranks of a DP group compare it with the next step's tokens.
    """

    def __init__(self, queues: bool = False) -> None:
        self._queues = queues
        self._due: tuple[GroupRows, Callable[[], Drafts | None]] | None = None
        self._of_rows, self.checksum = dict[int, Sequence[int]](), 0

    def put_off(self, rows: GroupRows, run: Callable[[], Drafts | None]) -> None:
        """Let `run` run the passes of a step with these rows later, or queue them now."""
        if self._queues:
            found = run()
            self._due = rows, lambda: found
        else:
            self._due = rows, run

    def run(self) -> None:
        """Run the passes that are due, before anything that changes the step's tensors."""
        if self._due is not None:
            (rows, run), self._due = self._due, None
            found = run()
            each = [] if found is None else found.tokens.t().tolist()
            self._of_rows = dict(zip(rows.sampling_rows, each, strict=False))
            self.checksum = zlib.crc32(repr(each).encode()) if each else 0

    def filled(self, rows: GroupRows) -> GroupRows:
        """Return a step's rows with the drafts that they hold."""
        if not (rows.drafts and token_array(rows.drafts[:4])[0] == HELD):
            return rows
        drafts = token_array(())
        for row, tokens in rows.decode_each:
            drafts.extend(self._of_rows[row][: tokens - 1] if tokens > 1 else ())
        return replace(rows, drafts=drafts.tobytes())
