"""Results of the engine other than increments: counters and whole completions."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from weft.engine.config.config import EngineError, QueueFull
from weft.engine.messages.request import Output
from weft.engine.output.request_output import OutputCallback, RequestOutput


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine's counters.

    Attributes:
        running, waiting: requests now.
        kv_used, kv_total: pages of each DP group now.
        preemptions: sequences that lost their pages to another and were computed again. This and all following fields
            are totals so far.
        stalls: steps skipped by a sequence because its sampling depends on a pending token.
        steps: steps sent to the ranks.
        step_sizes: histogram of steps: entry i counts steps with more than 2ⁱ⁻¹ and at most 2ⁱ rows.
        rejected: requests refused because too many waited.
        timeouts: requests ended by their deadline.
        queue_seconds: sum of the requests' waiting times until their first place in a batch.
        failures: failures of ranks, each followed by a restart.
        lost_places: node and place of each rank lost for good, without which the engine goes on.
        drafted, accepted: drafts by position in their row, and those that were accepted; empty: speculation is off.
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
    lost_places: tuple[tuple[int, int], ...] = ()
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def lost_ranks(self) -> int:
        """Number of ranks lost for good."""
        return len(self.lost_places)


def gather(
    prompts: Sequence[Sequence[int]],
    submit: Callable[[Sequence[int], OutputCallback], object],
    wait: Callable[[], object],
    each: Callable[[], None] = lambda: None,
) -> list[Output]:
    """Submit each prompt with a callback, wait for all completions, and return each as one increment.

    submit: called again after QueueFull. wait: waits for capacity. each: called after each completion. Raises other
    errors of `submit`, and EngineError if a completion ends with "error".
    """
    ended: queue.SimpleQueue[tuple[int, RequestOutput]] = queue.SimpleQueue()

    seen = set[int]()

    def callback(at: int, output: RequestOutput) -> None:
        if output.end is not None and at not in seen:  # each token of the last step has a call
            seen.add(at)
            ended.put((at, output))

    for at, prompt in enumerate(prompts):
        while True:
            try:
                submit(prompt, partial(callback, at))
                break
            except QueueFull:
                wait()
    outputs = dict[int, RequestOutput]()
    for _ in prompts:
        at, output = ended.get()
        outputs[at] = output
        each()
    results = [whole(outputs[at]) for at in range(len(prompts))]
    if failed := next((result for result in results if result.finish_reason == "error"), None):
        raise EngineError(failed.error or "the engine failed")
    return results


def whole(output: RequestOutput) -> Output:
    """Return all increments of an output that has ended as one, if none was taken yet."""
    assert output.end is not None
    return output.take(output.end.at + 1)
