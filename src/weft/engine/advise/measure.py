"""Times of a layout's steps on this host: its ranks run made-up steps of a load."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from weft.engine.advise.candidates import Candidate, ClientLoad, measured_servers
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import device_of, dtype_of
from weft.engine.controller.step_runner import started_ranks
from weft.engine.hosts.digests import source_version
from weft.engine.models.config_json.directory import config_file
from weft.kernels.cpu_rows import MAX_ROWS
from weft.tune.host import describe_host
from weft.tune.step_table import (
    NotMeasured,
    Place,
    StepShape,
    StepTable,
    StepTime,
    best_of,
    extrapolate,
    spread_of,
    table_path,
)

log = logging.getLogger(__name__)
Progress = Callable[[str, float], None]
FEW_LAYERS, WHOLE_LAYERS = (4, 16), 32
"""Numbers of layers to measure of a deep model: times grow by their difference. A model of up to 32 runs whole, as two
starts take longer. Layers repeat with a period of at most four, and as few dense layers precede experts. With 8 in
place of 16, errors of both would be 1.6 times as large in the times of 48 layers."""
ROUNDS, MAX_ROUNDS, AGREED = 3, 8, 0.1
"""Measurements of each step, and the maximum if its two least ones differ by more than this fraction."""
CHECKED = "weft", "torch", "ranks"
"""Entries of a table's description that may change on a host: other times are then measured in its place."""


def configs(candidate: Candidate, load: ClientLoad, layers: int) -> list[EngineConfig]:
    """Return the configuration of each server with the first `layers` layers."""
    config, (_, mixed) = candidate.config, grids(candidate, load)
    rows = max(int(decode) + -(-int(prompt) // load.input_len) for decode, prompt, _ in mixed)
    # With the model's own weights, if it has any: trained routers choose experts less evenly than made-up ones.
    config = replace(config, num_layers=layers, kv_tokens=candidate.given.kv_tokens)
    rows, tokens = max(rows, config.batch_sequences), max(rows, config.batch_tokens)
    config = replace(config, max_running=rows, max_batch_tokens=tokens)
    servers = measured_servers(candidate.cores, config)
    return [replace(config, cpu_bind=config.cpu_bind if cores == "auto" else cores) for cores in servers]


def grids(candidate: Candidate, load: ClientLoad) -> tuple[list[Place], list[Place]]:
    """Return the grids of decode steps and of steps with prompts that cover a load."""
    config = candidate.config
    load = load.per_server(candidate.replicas)
    groups, limit = config.attn_dp, config.batch_sequences
    rows = min(load.concurrency, limit, 2 * load.per_group(groups))  # groups may differ in requests
    recorded = sum(each.input_len for each in load.arrivals) or config.batch_tokens
    largest = min(config.batch_tokens, rows * load.input_len, recorded)
    eager = MAX_ROWS // groups + 1  # rows from which steps on CPUs are not recorded: times jump there
    decode = sorted({*_powers(rows, 4), rows, *(n for n in (eager - 1, eager) if n < rows)})
    jump = (n for n in (eager - 1, eager) if n < largest)
    prompts = sorted({*_powers(largest, 16), min(load.input_len, largest), largest, *jump})
    contexts, cached = (load.shortest, load.tokens), (0, load.tokens - 1)
    return (
        [(n, context) for n in decode for context in contexts],
        [(n, prompt, tokens) for n in (0, rows) for prompt in prompts for tokens in cached],
    )


def _powers(limit: int, base: int) -> list[int]:
    return [base**i for i in range(int(math.log(limit, base)) + 1) if base**i <= limit]


def described(candidate: Candidate) -> dict[str, Any]:
    """Return what a candidate's times depend on: host, source, model shape, dtype, layout, threads and cores."""
    config, host = candidate.config, describe_host()
    cores = "; ".join(config.cpu_bind if each == "auto" else each for each in candidate.cores)
    names = "attn_dp attn_tp ep moe_tp dcp kv_dtype transport attention_backend cuda_graphs split_vocabulary"
    shape = json.loads(config_file(config.model).read_text()) if config.model.is_dir() else str(config.model)
    return {
        "host": {name: host[name] for name in ("cpu", "cores", "gpu") if name in host},
        "model": hashlib.blake2b(json.dumps(shape, sort_keys=True).encode(), digest_size=8).hexdigest(),
        "layers": candidate.model.num_layers,
        "dtype": str(dtype_of(config)),
        "weights": config.load_format,
        "device": device_of(config, 0).type,
        "layout": {name: str(getattr(config, name)) for name in names.split()},
        "replicas": candidate.replicas,
        "weft": source_version(omit="serve/"),
        "torch": host["torch"],
        "ranks": f"{config.threads} thread(s) each, cores {cores}",
    }


def kept_path(about: Mapping[str, Any]) -> Path:
    """Return the path of the times that `described` describes."""
    return table_path({name: value for name, value in about.items() if name not in CHECKED})


def kept_times(about: Mapping[str, Any]) -> tuple[StepTable | None, str]:
    """Return the kept times that `described` describes, if there are any that still hold, and in one line why they do
    not."""
    if (table := StepTable.read(kept_path(about))) is None:
        return None, ""
    changed = [
        f"{each} was {old}, and is {about[each]}" for each in CHECKED if (old := table.about.get(each)) != about[each]
    ]
    return (None, f"kept times of steps are not used: {changed[0]}") if changed else (table, "")


@cache
def _warn(why: str) -> None:
    """Log a reason, once for all layouts."""
    log.warning("%s; measuring again", why)


def step_times(
    candidate: Candidate, load: ClientLoad, progress: Progress | None = None, again: bool = False
) -> StepTable:
    """Return the times of a candidate's steps under a load: kept ones if they cover it, else measured and kept.

    progress: called with (what, fraction); None: nothing is measured. again: measure even if times are kept. Raises
    NotMeasured if none are kept and none may be measured, and errors of a start.
    """
    decode, mixed = grids(candidate, load)
    kept, stale = kept_times(about := described(candidate))
    if kept is not None and not again and kept.holds(decode, mixed):
        return kept
    if progress is None:
        raise NotMeasured(stale or f"no times of {candidate} under this load are kept on this host")
    if stale:
        _warn(stale)
    table = measure(candidate, load, progress)
    table.about = about | {"load": asdict(replace(load, arrivals=()))}
    table.write(kept_path(about))
    return table


def kept_loads(candidates: Sequence[Candidate]) -> tuple[list[ClientLoad], str]:
    """Return the loads of the candidates' kept times, and the reason why some do not hold; empty: all do."""
    kept = [kept_times(described(each)) for each in candidates]
    found = [table.about["load"] for table, _ in kept if table and "load" in table.about]
    loads = dict.fromkeys(ClientLoad(**each | {"arrivals": ()}) for each in found)
    return list(loads), next((stale for _, stale in kept if stale), "")


def measure(candidate: Candidate, load: ClientLoad, progress: Progress) -> StepTable:
    """Return the measured times of a candidate's steps, extrapolated by the number of layers for a deep model."""
    decode, mixed = grids(candidate, load)
    shapes = [StepShape(int(n), context) for n, context in decode]
    shapes += [StepShape(int(n), load.shortest, int(prompt), cached) for n, prompt, cached in mixed]
    checks = _between(decode, mixed, load)
    layers = candidate.model.num_layers
    counts = FEW_LAYERS if layers > WHOLE_LAYERS else (layers,)
    found, table, points, runs = list[list[StepTime]](), StepTable(), [*shapes, *checks], list[list[float]]()
    for done, number in enumerate(counts):
        with started_ranks(configs(candidate, load, number), candidate.model, progress) as ranks:
            rounds: list[list[float]] = [[] for _ in points]
            for index in range(MAX_ROUNDS):  # in turns, as a busy host is slow for seconds
                unsure = [at for at, times in enumerate(rounds) if index < ROUNDS or best_of(times)[1] > AGREED]
                for many, at in enumerate(unsure, 1):
                    runs.append(ranks.run_us(points[at], load.input_len))
                    rounds[at].append(statistics.fmean(runs[-1]))
                    of_layers = min(1.0, (index + many / len(unsure)) / ROUNDS)
                    progress(f"measuring {candidate}", (done + of_layers) / len(counts))
        found.append([best_of(times) for times in rounds])
    table.spread = spread_of(runs)
    times = found[0]
    if len(counts) > 1:
        more = (layers - counts[0]) / (counts[1] - counts[0])
        times = [extrapolate(few, many, more) for few, many in zip(*found, strict=True)]
    whole = [us for us, _ in times]
    table.residuals = [residual for _, residual in times]
    table.decode = dict(zip(decode, whole, strict=False))
    table.mixed = dict(zip(mixed, whole[len(decode) :], strict=False))
    predicted = [table.us(shape) for shape in checks]
    table.residuals += [us / ours - 1 for us, ours in zip(whole[len(shapes) :], predicted, strict=True)]
    return table


def _between(decode: Sequence[Place], mixed: Sequence[Place], load: ClientLoad) -> list[StepShape]:
    """Return steps between the points of both grids, to see how far interpolation errs."""
    rows, prompts = (sorted({int(place[axis]) for place in grid}) for grid, axis in ((decode, 0), (mixed, 1)))
    middle = load.input_len + load.output_len / 2
    found = [StepShape((a + b + 1) // 2, middle) for a, b in zip(rows[-2:], rows[-1:], strict=False)]
    found += [StepShape(0, 0, (a + b) // 2, 0) for a, b in zip(prompts[-2:], prompts[-1:], strict=False)]
    return [*found, StepShape((rows[-1] + 1) // 2, middle, prompts[len(prompts) // 2], 0)]
