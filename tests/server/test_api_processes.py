"""Processes that serve HTTP for one engine: the same as one process, and none suffers from another's end."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from chaos.server_process import children
from engine.conftest import WAIT_S
from server.conftest import Served, serve
from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.controller.engine import Engine
from weft.engine.messages import api_messages
from weft.engine.messages.request import SamplingParams
from weft.serve.http.api_processes import ApiProcess, ApiProcesses
from weft.serve.http.loading import bind
from weft.serve.http.metrics import Metrics
from weft.serve.http.options import Options
from weft.serve.http.remote_engine import RemoteEngine
from weft.serve.http.shared import Shared

C, H, R = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TEXT: dict[str, Any] = {"prompt": "abc", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 16, "temperature": 0}
LONG = TEXT | {"max_tokens": 60}
SECRET = {"Authorization": "Bearer secret"}


class Gate:
    """Steps of an idle engine that wait until they are let through; at the end of the context all are."""

    def __init__(self, engine: Engine):
        self.engine, self._steps, self._step = engine, threading.Semaphore(0), engine._step
        self._cancelled = threading.Event()

    def __enter__(self) -> Gate:
        cancel = self.engine.cancel
        wait_until(lambda: self.engine._requests.here == 0)  # also those that are being cancelled

        def gated() -> None:
            self._steps.acquire()
            self._step()

        def noted(request: int) -> None:
            cancel(request)
            self._cancelled.set()

        self._patched = pytest.MonkeyPatch()
        self._patched.setattr(self.engine, "_step", gated)
        self._patched.setattr(self.engine, "cancel", noted)
        return self

    def __exit__(self, *_: object) -> None:
        self._patched.undo()
        self.let_through(1000)

    def let_through(self, steps: int) -> None:
        self._steps.release(steps)

    def wait_for_cancel(self) -> None:
        """Wait until a request's cancellation is what the engine does before its next step."""
        assert self._cancelled.wait(WAIT_S)

    def begun(self, http: httpx.Client, body: dict[str, Any], steps: int) -> Iterator[str]:
        """Begin a stream, let steps through once the engine has it, and return the iterator of its lines."""
        before, request = self.engine._requests.here, http.build_request("POST", C, json=body | {"stream": True})
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(http.send, request, stream=True)
            wait_until(lambda: self.engine._requests.here > before)
            self.let_through(steps)
            first = next(lines := reply.result().iter_lines())
        assert first.startswith("data: {"), first
        return itertools.chain([first], lines)


class Two:
    """Two processes that serve an engine."""

    def __init__(self, engine: Engine, **options: Any):
        self.engine, self._listener = engine, bind("127.0.0.1", 0)
        self.processes = ApiProcesses(2, self._listener)
        chosen = Options(**options)
        shared = Shared(engine, Metrics(engine), chosen, "small")
        setup = {"options": chosen.to_dict(), "model_name": "small", "log_format": "text", "log_level": "info"}
        self.processes.prepare(shared, setup)
        self.url = "{}://{}:{}".format("http" if chosen.tls is None else "https", *self._listener.getsockname())
        self._trusted = chosen.ssl_certfile
        self.serving = threading.Thread(target=self.processes.run, args=([],))
        self.serving.start()

    def close(self) -> None:
        self.processes.stop()
        self.processes.stop()
        self.serving.join()
        self.processes.__exit__(None, None, None)
        self._listener.close()

    def http(self) -> httpx.Client:
        verify = ssl.create_default_context(cafile=self._trusted)
        return httpx.Client(base_url=self.url, timeout=WAIT_S, headers=SECRET, verify=verify)

    @contextmanager
    def client_of(self, index: int) -> Iterator[httpx.Client]:
        """Give a client with a connection to the process of this index: the other is stopped when it connects."""
        other = self.processes.pids[1 - index]
        with self.http() as http:
            os.kill(other, signal.SIGSTOP)
            try:
                assert http.get("/health").json() == {"status": "ok"}
            finally:
                os.kill(other, signal.SIGCONT)
            yield http


def wait_until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def own_engine(chat_model_dir: Path) -> Iterator[Engine]:
    with Engine(EngineConfig(chat_model_dir, executor="thread", kv_tokens=4096, page_size=4)) as engine:
        yield engine


@pytest.fixture(scope="module")
def two(own_engine: Engine) -> Iterator[Two]:
    two = Two(own_engine, api_key="secret", drain_s=WAIT_S)
    yield two
    two.close()


@pytest.fixture(scope="module")
def alone(own_engine: Engine) -> Iterator[Served]:
    yield from serve(own_engine)


def text_of(lines: Iterator[str]) -> str:
    found = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for event in found for choice in event["choices"])


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (C, TEXT),
    "sampled": (C, TEXT | {"temperature": 1.0, "seed": 5}),
    "several": (C, TEXT | {"n": 3, "temperature": 1.0, "seed": 5, "prompt": ["abc", "x"]}),
    "logprobs": (C, TEXT | {"logprobs": 3, "echo": True}),
    "prompt logprobs": (C, TEXT | {"prompt_logprobs": 2}),
    "min tokens": (C, TEXT | {"ignore_eos": False, "min_tokens": 5}),
    "nothing sampled": (C, TEXT | {"max_tokens": 0, "echo": True, "logprobs": 1}),
    "biased": (C, TEXT | {"logit_bias": {"65": 100, "66": 99}, "bad_words": ["AAA"]}),
    "grammar": (C, TEXT | {"guided_regex": "[a-c]{3,9}"}),
    "grammar that ends": (C, TEXT | {"guided_choice": ["yes", "no"]}),
    "chat": (H, CHAT | {"logprobs": True, "top_logprobs": 2}),
    "json": (H, CHAT | {"response_format": {"type": "json_object"}, "max_tokens": 40}),
    "response": (R, {"input": "hello", "max_output_tokens": 9, "temperature": 0}),
    "too long": (C, TEXT | {"max_tokens": 5000}),
    "bad grammar": (C, TEXT | {"guided_regex": "("}),
    "bad parameter": (C, TEXT | {"temperature": -1}),
    "large seed": (C, TEXT | {"seed": 2**64}),
    "large priority": (C, TEXT | {"priority": -(2**64)}),
    "large minimum": (H, CHAT | {"min_tokens": 2**64}),
}


def plain(value: Any) -> Any:
    """Return a response without what differs each time, or by what a cache has."""
    differing = "id", "created", "created_at", "item_id", "prompt_tokens_details", "input_tokens_details"
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in differing}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value  # rows of another step are summed in another order


def answer(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    reply = http.post(path, json=body)
    if "text/event-stream" not in reply.headers["content-type"]:
        return reply.status_code, plain(reply.json())
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    choices: dict[int, tuple[Any, ...]] = {}
    for choice in (choice for event in events for choice in event.get("choices", ())):
        piece = choice.get("text", "") or choice.get("delta", {}).get("content", "")
        known = (choice.get("logprobs") or {}).get("token_logprobs", [])
        text, logprobs, *_ = choices.get(choice["index"], ("", []))  # how many tokens an event has is a matter of time
        ended = choice.get("finish_reason"), choice.get("stop_reason")
        choices[choice["index"]] = text + piece, logprobs + known, ended
    return reply.status_code, choices, events[-1].get("usage")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", BODIES)
def test_replies_are_those_of_one_process(alone: Served, two: Two, what: str, stream: bool) -> None:
    path, body = BODIES[what]
    body = body | {"stream": stream}
    with alone.http() as one, two.http() as other:
        assert answer(one, path, body) == answer(other, path, body)
    two.engine.check_idle()


def test_a_message_that_cannot_be_sent_is_its_callers_error_alone(own_engine: Engine) -> None:
    """Requests of other clients, in the same packet, were lost with it."""
    setup = {"config": json.dumps(own_engine.config.to_dict()), "max_model_len": 64, "vocabulary": 200, "eos": (0,)}
    setup |= {"tokenizer": pickle.dumps(own_engine.tokenizer)}
    sent: list[bytes] = []
    engine = RemoteEngine(cast(Any, SimpleNamespace(send=sent.append)), 7, setup, cast(Any, None))
    with engine._sending:  # a packet waits already, so none is sent at once
        engine._unsent.append(api_messages.encode(api_messages.ApiConnected()))
    submit: Any = partial(engine.submit_all, name="")
    [first] = submit([([1], SamplingParams(seed=3), print)])
    with pytest.raises(OverflowError):
        submit([([1], SamplingParams(seed=2**64), print)])
    [last] = submit([([1], SamplingParams(seed=4), print)])
    engine._flush()
    [packet] = map(api_messages.decode_from_api, sent)
    assert packet.process == 7 and engine._open.keys() == {first, last}
    assert [m.first for m in packet.messages if isinstance(m, api_messages.NewRequests)] == [first, last]


@pytest.mark.parametrize("keep", [False, True])
def test_stop_strings_end_the_text_and_the_request(two: Two, alone: Served, keep: bool) -> None:
    with alone.http() as one, two.http() as http:
        whole = http.post(C, json=LONG).json()["choices"][0]["text"]
        body = LONG | {"stop": [whole[10:13]], "include_stop_str_in_output": keep}
        replies = [answer(client, C, body | {"stream": stream}) for client in (one, http) for stream in (False, True)]
        assert replies[:2] == replies[2:] and replies[2][1]["choices"][0]["stop_reason"] == whole[10:13]
        with Gate(two.engine) as gate:
            gate.begun(http, body, 20)
            gate.wait_for_cancel()
            gate.let_through(2)
            wait_until(lambda: two.engine._requests.here == 0)
        two.engine.check_idle()


def test_keys_and_tools_hold_in_each_process(two: Two) -> None:
    for index in (0, 1):
        with two.client_of(index) as http:
            assert http.get("/get_load").json()[0]["num_reqs"] == 0
            assert "attn_dp" in http.get("/weft/plan").text
            assert http.get("/weft/report").json()["max_running"] == two.engine.config.batch_sequences
            assert http.post(C, json=TEXT, headers={"Authorization": "Bearer other"}).status_code == 401


def test_metrics_are_summed_and_counted_once(two: Two) -> None:
    def counts() -> tuple[float, float, float]:
        with two.http() as http:
            families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
        [first] = [s.value for s in families["weft_time_to_first_token_seconds"].samples if s.name.endswith("_count")]
        ends = {s.labels["outcome"]: s.value for s in families["weft_requests"].samples if s.name.endswith("_total")}
        return ends["length"], first, families["weft_generated_tokens"].samples[0].value

    with two.http() as http:
        http.post(C, json=TEXT)
    before = counts()
    for index, requests in ((0, 2), (1, 3)):
        with two.client_of(index) as http:
            for _ in range(requests):
                http.post(C, json=TEXT)
    after = counts()
    assert [b - a for a, b in zip(before, after, strict=True)] == [5, 5, 5 * TEXT["max_tokens"]]
    assert counts() == after


def test_a_stored_response_is_found_by_each_process(two: Two) -> None:
    with two.client_of(0) as http:
        made = http.post(R, json={"input": "hello", "max_output_tokens": 5}).json()
    with two.client_of(1) as http:
        assert http.get(f"{R}/{made['id']}").json() == made
        body = {"input": "more", "max_output_tokens": 5, "previous_response_id": made["id"]}
        assert http.post(R, json=body).status_code == 200
        assert http.delete(f"{R}/{made['id']}").status_code == 200
    with two.client_of(0) as http:
        assert http.get(f"{R}/{made['id']}").status_code == 404


def test_the_limit_of_requests_is_of_all_processes(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two.engine._requests, "max_requests", 1)
    replies: list[httpx.Response] = []
    with two.client_of(0) as http, two.client_of(1) as other:
        first = threading.Thread(target=lambda: replies.append(http.post(C, json=TEXT)))
        with Gate(two.engine):
            first.start()
            wait_until(lambda: two.engine._requests.here == 1)
            for stream in (False, True):
                refused = other.post(C, json=TEXT | {"stream": stream})
                assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["code"] == "queue_full"
        first.join()
    assert replies[0].status_code == 200


def test_a_client_that_leaves_is_cancelled_in_the_engine(two: Two) -> None:
    with Gate(two.engine) as gate:
        with two.http() as http:
            gate.begun(http, LONG, 3)
        gate.wait_for_cancel()
        gate.let_through(2)  # the step in flight, and none that would be of use
        wait_until(lambda: two.engine._requests.here == 0)
    two.engine.check_idle()


def test_a_killed_process_ends_its_own_streams_alone(two: Two) -> None:
    with two.http() as http:
        whole = http.post(C, json=LONG).json()["choices"][0]["text"]
    pids = two.processes.pids
    helpers = children(pids[1])  # of templates and grammars
    assert helpers
    with two.client_of(1) as http:
        stored = http.post(R, json={"input": "hello", "max_output_tokens": 5}).json()
    with (
        two.client_of(0) as kept,
        two.client_of(1) as lost,
        two.client_of(1) as other,
        ThreadPoolExecutor(1) as pool,
        Gate(two.engine) as gate,
    ):
        kept_lines = gate.begun(kept, LONG, 6)
        lost_lines = gate.begun(lost, LONG, 6)
        whole_lost = pool.submit(other.post, C, json=TEXT)
        wait_until(lambda: two.engine._requests.here == 3)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            text_of(lost_lines)
        with pytest.raises(httpx.HTTPError):
            whole_lost.result()
        wait_until(lambda: pids[1] not in two.processes.pids and len(two.processes.pids) == 2)
        wait_until(lambda: not any(Path(f"/proc/{helper}").exists() for helper in helpers))
        assert kept.get(f"{R}/{stored['id']}").json() == stored
        gate.let_through(2)
        wait_until(lambda: two.engine._requests.here == 1)
        gate.let_through(1000)
        assert text_of(kept_lines) == whole
    with two.client_of(1) as http:  # the new process, once it serves
        assert http.post(C, json=LONG).json()["choices"][0]["text"] == whole
    two.engine.check_idle()


def test_no_process_imports_torch(two: Two) -> None:
    """It takes seconds and 200 MB. The replacement of a killed process counts too, and processes of templates and
    grammars."""

    def imported(process: Any) -> bool:
        return "/libtorch" in Path(f"/proc/{process}/maps").read_text()

    for index, what in itertools.product((0, 1), ("chat", "json", "grammar", "logprobs", "response")):
        with two.client_of(index) as http:
            assert answer(http, *BODIES[what])[0] == 200
    helpers = [helper for pid in two.processes.pids for helper in children(pid)]
    assert len(helpers) >= 4 and imported("self")
    assert not list(filter(imported, [*two.processes.pids, *helpers]))


def test_processes_may_end_while_all_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their end is noticed on another thread."""

    def start(self: ApiProcesses) -> None:
        self._made += 1
        ended = SimpleNamespace(kill=lambda: None, wait=lambda number=self._made: self._processes.pop(number))
        self._processes[self._made] = ApiProcess(self._made, cast(Any, ended))

    sent = []
    monkeypatch.setattr(ApiProcesses, "_start", start)
    monkeypatch.setattr(ApiProcesses, "_send", lambda self, process, message: sent.append(process.number))
    with bind("127.0.0.1", 0) as listener, ApiProcesses(3, listener) as processes:
        processes._processes[2].started = True
        processes._collect()
    assert sent == [2], "the others wait for their setup"
    assert not processes._processes


def test_a_fault_of_their_thread_ends_the_server(own_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with exit code 0, as if somebody had stopped it."""

    class Failing(ApiProcesses):
        def _start(self) -> None:
            pass

        def _replace_ended(self) -> None:
            raise OSError("no process can be started")

    options = Options()
    shared = Shared(own_engine, Metrics(own_engine), options, "small")
    monkeypatch.setattr(own_engine, "after_callbacks", lambda callback: None)
    with bind("127.0.0.1", 0) as listener, Failing(2, listener) as processes:
        with pytest.raises(EngineError, match="internal error: OSError"):
            processes.prepare(shared, {"options": options.to_dict()})
        with pytest.raises(EngineError, match="internal error: OSError"):
            processes.run([])


def test_running_streams_end_before_the_processes_stop(two: Two) -> None:
    """The last test of this file: it ends the processes that the others share, as a start of others costs seconds."""
    with two.http() as http, two.http() as other, Gate(two.engine) as gate:
        lines = gate.begun(http, LONG, 4)
        two.processes.stop()
        wait_until(lambda: len(two.processes.pids) == 1)  # the one without a request has ended
        assert other.get("/health").json() == {"status": "draining"}
        assert other.post(C, json=TEXT).status_code == 503
        gate.let_through(1000)
        assert len(text_of(lines)) > 0
    two.serving.join(WAIT_S)
    assert not two.serving.is_alive()
