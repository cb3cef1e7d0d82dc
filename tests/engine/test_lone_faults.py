"""A fault while one output is made or heard ends that output, with an error, and nothing else."""

from __future__ import annotations

import importlib
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.conftest import WAIT_S
from engine.fake import expected_output
from engine.stub import Client, World
from weft.engine.controller.engine import Engine
from weft.engine.grammar.grammar import Grammar
from weft.engine.messages.request import SamplingParams
from weft.engine.output.detokenizer import TextStream
from weft.engine.output.request_output import OutputCallback, RequestOutput

PROMPT, LENGTH = [1, 2], 5
ANY = {"grammar": '{"grammars": [{"lark_grammar": "start: /(.|\\n)*/"}]}'}


@pytest.fixture
def world(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(model_dir, monkeypatch)


def on_call(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """The first object of its class that is used fails from that call of the method on."""
    owner = importlib.import_module(owner) if isinstance(owner, str) else owner
    method, calls, first = getattr(owner, name), [0], []

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        first[:] = first or [self]
        calls[0] += self is first[0]
        if self is first[0] and calls[0] >= call:
            raise RuntimeError("a fault of this output alone")
        return method(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, broken)


def breaking_callback(callback_for: OutputCallback, call: int) -> OutputCallback:
    """Fail at that increment, and hear those after it."""
    calls = [0]

    def callback(output: RequestOutput) -> None:
        calls[0] += 1
        if calls[0] == call:
            raise RuntimeError("a fault of this output alone")
        callback_for(output)

    return callback


# Of the output that fails: parameters, what is broken and at which call, and the tokens that its callback still gets.
FAULTS: dict[str, tuple[dict[str, Any], tuple[Any, str, int] | None, int]] = {
    "detokeniser": ({}, (TextStream, "push_all", 3), 2),
    "detokeniser, first token": ({}, (TextStream, "push_all", 1), 0),
    "detokeniser, last token": ({}, (TextStream, "push_all", LENGTH), LENGTH - 1),
    "what is held back at the end": ({}, (TextStream, "flush", 1), LENGTH - 1),
    "stop strings": ({"stop": ("never",)}, (TextStream, "push", 3), 2),
    "grammar": (ANY, (Grammar, "accept", 1), 0),
    "mask of a grammar": (ANY, (Grammar, "mask", 1), 0),
    "logprobs of the prompt": ({"prompt_logprobs": 0}, ("weft.engine.output.request_output", "TokenLogprob", 1), 0),
    "callback": ({}, None, 2),
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_output_ends_with_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str, overlap: bool
) -> None:
    params, broken, heard = FAULTS[fault]
    if broken:
        on_call(monkeypatch, *broken)
    with world.engine(overlap=overlap) as engine:
        client, others = Client(engine), [([3, 4], 12), ([5, 6, 7], 7), ([8], 9)]
        callback_for = client.callback_for(0) if broken else breaking_callback(client.callback_for(0), heard + 1)
        how = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True, **params)
        world.go.clear()
        engine.submit_all([(PROMPT, how, callback_for)], name="abc")
        client.ask_together(*others)
        world.go.set()
        client.wait(4)
        assert client.last(0).finish_reason == "error" and client.last(0).error == "internal error: RuntimeError"
        assert [o.finish_reason for o in client.increments[0][:-1]] == [None] * (len(client.increments[0]) - 1)
        if not params:
            assert client.tokens(0) == expected_output(PROMPT, LENGTH)[:heard]
        for at, (_, length) in enumerate(others, 1):
            client.check_whole(at, length)
        assert engine.stats().failures == 0 and world.starts == 1, "ranks were started anew"
        engine.check_idle()
        assert engine.stats().waiting == engine.stats().running == 0
        [said] = [r for r in caplog.records if r.levelno >= logging.ERROR]
        assert "request abc" in said.getMessage() and said.exc_info and "alone" in str(said.exc_info[1])
        assert engine.drain(WAIT_S) == 0
    assert client.ended.empty(), "a callback was called for an end twice"


def test_a_callback_that_always_fails_is_let_go(world: World) -> None:
    with world.engine() as engine:
        client, calls = Client(engine), []

        def fail(output: RequestOutput) -> None:
            calls.append(output.take())
            raise RuntimeError("never")

        engine.submit([9, 9], SamplingParams(max_tokens=40, ignore_eos=True), fail)
        client.ask([1, 2], 5)
        client.wait(1)
        client.check_whole(0, 5)
        assert engine._requests.wait_until_empty(WAIT_S)
        engine.check_idle()
        assert engine.stats().generated_tokens <= 5 + 4, "tokens are sampled for nobody"
        assert len(calls) == 2 and calls[-1].finish_reason == "error" and engine.stats().failures == 0


def test_a_fault_while_the_engine_ends_is_heard_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = world.engine()
    world.go.clear()
    client = Client(engine)
    client.ask_together(([1, 2], 5), ([3, 4], 5))
    on_call(monkeypatch, TextStream, "flush", 1)
    ends = threading.Thread(target=Engine.close, args=(engine,))
    ends.start()
    client.wait(2)
    ends.join(WAIT_S)
    assert not ends.is_alive() and engine.state == "stopped"
    assert sorted(str(client.last(at).finish_reason) for at in (0, 1)) == ["abort", "error"]
