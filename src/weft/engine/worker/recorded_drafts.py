"""`DraftGraphs` of CPUs: passes as recorded calls, one recording per number of sequences, made before its first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from weft.engine.kernels import cpu_ops
from weft.engine.messages.rank_messages import GroupRows
from weft.engine.worker.draft_graphs import CapturedPass, CapturePass, DraftGraphs, DraftInputs
from weft.engine.worker.graph_inputs import SampledRows
from weft.stream.step_rows import CapturedRows


class RecordedDraftInputs(DraftInputs):
    """`DraftInputs` of passes that are recorded on CPUs."""

    _step_in = staticmethod(cpu_ops.step_in)


class RecordedDrafts(DraftGraphs):
    """Recorded passes of a rank's draft layer. They overwrite the logits of their step."""

    inputs_type = RecordedDraftInputs

    def prepare(self, groups: Sequence[GroupRows], empty: Callable[[int], CapturedRows], capture: CapturePass) -> None:
        """Record further passes behind a step with these `groups`, unless they are. It overwrites the recorder's memory
        and the states, so it comes before the step.

        empty: returns counts of no rows with a capacity. capture: records a pass.
        """
        if (count := max(group.sampling_count for group in groups)) not in self._next:
            self.capture_next(count, empty(count), capture)

    def _next_of(self, sequences: int) -> CapturedPass:
        return self._next[sequences]

    def _best(self, logits: Tensor) -> Tensor:
        return cpu_ops.best(logits)

    def _sample(self, logits: Tensor, sampled: SampledRows) -> None:
        rows, best = self._inputs.rows, self._best(logits)[None]
        state = rows.last_token, rows.length, self._found, rows.steps, self._ring
        cpu_ops.step_out(sampled.rows, sampled.live, best, sampled.lengths, *state)
