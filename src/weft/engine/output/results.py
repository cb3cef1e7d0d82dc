"""Results of the engine besides increments: counters, whole completions, communication reports."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from weft.engine.messages.rank_messages import Stat
from weft.engine.messages.request import FinishReason, TokenLogprob
from weft.engine.output.request_output import OutputCallback, RequestOutput
from weft.stream.stats import StepStat


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine's counters.

    Attributes:
        running, waiting: requests now.
        kv_used, kv_total: pages of each DP group now.
        preemptions: sequences that lost their pages to another and were computed again. This and the rest: totals so
            far.
        stalls: how often a sequence skipped a step because its sampling depends on a pending token.
        steps: steps that were sent.
        step_rows: rows of all steps.
        step_sizes: steps with at most 2ⁱ rows and more than half of that, by i.
        rejected: requests that were refused because too many waited.
        timeouts: requests that ended by their deadline.
        queue_seconds: time that all requests waited for their first place in a batch.
        failures: failures of ranks, after which they were started anew.
    """

    running: int
    waiting: int
    kv_used: tuple[int, ...]
    kv_total: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    stalls: int
    steps: int
    step_rows: int
    step_sizes: tuple[int, ...]
    rejected: int
    timeouts: int
    queue_seconds: float
    failures: int


@dataclass(frozen=True)
class GenerationResult:
    """A whole completion. error: why it ended early, if it did (`weft.engine.messages.request.Output`)."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    cached_tokens: int
    error: str | None


def gather(
    prompts: Sequence[Sequence[int]], submit: Callable[[Sequence[int], OutputCallback], None]
) -> list[GenerationResult]:
    """Submits each prompt with a callback, and waits for all completions."""
    ended: queue.SimpleQueue[tuple[int, RequestOutput]] = queue.SimpleQueue()

    def callback(at: int, output: RequestOutput) -> None:
        if output.end is not None:
            ended.put((at, output))

    for at, prompt in enumerate(prompts):
        submit(prompt, partial(callback, at))
    outputs = dict(ended.get() for _ in prompts)
    return [whole(outputs[at]) for at in range(len(prompts))]


def whole(output: RequestOutput) -> GenerationResult:
    """The completion of an output that has ended and of which nothing was taken yet."""
    increments = []
    while not output.over:
        increments.append(output.take())
    reason = increments[-1].finish_reason
    assert reason is not None
    return GenerationResult(
        "".join(o.text for o in increments),
        tuple(t for o in increments for t in o.token_ids),
        tuple(p for o in increments for p in o.logprobs),
        reason,
        increments[-1].cached_tokens,
        increments[-1].error,
    )


def step_stats(stats: tuple[Stat, ...]) -> list[StepStat]:
    """From the wire."""
    return [StepStat(s.site, s.step, s.group, s.count, s.bytes, s.seconds, s.predicted) for s in stats]
