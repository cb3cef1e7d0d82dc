"""Prometheus metrics: the engine's values, read on each scrape, and latencies, observed per token; also under vLLM's
names, for dashboards and routers made for vLLM."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from weft.engine.messages.api_messages import Observed

if TYPE_CHECKING:  # it imports torch, which API processes do without
    from weft.engine.controller.engine import Engine

TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "weft_time_to_first_token_seconds": ("From the request to its first token", SECONDS),
    "weft_inter_token_latency_seconds": ("Between tokens of an output", SECONDS),
    "weft_request_queue_seconds": ("From the request to its place in the batch", SECONDS),
    "weft_request_seconds": ("From the request to its last token", SECONDS),
    "weft_request_prefill_seconds": ("From the place in the batch to the first token", SECONDS),
    "weft_request_decode_seconds": ("From the first token to the last", SECONDS),
    "weft_request_inference_seconds": ("From the place in the batch to the last token", SECONDS),
    "weft_request_time_per_output_token_seconds": ("Mean between tokens of a request's longest choice", SECONDS),
    "weft_request_prompt_tokens": ("Prompt tokens of a request", TOKENS),
    "weft_request_computed_tokens": ("Prompt tokens that were not cached", TOKENS),
    "weft_request_max_generated_tokens": ("Tokens of its longest choice", TOKENS),
    "weft_request_max_tokens": ("The limit that requests set on their choices", TOKENS),
    "weft_request_choices": ("Choices of a request", TOKENS[:9]),
    "weft_request_generated_tokens": ("Tokens sampled for a request", TOKENS),
}
"""Name of each histogram of requests, with its text and its buckets."""


LabelledValues = Iterable[tuple[dict[str, str], float]]
"""Labels of a metric's values, each with its value."""

VLLM_NAMES = {
    "vllm:num_requests_running": "weft_requests_running",
    "vllm:num_requests_waiting": "weft_requests_waiting",
    "vllm:kv_cache_usage_perc": "weft_kv_cache_used_ratio",
    "vllm:num_preemptions": "weft_preemptions",
    "vllm:prompt_tokens": "weft_prompt_tokens",
    "vllm:generation_tokens": "weft_generated_tokens",
    "vllm:prefix_cache_queries": "weft_prompt_tokens",
    "vllm:prefix_cache_hits": "weft_prefix_cached_tokens",
    "vllm:prompt_tokens_cached": "weft_prefix_cached_tokens",
    "vllm:request_success": "weft_requests",
    "vllm:time_to_first_token_seconds": "weft_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "weft_inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds": "weft_inter_token_latency_seconds",  # its older name
    "vllm:e2e_request_latency_seconds": "weft_request_seconds",
    "vllm:request_queue_time_seconds": "weft_request_queue_seconds",
    "vllm:request_prefill_time_seconds": "weft_request_prefill_seconds",
    "vllm:request_decode_time_seconds": "weft_request_decode_seconds",
    "vllm:request_prompt_tokens": "weft_request_prompt_tokens",
    "vllm:request_generation_tokens": "weft_request_generated_tokens",
    "vllm:request_max_num_generation_tokens": "weft_request_max_generated_tokens",
    "vllm:request_inference_time_seconds": "weft_request_inference_seconds",
    "vllm:request_time_per_output_token_seconds": "weft_request_time_per_output_token_seconds",
    "vllm:request_prefill_kv_computed_tokens": "weft_request_computed_tokens",
    "vllm:request_params_n": "weft_request_choices",
    "vllm:request_params_max_tokens": "weft_request_max_tokens",
    "vllm:iteration_tokens_total": "weft_step_rows",
    "vllm:spec_decode_num_drafts": "weft_draft_rows",
    "vllm:spec_decode_num_draft_tokens": "weft_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "weft_accepted_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "weft_accepted_draft_tokens_per_position",
}
"""vLLM's name → Weft's name of a metric. All have the label `model_name`."""
REASONS = {"stop": "stop", "length": "length", "error": "error"}
REASONS |= {"abort": "abort", "timeout": "abort", "client_left": "abort"}
"""Weft's outcome of a request → vLLM's `finished_reason`. Refused requests have none."""


def labelled(kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, rows: LabelledValues) -> Metric:
    """Return the metric `name` of a `kind`, explained by `text`, with a value for each set of labels (`rows`)."""
    metric = kind(name, text)
    for labels, value in rows:
        metric.add_sample(name + "_total" * (kind is CounterMetricFamily), labels, value)
    return metric


class Tally:
    """Counts of observed values by bucket, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Observations:
    """Observations of requests, made on the event loop."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._tallies = {name: Tally(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self._outcomes: Counter[str] = Counter()
        self._first = self._tallies["weft_time_to_first_token_seconds"]
        self._between = self._tallies["weft_inter_token_latency_seconds"]

    def _observe(self, **values: float) -> None:
        for name, value in values.items():
            self._tallies[f"weft_request_{name}"].observe(value)

    def token_batch(self, begun: bool, seconds: float, count: int) -> None:
        """Observe `count` tokens that arrived together. begun: not the choice's first; seconds: since the token before,
        or since the request."""
        if begun:
            self._between.observe(seconds / count, count)
        else:
            self._first.observe(seconds)
            self._between.observe(0.0, count - 1)

    def request(self, outcome: str, seconds: float, queued: float) -> None:
        """Count a request's end by `outcome`. seconds: in all; queued: before its first step."""
        self._outcomes[outcome] += 1
        self._observe(seconds=seconds, queue_seconds=queued)

    def tokens(self, prompt: int, cached: int, generated: Sequence[int], prefill: float, decode: float) -> None:
        """Observe the tokens and times of a finished request.

        Args:
            prompt, cached: tokens of its prompts, and how many of these tokens the cache had.
            generated: tokens of each choice.
            prefill, decode: seconds to the first token, and from the first to the last.
        """
        self._observe(prompt_tokens=prompt, computed_tokens=prompt - cached, generated_tokens=sum(generated))
        self._observe(max_generated_tokens=max(generated), prefill_seconds=prefill, decode_seconds=decode)
        self._observe(inference_seconds=prefill + decode)
        if max(generated) > 1:
            self._observe(time_per_output_token_seconds=decode / (max(generated) - 1))

    def asked(self, choices: int, max_tokens: int | None) -> None:
        """Observe the parameters of a request. max_tokens: None if omitted."""
        self._observe(choices=choices)
        if max_tokens is not None:
            self._observe(max_tokens=max_tokens)

    def refused(self, outcome: str) -> None:
        """Count a request that never reached the engine, without times."""
        self._outcomes[outcome] += 1

    def take(self) -> Observed:
        """Return all observations and forget them."""
        taken = {name: (tally.counts, tally.sum) for name, tally in self._tallies.items() if any(tally.counts)}
        outcomes = dict(self._outcomes)
        self._forget()
        return Observed(taken, outcomes)

    def add(self, observed: Observed) -> None:
        """Add what other observations have taken."""
        for name, (counts, total) in observed.histograms.items():
            tally = self._tallies[name]
            tally.counts[:] = map(sum, zip(tally.counts, counts, strict=True))
            tally.sum += total
        self._outcomes.update(observed.outcomes)

    def families(self) -> Iterator[Metric]:
        """Yield the observations so far."""
        for name, (text, bounds) in HISTOGRAMS.items():
            tally = self._tallies[name]
            bounds_of = [*map(floatToGoString, bounds), "+Inf"]
            buckets = list(zip(bounds_of, map(float, itertools.accumulate(tally.counts)), strict=True))
            yield HistogramMetricFamily(name, text, buckets=buckets, sum_value=tally.sum)
        ended = (({"outcome": outcome}, count) for outcome, count in self._outcomes.items())
        yield labelled(CounterMetricFamily, "weft_requests", "Requests that have ended, by outcome", ended)


class Metrics(Observations, Collector):
    """Collector with its own registry, so that several servers can run in one process."""

    def __init__(self, engine: Engine):
        super().__init__()
        self._engine = engine
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def text(self, model_name: str) -> bytes:
        """Return all metrics in Prometheus' text format. model_name: the clients' name."""
        return generate_latest(VllmCollector(self.registry, self._engine, model_name))

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's current values without waiting, as a step may hang."""
        yield from self.families()
        s, config = self._engine.stats(), self._engine.config
        for name, text, value in (
            ("weft_requests_running", "Requests in a batch", s.running),
            ("weft_requests_waiting", "Requests in the queue", s.waiting),
            ("weft_healthy", "1 while requests are served", float(self._engine.healthy)),
            ("weft_ranks", "Ranks that run the model", config.mesh.world),
            ("weft_ranks_lost", "Ranks lost for good, without which the engine goes on", s.lost_ranks),
            ("weft_max_running", "Sequences of a DP group that run at once, at most", config.batch_sequences),
            ("weft_max_batch_tokens", "Rows of one step of a DP group, at most", config.batch_tokens),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        groups = [{"group": str(group)} for group in range(len(s.kv_total))]
        used = ((group, used / total) for group, used, total in zip(groups, s.kv_used, s.kv_total, strict=True))
        capacity = ((group, config.cached_tokens) for group in groups)
        text = "Share of the cache that sequences hold"
        yield labelled(GaugeMetricFamily, "weft_kv_cache_used_ratio", text, used)
        yield labelled(GaugeMetricFamily, "weft_kv_cache_tokens", "Tokens that the cache holds", capacity)
        for name, text, total in (
            ("weft_prompt_tokens", "Prompt tokens taken in", s.prompt_tokens),
            ("weft_prefix_cached_tokens", "Prompt tokens found in the prefix cache", s.cached_tokens),
            ("weft_generated_tokens", "Tokens sampled", s.generated_tokens),
            ("weft_preemptions", "Sequences that gave up their pages", s.preemptions),
            ("weft_stalls", "Rows that waited a step for a token which their next sample depends on", s.stalls),
            ("weft_steps", "Steps of the engine", s.steps),
            ("weft_requests_rejected", "Requests refused because too many waited", s.rejected),
            ("weft_restarts", "Failures of ranks, after which they were started anew", s.failures),
        ):
            yield CounterMetricFamily(name, text, value=total)
        yield from self._drafts(s.drafted, s.accepted)
        sizes = [(str(2**i), float(n)) for i, n in enumerate(itertools.accumulate(s.step_sizes))]
        sizes[-1] = ("+Inf", sizes[-1][1])
        yield HistogramMetricFamily("weft_step_rows", "Rows of a step", buckets=sizes, sum_value=s.step_rows)
        if (events := self._engine.kv_events) is not None:
            yield CounterMetricFamily("weft_kv_event_batches", "Batches of KV events", value=events.published)
            yield CounterMetricFamily(
                "weft_kv_event_batches_lost", "Those that found the queue full", value=events.lost
            )
        yield from self._communication()

    def _drafts(self, drafted: Sequence[int], accepted: Sequence[int]) -> Iterator[Metric]:
        for name, text, total in (
            ("weft_draft_rows", "Decode rows with drafts", drafted[0] if drafted else 0),
            ("weft_draft_tokens", "Drafts", sum(drafted)),
            ("weft_accepted_draft_tokens", "Drafts that were accepted", sum(accepted)),
        ):
            yield CounterMetricFamily(name, text, value=total)
        text = "Drafts that were accepted, by position in their row"
        rows = (({"position": str(position)}, count) for position, count in enumerate(accepted))
        yield labelled(CounterMetricFamily, "weft_accepted_draft_tokens_per_position", text, rows)

    def _communication(self) -> Iterator[Metric]:
        ran, naive = self._engine.last_comm_report()
        for name, text, field in (
            ("weft_collective_calls", "Collectives of rank 0 by planned step", "count"),
            ("weft_collective_bytes", "Bytes received by the busiest rank", "bytes"),
            ("weft_collective_seconds", "Time in them, waiting included", "seconds"),
        ):
            rows = (({"read": stat.site, "step": stat.step}, getattr(stat, field)) for stat in ran)
            yield labelled(CounterMetricFamily, name, text, rows)
        times = (
            ({"plan": plan, "by": by}, sum(getattr(stat, field) for stat in stats))
            for plan, stats in (("followed", ran), ("naive", naive))
            for by, field in (("measured", "seconds"), ("predicted", "predicted"))
        )
        text = "Time in collectives, of the plan and of the naive one"
        yield labelled(CounterMetricFamily, "weft_plan_seconds", text, times)


class VllmCollector(Collector):
    """Collector of a registry's metrics, followed by vLLM's names. vLLM's values of a server cover all DP groups."""

    def __init__(self, ours: Collector, engine: Engine, model_name: str):
        self._ours, self._engine, self._labels = ours, engine, {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; each value is read once, so that both names agree."""
        families = {family.name: family for family in self._ours.collect()}
        yield from families.values()
        for name, source in VLLM_NAMES.items():
            yield self._renamed(name, families[source])
        yield self._cache_config()
        states = {state: float(state == "awake") for state in ("awake", "weights_offloaded", "discard_all")}
        rows = ((self._labels | {"sleep_state": state}, value) for state, value in states.items())
        yield labelled(GaugeMetricFamily, "vllm:engine_sleep_state", "It never sleeps", rows)

    def _renamed(self, name: str, own: Metric) -> Metric:
        metric = Metric(name, own.documentation, own.type)
        if own.name == "weft_requests":
            counts = dict.fromkeys(REASONS.values(), 0.0)
            for sample in own.samples:
                reason = REASONS.get(sample.labels["outcome"])
                if reason is not None and sample.name.endswith("_total"):
                    counts[reason] += sample.value
            for reason, count in counts.items():
                metric.add_sample(f"{name}_total", self._labels | {"finished_reason": reason}, count)
        elif own.name == "weft_kv_cache_used_ratio":  # groups have caches of one size
            metric.add_sample(name, self._labels, sum(s.value for s in own.samples) / len(own.samples))
        else:
            for sample in own.samples:
                suffix = sample.name.removeprefix(own.name)
                metric.add_sample(name + suffix, sample.labels | self._labels, sample.value)
        return metric

    def _cache_config(self) -> Metric:
        config = self._engine.config
        labels = self._labels | {
            "block_size": str(config.interleave.span),
            "num_gpu_blocks": str(sum(self._engine.stats().kv_total)),
            "enable_prefix_caching": str(config.prefix_cache),
        }
        return labelled(GaugeMetricFamily, "vllm:cache_config_info", "Tokens of a page, and pages", [(labels, 1)])
