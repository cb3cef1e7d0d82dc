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
from types import TracebackType
from typing import Any, Literal, TypeVar

from weft.comm.stats import StepStat
from weft.engine.config import EngineConfig, EngineError, QueueFull
from weft.engine.controller.executor import Executor
from weft.engine.controller.fault_window import FaultWindow, one_line
from weft.engine.controller.rank_executors import make_executor
from weft.engine.controller.request_queue import Intake
from weft.engine.messages import Step
from weft.engine.output.language import Language
from weft.engine.output.output_processor import Answers
from weft.engine.output.request_output import Answer, OnOutput, prepare
from weft.engine.output.results import EngineStats, GenerationResult, gather, step_stats
from weft.engine.request import EQUALS, FinishReason, SamplingParams, Sequence, Sharing
from weft.engine.scheduler.scheduler import Scheduled, Scheduler, make_schedulers
from weft.engine.startup import check_plans, context_tokens, load_tokenizer, read_model, settled

T = TypeVar("T")
log = logging.getLogger(__name__)
Request = tuple[Seq[int], SamplingParams, OnOutput]
"""Prompt tokens, how to answer, and who listens."""
EngineState = Literal["starting", "serving", "restarting", "draining", "failed", "stopped"]
IDLE_CHECK_S = 1.0
"""How often an idle engine looks whether its ranks still live."""
NEWCOMERS_PER_STEP = 64
"""Requests that are taken in between two steps, so that a crowd of them does not hold up those that run."""


class Engine:
    """Serves a model on all ranks of a layout. Thread-safe; a context manager.

    progress(what, fraction): while it starts. Raises ModelError, LayoutError or EngineError, each in one line.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[str, float], None] | None = None):
        self.config = config = settled(config)
        self.error: str | None = None
        self._phase: EngineState = "starting"
        self._faults = FaultWindow(config.max_restarts, config.restart_window_s, backoff_s=config.restart_backoff_s)
        self._executor: Executor = make_executor(config)
        try:
            self.model_config = read_model(config)
            self._executor.prepare()
            eos, vocabulary = self.model_config.eos_token_ids, self.model_config.vocab_size
            self.language = Language(load_tokenizer(config), config.tokenizer, vocabulary, eos)
            self.tokenizer = self.language.tokenizer
            self.max_model_len = context_tokens(config, self.model_config)
            self._executor.config = check_plans(config, self.model_config)
            self._executor.start(progress)
        except BaseException:
            self._executor.close(grace_s=0)
            raise
        self.config = self._executor.config
        self._schedulers = make_schedulers(config, self._executor.groups)
        self._under_way: deque[list[Scheduled]] = deque()  # steps that were sent, whose tokens have not come
        self._ids, self._seeds = itertools.count(1), random.Random(config.seed)
        self._intake = Intake(config.max_waiting + config.max_running * config.attn_dp)
        self._number = threading.Lock()  # requests are numbered in the order in which they are handed over
        self._answers = Answers(self._intake)
        self._steps = 0
        self._closing, self._ended = threading.Event(), threading.Event()
        self._draining = self._stopping = False
        self._phase = "serving"
        self._thread = threading.Thread(target=self._loop, name="weft-engine", daemon=True)
        self._thread.start()

    # --- for callers, on any thread ---------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """What it is doing: serving, restarting (ranks failed and start anew; requests wait), draining (no new requests
        are taken), failed (`error` says why), or stopped."""
        return "draining" if self._draining and self._phase == "serving" else self._phase

    @property
    def healthy(self) -> bool:
        """Whether requests are served now."""
        return self.state == "serving"

    def submit(
        self,
        prompt: Seq[int],
        params: SamplingParams,
        on_output: OnOutput,
        *,
        sharing: Sharing = EQUALS,
        timeout_s: float | None = None,
    ) -> int:
        """Queues one request and returns its id; see `submit_all`."""
        return self.submit_all([(prompt, params, on_output)], sharing=sharing, timeout_s=timeout_s)[0]

    def submit_all(
        self,
        requests: Seq[Request],
        *,
        sharing: Sharing = EQUALS,
        timeout_s: float | None = None,
        name: str = "",
    ) -> list[int]:
        """Queues requests, all or none, and returns their ids.

        on_output is called with the answer, on the engine's thread, once for each increment, which `Answer.take` then
        gives on any thread; the last has a finish_reason. timeout_s: until the whole answer; what has not ended by then
        ends with "timeout". name: in the log.

        Raises ValueError for a prompt that is empty, too long or holds unknown tokens, and for more requests than
        max_choices; QueueFull where too many wait already; EngineError when not healthy.
        """
        if len(requests) > (most := self.config.max_choices):
            raise ValueError(f"{len(requests)} answers are asked for at once (prompts × n); at most {most} are given")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        context = min(self.max_model_len, self.config.cached_tokens)
        answers = []
        for prompt, params, on_output in requests:
            seed = self._seeds.getrandbits(62)
            answers.append(prepare(prompt, params, on_output, seed, context, self.language))
            answers[-1].name, answers[-1].sequence.sharing, answers[-1].sequence.deadline = name, sharing, deadline
        with self._number:
            for answer in answers:
                answer.sequence.request = next(self._ids)
            self._intake.add(answers)
        return [answer.sequence.request for answer in answers]

    def cancel(self, request: int) -> None:
        """Ends a request before the next step; its pages are free at once. No harm where it has ended already."""
        self._intake.put(lambda: self._answers.cancel(request))

    def generate(self, prompts: Seq[Seq[int]], params: SamplingParams) -> list[GenerationResult]:
        """Answers prompts, however many, and waits for all. Raises as `submit`, and EngineError where one ends with
        "error"."""

        def submit(prompt: Seq[int], listen: OnOutput) -> None:
            while True:
                try:
                    self.submit(prompt, params, listen)
                    return
                except QueueFull:
                    self._intake.wait_for_room(IDLE_CHECK_S)

        results = gather(prompts, submit)
        if failed := next((result for result in results if result.finish_reason == "error"), None):
            raise EngineError(failed.error or "the engine failed")
        return results

    def stats(self) -> EngineStats:
        """Numbers of now."""
        running = sum(len(s.running) for s in self._schedulers)
        return EngineStats(
            running=running,
            waiting=self._intake.here - running,
            kv_used=tuple(s.used_pages for s in self._schedulers),
            kv_total=tuple(s.caches.total for s in self._schedulers),
            prompt_tokens=self._answers.prompt_tokens,
            cached_tokens=self._answers.cached_tokens,
            generated_tokens=self._answers.generated_tokens,
            preemptions=sum(s.preemptions for s in self._schedulers),
            stalls=sum(s.stalls for s in self._schedulers),
            steps=self._steps,
            rejected=self._intake.refused,
            timeouts=self._answers.timeouts,
            queue_seconds=self._answers.queue_seconds,
            failures=self._faults.total,
        )

    def comm_report(self) -> tuple[list[StepStat], list[StepStat]]:
        """What rank 0 has communicated since the start, by step, and what the naive plan would have."""
        self._ask(lambda: self._executor.report())
        return self.last_comm_report()

    def last_comm_report(self) -> tuple[list[StepStat], list[StepStat]]:
        """The same as it was a few seconds ago, without waiting for the ranks."""
        return step_stats((report := self._executor.reported).ran), step_stats(report.naive)

    def plan_text(self, tokens_per_group: int) -> str:
        """The plan for so many tokens in each DP group, beside the naive one."""
        return self._ask(lambda: self._executor.plan_text(tokens_per_group))

    def ask_ranks(self, question: Callable[[Executor], T]) -> T:
        """What the ranks answer, asked on the engine's thread between two steps. EngineError when not serving."""
        return self._ask(lambda: question(self._executor))

    def reset_cache(self) -> None:
        """Forgets the prefixes that no request holds."""
        self._ask(lambda: list(map(Scheduler.forget, self._schedulers)))

    def check_idle(self) -> None:
        """AssertionError where pages leaked; to be called when nothing runs."""
        self._ask(lambda: list(map(Scheduler.check_idle, self._schedulers)))

    def drain(self, seconds: float) -> int:
        """Takes no new requests, lets those here end for so long, then ends the rest with "abort" and stops the ranks.

        Gives how many were cut short. May be called twice, from any thread but the engine's.
        """
        self._draining = True
        self._intake.refuse("the engine is shutting down and takes no new requests")
        if seconds > 0:
            self._intake.wait_until_empty(seconds)
        left = self._intake.here
        self._closing.set()
        self._executor.interrupt()
        self._intake.put(partial(setattr, self, "_stopping", True))
        self._thread.join()
        self._executor.close()
        return left

    def close(self) -> None:
        """Ends all requests with "abort" and stops the ranks. May be called twice."""
        self.drain(0)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the engine has stopped or failed for good; False where it has not in that time."""
        return self._ended.wait(timeout_s)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, question: Callable[[], Any]) -> Any:
        """The answer to a question, on the engine's thread and between steps. Raises EngineError when not serving."""

        def when_serving() -> Any:
            if self._phase != "serving":
                raise EngineError(self.error or f"the engine is {self._phase}")
            return question()

        return self._intake.ask(when_serving)

    # --- on the engine's thread -------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while not self._stopping:
                try:
                    if not (self._answers or self._under_way or self._intake.wait(IDLE_CHECK_S)):
                        self._executor.idle()
                    self._take_in()
                    if (self._answers or self._under_way) and not self._stopping:
                        self._step()
                except Exception as error:
                    self._restart(error)
        except Exception as error:
            self.error, self._phase = one_line(error), "failed"
            log.error("the engine ends: %s", self.error)
            self._executor.close(grace_s=0)
        finally:
            self._leave()

    def _restart(self, error: Exception) -> None:
        """After a failure: new ranks, and every request again from its prompt and the tokens that its client has.

        A request's next token depends on these and its seed alone, so it goes on as if nothing had been. Whatever was
        under way is forgotten: a step counts only once its results have been taken. Raises where it fails too often.
        """
        self._answers.tell()
        while not self._closing.is_set():
            pause = self._faults.add(one_line(error))
            log.error("%s; in %g s ranks start anew, %d requests wait", one_line(error), pause, len(self._answers))
            self._phase, began = "restarting", time.monotonic()
            # All ranks: the others may wait in a collective that never ends, or hold a device that has faulted.
            self._schedulers = make_schedulers(self.config, self._executor.groups)
            self._under_way.clear()
            for answer in sorted(self._answers, key=lambda a: a.sequence.admitted is None):
                answer.sequence.forget_pages()
                self._place(answer)
            try:
                self._intake.pause(pause, self._take_in_or_stop)
                self._executor.start(poll=self._take_in_or_stop)
            except Exception as another:
                error = another
                continue
            self._phase = "serving"
            log.warning("the ranks are back after %.1f s", time.monotonic() - began)
            return
        self._stopping = True

    def _take_in(self) -> None:
        """Between two steps: runs what callers asked for, a cancel before newcomers, and ends what is overdue."""
        for command in self._intake.commands():
            command()
        for answer in self._intake.newcomers(NEWCOMERS_PER_STEP):
            self._place(answer)
            self._answers.begin(answer)
        self._answers.end_overdue()

    def _take_in_or_stop(self) -> None:
        self._take_in()
        if self._stopping:
            raise EngineError("the engine is closed")

    def _leave(self) -> None:
        """Ends every request and runs what came until the end, so that everyone hears of it; then takes no more."""
        self._stopping = True
        self._answers.tell()
        if self.error is None:
            self._phase = "stopped"
        self._intake.refuse(self.error or "the engine is closed")
        reason: FinishReason = "error" if self.error else "abort"
        why = self.error or "the engine was stopped before the answer had ended"
        self._answers.end_all(reason, why)
        while not self._intake.close():
            for command in self._intake.commands():
                command()
            for answer in self._intake.newcomers(NEWCOMERS_PER_STEP):
                self._answers.end(answer, reason, why)
        self._ended.set()

    def _place(self, answer: Answer) -> None:
        answer.scheduler = self._choose_group(answer.sequence)
        answer.scheduler.add(answer.sequence)

    def _choose_group(self, sequence: Sequence) -> Scheduler:
        """Where the prompt's first token will come soonest: fewest rows queued before it, and its own uncached ones."""
        tokens, salt = sequence.tokens, sequence.sharing.cache_salt
        return min(
            self._schedulers,
            key=lambda s: (s.queued_tokens + len(tokens) - s.cached_tokens(tokens, salt), len(s.running)),
        )

    def _step(self) -> None:
        """Sends the next step, if there is any, then waits for the one before; without overlap it waits for each."""
        scheduled = [scheduler.schedule() for scheduler in self._schedulers]
        step = Step(self._steps + 1, tuple(s.rows for s in scheduled))
        if sent := any(rows.answers or rows.chunks for rows in step.groups):
            self._steps += 1
            self._executor.send(step)
            self._under_way.append(scheduled)
        self._answers.tell()
        if self._under_way and not (sent and self.config.overlap and len(self._under_way) == 1):
            results = self._executor.collect()
            self._faults.worked()
            for of_group, result in zip(self._under_way.popleft(), results, strict=True):
                self._answers.take(of_group, result)
            if not self._answers:
                self._answers.tell()
