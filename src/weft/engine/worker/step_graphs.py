"""CUDA graphs of steps: one per shape, captured at the start, replayed for every step that fits.

A graph's tensors have its shape. Live counts and sequences' inputs are in device memory
(`weft.engine.worker.graph_inputs`), so one graph serves all DP groups, even idle ones. Padding rows are not stored and
choose no expert. The next step reads sampled tokens from the place where the graph writes them. All ranks know the rows
of all groups, so they choose the same graph.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from weft.comm.transport import Transport
from weft.engine.attention.caches import Caches
from weft.engine.messages.rank_messages import GRAPH_PARAMETERS, SHARE_PARAMETERS, GroupRows
from weft.engine.models.layers.model_config import LanguageModel
from weft.engine.worker.device_rows import DeviceRows
from weft.engine.worker.draft_graphs import CapturedPass, CapturedStep, DraftGraphs, Pass
from weft.engine.worker.graph_inputs import Inputs, SampledRows, Shape
from weft.engine.worker.pinned_tokens import PinnedTokenRing
from weft.engine.worker.split_vocabulary import SplitVocabulary
from weft.planner.chain import Counts
from weft.planner.plan import Plan
from weft.planner.spec import Mesh, Rows
from weft.stream.block_exchanges import BlockExchanges
from weft.stream.step_rows import CapturedRows, captured_rows
from weft.stream.stream import Stream

T = TypeVar("T")


class StepGraphs:
    """Graphs of a rank, and their input and output tensors. Layers get batches with `spans` None.

    Args:
        plan: returns the plan of the given rows per DP group.
        inputs: inputs of each kind of steps, with the shapes of their graphs.
        vocabulary: the split vocabulary, with captured exchanges; None if it is not split.

    Attributes:
        greedy: every row's greatest logit is sampled, whatever its parameters.
        drafts: graphs of the draft layer; None: it has none.
    """

    greedy = False
    drafts: DraftGraphs | None = None

    def __init__(
        self,
        model: LanguageModel,
        mesh: Mesh,
        rank: int,
        plan: Callable[[Counts], Plan],
        transports: Mapping[str, Transport],
        caches: Caches,
        rows: DeviceRows,
        inputs: Sequence[Inputs],
        exchanges: BlockExchanges,
        vocabulary: SplitVocabulary | None = None,
    ):
        self._model, self._mesh, self._rank, self._plan = model, mesh, rank, plan
        self._transports, self._caches, self._rows, self._vocabulary = transports, caches, rows, vocabulary
        self._exchanges = exchanges
        self._inputs = {kind.shapes[0].prompts: kind for kind in inputs}
        self.shapes = sorted(shape for kind in inputs for shape in kind.shapes)
        weight, max_rows = model.embed.weight, rows.max_sampled
        self._device, own_vocabulary = weight.device, len(weight)  # the head is split like the embedding
        # Logits of steps with prompts are rarely read again: one buffer serves all graphs of such steps.
        self._logits = weight.new_empty(max_rows if True in self._inputs else 0, own_vocabulary)
        self._tokens = torch.zeros(max_rows, dtype=torch.int32, device=self._device)
        self.token_ring = PinnedTokenRing(max_rows, self._device.type == "cuda")
        self._counts: dict[int, CapturedRows] = {}  # by rows
        self._graphs: dict[Shape, tuple[CapturedStep, Tensor]] = {}
        self._outputs: dict[tuple[Shape, int], tuple[Tensor, Tensor]] = {}  # of `replay`, by shape and sampled rows

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every graph, the largest first, so that all share its memory. Collective. progress(done, of)."""
        self._pool, shapes = torch.cuda.graph_pool_handle(), self.shapes[::-1]
        gc.collect()
        gc.freeze()  # keep permanent objects out of the collections below
        for shape in shapes:  # run once before: kernels compile at first use, which a capture does not allow
            if shape.rows not in self._counts:
                self._counts[shape.rows] = self.empty_rows(shape.rows)
            self._step(shape, self._counts[shape.rows])
            if self.drafts is not None:
                self.drafts.first_pass(shape)(self._counts[shape.rows])
            torch.cuda.synchronize()
        self._rows.writes.capture()
        for done, shape in enumerate(shapes):
            counts = self._counts[shape.rows]
            self._graphs[shape] = self._captured(partial(self._step, shape, counts))
            if self.drafts is not None:
                self.drafts.capture_first(shape, counts, self.capture_pass)
            if progress:
                progress(done + 1, len(shapes))
        if self.drafts is not None:
            self._capture_further(self.drafts)
        gc.unfreeze()
        self._rows.steps.zero_()  # no graph has been replayed yet

    def _capture_further(self, drafts: DraftGraphs) -> None:
        for sequences in drafts.further[::-1]:
            counts = self.empty_rows(sequences)
            drafts.next_pass(sequences)(counts)  # once before, as for steps
            torch.cuda.synchronize()
            drafts.capture_next(sequences, counts, self.capture_pass)

    def empty_rows(self, rows: int) -> CapturedRows:
        """Return counts of no rows, with a capacity of `rows` rows per DP group."""
        counts = captured_rows(self._transports.values(), self._mesh, self._rank, rows, self._device)
        counts.fill((0,) * self._mesh.attn_dp)
        return counts

    @torch.inference_mode()
    def capture_pass(self, counts: CapturedRows, run: Pass) -> CapturedPass:
        """Capture a pass of the draft layer."""
        graph, made = self._captured(partial(run, counts))
        return CapturedPass(graph, counts, made)

    def _captured(self, run: Callable[[], T]) -> tuple[CapturedStep, T]:
        gc.collect()  # a tensor freed during a capture would be lost to the graph
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            made = run()
        return graph, made

    def shape_of(self, groups: Sequence[GroupRows], counts: Counts) -> Shape | None:
        """Return the shape of the graph for a step; None if there is none: for too many rows, for prompts of models
        without captured prompts, and for requested logprobs of prompts. counts: rows of these DP groups.
        """
        prompts = any(group.chunks for group in groups)
        inputs = self._inputs.get(prompts)
        if inputs is None or (prompts and any(chunk.score for group in groups for chunk in group.chunks)):
            return None
        at = bisect.bisect_left(inputs.shapes, Shape(max(counts), 0, False))
        return inputs.shapes[at] if at < len(inputs.shapes) else None

    def replay(self, shape: Shape, group_rows: GroupRows, counts: Counts) -> tuple[Tensor, Tensor]:
        """Replay a graph without waiting for it. The next replay overwrites the returned tensors.

        Args:
            group_rows: this group's part of the step, already applied to the table on the device.
            counts: rows of all groups, the same on every rank.

        Returns:
            Logits `[sampled, vocabulary]` in the model's dtype, or this rank's share if the vocabulary is split; and
            the sampled tokens, int32, NO_TOKEN for a decode row without a last token. They are sampled with
            `GRAPH_PARAMETERS`, or `SHARE_PARAMETERS`.
        """
        for transport in self._transports.values():
            transport.check()
        n = self._inputs[shape.prompts].put(group_rows)
        self._counts[shape.rows].fill(counts, self._rows.writes.fill)
        self._rows.writes.flush()
        self.repeat(shape)
        if (output := self._outputs.get((shape, n))) is None:
            logits = self._graphs[shape][1]
            output = self._outputs[shape, n] = logits[:n], self._tokens[:n]
        return output

    def repeat(self, shape: Shape) -> None:
        """Replay the last graph for the same rows, and overwrite the returned tensors. Transports are checked when the
        step's tokens are read."""
        self._graphs[shape][0].replay()
        self.token_ring.next()

    def _step(self, shape: Shape, counts: CapturedRows) -> Tensor:
        batch, sampled = self._inputs[shape.prompts].batch(shape, counts.live(Rows.GROUP))
        plan = self._plan((shape.rows,) * self._mesh.attn_dp)
        stream = Stream(plan, self._transports, counts, exchanges=self._exchanges)
        logits: Tensor = self._model(stream, batch, self._caches.plan(batch))
        stream.finish()
        if shape.prompts:
            logits = self._logits[: shape.sampled].copy_(logits)
        self._sample(logits, sampled)
        return logits

    def _sample(self, logits: Tensor, sampled: SampledRows) -> None:
        from weft.engine.kernels.triton.decode_step import step_out
        from weft.engine.kernels.triton.sample import best, candidates  # a CPU need not have Triton

        rows, split = self._rows, self._vocabulary
        first, names = (0, GRAPH_PARAMETERS) if split is None else (split.share.start, SHARE_PARAMETERS)
        how = {name: rows.parameters[name] for name in names}
        places = dict(seed=rows.seed, position=sampled.lengths, live=sampled.live, table=sampled.rows)
        best_tokens = candidates(logits, first=first, **how, **places)[None]
        if split is not None:
            best_tokens = split.gather_best(best(best_tokens[0], sampled.live))[:, :, None]
        state = rows.last_token, rows.length, self._tokens, rows.steps, self.token_ring.rows
        step_out(sampled.rows, sampled.live, sampled.decode_count, best_tokens, sampled.lengths, *state)
