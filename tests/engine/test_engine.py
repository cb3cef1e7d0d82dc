"""The engine with a real model: the same tokens on every layout and under disturbance; faults that end clearly."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2MoeForCausalLM

from comm.forks import in_a_child
from engine.conftest import WAIT_S, greedy_outputs, outputs_of_some
from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.controller.engine import Engine
from weft.engine.messages.request import SamplingParams
from weft.engine.processes import rank_processes

pytestmark = pytest.mark.usefixtures("planned_once")

LAYOUTS = {
    "1x1": dict(),
    "2x2": dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2),
    "4x1": dict(attn_dp=4, attn_tp=1, ep=4, moe_tp=1),
    "1x4": dict(attn_dp=1, attn_tp=4, ep=1, moe_tp=4),
}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def config(model_dir: Path, **changes: Any) -> EngineConfig:
    values = dict(model=model_dir, executor="thread", kv_tokens=512, page_size=4, max_batch_tokens=16, max_running=8)
    return EngineConfig(**values | changes)


def prompts(count: int = 7) -> list[list[int]]:
    """Return prompts of many lengths, some with a common prefix."""
    rng = random.Random(4)
    shared = [rng.randrange(1, 257) for _ in range(21)]
    return [
        (shared[: rng.randrange(4, 21)] if i % 2 else []) + [rng.randrange(1, 257) for _ in range(rng.randrange(1, 30))]
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[tuple[int, ...]]:
    """Return transformers' greedy outputs."""
    model = Qwen2MoeForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    return greedy_outputs(lambda tokens: model(tokens).logits, prompts(), GREEDY.max_tokens)


def test_what_ranks_have_run_is_published_while_they_run(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while others ask for it, and the outputs are the same."""
    monkeypatch.setattr("weft.engine.controller.executor.REPORT_S", 0.0)
    with Engine(config(model_dir, attn_tp=2, ep=2)) as engine:
        expected = engine.generate(prompts(), GREEDY)
        known = sum(stat.count for stat in engine.comm_report()[0])
        got: list[Any] = []
        asker = threading.Thread(target=lambda: got.extend(engine.comm_report()[0] for _ in range(3)))
        asker.start()
        assert [r.token_ids for r in engine.generate(prompts(), GREEDY)] == [r.token_ids for r in expected]
        asker.join(WAIT_S)
        last = sum(stat.count for stat in engine.comm_report()[0])
        assert len(got) == 3 and known <= sum(s.count for s in got[0]) <= sum(s.count for s in got[2]) <= last
        assert sum(stat.count for stat in engine.last_comm_report()[0]) == last > known


@pytest.mark.parametrize("layout, executor", [*((layout, "thread") for layout in LAYOUTS), ("2x2", "process")])
def test_greedy_tokens_are_transformers_on_every_layout(
    model_dir: Path, expected: Any, layout: str, executor: str
) -> None:
    with Engine(config(model_dir, executor=executor, **LAYOUTS[layout])) as engine:
        cold = engine.generate(prompts(), GREEDY)
        warm = engine.generate(prompts(), GREEDY)
        assert [r.token_ids for r in cold] == expected
        assert [r.token_ids for r in warm] == expected
        assert sum(r.cached_tokens for r in warm) > sum(r.cached_tokens for r in cold)
        ran, naive = engine.comm_report()
        assert bool(ran) == (layout != "1x1") and bool(naive) == bool(ran)
        assert "saving" in engine.plan_text(4)
        engine.check_idle()


@pytest.mark.parametrize(
    "layout, executor", [(LAYOUTS["2x2"], "thread"), (dict(attn_dp=2, ep=2), "process")], ids=["2x2", "2x1 processes"]
)
def test_experts_by_dispatch_give_the_same_tokens(
    model_dir: Path, expected: Any, layout: dict[str, int], executor: str
) -> None:
    with Engine(config(model_dir, executor=executor, moe_exchange="dispatch", **layout)) as engine:
        assert [r.token_ids for r in engine.generate(prompts(), GREEDY)] == expected
        ran, _ = engine.comm_report()
        calls = {s.step.split(" ")[0]: s.count for s in ran if "experts" in s.site or "post_attention" in s.site}
        assert calls["counts:"] == calls["dispatch:"] == calls["combine:"] > 0
        assert all(s.bytes > 0 for s in ran)
        engine.check_idle()


def test_the_naive_plan_gives_the_same_tokens(model_dir: Path, expected: Any) -> None:
    with Engine(config(model_dir, executor="thread", plan="naive", **LAYOUTS["2x2"])) as engine:
        assert [r.token_ids for r in engine.generate(prompts(), GREEDY)] == expected
        ran, naive = engine.comm_report()
        assert [(s.site, s.step, s.count, s.bytes) for s in ran] == [(s.site, s.step, s.count, s.bytes) for s in naive]


def test_pages_run_out_and_requests_are_cancelled_at_random(model_dir: Path, expected: Any) -> None:
    """12 pages for 7 requests that want up to 16 each: preemption, and each output is still right."""
    rng = random.Random(1)
    with Engine(config(model_dir, kv_tokens=64, max_batch_tokens=8, attn_dp=2, ep=2)) as engine:
        for _ in range(3):
            cancelled = {at: rng.randrange(6) for at in rng.sample(range(7), 3)}
            reasons, outputs = outputs_of_some(engine, prompts(), GREEDY, cancelled)
            for at in range(7):
                assert reasons[at] == ("abort" if at in cancelled else "length")
                assert outputs[at] == expected[at][: len(outputs[at])]
                assert at in cancelled or len(outputs[at]) == 12
            engine.check_idle()
        assert engine.stats().preemptions > 0


def test_sampling_is_a_function_of_the_seed_alone(model_dir: Path) -> None:
    params = SamplingParams(max_tokens=10, temperature=30.0, top_p=0.95, top_k=100, seed=7, ignore_eos=True)
    with Engine(config(model_dir)) as engine:
        alone = engine.generate(prompts()[:1], params)[0].token_ids
        crowd = engine.generate(prompts(), params)[0].token_ids
        other = engine.generate(prompts()[:1], SamplingParams(max_tokens=10, temperature=30.0, seed=8, ignore_eos=True))
    assert alone == crowd != other[0].token_ids


def test_stop_strings_logprobs_and_minimum(model_dir: Path) -> None:
    with Engine(config(model_dir)) as engine:
        free = engine.generate(
            prompts()[:1], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, logprobs=3)
        )[0]
        assert len(free.logprobs) == 30
        for token, p in zip(free.token_ids, free.logprobs, strict=True):
            assert p.token_id == token == p.top[0][0] and p.logprob == p.top[0][1] <= 0 and len(p.top) == 3
        readable = free.text.replace("\ufffd", "")
        cut = readable[-1]
        stopped = engine.generate(
            prompts()[:1], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, stop=(cut,))
        )[0]
        assert stopped.finish_reason == "stop" and stopped.text == free.text[: free.text.index(cut)]
        end = free.token_ids[0]
        early = SamplingParams(max_tokens=9, temperature=0, stop_token_ids=(end,))
        assert engine.generate(prompts()[:1], early)[0].token_ids == (end,)
        late = SamplingParams(max_tokens=9, min_tokens=5, temperature=0, stop_token_ids=(end,))
        held = engine.generate(prompts()[:1], late)[0]
        assert len(held.token_ids) >= 5 and end not in held.token_ids[:5]


def test_bad_requests_are_refused_with_one_line(model_dir: Path) -> None:
    with Engine(config(model_dir)) as engine:
        for prompt, params, text in [
            ([], GREEDY, "prompt is empty"),
            ([1, 257], GREEDY, "between 0 and 256"),
            ([1] * 256, GREEDY, "256 in the prompt"),
            ([1] * 250, GREEDY, "256 tokens. However, you requested 262 tokens .250 in the prompt"),
        ]:
            with pytest.raises(ValueError, match=text):
                engine.submit(prompt, params, lambda output: None)
        assert engine.generate([[1, 2]], GREEDY)[0].finish_reason == "length"
    with pytest.raises(EngineError, match="takes no new requests"):
        engine.submit([1], GREEDY, lambda output: None)
    for bad in (dict(max_tokens=-1), dict(temperature=-1), dict(top_p=0), dict(stop=("",)), dict(min_tokens=20)):
        with pytest.raises(ValueError):
            SamplingParams(**bad)


def refused_in_a_child(engine: Engine, leave: Callable[..., None]) -> None:
    """A forked process has the engine's sockets, and none of its threads."""
    for call in (lambda: engine.generate(prompts()[:1], GREEDY), lambda: engine.stats(), lambda: engine.drain(0)):
        with pytest.raises(EngineError, match=r"Engine belongs to process \d+, from which this process was forked"):
            call()
    leave(None, None, None)
    engine.close()


def test_neither_a_child_nor_a_callback_that_fails_ends_the_others(model_dir: Path, expected: Any) -> None:
    with Engine(config(model_dir)) as engine:
        leave = engine.__exit__  # as a `with` block keeps it
        in_a_child(lambda: refused_in_a_child(engine, leave))
        engine.submit(prompts()[1], GREEDY, lambda output: 1 / 0)
        assert engine.generate(prompts()[:1], GREEDY)[0].token_ids == expected[0]
        engine.check_idle()


def test_a_folder_without_sockets_ends_in_one_line(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(rank_processes, "SOCKET", "x" * 108)  # a name, not a path, that is too long
    with pytest.raises(EngineError, match=r"no sockets in .*/weft-.*; set TMPDIR") as error:
        Engine(config(model_dir, executor="process"))
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())
