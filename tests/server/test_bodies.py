"""Bodies: what is read where, and what is refused before it is read."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.conftest import Served
from weft.engine.controller.engine import Engine
from weft.engine.grammar.grammar import Grammars
from weft.serve.chat.chats import ChatRequest
from weft.serve.chat.prompts import Prompts
from weft.serve.http import bodies, engine_client

C = "/v1/completions"
JSON = st.recursive(
    st.none() | st.integers(-9, 9) | st.text('a,"\\\n[{é', max_size=6),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text('a,"', max_size=2), inside, max_size=4),
    max_leaves=12,
)


def counts(value: Any) -> tuple[int, int, int]:
    """Commas, lists and objects, and members of objects, of a value and what is in it."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inside = value.values() if isinstance(value, dict) else value
    own = max(len(value) - 1, 0), 1, len(value) if isinstance(value, dict) else 0
    commas, containers, members = (sum(of) for of in zip(own, *map(counts, inside), strict=True))
    return commas, containers, members


@given(JSON, st.integers(0, 8), st.integers(0, 8))
def test_what_stands_in_strings_separates_no_values(value: Any, limit: int, max_containers: int) -> None:
    commas, containers, members = counts(value)
    exceeds = commas > limit or max(containers, members) > max_containers
    for ascii_only in (False, True):
        data = json.dumps(value, ensure_ascii=ascii_only).encode()
        assert bodies.has_more_values(data, limit, max_containers) == exceeds


def test_what_is_no_json_is_counted_too() -> None:
    for data in (b'"', b'",,', b'"\\', b',,"\\",,', bytes(random.Random(0).choices(b'",\\a', k=200))):
        assert not bodies.has_more_values(data, 200, 200) and isinstance(bodies.has_more_values(data, 1, 1), bool)


@pytest.mark.parametrize(
    "inside", ['"' + "a" * 70_000, '"' + "\\n" * 40_000, '"\\ud800' + "a" * 70_000 + '"}', "1" * 70_000 + "}"]
)
def test_pythons_parser_reads_no_large_body(served: Served, monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    """It holds up all threads for as long as it takes."""
    loads = json.loads

    def small_only(data: Any, **kwargs: Any) -> Any:
        assert len(data) < bodies.EXPLAINED, "a large body was read by it"
        return loads(data, **kwargs)

    with served.http() as http:
        monkeypatch.setattr(json, "loads", small_only)
        response = http.post(C, content='{"prompt": ' + inside, headers={"Content-Type": "application/json"})
        monkeypatch.undo()
    assert response.status_code == 400 and "the body is not JSON" in response.json()["error"]["message"], response.text


@pytest.mark.parametrize("value", [[[]] * 60, [{}] * 60, {str(i): 0 for i in range(60)}])
def test_too_many_containers_are_refused_unread(served: Served, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    monkeypatch.setattr(bodies, "MAX_CONTAINERS", 50)
    with served.http() as http:
        assert http.post(C, json={"prompt": "[{:" * 60, "max_tokens": 1}).status_code == 200
        monkeypatch.setattr(bodies, "msgspec", None)
        response = http.post(C, json={"prompt": "a", "metadata": value})
    assert response.status_code == 400 and "50 lists and objects" in response.json()["error"]["message"]


def test_too_many_values_are_refused_unread(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_VALUES", 50)
    with served.http() as http:
        assert http.post(C, json={"prompt": [5] * 40, "max_tokens": 1}).status_code == 200
        assert http.post(C, json={"prompt": "," * 60, "max_tokens": 1}).status_code == 200
        monkeypatch.setattr(bodies, "msgspec", None)
        response = http.post(C, json={"prompt": [5] * 60})
    assert response.status_code == 400 and "more than 50 values" in response.json()["error"]["message"]


@pytest.mark.parametrize("where", ["decode", "of_completion", "submit_all"])
def test_a_large_body_does_not_hold_up_others(served: Served, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """While it is read, made into tokens, or handed to the engine, another request begins and ends."""
    owner: Any = {"decode": bodies, "of_completion": Prompts, "submit_all": Engine}[where]
    monkeypatch.setattr(engine_client, "QUICK_TOKENS", 100)
    whole, reading, answered = getattr(owner, where), threading.Event(), threading.Event()

    def held(*args: Any, **more: Any) -> Any:
        if threading.current_thread() is not here["loop"]:
            reading.set()
            assert answered.wait(60)
        return whole(*args, **more)

    here: dict[str, Any] = {"loop": None}
    monkeypatch.setattr(owner, where, held)
    large = {"prompt": "a" * 200, "max_tokens": 1, "metadata": {"padding": "x" * bodies.QUICK}}
    statuses: list[int] = []

    def ask_large() -> None:
        with served.http() as http:
            statuses.append(http.post(C, json=large).status_code)

    with served.http() as http:
        here["loop"] = loop_thread(served)
        asking = threading.Thread(target=ask_large)
        asking.start()
        assert reading.wait(60), "it was read on the event loop"
        assert http.post(C, json={"prompt": "b", "max_tokens": 1}).status_code == 200
        answered.set()
        asking.join()
    assert statuses == [200]


@pytest.mark.parametrize("prompt, on_loop", [([5] * 3000, "111"), ("a" * 5000, "101")], ids=["tokens", "text"])
def test_what_is_quick_is_done_on_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, prompt: Any, on_loop: str
) -> None:
    """Reading, and handing over; what token ids are made into, too, but not what a longer text is made into."""
    found: list[str] = []

    def noting(whole: Any) -> Any:
        def noted(*args: Any, **more: Any) -> Any:
            found.append(str(int(threading.current_thread() is loop)))
            return whole(*args, **more)

        return noted

    loop = loop_thread(served)
    for owner, name in ((bodies, "decode"), (Prompts, "of_completion"), (Engine, "submit_all")):
        monkeypatch.setattr(owner, name, noting(getattr(owner, name)))
    monkeypatch.setattr(Prompts, "check_length", lambda *_: None)
    with served.http() as http:
        response = http.post(C, json={"prompt": prompt, "max_tokens": 1})
    assert response.status_code == 400 and "maximum context length" in response.text
    assert "".join(found) == on_loop


GUIDED = {"prompt": "b", "max_tokens": 2, "guided_regex": "[ab]{2}"}


def test_grammars_are_compiled_beside_streams_and_other_bodies(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """While more of them are compiled than there are threads for bodies, a stream and a large body begin and end."""
    compiling, done = threading.Event(), threading.Event()
    whole, loop, threads = Grammars.compiled, loop_thread(served), []

    def held(self: Grammars, text: str) -> Any:
        threads.append(threading.current_thread())
        compiling.set()
        assert threads[-1] is loop or done.wait(60)
        return whole(self, text)

    monkeypatch.setattr(Grammars, "compiled", held)

    def guided(number: int) -> int:
        with served.http() as http:
            return http.post(C, json=GUIDED | {"stream": number % 2 == 0}).status_code

    with ThreadPoolExecutor(50) as pool, served.http() as http:
        asked = [pool.submit(guided, number) for number in range(50)]
        assert compiling.wait(60)
        try:
            for more in ({}, {"metadata": {"padding": "x" * bodies.QUICK}}):
                response = http.post(C, json={"prompt": "b", "max_tokens": 3, "stream": True} | more)
                assert response.status_code == 200 and response.text.rstrip().endswith("[DONE]")
            assert not any(job.done() for job in asked) and loop not in threads
        finally:
            done.set()
        assert {job.result() for job in asked} == {200}
    assert loop not in threads, "a grammar was compiled on the event loop"
    assert len(threads) == 50, "one was compiled again"


CHAT = {"messages": [{"role": "user", "content": "a"}]}
ROUTES = "chat/completions", "chat/completions/render", "messages", "messages/count_tokens"


@pytest.mark.parametrize("route", ROUTES)
def test_chats_are_rendered_beside_streams(served: Served, monkeypatch: pytest.MonkeyPatch, route: str) -> None:
    whole, loop, threads = Prompts.chat_text, loop_thread(served), []

    def noted(self: Prompts, body: ChatRequest) -> str:
        threads.append(threading.current_thread())
        return whole(self, body)

    monkeypatch.setattr(Prompts, "chat_text", noted)
    with served.http() as http:
        limit = {} if "count" in route else {"max_tokens": 1}
        assert http.post(f"/v1/{route}", json=CHAT | limit).status_code == 200
    assert threads and loop not in threads


def loop_thread(served: Served) -> threading.Thread:
    """On which the server's event loop runs."""
    return next(t for t in threading.enumerate() if getattr(t, "_target", None) == served.server.run)


@pytest.mark.parametrize("kind", ["text/plain", "", "application/jsonx", "multipart/form-data"])
def test_json_says_that_it_is(served: Served, kind: str) -> None:
    with served.http() as http:
        sent = {"Content-Type": kind} if kind else {}
        response = http.post(C, content=b'{"prompt": "a"}', headers=sent)
        assert response.status_code == 400 and "Content-Type: application/json" in response.text
        taken = http.post(
            C, content=b'{"prompt": "a", "max_tokens": 1}', headers={"Content-Type": "Application/JSON; charset=utf-8"}
        )
        assert taken.status_code == 200


def test_many_wrong_values_are_one_error(served: Served) -> None:
    with served.http() as http:
        for wrong in ([1.5] * 100_000, [["x"]] * 1000, [{}] * 1000):
            response = http.post(C, json={"prompt": wrong})
            assert response.status_code == 400 and len(response.text) < 1000, response.text[:2000]
