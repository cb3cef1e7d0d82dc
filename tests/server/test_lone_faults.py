"""A fault that nobody foresaw while one output is made: that client gets it, and nobody else."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.conftest import QuietEngine, Served, output, serve
from weft.engine.output.detokenizer import TextStream
from weft.serve.chat.prompts import Prompts
from weft.serve.dialects.completions import ChatReply, CompletionReply
from weft.serve.dialects.responses import ResponseReply

C, H, R = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TEXT: dict[str, Any] = {"prompt": "abc", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0}

# Path, body, and what is broken: of which class the method.
FAULTS: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "tokeniser": (C, TEXT, Prompts, "of_completion"),
    "detokeniser": (C, TEXT, TextStream, "push_all"),
    "logprobs": (C, TEXT | {"logprobs": 1}, CompletionReply, "_table"),
    "chat": (H, CHAT, ChatReply, "_rest"),
    "responses": (R, {"input": "hello", "max_output_tokens": 6}, ResponseReply, "finish"),
}


def outcomes(served: Served) -> dict[str, float]:
    with served.http() as http:
        families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
    return {s.labels["outcome"]: s.value for s in families["weft_requests"].samples if s.name.endswith("_total")}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_only_its_client_hears_of_it(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str, stream: bool
) -> None:
    path, body, owner, name = FAULTS[fault]
    before = outcomes(served)

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("a fault of this output alone")

    with served.http() as http:
        whole = http.post(C, json=TEXT | {"stream": True}).text
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, broken)
            reply = http.post(path, json=body | {"stream": stream}, headers={"X-Request-Id": "seven"})
        assert reply.headers["x-request-id"] == "seven"
        events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
        if reply.status_code == 200:
            assert stream and fault in ("logprobs", "chat", "responses")
            done = [] if path == R else [events.pop()]
            assert done in ([], ["[DONE]"])
            error = json.loads(events[-1])
            message = error["message"] if path == R else error["error"]["message"]
        else:
            assert reply.status_code == 500
            message = reply.json()["error"]["message"]
        assert message == "internal error: ZeroDivisionError"
        again = http.post(C, json=TEXT | {"stream": True}).text
    # The tokens that are there when a chunk is written share it, so that the same text comes in other chunks.
    texts = ["".join(json.loads(e[6:])["choices"][0]["text"] for e in t.split("\n\n")[:-2]) for t in (whole, again)]
    assert texts[0] == texts[1] != ""
    assert served.engine.stats().failures == 0 and served.engine.healthy
    served.engine.check_idle()
    [said] = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert "request seven" in said.getMessage() and said.exc_info and "alone" in str(said.exc_info[1])
    after = outcomes(served)
    assert after["error"] - before.get("error", 0) == 1 and after["length"] - before.get("length", 0) == 2


def test_an_engine_that_fails_is_another_matter(quiet: QuietEngine) -> None:
    """503 says that another server may answer; 500 that this request may fail there too."""
    for served in serve(quiet):
        with served.http() as http:
            for at, (state, status) in enumerate((("serving", 500), ("failed", 503))):
                submit = quiet.submit_all

                def asked(*args: Any, _state: Any = state, _at: int = at, _submit: Any = submit, **how: Any) -> Any:
                    ids = _submit(*args, **how)
                    quiet.state = _state
                    quiet.say(output("", "error", "why"), _at)
                    return ids

                quiet.submit_all = asked  # type: ignore[method-assign]
                reply = http.post(C, json={"prompt": "a"})
                quiet.submit_all, quiet.state = submit, "serving"  # type: ignore[method-assign]
                assert reply.status_code == status and reply.json()["error"]["message"] == "why"
