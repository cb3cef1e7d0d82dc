"""Two API processes before ranks in processes of their own, with TLS, tools and KV events: the same as one process."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from engine.test_cache_events import Subscriber, replayed, socket
from engine.test_recovery import kill_last
from server.conftest import Served, serve
from server.test_api_processes import LONG, C, Gate, H, R, Two, text_of, wait_until
from server.test_responses import FLAT
from server.test_run import certificate
from server.test_tools import TEMPLATE, TOOLS
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.controller.event_publisher import KvEventsConfig
from weft.engine.kv.cache_events import AllBlocksCleared, KVEventBatch

__all__ = ["certificate"]
M = "/v1/messages"


class Heard:
    """Batches of each group as a subscriber receives them: (number, payload)."""

    def __init__(self, endpoints: list[str]):
        self.batches: list[list[tuple[int, bytes]]] = [[] for _ in endpoints]
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._listen, args=each) for each in zip(endpoints, self.batches, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self, endpoint: str, batches: list[tuple[int, bytes]]) -> None:
        with socket(zmq.SUB, endpoint) as subscribed:
            subscribed.subscribe("")
            while not self._over.is_set():
                if subscribed.poll(20):
                    _, number, payload = subscribed.recv_multipart()
                    batches.append((int.from_bytes(number, "big"), payload))

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture(scope="module")
def ranked_engine(chat_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("ranked")
    (template := folder / "template.jinja").write_text(TEMPLATE)
    layout: dict[str, Any] = dict(executor="process", attn_dp=2, ep=2, kv_tokens=4096, page_size=4)
    config = EngineConfig(chat_model_dir, chat_template=template, restart_backoff_s=0.01, **layout)
    events = KvEventsConfig(endpoint=f"ipc://{folder}/events", replay_endpoint=f"ipc://{folder}/replay")
    with Engine(config, kv_events=events) as engine:
        yield engine


@pytest.fixture(scope="module")
def heard(ranked_engine: Engine) -> Iterator[Heard]:
    assert ranked_engine.kv_events is not None
    heard = Heard([channel.endpoint for channel in ranked_engine.kv_events.channels])
    yield heard
    heard.close()


@pytest.fixture(scope="module")
def two(ranked_engine: Engine, certificate: tuple[Path, Path], heard: Heard) -> Iterator[Two]:
    key, chain = certificate
    two = Two(ranked_engine, api_key="secret", ssl_keyfile=key, ssl_certfile=chain)
    yield two
    two.close()


@pytest.fixture(scope="module")
def alone(ranked_engine: Engine) -> Iterator[Served]:
    yield from serve(ranked_engine)


def test_https_and_the_key_hold_in_each_process(two: Two, certificate: tuple[Path, Path]) -> None:
    for index in (0, 1):
        with two.client_of(index) as http:
            streamed = http.post(C, json=LONG | {"stream": True})
            assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")
            assert http.post(C, json=LONG, headers={"Authorization": "Bearer other"}).status_code == 401
            plain = httpx.Client(base_url=str(http.base_url).replace("https:", "http:"))
        with pytest.raises(httpx.TransportError), plain:
            plain.get("/health")
    with httpx.Client(verify=ssl.create_default_context()) as distrusting, pytest.raises(httpx.ConnectError):
        distrusting.get(f"{two.url}/health")


HELLO: Any = [{"role": "user", "content": "hi"}]
SAMPLED: dict[str, Any] = {"temperature": 9, "seed": 5, "max_tokens": 200}
GREEDY: dict[str, Any] = {"temperature": 0}
SHORT = {"name": "time", "input_schema": TOOLS[1]["function"]["parameters"]}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
ANY = {"type": "any", "disable_parallel_tool_use": True}
ONE = GREEDY | {"parallel_tool_calls": False}
STRICT = {"type": "function", "function": TOOLS[1]["function"] | {"strict": True}}
CHAT = SAMPLED | {"messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "required": (H, CHAT | {"tool_choice": "required"}),
    "named": (H, CHAT | {"tool_choice": TIME}),
    "strict": (H, CHAT | {"tools": [TOOLS[0], STRICT]}),
    "several": (H, CHAT | {"tool_choice": "required", "parallel_tool_calls": True, "n": 2}),
    "response": (R, ONE | {"input": "hi", "tools": FLAT, "tool_choice": "required", "max_output_tokens": 200}),
    "message": (M, GREEDY | {"messages": HELLO, "tools": [SHORT], "tool_choice": ANY, "max_tokens": 200}),
}


def calls_of(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    """Return the text, the calls by name and arguments, and the reason of the end, by choice."""
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    if not body["stream"]:
        events = [reply.json()]
    else:
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    if path == R:
        [response] = [event.get("response", event) for event in events[-1:]]
        return [(item.get("name"), item.get("arguments"), item["type"], item["status"]) for item in response["output"]]
    if path == M:
        return message_calls(events)
    found: dict[int, Any] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text, calls, _ = found.get(choice["index"], ("", {}, None))
        piece = choice["delta"] if body["stream"] else choice["message"]
        for at, call in enumerate(piece.get("tool_calls") or ()):
            name, arguments = calls.get(call.get("index", at), ("", ""))
            new = call["function"].get("name") or "", call["function"].get("arguments") or ""
            calls[call.get("index", at)] = name + new[0], arguments + new[1]
        found[choice["index"]] = text + (piece.get("content") or ""), calls, choice["finish_reason"]
    return found


def message_calls(events: list[dict[str, Any]]) -> Any:
    if events[0]["type"] == "message":
        [message] = events
        return [(block["name"], block["input"]) for block in message["content"]], message["stop_reason"]
    names = [event["content_block"]["name"] for event in events if event["type"] == "content_block_start"]
    inputs = ["" for _ in names]
    for event in events:
        if event["type"] == "content_block_delta":
            inputs[event["index"]] += event["delta"]["partial_json"]
    [end] = [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"]
    return list(zip(names, map(json.loads, inputs), strict=True)), end


@pytest.mark.parametrize("what", CALLS)
def test_tool_calls_are_those_of_one_process(alone: Served, two: Two, what: str) -> None:
    path, body = CALLS[what]
    with alone.http() as one, two.http() as http:
        replies = [calls_of(client, path, body | {"stream": s}) for client in (one, http) for s in (False, True)]
    assert replies[0] == replies[1] == replies[2] == replies[3]
    assert what == "strict" or "time" in str(replies[0]) or "weather" in str(replies[0])


def counts(http: httpx.Client) -> dict[str, float]:
    families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
    names = "weft_generated_tokens", "weft_restarts", "weft_kv_event_batches"
    found = {name: families[name].samples[0].value for name in names}
    [first] = [s.value for s in families["weft_time_to_first_token_seconds"].samples if s.name.endswith("_count")]
    ends = {s.labels["outcome"]: s.value for s in families["weft_requests"].samples if s.name.endswith("_total")}
    return found | {"first": first} | ends


def test_a_lost_rank_loses_no_request_of_any_process(two: Two) -> None:
    """Streams of both processes, amid which a rank is killed, and requests that come while ranks start anew."""
    sampled = LONG | {"temperature": 1.0}
    with two.client_of(0) as a, two.client_of(1) as b, ThreadPoolExecutor(4) as pool:
        bodies = [sampled | {"seed": seed} for seed in range(8)]
        whole = [a.post(C, json=body).json()["choices"][0]["text"] for body in bodies]
        assert len(set(whole)) == len(whole)
        before = counts(a)
        with Gate(two.engine) as gate:
            streams = [gate.begun((a, b)[at % 2], bodies[at], 4) for at in range(4)]
            kill_last(two.engine)
            later = [pool.submit((a, b)[at % 2].post, C, json=bodies[at]) for at in range(4, 8)]
            wait_until(lambda: two.engine._requests.here == len(bodies))
            gate.let_through(1000)
            assert [text_of(lines) for lines in streams] == whole[:4]
            assert [reply.result().json()["choices"][0]["text"] for reply in later] == whole[4:]
        grown = {name: value - before[name] for name, value in counts(b).items()}
        assert grown["weft_restarts"] == 1 and grown["weft_kv_event_batches"] > 0
        assert {name: grown[name] for name in ("first", "length")} == {"first": 8, "length": 8}
        assert sum(grown.values()) == grown["weft_restarts"] + grown["weft_kv_event_batches"] + 16 + 8 * 60
        assert a.get("/health").json() == b.get("/health").json() == {"status": "ok"}
    two.engine.check_idle()


def test_each_kv_event_is_published_once_and_in_order(two: Two, heard: Heard) -> None:
    """The last test of this file: it looks at the events of all others."""
    engine = two.engine
    assert engine.kv_events is not None
    with two.client_of(0) as a, two.client_of(1) as b, ThreadPoolExecutor(8) as pool:
        asked = [LONG | {"prompt": f"prompt {at % 5} of several", "max_tokens": 9} for at in range(16)]
        sent = [pool.submit((a, b)[at % 2].post, C, json=body) for at, body in enumerate(asked)]
        assert {reply.result().status_code for reply in sent} == {200}
        assert a.post("/reset_prefix_cache").status_code == 200
        assert b.post(C, json=LONG).status_code == 200
    engine._ask(lambda: None)  # the step of the last token is over, and its events are published
    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    for group, scheduler in enumerate(engine._schedulers):
        again = list(replayed(engine.kv_events, group=group).items())
        assert [number for number, _ in again] == list(range(len(again)))
        batches = heard.batches[group]
        wait_until(lambda batches=batches, last=again[-1]: last in batches)
        assert batches == again[1:], "the first is published at the start, before anybody subscribes"
        subscriber = Subscriber(engine.config.page_size)
        events = [decode(payload).events for _, payload in again]
        for batch in events:
            subscriber.take(batch)
        assert scheduler.caches.tree is not None
        subscriber.check(scheduler.caches.tree)
        assert sum([AllBlocksCleared()] == batch for batch in events) >= 2, "of the lost rank, and of the reset"
