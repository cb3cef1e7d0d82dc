"""Chat templates that requests bring: refused by name unless the server takes them, and harmless where it does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from server.conftest import Served, serve
from server.test_tools import TEMPLATE, TOOLS
from weft.engine.controller.engine import Engine
from weft.serve.chat.templates import Templates

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a b "}]


@pytest.fixture(scope="module")
def trusting(engine: Engine) -> Iterator[Served]:
    yield from serve(engine, trust_request_chat_template=True)


def tokens(served: Served, **body: Any) -> Any:
    with served.http() as http:
        response = http.post("/tokenize", json={"messages": MESSAGES} | body)
    assert response.status_code == 200, response.text
    return served.engine.tokenizer.decode(response.json()["tokens"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_refused_by_name_unless_it_is_asked_for(served: Served, path: str) -> None:
    with served.http() as http:
        response = http.post(path, json={"messages": MESSAGES, "chat_template": "x"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "chat_template"
    assert "--trust-request-chat-template" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "template, more",
    [
        ("{% for m in messages %}\n  {{ m.role }}={{ m | tojson }}\n{% endfor %}{{ eos_token }}", {}),
        ("{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}", {"chat_template_kwargs": {"mood": "glad "}}),
        ("{% for m in messages %}{{ m.content }}|{% endfor %}", {"continue_final_message": True}),
        ("{{ messages }}{% if add_generation_prompt %}go{% endif %}", {"add_generation_prompt": False}),
        (TEMPLATE, {"tools": TOOLS}),
    ],
    ids=range(5),
)
def test_it_makes_the_prompt_that_the_same_template_of_a_model_makes(
    trusting: Served, monkeypatch: pytest.MonkeyPatch, template: str, more: Any
) -> None:
    brought = tokens(trusting, chat_template=template, **more)
    monkeypatch.setattr(trusting.engine.tokenizer, "chat_template", template)
    assert brought == tokens(trusting, **more)


def test_it_makes_the_prompt_of_a_chat(trusting: Served) -> None:
    body = {"messages": MESSAGES, "chat_template": "{{ messages[0].content }}!", "return_token_ids": True}
    with trusting.http() as http:
        response = http.post("/v1/chat/completions", json=body | {"max_tokens": 1}).json()
    assert trusting.engine.tokenizer.decode(response["prompt_token_ids"]) == "hi!"


@pytest.mark.parametrize(
    "template, error",
    [
        ("{{ messages[", "unexpected"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 'a' * 20000000 }}", "more than 16777216 characters"),
        ("{{ ('a' * 10 ** 10) | length }}", "more memory than it may"),
        ("{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}", "longer than 1 s"),
    ],
    ids=["syntax", "refusal", "escape", "long", "memory", "endless"],
)
def test_what_a_template_may_not_do(
    trusting: Served, monkeypatch: pytest.MonkeyPatch, template: str, error: str
) -> None:
    busy_s = 240.0  # a busy machine may take longer for any other
    monkeypatch.setattr("weft.serve.chat.templates.PROBE_S", 1.0 if error == "longer than 1 s" else busy_s)
    with trusting.http() as http:
        response = http.post("/tokenize", json={"messages": MESSAGES, "chat_template": template})
    assert response.status_code == 400 and error in response.json()["error"]["message"], response.text
    monkeypatch.setattr("weft.serve.chat.templates.PROBE_S", busy_s)
    assert tokens(trusting, chat_template="{{ messages[0].content }}") == "hi", "the next one is served"


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_of_the_model_that_does_not_end_holds_nobody_else_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health and completions are served meanwhile, and the next chat afterwards."""
    endless = "{% if messages[-1].content == 'loop' %}" + LOOP + "{% endif %}" + TEMPLATE
    monkeypatch.setattr(served.engine.tokenizer, "chat_template", endless)
    hello = {"messages": MESSAGES[:1], "max_tokens": 1}
    with served.http() as http:
        assert http.post("/v1/chat/completions", json=hello).status_code == 200  # its shape is known now
        found: list[Any] = []

        def loop() -> None:
            with served.http() as mine:
                body = hello | {"messages": [{"role": "user", "content": "loop"}]}
                found.append(mine.post("/v1/chat/completions", json=body))

        rendering, ask = threading.Event(), Templates._ask

        def asked(self: Templates, *args: Any) -> Any:
            rendering.set()
            return ask(self, *args)

        monkeypatch.setattr(Templates, "_ask", asked)
        thread = threading.Thread(target=loop)
        thread.start()
        assert rendering.wait(60)
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert not found, "they came while it was rendered"
        thread.join()
        assert found[0].status_code == 400 and found[0].json()["error"]["param"] == "messages"
        assert "it takes longer than 2 s" in found[0].json()["error"]["message"]
        assert http.post("/v1/chat/completions", json=hello).status_code == 200
