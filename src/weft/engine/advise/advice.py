"""Choice among layouts by their simulated figures under a load, with the reasons; and of a server that names none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from weft.engine.advise.candidates import Candidate, ClientLoad, KvDtype, choose_ranks, find_candidates, no_layout
from weft.engine.advise.measure import Progress, kept_loads, step_times
from weft.engine.advise.simulate import NO_API, ApiTimes, LoadFigures, simulate
from weft.engine.advise.step_prices import PricedSteps, PublishedGpu, decode_price
from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.controller.startup import context_tokens, read_model
from weft.engine.models.config_json.fields import ModelError
from weft.planner.spec import LayoutError
from weft.tune.step_table import NotMeasured, StepShape, StepTable

ROUNDS, MIN_REQUESTS, MAX_TOKENS = 4, 16, 200_000
"""Size of a simulation: requests of each client, minimum requests, and output tokens above which clients send fewer."""

SHORTEST = 256
"""Minimum of mixed_batch_tokens that is tried: products of fewer rows take longer for each row."""
SIMULATED = 8
"""Layouts on published GPUs to simulate: the ones with the cheapest decode steps."""


@dataclass(frozen=True)
class Limits:
    """Limits of a load's median latencies and of their 99th percentiles, in ms; None: no limit. Raises ValueError."""

    ttft_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_ms: float | None = None
    itl_p99_ms: float | None = None

    def __post_init__(self) -> None:
        for name, limit in vars(self).items():
            if limit is not None and not limit > 0:
                raise ValueError(f"{name} is {limit}; a limit must be more than 0")

    def excess(self, figures: LoadFigures) -> float:
        """Return by which factor the figures exceed their limits at worst; 1 or less: they keep to them."""
        (ttft, ttft_p99), (itl, itl_p99) = figures.ttft_ms, figures.itl_ms
        pairs = (ttft, self.ttft_ms), (ttft_p99, self.ttft_p99_ms), (itl, self.itl_ms), (itl_p99, self.itl_p99_ms)
        return max((value / limit for value, limit in pairs if limit is not None), default=0.0)


@dataclass(frozen=True)
class Prediction:
    """A layout's predicted figures under a load."""

    candidate: Candidate
    figures: LoadFigures  # of all servers; tokens per second are their sum
    error: float  # relative half-width of the interval of each figure, from the residuals of measured steps
    step_us: float  # time of a decode step of all clients in the middle of their outputs
    exchanges_us: float  # its exchanges, by the cost table
    collectives: int  # in a step
    excess: float  # see `Limits.excess`

    @property
    def why(self) -> str:
        """The parts of a decode step, in one line."""
        compute = (self.step_us - self.exchanges_us) / 1e3
        moved = "no collectives"
        if self.collectives:
            share = self.exchanges_us / self.step_us
            moved = f"{self.collectives} collectives {self.exchanges_us / 1e3:.2f} ms ({share:.0%})"
        return f"a decode step takes {self.step_us / 1e3:.2f} ms: {compute:.2f} ms of compute, {moved}"

    @property
    def text(self) -> str:
        """The figures, in one line."""
        (ttft, ttft_p99), (itl, itl_p99) = self.figures.ttft_ms, self.figures.itl_ms
        return (
            f"{self.figures.tokens_s:,.0f} tokens/s, TTFT {ttft:,.1f} ms (p99 {ttft_p99:,.1f}), ITL {itl:,.2f} ms "
            f"(p99 {itl_p99:,.2f}), each ± {self.error:.0%}"
        )

    def against(self, best: Prediction) -> str:
        """Return why this layout loses to the best, in one line."""
        less = 1 - self.figures.tokens_s / best.figures.tokens_s
        step, prompts = self.step_us / best.step_us, self.figures.ttft_ms[0] / max(best.figures.ttft_ms[0], 1e-9)
        sure = "" if abs(less) > self.error + best.error else ", within the error: measure both"
        rate = f"{less:.0%} fewer tokens/s" if less >= 0 else f"{-less:.0%} more tokens/s, beyond the limits"
        return f"loses: {rate}, decode steps × {step:.2f}, TTFT × {prompts:.2f}{sure}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON. Each figure has its interval: low and high."""

        def interval(value: float) -> dict[str, float]:
            low, high = value * (1 - self.error), value * (1 + self.error)
            return {name: round(each, 3) for name, each in (("value", value), ("low", max(0.0, low)), ("high", high))}

        found, candidate = self.figures, self.candidate
        latencies = {
            name: {"median": interval(median), "p99": interval(p99)}
            for name, (median, p99) in (("ttft_ms", found.ttft_ms), ("itl_ms", found.itl_ms))
        }
        step = {"us": round(self.step_us, 1), "exchanges_us": round(self.exchanges_us, 1)}
        return {
            "layout": str(candidate.config.mesh),
            "replicas": candidate.replicas,
            "kv_dtype": candidate.config.kv_dtype,
            "mixed_batch_tokens": candidate.config.mixed_tokens,
            "tokens_s": interval(found.tokens_s),
            **latencies,
            "error": round(self.error, 3),
            "meets_limits": self.excess <= 1,
            "decode_step": step | {"collectives": self.collectives},
            "steps": found.steps,
            "preemptions": found.preemptions,
        }


@dataclass
class Advice:
    """Layouts, the best first: the ones within the limits by tokens per second, then the nearest to the limits."""

    predictions: list[Prediction] = field(default_factory=list)
    not_known: dict[str, str] = field(default_factory=dict)  # reason why a layout has no figures
    refused: dict[str, str] = field(default_factory=dict)  # reason why a layout does not start
    omitted: int = 0  # layouts that start and were not simulated, as their decode steps cost more

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        layouts = [each.as_dict() for each in self.predictions]
        return {"layouts": layouts, "not_known": self.not_known, "refused": self.refused, "omitted": self.omitted}

    def lines(self, commands: Sequence[Sequence[str]]) -> list[str]:
        """Return the best three as text. commands: command lines of the servers of each prediction."""
        lines: list[str] = []
        for number, (each, servers) in enumerate(zip(self.predictions[:3], commands, strict=False), 1):
            lines += [f"{number}. {each.candidate}", f"   {each.text}", f"   {each.why}"]
            if each.excess > 1:
                nearest = "nearest possible: " * (number == 1)
                lines.append(f"   {nearest}exceeds the limits {each.excess:.2f} times")
            if number > 1:
                lines.append(f"   {each.against(self.predictions[0])}")
            lines += [f"   {line}" for line in servers]
        lines += [f"not known: {layout}: {why}" for layout, why in self.not_known.items()]
        if self.omitted:
            lines.append(f"{self.omitted} other layouts were not simulated: their decode steps cost more")
        if self.refused:
            lines.append(f"{len(self.refused)} other layouts do not start; --json says why")
        return lines


def advise(
    base: EngineConfig,
    ranks: int,
    load: ClientLoad,
    limits: Limits | None = None,
    progress: Progress | None = None,
    again: bool = False,
    kv_dtypes: Sequence[KvDtype] = ("auto",),
    one_server: bool = False,
    api: ApiTimes = NO_API,
    gpu: PublishedGpu | None = None,
) -> Advice:
    """Return the advice for a model on `ranks` ranks of this host.

    base: the model, and options that all layouts share. load, kv_dtypes, one_server, gpu: as in `find_candidates`.
    limits: of latencies. api: time of the HTTP server.
    progress: called with (what, fraction); None: nothing is measured. again: measure all steps again.
    Raises ModelError, LayoutError.
    """
    candidates, refused = find_candidates(base, ranks, load, None, kv_dtypes, one_server, gpu, progress)
    advice = Advice(refused=refused)
    if gpu is not None:
        candidates.sort(key=lambda each: _decode_us(each, _priced(gpu, each), load))
        advice.omitted, candidates = len(candidates[SIMULATED:]), candidates[:SIMULATED]
    for done, candidate in enumerate(candidates):
        try:
            table = step_times(candidate, load, progress, again) if gpu is None else _priced(gpu, candidate)
            if progress:
                progress(f"simulating {candidate}", done / len(candidates))
            of = partial(predict, table=table, load=load, limits=limits or Limits(), api=api)
            prediction = _shortened(of(candidate), load, of)
        except (NotMeasured, EngineError, ModelError) as error:
            advice.not_known[str(candidate)] = str(error)
        else:
            advice.predictions.append(prediction)
    advice.predictions.sort(key=_order)
    return advice


def _order(prediction: Prediction) -> tuple[float, float]:
    """Return the place of a prediction: the ones within the limits by tokens per second, then by their excess."""
    return max(1.0, prediction.excess), -prediction.figures.tokens_s


def _shortened(found: Prediction, load: ClientLoad, of: Callable[[Candidate], Prediction]) -> Prediction:
    """Return the best prediction of a layout that exceeds the limits, also with shorter steps while sequences decode.

    of: returns the prediction of a candidate.
    """
    candidate, given, config = found.candidate, found.candidate.given, found.candidate.config
    # As at a start: fewer sequences run if a step has fewer rows, unless their number is given.
    clients = load.per_server(candidate.replicas).per_group(config.attn_dp)
    minimum, rows = max(SHORTEST, given.max_running or clients), config.mixed_tokens // 2
    while found.excess > 1 and rows >= minimum:
        fewer = replace(config, mixed_batch_tokens=rows, max_running=min(rows, config.batch_sequences))
        shorter = of(replace(candidate, given=replace(given, mixed_batch_tokens=rows), config=fewer))
        if shorter.figures == found.figures:
            break  # no prompt is read while a sequence decodes
        found, rows = min(found, shorter, key=_order), rows // 2
    return found


def choose_layout(config: EngineConfig) -> tuple[EngineConfig, str]:
    """Return a server's configuration with a layout for this host, and the layout and the reason in one line.

    Everything else stays, and so do sizes of a layout that are not the defaults. The load is the one of the kept times,
    else `ClientLoad`'s defaults. Raises ModelError, and LayoutError if no layout starts.
    """
    if config.mesh.hosts > 1:
        raise LayoutError("--layout auto chooses for one host; name a layout of several: --attn-tp, --attn-dp")
    ranks, _ = choose_ranks(None, config.device)
    half = context_tokens(config, read_model(config)) // 2
    load = ClientLoad(min(ClientLoad.input_len, half), min(ClientLoad.output_len, half))
    candidates, refused = find_candidates(config, ranks, load, kv_dtypes=(config.kv_dtype,), one_server=True)
    if not candidates:
        raise no_layout(ranks, refused)
    loads, stale = kept_loads(candidates)
    for load in (each for each in loads if each.tokens <= 2 * half):
        found = advise(config, ranks, load, kv_dtypes=(config.kv_dtype,), one_server=True).predictions
        if found:
            best = found[0]
            return best.candidate.given, f"layout {best.candidate}, for {load.text}: {best.text} (measured steps)"
    best_us, chosen = min(((_price_us(each, load), each) for each in candidates), key=lambda pair: pair[0])
    why = f"the least of {len(candidates)} layouts; {stale or 'no steps are measured here'}: run weft advise once"
    return chosen.given, f"layout {chosen}, for {load.text}: a decode step is priced {best_us / 1e3:.2f} ms, {why}"


def predict(
    candidate: Candidate,
    table: StepTable | PricedSteps,
    load: ClientLoad,
    limits: Limits,
    requests: int | None = None,
    api: ApiTimes = NO_API,
) -> Prediction:
    """Return a candidate's figures by a table of its steps. Arguments are as in `advise`. Raises NotMeasured.

    requests: number of all requests to simulate; None: some for each client.
    The time of each step is sampled from the spread of measured steps, with the same seed for all layouts.
    """
    own = load.per_server(candidate.replicas)
    count = max(own.concurrency, min(max(MIN_REQUESTS, ROUNDS * own.concurrency), MAX_TOKENS // load.output_len))
    if requests is not None:
        count = -(-requests // candidate.replicas)
    given, random = replace(candidate.config, cpu_bind="off", threads=1), Random(0)

    def sampled_us(shapes: Sequence[StepShape]) -> float:
        return step_us(table, shapes) * random.choice(table.spread)

    figures = simulate(given, candidate.groups, own, sampled_us, count, replace(api, crowded=candidate.crowded))
    if figures.unknown:
        raise NotMeasured(f"times of {figures.unknown} were not measured")
    figures = replace(figures, tokens_s=figures.tokens_s * load.servers(candidate.replicas))
    groups = candidate.config.attn_dp
    rows = min(own.per_group(groups), candidate.config.batch_sequences)
    plan = candidate.planner.plan((rows,) * groups)
    us = _decode_us(candidate, table, load)
    collectives = sum(len(op.collectives) for _, op in plan.ops(optional=False))
    moved = min(us, plan.exchanges_us)
    return Prediction(candidate, figures, table.error, us, moved, collectives, limits.excess(figures))


def _priced(gpu: PublishedGpu, candidate: Candidate) -> PricedSteps:
    return PricedSteps(gpu, candidate.footprint, candidate.planner)


def _decode_us(candidate: Candidate, table: StepTable | PricedSteps, load: ClientLoad) -> float:
    """Return the µs of a decode step of all clients in the middle of their outputs."""
    rows = load.per_server(candidate.replicas).per_group(candidate.config.attn_dp)
    shape = StepShape(min(rows, candidate.config.batch_sequences), load.input_len + load.output_len / 2)
    return table.us(shape)


def _price_us(candidate: Candidate, load: ClientLoad) -> float:
    """Return the µs of this step by the cost table."""
    rows, threads = load.per_group(candidate.config.attn_dp), candidate.config.threads
    shape = StepShape(rows, load.input_len + load.output_len / 2)
    return decode_price(candidate.footprint, candidate.planner, shape, 1 if threads == "auto" else threads)


def step_us(table: StepTable | PricedSteps, shapes: Sequence[StepShape]) -> float:
    """Return the µs of a step: of its slowest DP group. A step is measured as if all groups had these rows."""
    live = [shape for shape in shapes if shape.decode or shape.prompt]
    if isinstance(table, PricedSteps):
        return max(table.us(shape, sum(each.decode + each.prompt for each in live)) for shape in live)
    return max(map(table.us, live))
