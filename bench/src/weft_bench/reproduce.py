"""Runs of a seed's variants and loads: a fresh engine for each variant and round, in alternating order."""

from __future__ import annotations

import bisect
import itertools
import json
import queue
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from weft.engine.assets import preset_dir
from weft.engine.config.config import EngineConfig
from weft.engine.config.engine_options import CacheOptions, RequestOptions
from weft.engine.controller.engine import Engine
from weft.engine.controller.profiling import ProfileError
from weft.engine.controller.startup import resolve_defaults
from weft.engine.messages.request import SamplingParams
from weft.engine.models.config_json.fields import first_line
from weft.engine.output.request_output import RequestOutput
from weft.engine.worker.memory import weight_bytes
from weft.planner.spec import LayoutError
from weft_bench.breakdown import SPARE_TOKENS, output_length, random_prompts, run
from weft_bench.setups import Load, Metric, Profile, Setup, TableRow

WEIGHTS_SHARE = 0.6
"""Share of a GPU's free memory for weights; the rest is for caches and activations."""
MIN_BATCH_TOKENS = 1024
"""Tokens of a step on CPUs; on GPUs there are more."""
SPARE = 8
"""Tokens of a sequence in addition to the load's tokens."""
WARM_OUTPUT = 8
"""Tokens of the outputs that warm an engine."""
WAIT_S = 600.0
"""Seconds without a token after which a load counts as hung."""
COUNTED_S = 0.05
"""Seconds between counts of the running sequences. A count per token would keep the engine's thread waiting for
Python's lock."""
FAILURES = (LayoutError, RuntimeError, TimeoutError)
"""Errors of an engine's start and of loads."""
Figures = dict[Metric, float]


@dataclass(frozen=True)
class Measured:
    """Measurements of a setup.

    Attributes:
        figures: medians over rounds of each load of each variant, without metrics that were not measured.
        failed: reason of each variant without figures, in one line.
        layers: number of layers that ran, if not all.
    """

    figures: dict[str, list[Figures]]
    failed: dict[str, str] = field(default_factory=dict)
    layers: int | None = None

    def ratio(self, row: TableRow) -> float | None:
        """Return the second variant's figure as a multiple of the first's, or None if one was not measured. See
        `better`."""
        before, after = (self.value(row, variant) for variant in (row.before, row.after))
        return None if before is None or after is None else better(row.metric, before, after)

    def value(self, row: TableRow, variant: str) -> float | None:
        """Return a variant's figure of a row; None if it was not measured."""
        loads = self.figures.get(variant)
        return None if loads is None else loads[row.load].get(row.metric)


def better(metric: Metric, before: float, after: float) -> float | None:
    """Return how many times better `after` is: more tokens or sequences, less time, or fewer calls. None for zeros."""
    if before <= 0 or after <= 0:
        return None
    return after / before if metric in ("tokens/s", "sequences at once") else before / after


def measure(
    setup: Setup, folder: Path, rounds: int, num_layers: int | None, device: str, at_once: bool = False
) -> Iterator[Measured]:
    """Yield the measurements so far, after each variant of each round.

    folder: place for the files of models. at_once: one engine a variant, started at the same time, in place of a fresh
    one a round. A variant that fails is not run again, and the others are. Raises as `EngineConfig` does, before
    anything is run.
    """
    configs = {name: config_of(setup, options, folder, num_layers, device) for name, options in setup.variants.items()}
    if device == "cuda" and num_layers is None:
        num_layers = min(map(_fitting_layers, {config.mesh: config for config in configs.values()}.values()))
        configs = {name: replace(config, num_layers=num_layers) for name, config in configs.items()}
    found: dict[str, list[list[Figures]]] = {}
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        engines = _start(configs, stack, failed) if at_once else {}
        for index in range(rounds):
            for name in sorted(configs, key=list(configs).index, reverse=bool(index % 2)):
                if name not in failed:
                    try:
                        with nullcontext(engines[name]) if at_once else Engine(configs[name]) as engine:
                            found.setdefault(name, []).append(_figures(setup, engine))
                    except FAILURES as error:
                        failed[name] = first_line(error)
                medians = {each: [_median(load) for load in zip(*of, strict=True)] for each, of in found.items() if of}
                yield Measured(medians, dict(failed), num_layers)


def _start(configs: Mapping[str, EngineConfig], stack: ExitStack, failed: dict[str, str]) -> dict[str, Engine]:
    """Start an engine for each variant, all at the same time, to be ended by `stack`. failed: gets what fails."""

    def start_one(config: EngineConfig) -> Engine:
        return stack.enter_context(Engine(config))  # at once, so that it ends whatever another start raises

    with ThreadPoolExecutor(len(configs)) as pool:
        starts = {name: pool.submit(start_one, config) for name, config in configs.items()}
    engines: dict[str, Engine] = {}
    for name, start in starts.items():
        try:
            engines[name] = start.result()
        except FAILURES as error:
            failed[name] = first_line(error)
    return engines


def _figures(setup: Setup, engine: Engine) -> list[Figures]:
    """Return the figures of each load. Raises as `run_load` does."""
    first = setup.loads[0]
    run_load(engine, replace(first, requests=engine.config.attn_dp, output=min(first.output, WARM_OUTPUT)))
    figures = [_median([run_load(engine, load) for _ in range(load.times)]) for load in setup.loads]
    if setup.profile is not None:
        figures[0] |= run_profile(engine, setup.profile)
    return figures


def run_load(engine: Engine, load: Load) -> Figures:
    """Return a load's figures: tokens read and written per second, median times to the first token and between tokens,
    the maximum of running sequences, and exchanges of a step. Raises TimeoutError, RuntimeError."""
    prompts = random_prompts(engine, load.requests, load.input, seed=load.requests * load.input)
    events: queue.SimpleQueue[tuple[int, float, bool]] = queue.SimpleQueue()
    params = SamplingParams(max_tokens=load.output, temperature=0.0, ignore_eos=True)
    began: dict[int, float] = {}
    came: dict[int, list[float]] = {}

    def submit(number: int) -> None:
        def callback(output: RequestOutput) -> None:
            events.put((number, time.perf_counter(), output.end is not None))

        began[number], came[number] = time.perf_counter(), []
        engine.submit(prompts[number], params, callback)

    steps, (calls, received) = engine.stats().steps, _exchanged(engine)
    submitted, ended, running, start = 0, set[int](), 0, time.perf_counter()
    counted = start - COUNTED_S
    while len(ended) < load.requests:
        while submitted < load.requests and submitted - len(ended) < load.concurrency:
            submit(submitted)
            submitted += 1
        try:
            number, at, last = events.get(timeout=WAIT_S)
        except queue.Empty:
            raise TimeoutError(f"no token came for {WAIT_S:g} s") from None
        if at >= counted + COUNTED_S:
            running, counted = max(running, engine.stats().running), at
        if engine.error is not None:
            raise RuntimeError(engine.error)
        came[number].append(at)
        if last:  # of each token of the last step
            ended.add(number)
    seconds = time.perf_counter() - start
    gaps = [b - a for times in came.values() for a, b in itertools.pairwise(times)]
    steps, (all_calls, all_received) = max(1, engine.stats().steps - steps), _exchanged(engine)
    return {
        "tokens/s": load.requests * (load.input + load.output) / seconds,
        "first token, ms": 1e3 * statistics.median(times[0] - began[n] for n, times in came.items()),
        "next token, ms": 1e3 * statistics.median(gaps or [0.0]),
        "sequences at once": running,
        "collectives a step": (all_calls - calls) / steps,
        "MiB a step": (all_received - received) / steps / 2**20,
    }


def run_profile(engine: Engine, profile: Profile) -> Figures:
    """Return time and count of a decode step's collectives; nothing if the profile has none of them."""
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        tokens = _profiled_tokens(profile)
        try:
            found = run(engine, profile.batch, profile.context, profile.steps, tokens, Path(folder))
        except (ProfileError, ValueError):  # too few steps, or a trace without them
            return {}
    collectives = next((row for row in found.figures["kinds"] if row["kind"] == "collectives"), None)
    if collectives is None or not collectives["us"]:
        return {}
    return {
        "collectives of a decode step, ms": collectives["us"] / 1e3,
        "collectives and waiting of a decode step, ms": (collectives["us"] + collectives["waiting_us"]) / 1e3,
        "collectives a decode step": collectives["calls"],
    }


def _profiled_tokens(profile: Profile) -> int:
    """Return the tokens of each output while steps are profiled."""
    chunks = -(-profile.batch * profile.context // MIN_BATCH_TOKENS)
    return output_length(profile.steps, chunks) + SPARE_TOKENS


def _exchanged(engine: Engine) -> tuple[int, int]:
    """Return the number of collectives so far, and the bytes that the busiest ranks received."""
    ran, _ = engine.comm_report()
    return sum(stat.count for stat in ran), sum(stat.bytes for stat in ran)


def _median(rounds: Sequence[Figures]) -> Figures:
    measured = [metric for metric in rounds[0] if all(metric in figures for figures in rounds)]
    return {metric: statistics.median(figures[metric] for figures in rounds) for metric in measured}


def config_of(setup: Setup, options: Any, folder: Path, num_layers: int | None, device: str) -> EngineConfig:
    """Return a variant's configuration. On GPUs the cache has the size that the loads need, unless the variant has one.

    folder: place for the files of a preset with other sizes. Raises as EngineConfig does.
    """
    concurrency = max(load.concurrency for load in setup.loads)
    longest = max(load.input + load.output for load in setup.loads)
    if (profile := setup.profile) is not None:
        concurrency = max(concurrency, profile.batch)
        longest = max(longest, profile.context + _profiled_tokens(profile))
    running = -(-concurrency // options.get("attn_dp", 1))
    sizes: dict[str, Any] = dict(
        max_running=running,
        max_waiting=max(RequestOptions.max_waiting, concurrency),
        max_batch_tokens=max(8192 if device == "cuda" else MIN_BATCH_TOKENS, running),
        max_model_len=longest + SPARE,
        kv_tokens=running * (longest + SPARE + CacheOptions.page_size) if device == "cuda" else None,
        prefix_cache=False,
        device=device,
        num_layers=num_layers,
    )
    if setup.model is not None:
        sizes |= dict(model=_model(setup, folder), load_format="dummy")
    return EngineConfig(**sizes | dict(options))


def _model(setup: Setup, folder: Path) -> Path:
    """Return the directory of a preset, or of one with other sizes."""
    assert setup.model is not None
    if not setup.changed:
        return preset_dir(setup.model)
    config = json.loads((preset_dir(setup.model) / "config.json").read_text())
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | dict(setup.changed)))
    return folder


def _fitting_layers(config: EngineConfig) -> int:
    """Return the number of the model's layers, 1 at least, that fit the memory of a GPU."""
    config = resolve_defaults(config)
    free = WEIGHTS_SHARE * torch.cuda.mem_get_info()[0]

    def exceeds(layers: int) -> bool:
        model = replace(config, num_layers=layers).read_model()
        return weight_bytes(model, config.mesh, 0, torch.bfloat16) > free

    layers = range(1, replace(config, num_layers=None).read_model().num_layers + 1)
    return max(1, bisect.bisect_left(layers, True, key=exceeds))
