"""Times of made-up steps on started ranks, sent as the engine sends steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from random import Random

from weft.engine.config.config import EngineConfig
from weft.engine.controller.executor import Executor
from weft.engine.controller.rank_executors import make_executor
from weft.engine.kv.tokens import token_bytes
from weft.engine.messages.rank_messages import Chunk, GroupRows, Join, Sampling, Step
from weft.engine.models.layers.model_config import ModelConfig
from weft.engine.worker.memory import dummy_tables
from weft.tune.step_table import StepShape

WARM_STEPS, MIN_STEPS, MAX_STEPS, POINT_S = 2, 3, 16, 0.08
"""Steps of a measurement: before it, minimum, maximum, and seconds between these two."""


class StepRunner:
    """Ranks of one server or several, which all run the same steps at the same time.

    executors: one of each server, started. config: of their ranks, with a row of the table for each sequence.
    """

    def __init__(self, executors: Sequence[Executor], config: EngineConfig, model: ModelConfig):
        self._executors, self._config, self._vocabulary = executors, config, model.vocab_size
        self._longest = min(config.max_model_len or model.max_position, config.cached_tokens)
        self._number, self._random = 0, Random(0)

    def run_us(self, shape: StepShape, input_len: int) -> list[float]:
        """Return the µs of each step of a run of this shape in each DP group; prompts have `input_len` rows, the last
        fewer. Groups have tokens of their own: the same tokens would choose the same experts.

        Only the mean prices a step: after a late result the next one seems early.
        """
        steps = MAX_STEPS + WARM_STEPS
        start = max(1, min(int(shape.context), self._longest - steps - 1))
        decode_rows, groups = tuple(range(shape.decode)), range(self._config.attn_dp)
        joins = tuple(self._join(row, start - 1, steps + 1) for row in decode_rows)
        size = min(input_len, self._longest)
        cached = min(int(shape.cached), self._longest - size)
        prompts = [min(size, shape.prompt - at) for at in range(0, shape.prompt, size)]
        if joins:  # ranks must hold a last token of each row
            first = (tuple(self._chunk(row, 1) for row in decode_rows) for _ in groups)
            list(self._run([[GroupRows(chunks=chunks, joins=joins) for chunks in first]]))
        prompt_rows = range(shape.decode, shape.decode + len(prompts))
        new = tuple(self._join(row, cached, n) for row, n in zip(prompt_rows, prompts, strict=True))
        each = (tuple(self._chunk(row, n) for row, n in zip(prompt_rows, prompts, strict=True)) for _ in groups)
        found = list[float]()
        # Closed here: Ctrl-C would be lost in a generator that ends because nothing refers to it.
        with closing(self._run([[GroupRows(decode_rows, chunks, new) for chunks in each]] * steps)) as run:
            for seconds in run:
                found.append(seconds * 1e6)
                counted = found[WARM_STEPS:]
                if len(counted) >= MIN_STEPS and sum(counted) > POINT_S * 1e6:
                    break
        return found[WARM_STEPS:]

    def _join(self, row: int, context: int, more: int) -> Join:
        groups, span = self._executors[0].groups, self._config.interleave.span
        pages = -(-(context + more) // span)
        tables = dummy_tables(groups, row * pages, context + more, span)
        return Join(row, row, context, tuple(tables), Sampling(temperature=0.0))

    def _chunk(self, row: int, count: int) -> Chunk:
        return Chunk(row, token_bytes([self._random.randrange(self._vocabulary) for _ in range(count)]), True)

    def _run(self, messages: Sequence[Sequence[GroupRows]]) -> Generator[float]:
        """Yield the seconds between the ends of steps of all groups' rows; each is sent before the end of the one
        before, as serving."""
        in_flight, ended = 0, 0.0
        try:
            for rows in [*messages, None]:
                if rows is not None:
                    self._number += 1
                    step = Step(self._number, tuple(rows))
                    for executor in self._executors:
                        executor.send(step)
                    in_flight += 1
                if in_flight == 2 or rows is None:
                    in_flight -= 1
                    seconds, ended = self._collect(ended)
                    yield seconds
        finally:
            for _ in range(in_flight):
                self._collect(ended)

    def _collect(self, before: float) -> tuple[float, float]:
        for executor in self._executors:
            executor.collect()
        now = time.perf_counter()
        return now - before, now


@contextmanager
def started_ranks(
    configs: Sequence[EngineConfig], model: ModelConfig, progress: Callable[[str, float], None]
) -> Iterator[StepRunner]:
    """Start the ranks of a server for each of `configs`, and stop them at the end. Raises errors of a start.

    configs: equal but for cores. model: shape of their model. progress: called with (what, fraction).
    """
    with ExitStack() as stack:
        executors = [make_executor(config) for config in configs]
        for executor in executors:
            stack.callback(executor.close)
            executor.prepare()
        for executor in executors:
            executor.start(progress)
        yield StepRunner(executors, executors[0].config, model)
