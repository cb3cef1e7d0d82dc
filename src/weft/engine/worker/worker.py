"""A rank: its model, its cache, and the loop that carries out the controller's messages."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from weft.comm.transport import CommError, Transport
from weft.engine.attention.backend_registry import BackendEntry
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import attention_backend, check_formats, device_of, dtype_of, eager_because, kv_dtype_of
from weft.engine.config.threads import name_thread
from weft.engine.kernels.staging import on_device
from weft.engine.kv.cache_spec import CacheGroup
from weft.engine.messages.rank_messages import (
    AskPlan,
    AskReport,
    Failure,
    FromRank,
    GroupRows,
    PlanText,
    Progress,
    Ran,
    Ready,
    Report,
    Result,
    Scored,
    StartProfile,
    Step,
    Stop,
    StopProfile,
    ToRank,
)
from weft.engine.models.layers.model_config import LanguageModel, ModelConfig
from weft.engine.models.load import dummy_model, load_model, with_draft_model
from weft.engine.worker.device_rows import DeviceRows
from weft.engine.worker.graph_inputs import Shape
from weft.engine.worker.held_drafts import HeldDrafts
from weft.engine.worker.memory import CacheNeed, check_weights, measure, min_over_ranks, weight_bytes
from weft.engine.worker.model_runner import ModelRunner
from weft.engine.worker.rank_profiler import RankProfiler
from weft.engine.worker.row_table import Accepted, RowTable
from weft.engine.worker.sampler import Sampler
from weft.engine.worker.step_output import StepOutput, sampled_logits
from weft.engine.worker.warmup import sizes, warm_steps
from weft.planner.chain import Counts
from weft.planner.cost import Costs
from weft.planner.show import plan_text

Send = Callable[[FromRank], None]
Finish = Callable[[], Result]
"""Function that waits for a step's tokens, if necessary, and returns its result."""


class Repeatable(NamedTuple):
    """A decode step by a graph, repeated while messages have the same rows.

    groups: a message with these rows and no changes. tokens: int32 `[S]` on the device, overwritten by each replay.
    plan: checksum of the plan.
    """

    groups: tuple[GroupRows, ...]
    counts: Counts
    shape: Shape
    tokens: Tensor
    plan: int


class Worker:
    """Worker of a rank: it loads the rank's shard, then runs steps. Every rank of a DP group samples the same tokens.

    config: resolved by `weft.engine.controller.startup.resolve_defaults`, since `auto` depends on the model's caches.
    """

    def __init__(self, config: EngineConfig, transports: Sequence[Transport], costs: Costs, send: Send):
        self.config, self.mesh, self.rank = config, config.mesh, transports[0].rank
        self._group = self.mesh.group_of(self.rank)
        self._leads = self.rank == self.mesh.leader(self._group)
        shown = -1

        def progress(done: int, total: int) -> None:
            nonlocal shown
            if (percent := 20 * done // total) > shown:  # limit messages to one per twentieth
                shown = percent
                send(Progress(self.rank, done, total))

        model_config, dtype, empty = config.read_model(), dtype_of(config), transports[0].empty
        device, kv_dtype = device_of(config, self.rank), kv_dtype_of(config)
        attention = attention_backend(config, device=device)
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            torch.cuda.set_device(device)
            check_formats(model_config, kv_dtype, device)
            need = weight_bytes(model_config, self.mesh, self.rank, dtype)
            check_weights(need, self.rank, torch.cuda.mem_get_info()[0])

        def load(path: Path, of: ModelConfig) -> LanguageModel:
            given = self.mesh, self.rank, dtype, device, progress, empty
            return dummy_model(of, *given) if config.load_format == "dummy" else load_model(path, of, *given)

        model = load(config.model, model_config)
        if config.draft_model is not None and model_config.draft_model is not None:
            model = with_draft_model(model, model_config, load(config.draft_model, model_config.draft_model))
        cache = CacheNeed.of(config, model)

        def make(groups: Sequence[CacheGroup]) -> ModelRunner:
            return ModelRunner(
                model,
                self.mesh,
                self.rank,
                transports,
                groups,
                config.page_size,
                costs,
                interleave=config.dcp_interleave,
                dcp_exchange=config.dcp_exchange,
                dcp_prefill=config.dcp_prefill,
                plan=config.plan,
                attention=attention,
                kv_dtype=kv_dtype,
                max_rows=config.batch_tokens,
            )

        if self.on_gpu and config.kv_tokens is None:
            send(Progress(self.rank, 0, 1, "measuring memory"))
            memory, agree = measure(make, cache, model_config), min_over_ranks(transports, self.mesh, device)
            cache = cache.sized(memory, agree)
            config = self.config = cache.config
        elif self.on_gpu:
            torch.cuda.empty_cache()  # release memory used by loading
            cache.check(torch.cuda.mem_get_info()[0])
        else:
            cache.check()
        self.groups = cache.groups()
        self.runner = make(self.groups)
        self.profiler = RankProfiler(self.runner)
        rules, span, vocabulary = self.runner.rules, config.interleave.span, self.runner.vocabulary
        self.table = RowTable(config.batch_sequences, rules, span, device, vocabulary is not None)
        self.sampler = Sampler(self.table, vocabulary)
        self.device_rows: DeviceRows | None = None
        self._last: Repeatable | None = None
        self.held = HeldDrafts(queues=self.on_gpu)
        self._repeats = 0  # replays of `_last` not yet added to the table and the counts
        tokens = min(config.max_model_len or model_config.max_position, config.cached_tokens)
        if self.on_gpu:
            self.device_rows = self.sampler.state = self.rows_on_device(tokens)
            self.warm_up(tokens, lambda done, total: send(Progress(self.rank, done, total, "compiling kernels")))
        if self.on_gpu and config.cuda_graphs:
            self.capture(tokens, lambda done, total: send(Progress(self.rank, done, total, "capturing graphs")))
        self.eager_because = None if self.on_gpu else self._record(tokens, attention)

    def _record(self, longest: int, attention: BackendEntry) -> str | None:
        """Record decode steps on a CPU. Collective. Returns the reason if they run eagerly. longest: see `capture`."""
        if (why := eager_because(self.config, attention)) is None:
            rows = self.rows_on_device(longest)
            if (why := self.runner.record(rows)) is None:
                self.device_rows = rows
        return why

    def rows_on_device(self, longest: int) -> DeviceRows:
        """Return the table's part on the device. longest: maximum tokens of a sequence."""
        config = self.config  # with the same number of drafts as `measure` reckons with
        return DeviceRows(
            self.table, -(-longest // config.interleave.span), config.batch_sampled - config.batch_sequences
        )

    def capture(self, longest: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture the graphs of steps. Collective. longest: maximum tokens of a sequence."""
        self.device_rows = self.rows_on_device(longest)
        self.sampler.state = self.device_rows if self.on_gpu else None
        self.runner.capture(self.device_rows, self.config.batch_tokens, progress)

    @torch.inference_mode()
    def warm_up(self, longest: int, progress: Callable[[int, int], None]) -> None:
        """Run the steps of `warm_steps` eagerly, before graphs are captured, and forget them. Collective.

        longest: maximum tokens of a sequence.
        """
        split = self.runner.vocabulary is not None
        steps = warm_steps(self.config, self.groups, longest, split, self.runner.merges_from)
        for done, step in enumerate(steps):
            self.step(step)  # do not read its tokens: decode rows have no last token
            progress(done + 1, len(steps))
        self.held.run()
        if self.runner.draft is not None:  # delayed rows may be more than a step has sequences
            self.runner.draft.warm_up(sizes(self.runner.draft.delayed.limit), self.table)
        if self.on_gpu:
            torch.cuda.synchronize(self.table.device)
            self.runner.check()
        self.runner.stats.forget()
        self.table.forget()

    def step(self, step: Step) -> Finish:
        """Begin a step. On a GPU it may still run when this returns, and the next one may begin before it ends.

        The result of the DP group's leader has the tokens. The caller must be in inference mode: entering it here would
        cost a good part of a step's CPU time.
        """
        if (last := self._last) is not None and self._repeats_last(step, last):
            return self._repeat(step, last)
        self._settle()
        self.held.run()
        passes = self.runner.draft_passes(step, self.table)
        rows, counts = self.held.filled(step.groups[self._group]), step.counts
        shape, drafts = self.runner.shape_of(step.groups, counts), any(group.decode_tokens for group in step.groups)
        self.profiler.begin(step.number, counts, shape)
        if self.runner.draft is not None:
            self.runner.draft.delayed.give_away(rows, self.table)
        self.table.apply(rows)
        if copies := [join.copy for join in rows.joins if join.copy]:
            self.runner.caches.copy(on_device(copies, torch.int64, self.table.device))
        if self.device_rows:
            self.device_rows.stage(rows)
        else:
            self.table.forget_tokens(rows)
        beyond = self.sampler.beyond(rows, shape is not None and self.runner.greedy)
        if shape is not None:
            logits, tokens = self.runner.replay(shape, rows, counts)
            self.table.advance(rows)
            if beyond:
                at = on_device(beyond, torch.int64, logits.device)
                logits = self.runner.full_logits(logits.index_select(0, at))
                self.sampler.sample(rows, logits, tokens=tokens, again=beyond)
        else:
            if self.device_rows:
                self.device_rows.writes.flush()
            full = self.runner.vocabulary is None or bool(beyond) or any(chunk.score for chunk in rows.chunks)
            logits = self.runner.forward(self.table.batch(rows), counts, full)
            self.table.advance(rows)
            tokens = self.sampler.sample(rows, sampled_logits(rows, logits), full)
        read_tokens = self.runner.sampled_tokens(len(tokens)) if shape is not None and not beyond else None
        accepted = Accepted()
        if rows.decode_tokens:
            accepted = self.table.accept(rows, (read_tokens() if read_tokens else tokens).tolist())
        if self.device_rows and (shape is None or accepted.last):
            self.device_rows.ran(self.table, rows, accepted.last)
        elif accepted.last:
            at, last = on_device([rows.decode_rows, accepted.last], torch.int64, self.table.device)
            self.table.last_token.index_copy_(0, at, last.int())
        output = StepOutput(rows, tokens, read_tokens, accepted.counts)
        if self._leads:
            output.note_prompt_logprobs(logits)
            output.note_logprobs(sampled_logits(rows, logits), None if shape is None else beyond)
        find_drafts = partial(self.runner.drafts, step, rows, self.table, tokens, accepted.counts, shape)
        output.begin, holds = self.held.checksum, step.hold or not step.drafts
        if holds:
            output.held = self.runner.draft_counts(step, self.table.tokens_left(rows.sampling_rows))
        else:
            output.drafts = find_drafts()
        output.copy()
        if holds:
            self.held.put_off(rows, find_drafts)
        plan = self.runner.plan_checksum(counts, shape, passes)
        self._last = None
        if shape is not None and not (shape.prompts or beyond or drafts or step.drafts):
            again = tuple(GroupRows(group.decode_rows) for group in step.groups)
            # Without the passes before this step: a group with rows beyond the graph does not repeat it.
            self._last = Repeatable(again, counts, shape, tokens, self.runner.plan_checksum(counts, shape))
        scored_from = [self.table.rows[c.row].length - c.count + 1 for c in rows.chunks if c.score]
        return partial(self._result, step.number, counts, plan, output, scored_from)

    def _repeats_last(self, step: Step, last: Repeatable) -> bool:
        """Tell whether a step is the last one again, perhaps with new pages, and without a pass of a draft layer."""
        if step.groups != last.groups and not _only_entries(step.groups, last.groups):
            return False
        return self.runner.draft is None or self.runner.draft.delayed.takes(step, last.counts)

    def _repeat(self, step: Step, last: Repeatable) -> Finish:
        """Repeat the last step for the same rows, perhaps with new pages, without looking anything up again.

        Most decode steps take this path. Keep it short: the thread has just woken up, so its caches are cold.
        """
        rows, draft = step.groups[self._group], self.runner.draft
        self.profiler.begin(step.number, last.counts, last.shape)
        if draft is not None:
            self.held.run()
        if rows.entries:
            assert self.device_rows is not None, "graphs read their rows from the device"
            if draft is not None:
                draft.delayed.give_away(rows, self.table)
            self.table.apply(rows)
            self.device_rows.apply(rows)
        self.runner.repeat(last.shape)
        self._repeats += 1
        if draft is not None:
            self.runner.delay_drafts(last.counts, rows, self.table, last.tokens, last.shape, self._repeats)
        output = StepOutput(rows, last.tokens, self.runner.sampled_tokens(len(rows.decode_rows)))
        return partial(self._result, step.number, last.counts, last.plan, output, ())

    def _settle(self) -> None:
        """Count the steps run by `_repeat`."""
        if self._last is not None and self._repeats:
            self.table.advance(self._last.groups[self._group], self._repeats)
            self.runner.stats.ran(self._last.counts, self._last.shape.rows, self._repeats)
            self._repeats = 0

    def _result(self, number: int, counts: Counts, plan: int, output: StepOutput, scored_from: Sequence[int]) -> Result:
        """Wait for a step's tokens. scored_from: first token with logprobs of each scored chunk."""
        sampled, checksum = output.tokens()
        if self.on_gpu:  # kernels record faults and go on
            self.runner.check()
        ran = Ran(number, counts, plan, checksum)
        if not self._leads:
            return Result(self.rank, ran)
        logprobs, scored = output.logprobs()
        prompts = tuple(map(Scored, scored_from, scored))
        return Result(self.rank, ran, sampled, logprobs, prompts, output.accepted, output.proposed())

    @torch.inference_mode()
    def serve(self, receive: Callable[[], ToRank], send: Send) -> None:
        """Carry out the controller's messages until Stop. send: called on two threads."""
        plans = self.runner.planned(self.config.batch_tokens)
        send(Ready(self.rank, self.groups, plans, self.eager_because or ""))
        begun: queue.SimpleQueue[Finish | None] = queue.SimpleQueue()
        # While a GPU runs a step, one thread waits for its tokens, and this one for the next step.
        sender = threading.Thread(target=self._send_results, args=(begun, send), daemon=True)
        if self.on_gpu:
            sender.start()
        while True:
            message = receive()
            if isinstance(message, Step):
                finish = self.step(message)
                if self.on_gpu and not any(group.decode_tokens for group in message.groups):
                    begun.put(finish)
                else:  # a step with drafts has ended, and all steps before it are collected
                    send(finish())
                self.held.run()
            elif isinstance(message, AskReport):
                self._settle()
                send(Report(tuple(self.runner.stats.report()), tuple(self.runner.stats.naive_report())))
            elif isinstance(message, AskPlan):
                counts = (message.tokens,) * self.config.mesh.attn_dp
                text, draft = plan_text(self.runner.planner, counts), self.runner.draft
                send(PlanText(text if draft is None else f"{text}\n\ndraft layer: {plan_text(draft.planner, counts)}"))
            elif isinstance(message, StartProfile):
                send(self.profiler.start(message))
            elif isinstance(message, StopProfile):
                send(self.profiler.stop())
            elif isinstance(message, Stop):
                break
        if self.on_gpu:
            begun.put(None)
            sender.join()

    def _send_results(self, begun: queue.SimpleQueue[Finish | None], send: Send) -> None:
        name_thread("weft-results")
        torch.cuda.set_device(self.table.device)
        while (finish := begun.get()) is not None:
            try:
                send(finish())
            except Exception as error:
                send(failure(self.rank, error))
                return


def _only_entries(groups: tuple[GroupRows, ...], rows: tuple[GroupRows, ...]) -> bool:
    """Tell whether a message has these rows, and no changes other than new entries of tables."""
    return all(group == replace(same, entries=group.entries) for group, same in zip(groups, rows, strict=True))


def failure(rank: int, error: Exception) -> Failure:
    """Return the message of an unforeseen error."""
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, torch.OutOfMemoryError):
        first += "; lower --kv-tokens, --max-batch-tokens or --max-running, or use more ranks"
    return Failure(rank, f"{type(error).__name__}: {first}", user=False, lost_peer=isinstance(error, CommError))
