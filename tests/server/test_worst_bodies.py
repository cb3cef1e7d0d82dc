"""The worst body of each field: one above its limit is refused by name, and the largest that is served stops nobody."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from server.conftest import Served
from weft.engine.controller.engine import Engine
from weft.serve.chat.protocol import MAX_ITEMS, MAX_NAME, MAX_NAMED, MAX_PAIRS, MAX_STOP_TEXT, MAX_STOPS, MAX_WORDS_TEXT
from weft.serve.http import bodies

C, H, R, A = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEXT = {C: {"prompt": "a"}, H: {"messages": [{"role": "user", "content": "a"}]}, R: {"input": "a"}}
TEXT[A] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


def tool(at: int, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{at}", "parameters": {"type": "object", **more}}}


def words(count: int) -> list[str]:
    return [f"w{at}" for at in range(count)]


def nested(depth: int) -> Any:
    value: Any = "a"
    for _ in range(depth):
        value = {"a": value}
    return value


def pairs(count: int) -> dict[str, str]:
    return dict.fromkeys(words(count), "x" * 64)


FIELDS: list[tuple[str, str, Callable[[int], Any], int]] = [
    (C, "bad_words", words, MAX_NAMED),
    (C, "bad_words", lambda length: ["a" * length], MAX_WORDS_TEXT),
    (C, "logit_bias", lambda count: dict.fromkeys(map(str, range(count)), 1), MAX_NAMED),
    (C, "stop_token_ids", lambda count: [256] * count, MAX_NAMED),
    (C, "allowed_token_ids", lambda count: [at % 250 for at in range(count)], MAX_ITEMS),
    (C, "stop", words, MAX_STOPS),
    (C, "stop", lambda length: ["a" * length], MAX_STOP_TEXT),
    (C, "guided_choice", words, MAX_ITEMS),
    (C, "user", lambda length: "a" * length, MAX_NAME),
    (C, "cache_salt", lambda length: "a" * length, MAX_NAME),
    (C, "n", lambda count: count, 128),
    (C, "logprobs", lambda count: count, 20),
    (C, "prompt_logprobs", lambda count: count, 20),
    (H, "tools", lambda count: [tool(at) for at in range(count)], MAX_NAMED),
    (H, "messages", lambda count: [{"role": ""}] * count, MAX_ITEMS),
    (H, "chat_template_kwargs", pairs, MAX_NAMED),
    (R, "input", lambda count: [{"role": ""}] * count, MAX_ITEMS),
    (R, "tools", lambda count: [tool(at)["function"] | {"type": "function"} for at in range(count)], MAX_NAMED),
    (R, "metadata", pairs, MAX_PAIRS),
    (A, "messages", lambda count: [{"role": "user"}] * count, MAX_ITEMS),
    (A, "tools", lambda count: [{"name": f"f{at}", "input_schema": {}} for at in range(count)], MAX_NAMED),
    (A, "metadata", pairs, MAX_PAIRS),
    (A, "stop_sequences", words, MAX_STOPS),
    ("/detokenize", "tokens", lambda count: [5] * count, MAX_ITEMS),
]
"""Path, field, what makes a value of a size, and the largest size."""
OTHERS: list[tuple[str, dict[str, Any]]] = [
    (C, {"prompt": ["a"] * 2, "n": 128, "max_tokens": 4, "seed": 5, "bad_words": words(MAX_NAMED)}),
    (C, {"prompt": "a" * 8_000_000}),
    (C, {"prompt": [5] * 1_000_000}),
    (C, {"prompt": [[5]] * 130_000}),
    (C, {"guided_regex": "(a|b)" * 100_000}),
    (C, {"guided_json": {"type": "object", "properties": {name: {"type": "string"} for name in words(20_000)}}}),
    (C, {"colour": "x" * 8_000_000}),
    (C, {"model": "x" * 8_000_000}),
    (C, {"echo": True, "logprobs": 20, "prompt": "a" * 200, "n": 32}),
    (H, {"tools": [tool(0, properties={name: {"enum": ["a", "b"]} for name in words(20_000)})]}),
    (H, {"tools": [tool(0, properties=nested(400))], "tool_choice": "required"}),
    (H, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 60_000}]}),
    (H, {"messages": [{"role": "user", "content": "a", "more": nested(900)}]}),
    (H, {"metadata": dict.fromkeys(words(100_000), "a")}),
    (R, {"include": words(100_000)}),
    (A, {"system": [{"type": "text", "text": "a"}] * 60_000}),
    ("/tokenize", {"prompt": "a" * 1_000_000, "return_token_strs": True}),
    (f"{C}/render", {"prompt": "a" * 1_000_000}),
    (f"{H}/render", {"messages": [{"role": ""}] * 60_000}),
    (f"{A}/count_tokens", {"messages": [{"role": "user", "content": ""}] * 60_000}),
]
"""Bodies that are large in another way than by one list."""
WORST = [(path, {name: made(limit)}) for path, name, made, limit in FIELDS] + OTHERS
NAMES = [f"{path.split('/')[-1]}-{name}" for path, name, *_ in FIELDS]
NAMES += [f"{path.split('/')[-1]}-{'-'.join(body)}" for path, body in OTHERS]


def whole(path: str, body: dict[str, Any]) -> dict[str, Any]:
    known = next((text for start, text in TEXT.items() if path.startswith(start)), {})
    return known | ({"max_tokens": 4, "ignore_eos": True} if path in (C, H) else {}) | body


@pytest.mark.parametrize("path, name, made, limit", FIELDS, ids=NAMES[: len(FIELDS)])
def test_one_more_than_the_limit_is_refused_by_name(
    served: Served, path: str, name: str, made: Callable[[int], Any], limit: int
) -> None:
    with served.http() as http:
        response = http.post(path, json=whole(path, {name: made(limit + 1)}))
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and name in message.replace("bad words", "bad_words").replace(
        "stop string", "stop"
    ), message
    assert len(message) < 300


@contextmanager
def under_load(served: Served, sent: list[tuple[str, bytes]], clients: int) -> Iterator[set[int]]:
    """`clients` of each body are sent again and again until the context ends; gives the statuses so far."""
    statuses: set[int] = set()
    ended, begun = threading.Event(), threading.Semaphore(0)

    http = httpx.Client(base_url=served.url, timeout=None, headers={"Content-Type": "application/json"})

    def send(path: str, body: bytes) -> None:
        begun.release()
        while not ended.is_set():
            statuses.add(http.post(path, content=body).status_code)

    threads = [threading.Thread(target=send, args=each) for each in sent for _ in range(clients)]
    for thread in threads:
        thread.start()
    for _ in threads:
        begun.acquire()
    try:
        yield statuses
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        http.close()


def served_at_last(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    """Send a body again as long as the queue is full: each choice of the others is a request that waits."""
    while (response := http.post(path, json=body)).status_code == 429:
        assert int(response.headers["Retry-After"]) >= 1
    return response


def check_others_are_served(served: Served, worst: list[tuple[str, dict[str, Any]]], clients: int) -> None:
    sent = [(path, json.dumps(whole(path, body)).encode()) for path, body in worst]
    with served.http() as http, under_load(served, sent, clients) as statuses:
        for _ in range(3):
            assert http.get("/health").status_code == 200
            chat = served_at_last(http, H, {**TEXT[H], "max_tokens": 1})
            assert chat.status_code == 200, chat.text
            on_a_thread = {"prompt": "a", "max_tokens": 1, "metadata": {"padding": "x" * bodies.SMALL}}
            assert served_at_last(http, C, on_a_thread).status_code == 200
    assert statuses <= {200, 400, 404, 429}, statuses


def test_worst_words_and_masks_stop_nobody(served: Served) -> None:
    few = [(path, {name: made(limit)}) for path, name, made, limit in FIELDS if name in ("bad_words", "logit_bias")]
    check_others_are_served(served, few, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("path, body", WORST, ids=NAMES)
def test_45_of_each_worst_body_stop_nobody(served: Served, path: str, body: dict[str, Any]) -> None:
    check_others_are_served(served, [(path, body)], 45)


def test_nested_bodies_are_refused(served: Served) -> None:
    messages = [{"role": "user", "content": "a", "more": nested(900)}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        (H, {"messages": messages}),
        (f"{H}/render", {"messages": messages}),
        (H, TEXT[H] | {"tools": [tool(0, properties=nested(900))]}),
        (H, TEXT[H] | {"chat_template_kwargs": nested(900)}),
        (A, TEXT[A] | {"tools": [{"name": "f", "input_schema": nested(900)}]}),
        (C, TEXT[C] | {"guided_json": nested(900)}),
    ]
    with served.http() as http:
        for path, body in bodies:
            response = http.post(path, json=body)
            assert response.status_code in (200, 400), (path, response.text)


def test_large_bodies_leave_threads_to_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are threads wait for each other while another body on a thread begins and ends."""
    decode, reading, answered = bodies.decode, threading.Semaphore(0), threading.Event()

    def held(data: bytes) -> Any:
        if len(data) > bodies.QUICK:
            reading.release()
            assert answered.wait(120)
        return decode(data)

    monkeypatch.setattr(bodies, "decode", held)
    large = {"prompt": "a", "max_tokens": 1, "metadata": {"padding": "x" * bodies.QUICK}}
    statuses: list[int] = []

    with served.http() as http:
        threads = [
            threading.Thread(target=lambda: statuses.append(http.post(C, json=large).status_code)) for _ in range(45)
        ]
        for thread in threads:
            thread.start()
        for _ in range(bodies.LARGE_AT_ONCE):
            assert reading.acquire(timeout=120)
        on_a_thread = {"prompt": "a" * 100, "max_tokens": 1, "metadata": {"padding": "x" * bodies.SMALL}}
        assert http.post(C, json=on_a_thread).status_code == 200
        assert not statuses
        answered.set()
        for thread in threads:
            thread.join()
    assert statuses == [200] * 45


def test_choices_share_what_their_parameters_name(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks and checks of a request are made once, however many choices it has."""
    from weft.engine.output import request_output

    made: list[Any] = []
    bits = request_output.bits
    monkeypatch.setattr(request_output, "bits", lambda *args: made.append(args) or bits(*args))
    body = {"prompt": "a", "n": 8, "seed": 3, "allowed_token_ids": list(range(100)), "max_tokens": 1}
    with served.http() as http:
        assert len(http.post(C, json=body).json()["choices"]) == 8
    assert len(made) == 1 and isinstance(served.engine, Engine)
