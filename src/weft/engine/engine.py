"""The engine: requests in, increments out, one loop that steps every DP group together."""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from transformers import AutoTokenizer

from weft.engine.config import EngineConfig, EngineError
from weft.engine.executor import Executor, make_executor
from weft.engine.messages import Drawn, Stat, Step
from weft.engine.request import FinishReason, Output, SamplingParams, Sequence, TokenLogprob
from weft.engine.scheduler import Scheduler
from weft.engine.text import TextStream
from weft.models.config import ModelError
from weft.stream import StepStat

OnOutput = Callable[[Output], None]
IDLE_CHECK_S = 1.0
"""How often an idle engine looks whether its ranks still live."""


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. running, waiting: requests. kv_used, kv_total: pages of each DP group. The rest are totals so far."""

    running: int
    waiting: int
    kv_used: tuple[int, ...]
    kv_total: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int


@dataclass(frozen=True)
class GenerationResult:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    cached_tokens: int


@dataclass(eq=False)
class _Running:
    sequence: Sequence
    scheduler: Scheduler
    text: TextStream


class Engine:
    """Serves a model on all ranks of a layout. Thread-safe; a context manager.

    progress(what, fraction): while it starts. Raises ModelError, LayoutError or EngineError, each in one line.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[str, float], None] | None = None):
        self.config, self.model_config = config, config.read_model()
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(config.model)
        except (OSError, ValueError) as error:
            raise ModelError(f"{config.model} has no usable tokenizer: {str(error).splitlines()[0]}") from error
        self.max_model_len = min(config.max_model_len or self.model_config.max_position, self.model_config.max_position)
        self.error: str | None = None
        self._executor: Executor = make_executor(config)
        self._executor.start(progress)
        self._schedulers = [
            Scheduler(
                num_pages=config.num_pages,
                page_size=config.page_size,
                max_batch_tokens=config.max_batch_tokens,
                max_running=config.max_running,
                prefix_cache=config.prefix_cache,
            )
            for _ in range(config.attn_dp)
        ]
        self._ids, self._seeds = itertools.count(1), random.Random(config.seed)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._requests: dict[int, _Running] = {}
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = self._steps = 0
        self._stopping = self._drained = False
        self._intake = threading.Lock()  # to put a command or to close the queue: none is put after the last look
        self._thread = threading.Thread(target=self._loop, name="weft-engine", daemon=True)
        self._thread.start()

    # --- for callers, on any thread ---------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """Whether requests are served; `error` says why not."""
        return self.error is None and not self._stopping

    def submit(self, prompt: Seq[int], params: SamplingParams, on_output: OnOutput) -> int:
        """Queues a request and returns its id. on_output is called on the engine's thread, last with a finish_reason.

        Raises ValueError for a prompt that is empty, too long or holds unknown tokens; EngineError when not healthy.
        """
        if not self.healthy:
            raise EngineError(self.error or "the engine is closed")
        tokens = list(prompt)
        if not tokens:
            raise ValueError("the prompt is empty; give at least one token")
        if min(tokens) < 0 or max(tokens) >= self.model_config.vocab_size:
            raise ValueError(f"prompt tokens must be between 0 and {self.model_config.vocab_size - 1}")
        vocabulary = self.model_config.vocab_size
        if any(not 0 <= token < vocabulary for token in params.stop_token_ids):
            raise ValueError(f"stop_token_ids must be between 0 and {vocabulary - 1}")
        most = min(self.max_model_len, self.config.num_pages * self.config.page_size) - len(tokens)
        if most < 1:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens; at most {most + len(tokens)} fit with the answer's first"
            )
        if params.max_tokens is not None and params.max_tokens > most:
            raise ValueError(
                f"the prompt's {len(tokens)} tokens and max_tokens={params.max_tokens} exceed the context of "
                f"{most + len(tokens)} tokens; ask for at most {most}"
            )
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.model_config.eos_token_ids))
        sequence = Sequence(
            request=next(self._ids),
            tokens=tokens,
            prompt_tokens=len(tokens),
            params=params,
            seed=self._seeds.getrandbits(62) if params.seed is None else params.seed & (2**62 - 1),
            max_tokens=most if params.max_tokens is None else params.max_tokens,
            end_ids=frozenset(ends),
            on_output=on_output,
        )
        if not self._put(lambda: self._begin(sequence)):
            raise EngineError(self.error or "the engine is closed")
        return sequence.request

    def cancel(self, request: int) -> None:
        """Ends a request before the next step; its pages are free at once. No harm where it has ended already."""
        self._put(lambda: self._abort(request))

    def generate(self, prompts: Seq[Seq[int]], params: SamplingParams) -> list[GenerationResult]:
        """Answers prompts and waits for all. Raises as `submit`, and EngineError where the engine fails meanwhile."""
        outputs: list[list[Output]] = [[] for _ in prompts]
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()

        def listen(at: int) -> OnOutput:
            def on_output(output: Output) -> None:
                outputs[at].append(output)
                if output.finish_reason:
                    ended.put(at)

            return on_output

        for at, prompt in enumerate(prompts):
            self.submit(prompt, params, listen(at))
        for _ in prompts:
            ended.get()
        if any(o[-1].finish_reason == "error" for o in outputs):
            raise EngineError(self.error or "the engine failed")
        return [_whole(o) for o in outputs]

    def stats(self) -> EngineStats:
        """Numbers of now."""
        return EngineStats(
            running=sum(len(s.running) for s in self._schedulers),
            waiting=sum(len(s.waiting) for s in self._schedulers),
            kv_used=tuple(s.used_pages for s in self._schedulers),
            kv_total=tuple(s.pool.total for s in self._schedulers),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=sum(s.preemptions for s in self._schedulers),
            steps=self._steps,
        )

    def comm_report(self) -> tuple[list[StepStat], list[StepStat]]:
        """What rank 0 has communicated since the start, by step, and what the naive plan would have."""
        report = self._ask(lambda: self._executor.report())
        return _step_stats(report.ran), _step_stats(report.naive)

    def plan_text(self, tokens_per_group: int) -> str:
        """The plan for so many tokens in each DP group, beside the naive one."""
        return self._ask(lambda: self._executor.plan_text(tokens_per_group))

    def check_idle(self) -> None:
        """AssertionError where pages leaked; to be called when nothing runs."""

        def check() -> None:
            for scheduler in self._schedulers:
                scheduler.check_idle()

        self._ask(check)

    def close(self) -> None:
        """Ends all requests with "abort" and stops the ranks. May be called twice."""
        if self._put(self._stop):
            self._thread.join()
        self._executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Runs a question on the engine's thread, between steps, and gives its answer."""
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put((question(), None))
            except BaseException as error:
                answer.put((None, error))

        if not self.healthy or not self._put(run):
            raise EngineError(self.error or "the engine is closed")
        value, error = answer.get()
        if error is not None:
            raise error
        return value

    def _put(self, command: Callable[[], None]) -> bool:
        """Hands a command to the engine's thread; False where that takes none any more. One that is taken will run."""
        with self._intake:
            if not self._drained:
                self._commands.put(command)
            return not self._drained

    # --- on the engine's thread -------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while not self._stopping:
                self._run_commands(wait=not self._requests)
                if self._requests and not self._stopping:
                    self._step()
        except Exception as error:
            self.error = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            for running in list(self._requests.values()):
                self._end(running, "error")
            self._executor.close()
        finally:
            self._stopping = True
            self._drain()

    def _run_commands(self, wait: bool) -> None:
        """Runs what callers have asked for; with nothing to step, waits for the next and looks after the ranks."""
        try:
            command = self._commands.get(block=wait, timeout=IDLE_CHECK_S)
        except queue.Empty:
            if wait:
                self._executor.check()
            return
        command()
        for _ in range(self._commands.qsize()):  # what is here now: a stream of newcomers must not hold up the step
            self._commands.get()()

    def _drain(self) -> None:
        """Runs what came until the end, so that everyone hears of it, and takes no more."""
        while True:
            with self._intake:
                if self._commands.empty():
                    self._drained = True
                    return
            self._commands.get()()

    def _stop(self) -> None:
        for running in list(self._requests.values()):
            self._end(running, "abort")
        self._stopping = True

    def _begin(self, sequence: Sequence) -> None:
        running = _Running(sequence, self._choose_group(sequence), TextStream(self.tokenizer, sequence.params.stop))
        self._requests[sequence.request] = running
        running.scheduler.add(sequence)
        self._prompt_tokens += sequence.prompt_tokens
        if self._stopping:
            self._end(running, "error" if self.error else "abort")

    def _choose_group(self, sequence: Sequence) -> Scheduler:
        """Where the prompt's first token will come soonest: fewest rows queued before it, and its own uncached ones."""
        return min(
            self._schedulers,
            key=lambda s: (s.queued_tokens + len(sequence.tokens) - s.cached_tokens(sequence.tokens), len(s.running)),
        )

    def _abort(self, request: int) -> None:
        if request in self._requests:
            self._end(self._requests[request], "abort")

    def _step(self) -> None:
        self._steps += 1
        step = Step(self._steps, tuple(s.schedule() for s in self._schedulers))
        results = self._executor.step(step)
        for scheduler, result in zip(self._schedulers, results, strict=True):
            for sequence, drawn in zip(scheduler.advance(), result.drawn, strict=True):
                if sequence.request != drawn.request:
                    raise EngineError(f"a token for request {drawn.request} came where {sequence.request} was due")
                self._accept(self._requests[sequence.request], drawn)

    def _accept(self, running: _Running, drawn: Drawn) -> None:
        """Takes one drawn token: the answer goes on or ends."""
        sequence, params = running.sequence, running.sequence.params
        if sequence.drawn == 0:
            self._cached_tokens += sequence.cached or 0
        sequence.tokens.append(drawn.token)
        self._generated_tokens += 1
        enough = sequence.drawn >= params.min_tokens
        ended = enough and drawn.token in sequence.end_ids
        text, stop = ("", None) if ended else running.text.push(drawn.token, check_stop=enough)
        if ended:
            self._end(
                running, "stop", text, drawn, None if drawn.token in self.model_config.eos_token_ids else drawn.token
            )
        elif stop is not None:
            self._end(running, "stop", text, drawn, stop)
        elif sequence.drawn >= sequence.max_tokens:
            self._end(running, "length", text, drawn)
        else:
            self._emit(running, text, drawn, None, None)

    def _end(
        self,
        running: _Running,
        reason: FinishReason,
        text: str = "",
        drawn: Drawn | None = None,
        stop_reason: str | int | None = None,
    ) -> None:
        del self._requests[running.sequence.request]
        if reason != "error":  # after a fault a scheduler may be in any state, and is not used again
            running.scheduler.finish(running.sequence)
        if not isinstance(stop_reason, str):
            text += running.text.flush()
        self._emit(running, text, drawn, reason, stop_reason)

    def _emit(
        self,
        running: _Running,
        text: str,
        drawn: Drawn | None,
        reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> None:
        s = running.sequence
        logprobs: tuple[TokenLogprob, ...] = ()
        if drawn is not None and drawn.logprob is not None:
            logprobs = (TokenLogprob(drawn.token, drawn.logprob, drawn.top),)
        tokens = () if drawn is None else (drawn.token,)
        try:
            s.on_output(Output(text, tokens, logprobs, reason, stop_reason, s.prompt_tokens, s.cached or 0, s.drawn))
        except Exception:  # a listener's fault must not end the others' requests
            logging.getLogger(__name__).exception(
                "the listener of request %d failed; the request is cancelled", s.request
            )
            self.cancel(s.request)


def _whole(outputs: list[Output]) -> GenerationResult:
    reason = outputs[-1].finish_reason
    assert reason is not None
    return GenerationResult(
        "".join(o.text for o in outputs),
        tuple(t for o in outputs for t in o.token_ids),
        tuple(p for o in outputs for p in o.logprobs),
        reason,
        outputs[-1].cached_tokens,
    )


def _step_stats(stats: tuple[Stat, ...]) -> list[StepStat]:
    return [StepStat(s.site, s.step, s.group, s.count, s.bytes, s.seconds) for s in stats]
