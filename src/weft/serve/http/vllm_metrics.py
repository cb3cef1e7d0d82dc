"""Weft's metrics under vLLM's names, for dashboards and routers made for vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.engine.controller.engine import Engine

NAMES = {
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


class VllmCollector(Collector):
    """Collector of a registry's metrics, followed by vLLM's names. vLLM's values of a server cover all DP groups."""

    def __init__(self, ours: Collector, engine: Engine, model_name: str):
        self._ours, self._engine, self._labels = ours, engine, {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; each value is read once, so that both names agree."""
        families = {family.name: family for family in self._ours.collect()}
        yield from families.values()
        for name, source in NAMES.items():
            yield self._renamed(name, families[source])
        yield self._cache_config()
        awake = GaugeMetricFamily("vllm:engine_sleep_state", "It never sleeps", labels=[*self._labels, "sleep_state"])
        for state in ("awake", "weights_offloaded", "discard_all"):
            awake.add_metric([*self._labels.values(), state], float(state == "awake"))
        yield awake

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
        metric = GaugeMetricFamily("vllm:cache_config_info", "Tokens of a page, and pages", labels=list(labels))
        metric.add_metric(list(labels.values()), 1)
        return metric
