"""The port while the model loads, and the signals that end the process by then."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from weft.serve.cli.cmd_serve import StopSignals
from weft.serve.http.loading import MAX_CLIENTS, Loading, bind
from weft.serve.http.options import Options
from weft.serve.http.run import Server


@contextmanager
def loading() -> Iterator[tuple[Loading, httpx.Client]]:
    with (
        bind("127.0.0.1", 0) as listener,
        Loading(listener, root_path="/llm") as found,
        httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as client,
    ):
        yield found, client


def test_each_request_gets_503_while_the_model_loads() -> None:
    with loading() as (_, client):
        assert (health := client.get("/health")).status_code == 503 and health.json() == {"status": "loading"}
        assert client.head("/health").status_code == 503
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("OPTIONS", "/v1/responses")):
            refused = client.request(method, path, content=b"x" * 100_000 if method == "POST" else b"")
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["code"] == "loading"
        for path in ("/v1/messages", "/llm/v1/messages"):
            refused = client.post(path, json={"messages": []})
            assert refused.json()["error"]["type"] == "overloaded_error" and refused.status_code == 503
        assert client.get("/llm/health").json() == {"status": "loading"}
        assert client.request("BREW", "/v1/models").json()["error"]["code"] == "loading"


def test_what_is_no_request_gets_an_error_while_the_model_loads() -> None:
    with loading() as (found, _):
        for bad in (b"GET / HTTP/9.9\r\n\r\n", b"a b c d\r\n\r\n", b"GET /".ljust(2**16 + 1, b"x")):
            with socket.create_connection(found.socket.getsockname(), timeout=60) as connection:
                connection.sendall(bad)
                with connection.makefile("rb") as response:
                    head, _, body = response.read().partition(b"\r\n\r\n")
            assert b"application/json" in head
            assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_clients_that_send_nothing_do_not_fill_the_process() -> None:
    with loading() as (found, _):
        port = found.socket.getsockname()[1]
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * MAX_CLIENTS)]
        for connection in silent[MAX_CLIENTS:]:
            connection.settimeout(60)
            assert connection.recv(1) == b"", "it was closed"
            connection.close()
        for connection in silent:
            connection.close()


def test_the_server_takes_the_same_port_over() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    engine_client: Any = SimpleNamespace(live=0, close=lambda: None)
    server = Server(app, engine_client, Options())
    with loading() as (found, client):
        assert client.get("/health").status_code == 503
        found.shutdown()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [found.socket]})
        thread.start()
        try:
            assert client.get("/health").status_code == 204
        finally:
            server.stop()
            thread.join()


def test_the_first_signal_ends_the_start_and_later_ones_change_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stopped: list[int] = []
    with StopSignals() as signals:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.asked
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        signals.stop = lambda: stopped.append(1)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped == [1]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


IMPORTS = """
import sys
from weft.serve.cli.main import main
for arguments in sys.argv[1].splitlines():
    code = main(["serve", *arguments.split()])
    assert code == 2, (arguments, code)
    found = {"torch", "transformers", "fastapi", "uvicorn"} & sys.modules.keys()
    assert not found, (arguments, found)
"""


def test_options_are_checked_before_what_takes_seconds_to_import() -> None:
    wrong = [
        "--port 99999999",
        "--max-body-mb -1",
        "--attn-tp 3 --ep 2",
        "--dcp 3 --attn-tp 2",
        "--cpu-bind x",
        "/no/such/folder",
    ]
    ran = subprocess.run([sys.executable, "-c", IMPORTS, "\n".join(wrong)], capture_output=True, text=True)
    lines = ran.stderr.splitlines()
    assert ran.returncode == 0 and len(lines) == len(wrong), ran.stderr
    assert all(line.startswith("weft: ") for line in lines)
