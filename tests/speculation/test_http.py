"""Outputs over HTTP, where several tokens of a request come with one step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.conftest import WAIT_S
from engine.test_engine import config
from server.conftest import serve
from server.test_api_processes import Two
from speculation.toy import Toy
from weft.engine.controller.engine import Engine

BODIES: list[dict[str, Any]] = [
    dict(temperature=0, ignore_eos=True, max_tokens=20),
    dict(temperature=1.2, seed=7, max_tokens=20, n=2, logprobs=2),
    dict(temperature=1.2, seed=8, max_tokens=30, stop=["a", "k", "B", "7"]),
    dict(temperature=1.2, seed=9, max_tokens=30, ignore_eos=False, stop_token_ids=[*range(0, 257, 9)]),
    dict(temperature=1.2, seed=10, max_tokens=30, structured_outputs=dict(regex="[a-f]{4}[0-9]{5}")),
]
PROMPT = [5, 6, 7, 8]


def replies(http: httpx.Client, stream: bool) -> list[Any]:
    """Return texts, reasons and tokens of every choice of each body."""
    found = []
    for body in BODIES:
        asked = dict(model="small", prompt=PROMPT, return_token_ids=True, stream=stream) | body
        reply = http.post("/v1/completions", json=asked)
        assert reply.status_code == 200, reply.text
        choices: dict[int, list[Any]] = {}
        lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line) for line in (lines if stream else [reply.text])]
        for choice in (choice for event in events for choice in event["choices"]):
            text, reason, tokens, logprobs = choices.setdefault(choice["index"], ["", None, [], []])
            tokens += choice.get("token_ids") or []
            logprobs += (choice.get("logprobs") or {}).get("tokens") or []
            choices[choice["index"]] = [text + choice["text"], reason or choice["finish_reason"], tokens, logprobs]
        found.append(choices)
    return found


@contextmanager
def client(engine: Engine, processes: bool) -> Iterator[httpx.Client]:
    if processes:
        two = Two(engine, api_key="secret", drain_s=WAIT_S)
        with two.http() as http:
            yield http
        two.close()
        return
    for served in serve(engine):
        with served.http() as http:
            yield http


@pytest.mark.usefixtures("never_pausing")
@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_replies_are_those_without_drafts(
    chat_model_dir: Path, monkeypatch: pytest.MonkeyPatch, processes: bool
) -> None:
    with Engine(config(chat_model_dir)) as engine, client(engine, False) as http:
        wanted = replies(http, stream=False)
    sequences = [[*PROMPT, *tokens] for choices in wanted for _, _, tokens, _ in choices.values()]
    assert all(len(each) > len(PROMPT) for each in sequences), "token ids are returned"
    Toy(sequences, 0.9).use(monkeypatch)
    with Engine(config(chat_model_dir, speculative="ngram")) as engine, client(engine, processes) as http:
        assert replies(http, stream=False) == wanted
        streamed = replies(http, stream=True)
        engine.check_idle()
    for found, other in zip(streamed, wanted, strict=True):
        for choice, (text, reason, tokens, _) in other.items():
            assert found[choice][:2] == [text, reason] and found[choice][2] in ([], tokens)
    assert engine.speculation and sum(engine.speculation.accepted) > 40
