"""Logprobs of prompts: the same however the prompt is cut into steps, cached, or run anew."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.conftest import WAIT_S
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.messages.request import Output, SamplingParams
from weft.engine.output.request_output import OutputCallback


def scores(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[float]]:
    """Return the scores of each prompt, all asked for at once."""

    def callback_for(own: list[Output]) -> OutputCallback:
        return lambda output: own.append(output.take())

    increments: dict[int, list[Output]] = {i: [] for i in range(len(prompts))}
    engine.submit_all(
        [(prompt, params, callback_for(own)) for prompt, own in zip(prompts, increments.values(), strict=True)]
    )
    assert engine.drain(WAIT_S) == 0
    for own in increments.values():
        assert own[-1].finish_reason == "length" and all(not o.prompt_logprobs for o in own[1:])
    return [[p.logprob for p in own[0].prompt_logprobs] for own in increments.values()]


@pytest.mark.parametrize(
    "changes", [{"max_batch_tokens": 20, "max_running": 20}, {"kv_tokens": 72}, {"attn_dp": 2, "ep": 2}]
)
def test_scores_do_not_depend_on_steps(model_dir: Path, changes: dict[str, int]) -> None:
    rng = random.Random(3)
    common = [rng.randrange(1, 257) for _ in range(9)]  # a prefix that the cache would give to all but the first
    prompts = [common + [rng.randrange(1, 257) for _ in range(rng.randrange(1, 30))] for _ in range(8)]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, prompt_logprobs=1)
    settings = {"executor": "thread", "page_size": 4, "kv_tokens": 2048}
    with Engine(EngineConfig(model_dir, **settings)) as engine:
        plain = scores(engine, prompts, params)
    with Engine(EngineConfig(model_dir, **settings | changes)) as engine:
        changed = scores(engine, prompts, params)
        if "kv_tokens" in changes:
            assert engine.stats().preemptions > 0, "nothing was run anew"
    assert [len(s) for s in plain] == [len(p) - 1 for p in prompts]
    for one, two in zip(plain, changed, strict=True):
        assert two == pytest.approx(one, abs=1e-4)
