"""Prometheus metrics: the engine's values, read on each scrape, and latencies, observed per token."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from weft.engine.controller.engine import Engine
from weft.engine.messages.api_messages import Observed
from weft.serve.http.vllm_metrics import VllmCollector

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
        requests = CounterMetricFamily("weft_requests", "Requests that have ended, by outcome", labels=["outcome"])
        for outcome, count in self._outcomes.items():
            requests.add_metric([outcome], count)
        yield requests


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
        used = GaugeMetricFamily("weft_kv_cache_used_ratio", "Share of the cache that sequences hold", labels=["group"])
        for group, (pages, total) in enumerate(zip(s.kv_used, s.kv_total, strict=True)):
            used.add_metric([str(group)], pages / total)
        yield used
        tokens = GaugeMetricFamily("weft_kv_cache_tokens", "Tokens that the cache holds", labels=["group"])
        for group in range(len(s.kv_total)):
            tokens.add_metric([str(group)], config.cached_tokens)
        yield tokens
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
        rows = drafted[0] if drafted else 0
        for name, text, total in (
            ("weft_draft_rows", "Decode rows with drafts", rows),
            ("weft_draft_tokens", "Drafts", sum(drafted)),
            ("weft_accepted_draft_tokens", "Drafts that were accepted", sum(accepted)),
        ):
            yield CounterMetricFamily(name, text, value=total)
        text = "Drafts that were accepted, by position in their row"
        by_position = CounterMetricFamily("weft_accepted_draft_tokens_per_position", text, labels=["position"])
        for position, count in enumerate(accepted):
            by_position.add_metric([str(position)], count)
        yield by_position

    def _communication(self) -> Iterator[Metric]:
        labels = ["read", "step"]
        calls = CounterMetricFamily("weft_collective_calls", "Collectives of rank 0 by planned step", labels=labels)
        moved = CounterMetricFamily("weft_collective_bytes", "Bytes received by the busiest rank", labels=labels)
        seconds = CounterMetricFamily("weft_collective_seconds", "Time in them, waiting included", labels=labels)
        plans = CounterMetricFamily(
            "weft_plan_seconds", "Time in collectives, of the plan and of the naive one", labels=["plan", "by"]
        )
        ran, naive = self._engine.last_comm_report()
        for plan, stats in (("followed", ran), ("naive", naive)):
            plans.add_metric([plan, "measured"], sum(s.seconds for s in stats))
            plans.add_metric([plan, "predicted"], sum(s.predicted for s in stats))
        for stat in ran:
            calls.add_metric([stat.site, stat.step], stat.count)
            moved.add_metric([stat.site, stat.step], stat.bytes)
            seconds.add_metric([stat.site, stat.step], stat.seconds)
        yield from (calls, moved, seconds, plans)
