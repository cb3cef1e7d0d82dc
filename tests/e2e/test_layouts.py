"""The embedded model through HTTP: the same greedy tokens on every layout, in traffic with hits and cancellations."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from server.conftest import Served, serve
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft_bench import word_problems

pytestmark = pytest.mark.usefixtures("planned_once")

LAYOUTS = {
    "1x1": dict(executor="thread"),
    "2x2": dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2),
    "4x1": dict(attn_dp=4, attn_tp=1, ep=4, moe_tp=1),
    "1x3": dict(attn_tp=3),
}
PROBLEMS = word_problems.generate("heldout", 4, seed=11)


def ask(served: Served, question: str) -> str:
    answer = served.client().chat.completions.create(
        model="small", messages=word_problems.prompt(question), temperature=0, max_tokens=100
    )
    return answer.choices[0].message.content or ""


def give_up(served: Served, question: str) -> None:
    """Ask, read a little, and go away."""
    messages: Any = word_problems.prompt(question)
    stream = served.client().chat.completions.create(
        model="small", messages=messages, temperature=0, max_tokens=100, stream=True
    )
    for _, _ in zip(range(4), stream, strict=False):
        pass
    stream.close()


def traffic(served: Served) -> list[str]:
    """Every problem asked twice at once (the second finds a prefix), every third client going away in between."""
    answers: dict[int, str] = {}

    def one(at: int) -> None:
        if at % 3 == 0:
            give_up(served, PROBLEMS[-at % 4].question)
        answers[at] = ask(served, PROBLEMS[at % 4].question)

    for begin in (0, 4):
        threads = [threading.Thread(target=one, args=(at,)) for at in range(begin, begin + 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [answers[at] for at in range(8)]


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """The answers of one rank to one client at a time."""
    with Engine(EngineConfig(executor="thread", prefix_cache=False)) as engine:
        for served in serve(engine):
            return [ask(served, p.question) for p in PROBLEMS]
    raise AssertionError


@pytest.mark.parametrize(
    "layout", ["1x1", "2x2", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("4x1", "1x3"))]
)
def test_same_greedy_outputs_on_every_layout(alone: list[str], layout: str) -> None:
    with Engine(EngineConfig(kv_tokens=2048, max_batch_tokens=64, max_running=8, **LAYOUTS[layout])) as engine:
        for served in serve(engine):
            answers = traffic(served)
        assert answers == alone * 2
        engine.check_idle()  # after the last cancellation
        stats = engine.stats()
        assert stats.cached_tokens > 0 and stats.running == stats.waiting == 0
    right = sum(word_problems.extract(a) == p.answer for a, p in zip(alone, PROBLEMS, strict=True))
    assert right >= 3, "the embedded model has forgotten how to count"
