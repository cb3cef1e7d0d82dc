"""`StepGraphs` of CPUs: decode steps as recorded calls, one recording per number of rows, made before its first use.

All ranks know the rows of all groups, so they record at the same step. A recording is made with zero live rows, which
leaves no trace. Rows of DP groups with fewer rows are padding, and so are all rows of an idle group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.engine.kernels import cpu_ops
from weft.engine.messages.rank_messages import GroupRows
from weft.engine.worker.draft_graphs import CapturedPass, Pass
from weft.engine.worker.graph_inputs import SampledRows, Shape
from weft.engine.worker.recorded_drafts import RecordedDrafts
from weft.engine.worker.recorder import NotRecordable, Recorder, StepRecording
from weft.engine.worker.step_graphs import StepGraphs
from weft.planner.chain import Counts
from weft.stream.step_rows import CapturedRows

_log = logging.getLogger(__name__)


class RecordedSteps(StepGraphs):
    """Recorded steps of a rank. Rows with a temperature are sampled again after a step.

    Attributes:
        refusal: reason why steps run eagerly; None: they are recorded.
        drafts: passes of the draft layer behind the steps; None: it has none.
    """

    greedy = True
    drafts: RecordedDrafts | None = None

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._recorder, self.refusal = Recorder(), None if self.shapes else "there are more DP groups than rows"

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Record the smallest step, to find whether the model can be recorded. Collective."""
        if self.shapes:
            self._record(self.shapes[0])

    def shape_of(self, groups: Sequence[GroupRows], counts: Counts) -> Shape | None:
        """See `StepGraphs.shape_of`. Records the step if it is the first of its shape."""
        shape = None if self.refusal else super().shape_of(groups, counts)
        if shape is not None and shape not in self._graphs:
            self._record(shape)
        if self.drafts is not None and shape in self._graphs:
            self.drafts.prepare(groups, self.empty_rows, self.capture_pass)
        return shape if shape in self._graphs else None

    @torch.inference_mode()
    def _record(self, shape: Shape) -> None:
        recorder, counts = self._recorder, self.empty_rows(shape.rows)
        step = int(self._rows.steps)
        try:
            with self._recording() as recording:
                logits = self._step(shape, counts)
            if self.drafts is not None:
                self.drafts.capture_first(shape, counts, self.capture_pass)
        except NotRecordable as error:
            self.refusal = str(error)
            if self._graphs:  # otherwise the rank reports it when it is ready
                _log.warning("weft: decode steps run eagerly, since they cannot be recorded: %s", error)
        else:
            self._counts[shape.rows], self._graphs[shape] = counts, (recording, recorder.borrowed(logits))
        self._rows.steps.fill_(step)

    @contextmanager
    def _recording(self) -> Iterator[StepRecording]:
        """Record the calls inside the context, which are not counted. Raises NotRecordable."""
        ran = dict(self._exchanges.ran)
        with ExitStack() as recorded:
            recorded.callback(self._exchanges.ran.update, ran)
            recorded.callback(self._exchanges.ran.clear)
            for name, transport in self._transports.items():
                if not hasattr(transport, "recorded"):  # of a plug-in, for GPUs
                    raise NotRecordable(f"transport {name} has no `recorded`")
                recorded.enter_context(transport.recorded(self._recorder))
            yield recorded.enter_context(self._recorder.recording())

    @torch.inference_mode()
    def capture_pass(self, counts: CapturedRows, run: Pass) -> CapturedPass:
        """Record a pass of the draft layer, without a live row."""
        with self._recording() as recording:
            made = run(counts)
        return CapturedPass(recording, counts, tuple(map(self._recorder.borrowed, made)))

    def _sample(self, logits: Tensor, sampled: SampledRows) -> None:
        rows, split = self._rows, self._vocabulary
        best = cpu_ops.best(logits, 0 if split is None else split.share.start)
        candidates = best[None] if split is None else split.gather_best(best)
        state = rows.last_token, rows.length, self._tokens, rows.steps, self.token_ring.rows
        cpu_ops.step_out(sampled.rows, sampled.live, candidates, sampled.lengths, *state)
