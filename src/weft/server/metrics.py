"""Prometheus metrics: what the engine knows, read when asked, and latencies, observed as tokens come."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.engine.config import EngineError
from weft.engine.engine import Engine

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Timer:
    """Times one answer: to its first token, and between the others."""

    def __init__(self, first: Histogram, between: Histogram):
        self._first, self._between = first, between
        self._last, self._begun = time.perf_counter(), False

    def observe(self, tokens: int) -> None:
        """`tokens` have come; each counts."""
        now = time.perf_counter()
        for _ in range(tokens):
            (self._between if self._begun else self._first).observe((now - self._last) / tokens)
            self._begun = True
        self._last = now


class Metrics(Collector):
    """A registry of its own, so that several servers can live in one process."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.registry = CollectorRegistry()
        self._first = Histogram(
            "weft_time_to_first_token_seconds",
            "From the request to its first token",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._between = Histogram(
            "weft_inter_token_latency_seconds", "Between an answer's tokens", buckets=SECONDS, registry=self.registry
        )
        self.registry.register(self)

    def timer(self) -> Timer:
        """For one answer, from now."""
        return Timer(self._first, self._between)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What the engine knows now."""
        s = self._engine.stats()
        for name, text, value in (
            ("weft_requests_running", "Requests in a batch", s.running),
            ("weft_requests_waiting", "Requests in the queue", s.waiting),
            ("weft_healthy", "1 while requests are served", float(self._engine.healthy)),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        used = GaugeMetricFamily("weft_kv_cache_used_ratio", "Share of the cache that sequences hold", labels=["group"])
        for group, (pages, total) in enumerate(zip(s.kv_used, s.kv_total, strict=True)):
            used.add_metric([str(group)], pages / total)
        yield used
        for name, text, total in (
            ("weft_prompt_tokens", "Prompt tokens taken in", s.prompt_tokens),
            ("weft_prefix_cached_tokens", "Prompt tokens found in the prefix cache", s.cached_tokens),
            ("weft_generated_tokens", "Tokens drawn", s.generated_tokens),
            ("weft_preemptions", "Sequences that gave up their pages", s.preemptions),
            ("weft_steps", "Steps of the engine", s.steps),
        ):
            yield CounterMetricFamily(name, text, value=total)
        yield from self._communication()

    def _communication(self) -> Iterator[Metric]:
        labels = ["read", "step"]
        calls = CounterMetricFamily("weft_collective_calls", "Collectives of rank 0 by planned step", labels=labels)
        moved = CounterMetricFamily("weft_collective_bytes", "Bytes received by the busiest rank", labels=labels)
        seconds = CounterMetricFamily("weft_collective_seconds", "Time in them, waiting included", labels=labels)
        try:
            ran, _ = self._engine.comm_report()
        except EngineError:
            ran = []
        for stat in ran:
            calls.add_metric([stat.site, stat.step], stat.count)
            moved.add_metric([stat.site, stat.step], stat.bytes)
            seconds.add_metric([stat.site, stat.step], stat.seconds)
        yield from (calls, moved, seconds)
