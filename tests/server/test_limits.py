"""Refusals before any work is done, and the log line of each request."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.conftest import QuietEngine, Served, output, serve
from weft.engine.messages.request import Sharing

C, H = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    "path, body, text",
    [
        (C, {"prompt": "a" * 1281}, "maximum context length is 256 tokens. However, 1281 characters cannot fit"),
        (C, {"prompt": ["a", "a" * 2560]}, "2561 characters cannot fit"),
        (C, {"prompt": [[5]] * 200, "n": 2}, "the request has 400 choices"),
        (C, {"prompt": ["a"] * 300}, "the request has 300 choices"),
        (H, {"messages": [{"role": "user", "content": "a" * 1278}]}, "1282 characters cannot fit"),
        (H, {"messages": [{"role": ""}] * 70_000}, "messages: Value error, 70000 items; at most 65536"),
    ],
    ids=range(6),
)
def test_what_cannot_fit_is_refused_before_it_is_encoded(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, text: str
) -> None:
    def encode(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it was encoded")

    monkeypatch.setattr(type(served.engine.tokenizer), "encode", encode)
    with served.http() as http:
        response = http.post(path, json=body)
    assert response.status_code == 400 and text in response.json()["error"]["message"], response.text


def test_an_echo_of_unknown_tokens_is_refused(served: Served) -> None:
    with served.http() as http:
        for token in (-1, 257, 2**40, 10**30):
            response = http.post(C, json={"prompt": [token], "echo": True})
            assert response.status_code == 400 and "between 0 and 256" in response.text, response.text


def test_a_full_queue_says_when_to_come_again(quiet: QuietEngine) -> None:
    quiet.full = True
    for served in serve(quiet):
        with served.http() as http:
            for stream in (False, True):
                response = http.post(C, json={"prompt": "a", "stream": stream})
                assert response.status_code == 429 and response.headers["retry-after"] == "3"
                assert response.json()["error"]["code"] == "queue_full"


def test_a_request_after_its_deadline(quiet: QuietEngine) -> None:
    def late() -> None:
        quiet.say(output("a"))
        quiet.say(output("", "timeout", "not in time"))

    for served in serve(quiet):
        with served.http() as http:
            threading.Thread(target=late).start()
            response = http.post(C, json={"prompt": "a", "user": "me", "stream": True})
        assert (
            response.status_code == 200 and "not in time" in [line for line in response.text.splitlines() if line][-2]
        )
    assert quiet.asked == [(Sharing("me"), None)]


def test_how_a_request_stands_to_others_reaches_the_engine(quiet: QuietEngine) -> None:
    bodies: list[tuple[str, Any]] = [
        (C, {"prompt": "a"}),
        (H, {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ]

    def say() -> None:
        for request in range(len(bodies)):
            quiet.say(output("a", "stop"), request)

    for served in serve(quiet):
        with served.http() as http:
            threading.Thread(target=say).start()
            for path, body in bodies:
                response = http.post(path, json=body | {"user": "me", "priority": -3, "cache_salt": "mine"})
                assert response.status_code == 200, response.text
    assert [sharing for sharing, _ in quiet.asked] == [Sharing("me", -3, "mine")] * 3


def test_cached_tokens_with_several_choices(served: Served) -> None:
    prompt = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    body = {"prompt": prompt, "n": 4, "max_tokens": 3, "temperature": 1}
    with served.http() as http:
        first = http.post(C, json=body).json()["usage"]
        http.post(C, json=body)
        third = http.post(C, json=body).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert third["prompt_tokens_details"]["cached_tokens"] == 12 and third["prompt_tokens"] == 13


def test_tokens_that_another_choice_has_computed_are_not_cached(quiet: QuietEngine) -> None:
    def say() -> None:
        for choice, cached in enumerate((0, 2)):
            quiet.say(msgspec.structs.replace(output("a", "stop"), cached_tokens=cached), choice)

    for served in serve(quiet):
        threading.Thread(target=say).start()
        with served.http() as http:
            usage = http.post(C, json={"prompt": [1, 2, 3], "n": 2}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0 and usage["completion_tokens"] == 2


def test_a_line_for_each_request(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weft")
    with served.http() as http:
        http.post(C, json={"prompt": "abc", "max_tokens": 2, "ignore_eos": True}, headers={"X-Request-Id": "one"})
        http.post(C, json={"prompt": "a" * 300}, headers={"X-Request-Id": "two"})
        metrics = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
    lines = {r.fields["id"]: r.fields for r in caplog.records if r.getMessage() == "request"}
    one = lines["one"]
    assert (one["path"], one["outcome"], one["prompt_tokens"], one["completion_tokens"]) == (C, "length", 3, 2)
    assert 0 <= one["queue_s"] <= one["first_token_s"] <= one["total_s"]
    assert lines["two"]["outcome"] == "refused" and lines["two"]["first_token_s"] is None
    assert "maximum context length" in lines["two"]["reason"] and lines["two"]["client"] == one["client"] == "127.0.0.1"
    json.dumps(lines)
    outcomes = {s.labels["outcome"]: s.value for s in metrics["weft_requests"].samples if s.name.endswith("_total")}
    assert outcomes["length"] >= 1 and outcomes["refused"] >= 1
    assert metrics["weft_request_queue_seconds"].samples and metrics["weft_request_seconds"].samples


def test_a_line_for_each_refusal(locked: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Refusals that the engine never hears of are logged; probes and scrapers are not."""
    caplog.set_level(logging.INFO, "weft")
    keyed = {"Authorization": "Bearer secret"}
    asked: dict[str, tuple[int, str, dict[str, str], Any]] = {
        "no-key": (401, C, {}, {"prompt": "a"}),
        "bad-field": (400, C, keyed, {"prompt": "a", "colour": "red"}),
        "no-field": (400, H, keyed, {}),
        "no-path": (404, "/v1/nothing", keyed, {}),
    }
    with locked.http() as http:
        for name, (status, path, headers, body) in asked.items():
            response = http.post(path, json=body, headers=headers | {"X-Request-Id": name})
            assert response.status_code == status, response.text
        http.post("/health")
        metrics = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
    lines = [r.fields for r in caplog.records if r.getMessage() == "request"]
    assert [(line["id"], line["path"], line["status"]) for line in lines] == [
        (name, path, status) for name, (status, path, _, _) in asked.items()
    ]
    assert all(line["outcome"] == "refused" and line["client"] == "127.0.0.1" for line in lines)
    why = {line["id"]: (line["reason"], line["param"]) for line in lines}
    assert why["bad-field"] == ("colour is not supported; leave it out", "colour")
    assert why["no-key"][0].startswith("wrong or missing API key") and "no path" in why["no-path"][0]
    assert why["no-field"][1] == "messages"
    outcomes = {s.labels["outcome"]: s.value for s in metrics["weft_requests"].samples if s.name.endswith("_total")}
    assert outcomes["refused"] == len(asked)
