"""The engine: requests in, increments out, one loop that steps every DP group together."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, TypeVar

from weft.comm.forks import ProcessBound
from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.config.threads import name_thread
from weft.engine.controller.event_publisher import EventPublisher, KvEventsConfig, open_publisher
from weft.engine.controller.executor import Executor
from weft.engine.controller.output_processor import OutputProcessor
from weft.engine.controller.rank_executors import make_executor
from weft.engine.controller.recovery import Recovery, one_line
from weft.engine.controller.request_queue import RequestQueue
from weft.engine.controller.startup import context_tokens, read_model, resolve_defaults
from weft.engine.kv.manager import CacheManager
from weft.engine.messages.api_messages import EngineState
from weft.engine.messages.rank_messages import Step
from weft.engine.messages.request import FAIR_SHARE, FinishReason, Output, SamplingParams, Sharing
from weft.engine.output.request_output import OutputCallback, Request, RequestOutput, check_count, prepare_all
from weft.engine.output.results import EngineStats, gather
from weft.engine.output.text_processor import TextProcessor
from weft.engine.output.tokenizer_files import load_tokenizer
from weft.engine.scheduler.draft_rows import make_speculation, note_step
from weft.engine.scheduler.scheduled import Scheduled
from weft.engine.scheduler.scheduler import Scheduler, drafts_asked, make_schedulers, schedule_all
from weft.stream.step_stat import StepStat

T = TypeVar("T")
log = logging.getLogger(__name__)
IDLE_CHECK_S = 1.0
"""Interval at which an idle engine checks that its ranks are alive."""
NEWCOMERS_PER_STEP = 64
"""Maximum requests admitted between two steps, so that a burst does not delay running requests."""
MAX_STEP_BITS = 20
"""Number of bins of `EngineStats.step_sizes`."""


class Engine(ProcessBound):
    """Engine that serves a model on all ranks of a layout. A thread-safe context manager, used by one process.

    Raises ModelError, LayoutError or EngineError, each in one line.

    Args:
        progress: called with (what, fraction) during the start.
        kv_events: publishes changes of the prefix caches; omitted: they are not recorded.
        executor: makes the controller's end of the ranks; omitted: `make_executor`.
    """

    fork_error = EngineError

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str, float], None] | None = None,
        kv_events: KvEventsConfig | None = None,
        executor: Callable[[EngineConfig], Executor] | None = None,
    ):
        given, self.config = config, (config := resolve_defaults(config))
        self.error: str | None = None
        self._phase: EngineState = "starting"
        self._executor = (executor or make_executor)(config)
        self._recovery = Recovery(given, config, self._executor)
        self.kv_events: EventPublisher | None = None
        try:
            self.kv_events = open_publisher(kv_events, config)
            self.model_config = read_model(config)
            self._executor.prepare()
            eos, vocabulary = self.model_config.eos_token_ids, self.model_config.vocab_size
            self.text_processor = TextProcessor(load_tokenizer(config), config.tokenizer, vocabulary, eos)
            self.tokenizer = self.text_processor.tokenizer
            self.max_model_len = context_tokens(config, self.model_config)
            self._executor.plan(self.model_config)
            self._executor.start(progress)
        except BaseException:
            self._executor.close(grace_s=0)
            if self.kv_events:
                self.kv_events.close()
            raise
        self.config = self._executor.config
        self.speculation = make_speculation(config)
        self._schedulers = self._make_schedulers()
        self._in_flight: deque[list[Scheduled]] = deque()  # steps sent, without their results
        self._ids, self._seeds = itertools.count(1), random.Random(config.seed)
        self._requests = RequestQueue(config.max_waiting + config.batch_sequences * config.attn_dp)
        self._number = threading.Lock()  # held while requests are numbered and queued, so that the orders agree
        self._outputs = OutputProcessor(self._requests)
        self._steps, self._step_rows, self._step_sizes = 0, 0, [0] * MAX_STEP_BITS
        self._closing, self._ended = threading.Event(), threading.Event()
        self._draining, self._stopping, self._phase = False, False, "serving"
        self._thread = threading.Thread(target=self._loop, name="weft-engine", daemon=True)
        self._thread.start()

    # --- for callers, on any thread ---------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """State: serving, degraded (it serves, with fewer ranks), restarting (after a failure of ranks; requests wait),
        draining (new requests are refused), failed (see `error`), or stopped."""
        if self._phase != "serving":
            return self._phase
        return "draining" if self._draining else "degraded" if self._recovery.lost_places else "serving"

    @property
    def eager(self) -> str:
        """Reason why decode steps on CPUs are not recorded; empty: they are, or ranks run on GPUs."""
        return self._executor.eager

    @property
    def healthy(self) -> bool:
        """True while requests are served."""
        return self.state in ("serving", "degraded")

    def submit(
        self,
        prompt: Seq[int],
        params: SamplingParams,
        callback: OutputCallback,
        *,
        sharing: Sharing = FAIR_SHARE,
        timeout_s: float | None = None,
    ) -> int:
        """Queue one request and return its id; see `submit_all`."""
        return self.submit_all([(prompt, params, callback)], sharing=sharing, timeout_s=timeout_s)[0]

    def submit_all(
        self, requests: Seq[Request], *, sharing: Sharing = FAIR_SHARE, timeout_s: float | None = None, name: str = ""
    ) -> list[int]:
        """Queue requests, all or none, and return their ids.

        Each request's callback is called with its `RequestOutput`, on the engine's thread, once per increment.
        `RequestOutput.take` then returns the increment, on any thread; the last one has a finish_reason.

        Args:
            requests: (prompt tokens, sampling parameters, callback) of each.
            timeout_s: seconds until the end of the output; a request that lasts longer ends with "timeout".
            name: name of the requests in the log.

        Raises ValueError for a prompt that is empty, too long or holds unknown tokens, and for more requests than
        max_choices or than the queue can hold; QueueFull if too many wait already; EngineError when not healthy.
        """
        check_count(len(requests), min(self.config.max_choices, self._requests.max_requests))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        context = min(self.max_model_len, self.config.cached_tokens)
        outputs = prepare_all(requests, context, self.text_processor, self._seeds)
        for output in outputs:
            output.name, output.sequence.sharing, output.sequence.deadline = name, sharing, deadline
        with self._number:
            for output in outputs:
                output.sequence.request = next(self._ids)
            self._requests.add(outputs)
        return [output.sequence.request for output in outputs]

    def after_callbacks(self, call: Callable[[], None]) -> None:
        """Let the engine's thread call `call` after the callbacks of each step."""
        self._outputs.notified = call

    def cancel(self, request: int) -> None:
        """End a request before the next step and free its pages, unless it has ended already."""
        self._requests.put(lambda: self._outputs.cancel(request))

    def generate(
        self, prompts: Seq[Seq[int]], params: SamplingParams, each: Callable[[], None] = lambda: None
    ) -> list[Output]:
        """Complete any number of prompts and wait for all. Raises errors of `submit`, and EngineError if one ends with
        "error". each: called after each completion."""
        wait = partial(self._requests.wait_for_capacity, IDLE_CHECK_S)
        return gather(prompts, lambda prompt, callback: self.submit(prompt, params, callback), wait, each)

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""
        running = sum(len(s.running) for s in self._schedulers)
        return EngineStats(
            running=running,
            waiting=self._requests.here - running,
            kv_used=tuple(s.caches.used for s in self._schedulers),
            kv_total=tuple(s.caches.total for s in self._schedulers),
            prompt_tokens=self._outputs.prompt_tokens,
            cached_tokens=self._outputs.cached_tokens,
            generated_tokens=self._outputs.generated_tokens,
            preemptions=sum(s.preemptions for s in self._schedulers),
            stalls=sum(s.stalls for s in self._schedulers),
            steps=self._steps,
            step_rows=self._step_rows,
            step_sizes=tuple(self._step_sizes),
            rejected=self._requests.refused,
            timeouts=self._outputs.timeouts,
            queue_seconds=self._outputs.queue_seconds,
            failures=self._recovery.faults.total,
            lost_places=tuple(self._recovery.lost_places),
            drafted=tuple(self.speculation.drafted if self.speculation else ()),
            accepted=tuple(self.speculation.accepted if self.speculation else ()),
        )

    def comm_report(self) -> tuple[list[StepStat], list[StepStat]]:
        """Return statistics of rank 0's collectives since the start, and of the naive plan for the same steps."""
        self._ask(lambda: self._executor.report())
        return self.last_comm_report()

    def last_comm_report(self) -> tuple[list[StepStat], list[StepStat]]:
        """Return the last `comm_report`, a few seconds old, without waiting for the ranks."""
        return list((report := self._executor.reported).ran), list(report.naive)

    def plan_text(self, tokens_per_group: int) -> str:
        """Return the plan for this number of tokens per DP group, next to the naive plan."""
        return self._ask(lambda: self._executor.plan_text(tokens_per_group))

    def ask_ranks(self, question: Callable[[Executor], T]) -> T:
        """Run `question` on the engine's thread, between two steps. Raises EngineError when not serving."""
        return self._ask(lambda: question(self._executor))

    def reset_cache(self) -> None:
        """Forget cached prefixes that no request holds."""
        self._ask(lambda: list(map(CacheManager.forget, [s.caches for s in self._schedulers])))

    def check_idle(self) -> None:
        """Raise AssertionError if pages leaked. Call it when no request is here."""
        self._ask(lambda: list(map(Scheduler.check_idle, self._schedulers)))

    def drain(self, seconds: float) -> int:
        """Refuse new requests, wait up to `seconds` for the others, end the rest with "abort" and stop the ranks.

        Returns the number of aborted requests. May be called twice, from any thread but the engine's.
        """
        self._draining = True
        self._requests.refuse("the engine is shutting down and takes no new requests")
        self._requests.wait_until_empty(seconds)
        unfinished = self._requests.here
        self._closing.set()
        self._executor.interrupt()
        self._requests.put(partial(setattr, self, "_stopping", True))
        self._thread.join()
        self._executor.close()
        if self.kv_events:
            self.kv_events.close()
        return unfinished

    def close(self) -> None:
        """End all requests with "abort" and stop the ranks. May be called twice."""
        self.drain(0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the engine has stopped or failed for good. Returns False after timeout_s."""
        return self._ended.wait(timeout_s)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, question: Callable[[], Any]) -> Any:
        def when_serving() -> Any:
            if self._phase != "serving":
                raise EngineError(self.error or f"the engine is {self._phase}")
            return question()

        return self._requests.ask(when_serving)

    # --- on the engine's thread -------------------------------------------------------------------------------

    def _loop(self) -> None:
        name_thread("weft-engine")
        try:
            while not self._stopping:
                try:
                    if not (self._outputs or self._in_flight or self._requests.wait(IDLE_CHECK_S)):
                        self._executor.idle()
                    self._admit()
                    if (self._outputs or self._in_flight) and not self._stopping:
                        self._step()
                    if self.kv_events:
                        self.kv_events.publish()
                except Exception as error:
                    self._restart(error)
        except Exception as error:
            self.error, self._phase = one_line(error), "failed"
            log.error("the engine ends: %s", self.error)
            self._executor.close(grace_s=0)
        finally:
            self._shut_down()

    def _restart(self, error: Exception) -> None:
        """Restart the ranks after a failure, and resume every request from its prompt and its tokens so far.

        A request's next token depends only on these and its seed, so its output does not change. Steps in flight are
        dropped: a step counts only once its results are processed. Raises EngineError after too many failures.
        """
        self._outputs.notify()
        while not self._closing.is_set():
            self._phase, began = "restarting", time.monotonic()
            pause = self._recovery.failed(error, self.model_config)
            self.config = self._executor.config
            log.error("%s; in %g s ranks start anew, %d requests wait", one_line(error), pause, len(self._outputs))
            # Restart all ranks: others may wait in a collective that never ends, or hold a device with a fault.
            self._place_all()
            try:
                self._requests.pause(pause, self._admit_or_stop)
                groups = self._executor.groups
                self._executor.start(poll=self._admit_or_stop)
            except Exception as another:
                error = another
                continue
            self.config = self._executor.config
            if self._executor.groups != groups:
                self._place_all()
            self._phase = "serving"
            log.warning("the ranks are back after %.1f s, with %s", time.monotonic() - began, self.config.mesh)
            return
        self._stopping = True

    def _place_all(self) -> None:
        """Begin with empty caches, and compute every request again from its prompt and its tokens so far."""
        self._schedulers = self._make_schedulers()
        self._in_flight.clear()
        for output in sorted(self._outputs, key=lambda a: a.sequence.admitted is None):
            output.scheduler = None
            output.sequence.forget_pages()
            try:
                self._place(output)
            except ValueError as error:  # a smaller layout has smaller caches
                self._outputs.end(output, "error", str(error))

    def _admit(self) -> None:
        """Run commands of callers, then admit new requests, then end overdue ones. Called between two steps."""
        for command in self._requests.commands():
            command()
        for output in self._requests.newcomers(NEWCOMERS_PER_STEP):
            self._place(output)
            self._outputs.begin(output)
        self._outputs.end_overdue()

    def _admit_or_stop(self) -> None:
        self._admit()
        if self._stopping:
            raise EngineError("the engine is closed")

    def _shut_down(self) -> None:
        """End every request and run the last commands, so that each caller gets a result; then accept no more."""
        self._stopping = True
        self._outputs.notify()
        if self.error is None:
            self._phase = "stopped"
        self._requests.refuse(self.error or "the engine is closed")
        reason: FinishReason = "error" if self.error else "abort"
        why = self.error or "the engine was stopped before the completion ended"
        self._outputs.end_all(reason, why)
        while not self._requests.close():
            for command in self._requests.commands():
                command()
            for output in self._requests.newcomers(NEWCOMERS_PER_STEP):
                self._outputs.end(output, reason, why)
        self._ended.set()

    def _make_schedulers(self) -> list[Scheduler]:
        """Return schedulers with empty caches."""
        if self.kv_events:
            self.kv_events.publish_cleared()
        events = self.kv_events.recorded if self.kv_events else ()
        return make_schedulers(self.config, self._executor.groups, events, self.speculation)

    def _place(self, output: RequestOutput) -> None:
        """Queue a sequence in the DP group with the fewest rows until its first token: queued and uncached ones."""
        tokens, salt = output.sequence.tokens, output.sequence.sharing.cache_salt
        output.scheduler = min(
            self._schedulers,
            key=lambda s: (s.queued_tokens + len(tokens) - s.caches.longest(tokens, salt), len(s.running)),
        )
        output.scheduler.add(output.sequence)

    def _step(self) -> None:
        """Send the next step, if there is one, then collect the previous step (without overlap, this step)."""
        scheduled = schedule_all(self._schedulers)
        step = Step(self._steps + 1, tuple(s.rows for s in scheduled), *drafts_asked(self._schedulers))
        if rows := sum(step.counts):
            self._steps, self._step_rows = self._steps + 1, self._step_rows + rows
            self._step_sizes[min((rows - 1).bit_length(), MAX_STEP_BITS - 1)] += 1
            self._executor.send(step)
            self._in_flight.append(scheduled)
        self._outputs.notify()
        ahead = bool(rows and self.config.overlap and not any(s.drafts_next for s in self._schedulers))
        while len(self._in_flight) > ahead:
            results = self._executor.collect()
            self._recovery.faults.worked()
            note_step(self.speculation, self._in_flight[0])
            for of_group, result in zip(self._in_flight.popleft(), results, strict=True):
                self._outputs.take(of_group, result)
            if not self._outputs:
                self._outputs.notify()
