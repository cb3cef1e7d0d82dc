"""Exports of /metrics: vLLM's names next to ours, and every name that the dashboard asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from server.conftest import Served
from weft.engine.output.results import EngineStats
from weft.serve.http.metrics import Metrics

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana" / "weft.json"


@pytest.fixture(scope="module")
def families(served: Served) -> dict[str, Metric]:
    served.client().completions.create(model="small", prompt="metrics", max_tokens=4, extra_body={"ignore_eos": True})
    with served.http() as http:
        return {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}


def values(family: Metric, suffix: str = "", **labels: str) -> dict[tuple[str, ...], float]:
    """Return a family's values by the labels that are not given, sorted by their names."""
    return {
        tuple(s.labels[name] for name in sorted(s.labels) if name not in labels): s.value
        for s in family.samples
        if s.name == family.name + suffix and labels.items() <= s.labels.items()
    }


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("num_requests_running", "requests_running"),
        ("num_requests_waiting", "requests_waiting"),
        ("num_preemptions", "preemptions"),
        ("prompt_tokens", "prompt_tokens"),
        ("generation_tokens", "generated_tokens"),
        ("prefix_cache_queries", "prompt_tokens"),
        ("prefix_cache_hits", "prefix_cached_tokens"),
        ("time_to_first_token_seconds", "time_to_first_token_seconds"),
        ("inter_token_latency_seconds", "inter_token_latency_seconds"),
        ("time_per_output_token_seconds", "inter_token_latency_seconds"),
        ("e2e_request_latency_seconds", "request_seconds"),
        ("request_queue_time_seconds", "request_queue_seconds"),
        ("prompt_tokens_cached", "prefix_cached_tokens"),
        ("request_prefill_time_seconds", "request_prefill_seconds"),
        ("request_decode_time_seconds", "request_decode_seconds"),
        ("request_prompt_tokens", "request_prompt_tokens"),
        ("request_generation_tokens", "request_generated_tokens"),
        ("request_max_num_generation_tokens", "request_max_generated_tokens"),
        ("request_inference_time_seconds", "request_inference_seconds"),
        ("request_time_per_output_token_seconds", "request_time_per_output_token_seconds"),
        ("request_prefill_kv_computed_tokens", "request_computed_tokens"),
        ("request_params_n", "request_choices"),
        ("request_params_max_tokens", "request_max_tokens"),
        ("iteration_tokens_total", "step_rows"),
    ],
)
def test_both_names_have_the_same_values(families: dict[str, Metric], theirs: str, ours: str) -> None:
    found, own = families[f"vllm:{theirs}"], families[f"weft_{ours}"]
    assert found.type == own.type and own.samples
    for suffix in ("", "_total", "_bucket", "_count", "_sum"):
        assert values(found, suffix, model_name="small") == values(own, suffix)


def test_parts_of_a_request(served: Served, families: dict[str, Metric]) -> None:
    """One request has its tokens, and times that add up to at most the whole."""
    names = ("request_prompt_tokens", "request_generated_tokens", "request_prefill_seconds", "request_decode_seconds")
    names += ("request_seconds", "request_queue_seconds", "request_inference_seconds", "request_computed_tokens")
    names += ("request_max_generated_tokens", "request_max_tokens", "request_choices")
    names += ("request_time_per_output_token_seconds",)
    before = [values(families[f"weft_{name}"], "_sum")[()] for name in names]
    count = values(families["weft_request_prompt_tokens"], "_count")[()]
    body = {"prompt": "metrics", "max_tokens": 4, "n": 2, "ignore_eos": True}
    with served.http() as http:
        cached = http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        after = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
    grown = [values(after[f"weft_{name}"], "_sum")[()] - was for name, was in zip(names, before, strict=True)]
    prompt, generated, prefill, decode, whole, queued, inference, computed, longest, limit, choices, between = grown
    assert values(after["weft_request_prompt_tokens"], "_count")[()] == count + 1
    assert (prompt, generated, longest, limit, choices) == (2 * len("metrics"), 8, 4, 4, 2)
    assert 0 <= computed <= prompt - 2 * cached and between == pytest.approx(decode / 3)
    assert inference == pytest.approx(prefill + decode)
    assert prefill > 0 and decode > 0 and queued + prefill + decode <= whole + 1e-6


def test_steps_and_the_process(families: dict[str, Metric]) -> None:
    """Rows of steps in buckets that grow, and what Prometheus' clients say of their process."""
    steps = families["weft_step_rows"]
    counts = [value for _, value in sorted((float(le), n) for (le,), n in values(steps, "_bucket").items())]
    assert counts == sorted(counts) and counts[-1] == values(steps, "_count")[()]
    assert values(families["weft_steps"], "_total")[()] == counts[-1] <= values(steps, "_sum")[()]
    for name in ("process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"):
        assert values(families[name])[()] > 0
    assert values(families["process_cpu_seconds"], "_total")[()] > 0
    assert values(families["vllm:engine_sleep_state"], model_name="small", sleep_state="awake") == {(): 1.0}


def test_what_vllm_counts_otherwise(served: Served, families: dict[str, Metric]) -> None:
    outcomes = values(families["weft_requests"], "_total")
    reasons = values(families["vllm:request_success"], "_total", model_name="small")
    assert set(reasons) == {("stop",), ("length",), ("abort",), ("error",)}
    assert reasons["length",] == outcomes["length",] >= 1
    aborted = ("abort", "timeout", "client_left")
    assert reasons["abort",] == sum(outcomes.get((outcome,), 0) for outcome in aborted)
    used = values(families["weft_kv_cache_used_ratio"])
    [usage] = values(families["vllm:kv_cache_usage_perc"], model_name="small").values()
    assert len(used) == 2 and usage == pytest.approx(sum(used.values()) / 2)
    [config] = families["vllm:cache_config_info"].samples
    stats = served.engine.stats()
    assert config.value == 1 and int(config.labels["num_gpu_blocks"]) == sum(stats.kv_total)
    assert config.labels["block_size"] == "4" and config.labels["model_name"] == "small"
    limits = served.engine.config
    assert values(families["weft_max_running"]) == {(): limits.batch_sequences}
    assert values(families["weft_max_batch_tokens"]) == {(): limits.batch_tokens}
    held = values(families["weft_kv_cache_tokens"])
    assert set(held) == {("0",), ("1",)} and sum(held.values()) == 4 * sum(stats.kv_total)


def expressions(board: Any) -> list[str]:
    if isinstance(board, list):
        return [e for item in board for e in expressions(item)]
    if isinstance(board, dict):
        own = [board[key] for key in ("expr", "query") if isinstance(board.get(key), str)]
        return own + [e for value in board.values() for e in expressions(value)]
    return []


def test_the_dashboard_asks_for_what_is_exported(families: dict[str, Metric]) -> None:
    exported = {s.name for family in families.values() for s in family.samples}
    asked = [e for e in expressions(json.loads(DASHBOARD.read_text())) if e != "prometheus"]
    assert len(asked) > 15
    for expression in asked:
        names = set(re.findall(r"\b(?:weft_|vllm:)\w+", expression))
        assert names and names <= exported, expression


def test_labels_tell_values_of_a_metric_apart() -> None:
    followed = [
        SimpleNamespace(site=site, step="move", count=number, bytes=10 * number, seconds=0.5, predicted=0.25)
        for number, site in enumerate(("attn", "moe"), start=1)
    ]
    counts = (0, 0, (3, 4), (10, 20), *[0] * 7, (1,), 0, 0, 0.0, 0)
    stats = EngineStats(*counts, drafted=(5, 3), accepted=(4, 1))
    mesh = SimpleNamespace(world=2)
    engine: Any = SimpleNamespace(
        stats=lambda: stats,
        config=SimpleNamespace(mesh=mesh, batch_sequences=8, batch_tokens=64, cached_tokens=160),
        healthy=True,
        kv_events=None,
        last_comm_report=lambda: (followed, followed[:1]),
    )
    found = {family.name: family for family in Metrics(engine).collect()}
    assert values(found["weft_collective_calls"], "_total") == {("attn", "move"): 1, ("moe", "move"): 2}
    assert values(found["weft_collective_bytes"], "_total") == {("attn", "move"): 10, ("moe", "move"): 20}
    assert values(found["weft_collective_seconds"], "_total", read="moe") == {("move",): 0.5}
    assert values(found["weft_plan_seconds"], "_total", plan="followed") == {("measured",): 1.0, ("predicted",): 0.5}
    assert values(found["weft_plan_seconds"], "_total", plan="naive") == {("measured",): 0.5, ("predicted",): 0.25}
    assert values(found["weft_kv_cache_used_ratio"]) == {("0",): 0.3, ("1",): 0.2}
    assert values(found["weft_accepted_draft_tokens_per_position"], "_total") == {("0",): 4, ("1",): 1}
