"""A load on started engines of a layout, without HTTP: its figures correct the layout's times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from weft.engine.advise.advice import Limits, Prediction, predict
from weft.engine.advise.candidates import ClientLoad
from weft.engine.advise.measure import described, kept_path, step_times
from weft.engine.advise.simulate import NO_API, ApiTimes, Clients, figures
from weft.engine.config.config import EngineError
from weft.engine.config.device import on_gpus
from weft.engine.controller.engine import Engine

MAX_ROUND_S = 600.0
RoundFigures = tuple[tuple[float, float], tuple[float, float], float]
"""TTFT, ITL and output tokens per second, as `figures` returns them."""


def run_load(
    engines: Sequence[Engine], load: ClientLoad, requests: int, seconds: float, rounds: int = 2
) -> RoundFigures:
    """Return the figures of the quickest round, after one that warms up.

    Args:
        engines: servers, each with this load.
        load: clients of one server.
        requests: requests of a round and a server.
        seconds: time after which no round begins, but for the minimum.
        rounds: minimum rounds.

    Raises EngineError for a round that does not end.
    """
    found, until = list[RoundFigures](), time.monotonic() + seconds
    while len(found) <= rounds or time.monotonic() < until:
        vocabulary, seed = engines[0].model_config.vocab_size, len(found)
        groups = [Clients(load, requests, vocabulary, time.perf_counter, seed) for _ in engines]
        began = time.perf_counter()
        for group, engine in zip(groups, engines, strict=True):
            group.submit = engine.submit_all
            group.begin()
        if not all(group.ended.wait(MAX_ROUND_S) for group in groups):
            raise EngineError(f"{requests} requests did not end in {MAX_ROUND_S:.0f} s")
        found.append(figures([times for group in groups for times in group.times], began))
    return max(found[1:], key=lambda each: each[2])


def correct(prediction: Prediction, load: ClientLoad, seconds: float, api: ApiTimes = NO_API) -> dict[str, Any]:
    """Run a load on a layout for some seconds, keep the factor that corrects its times, and return both figures.

    api: time of the controller.
    """
    candidate, given = prediction.candidate, prediction.candidate.given
    cores = candidate.cores[:1] if on_gpus(given) else candidate.cores  # servers share no GPU, so one tells for all
    own = load.per_server(candidate.replicas)
    with ExitStack() as stack:
        configs = [replace(given, cpu_bind=given.cpu_bind if each == "auto" else each) for each in cores]
        engines = [stack.enter_context(Engine(config)) for config in configs]
        ttft, itl, rate = run_load(engines, own, 4 * own.concurrency, seconds)
    rate *= candidate.replicas / len(cores)
    table = step_times(candidate, load)
    ours = predict(candidate, table, load, Limits(), 4 * load.concurrency, api).figures
    table.factor *= ours.tokens_s / rate
    table.write(kept_path(described(candidate)))
    both = {
        "tokens_s": (ours.tokens_s, rate),
        "ttft_ms": (ours.ttft_ms[0], ttft[0]),
        "itl_ms": (ours.itl_ms[0], itl[0]),
    }
    pairs = {name: {"predicted": round(a, 3), "measured": round(b, 3)} for name, (a, b) in both.items()}
    return {"layout": str(candidate), **pairs, "factor": round(table.factor, 4)}
