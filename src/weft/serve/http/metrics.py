"""Prometheus metrics: the engine's values, read on each scrape, and latencies, observed per token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.engine.controller.engine import Engine
from weft.serve.http.vllm_metrics import VllmCollector

TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics(Collector):
    """Collector with its own registry, so that several servers can run in one process."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.registry = CollectorRegistry()
        self._first = self._histogram("weft_time_to_first_token_seconds", "From the request to its first token")
        self._between = self._histogram("weft_inter_token_latency_seconds", "Between tokens of an output")
        self._queue = self._histogram("weft_request_queue_seconds", "From the request to its place in the batch")
        self._whole = self._histogram("weft_request_seconds", "From the request to its last token")
        self._prefill = self._histogram(
            "weft_request_prefill_seconds", "From the place in the batch to the first token"
        )
        self._decode = self._histogram("weft_request_decode_seconds", "From the first token to the last")
        self._prompts = self._histogram("weft_request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self._inference = self._histogram(
            "weft_request_inference_seconds", "From the place in the batch to the last token"
        )
        self._per_token = self._histogram(
            "weft_request_time_per_output_token_seconds", "Mean between tokens of a request's longest choice"
        )
        self._computed = self._histogram("weft_request_computed_tokens", "Prompt tokens that were not cached", TOKENS)
        self._longest = self._histogram("weft_request_max_generated_tokens", "Tokens of its longest choice", TOKENS)
        self._limit = self._histogram("weft_request_max_tokens", "The limit that requests set on their choices", TOKENS)
        self._choices = self._histogram("weft_request_choices", "Choices of a request", TOKENS[:9])
        self._generated = self._histogram("weft_request_generated_tokens", "Tokens sampled for a request", TOKENS)
        self._requests = Counter(
            "weft_requests", "Requests that have ended, by outcome", labelnames=["outcome"], registry=self.registry
        )
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def token(self, begun: bool, seconds: float) -> None:
        """Observe a token. begun: not the choice's first; seconds: since the previous token, or since the request."""
        (self._between if begun else self._first).observe(seconds)

    def request(self, outcome: str, seconds: float, queued: float) -> None:
        """Count a request's end by `outcome`. seconds: in all; queued: before its first step."""
        self._requests.labels(outcome).inc()
        self._whole.observe(seconds)
        self._queue.observe(queued)

    def tokens(self, prompt: int, cached: int, generated: Sequence[int], prefill: float, decode: float) -> None:
        """Observe the tokens and times of a finished request.

        Args:
            prompt, cached: tokens of its prompts, and how many of these tokens the cache had.
            generated: tokens of each choice.
            prefill, decode: seconds to the first token, and from the first to the last.
        """
        self._prompts.observe(prompt)
        self._computed.observe(prompt - cached)
        self._generated.observe(sum(generated))
        self._longest.observe(max(generated))
        self._prefill.observe(prefill)
        self._decode.observe(decode)
        self._inference.observe(prefill + decode)
        if max(generated) > 1:
            self._per_token.observe(decode / (max(generated) - 1))

    def asked(self, choices: int, max_tokens: int | None) -> None:
        """Observe the parameters of a request. max_tokens: None if omitted."""
        self._choices.observe(choices)
        if max_tokens is not None:
            self._limit.observe(max_tokens)

    def refused(self, outcome: str) -> None:
        """Count a request that never reached the engine, without times."""
        self._requests.labels(outcome).inc()

    def text(self, model_name: str) -> bytes:
        """Return all metrics in Prometheus' text format. model_name: the clients' name."""
        return generate_latest(VllmCollector(self.registry, self._engine, model_name))

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's current values without waiting, as a step may hang."""
        s, config = self._engine.stats(), self._engine.config
        for name, text, value in (
            ("weft_requests_running", "Requests in a batch", s.running),
            ("weft_requests_waiting", "Requests in the queue", s.waiting),
            ("weft_healthy", "1 while requests are served", float(self._engine.healthy)),
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
        sizes = [(str(2**i), float(n)) for i, n in enumerate(itertools.accumulate(s.step_sizes))]
        sizes[-1] = ("+Inf", sizes[-1][1])
        yield HistogramMetricFamily("weft_step_rows", "Rows of a step", buckets=sizes, sum_value=s.step_rows)
        if (events := self._engine.kv_events) is not None:
            yield CounterMetricFamily("weft_kv_event_batches", "Batches of KV events", value=events.published)
            yield CounterMetricFamily(
                "weft_kv_event_batches_lost", "Those that found the queue full", value=events.lost
            )
        yield from self._communication()

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
