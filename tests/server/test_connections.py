"""Connections: what clients send late, half or never, how many there may be, and what is refused unread."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.conftest import WAIT_S
from server.conftest import QuietEngine, Served, output, serve
from weft.engine.controller.engine import Engine
from weft.serve.http.loading import bind
from weft.serve.http.options import Options
from weft.serve.http.run import Server


@pytest.fixture
def strict(engine: Engine) -> Iterator[Served]:
    """Small limits."""
    yield from serve(engine, api_key="secret", max_body_mb=1000 / 2**20, max_connections=8)


@pytest.fixture
def impatient(engine: Engine) -> Iterator[Served]:
    """Short time-outs, within which a test cannot be sure to send anything."""
    yield from serve(engine, api_key="secret", header_timeout_s=0.3, body_timeout_s=0.3, idle_timeout_s=0.3)


def received(connection: socket.socket) -> bytes:
    """All until the server closes."""
    got = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            got += piece
    return got


def head(path: str, length: int | str, key: str = "secret") -> bytes:
    size = f"Content-Length: {length}" if isinstance(length, int) else f"Transfer-Encoding: {length}"
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Authorization: Bearer {key}", size]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def received_until(connection: socket.socket, end: bytes) -> bytes:
    got = b""
    while end not in got:
        piece = connection.recv(65536)
        assert piece, got
        got += piece
    return got


def test_accepted_connections_send_at_once() -> None:
    """TCP_NODELAY: without it the second small write of a response waits for the client's delayed acknowledgement."""

    async def main() -> int:
        delay: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                accepted = transport.get_extra_info("socket")
                delay.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        listener = bind("127.0.0.1", 0)
        async with await asyncio.get_running_loop().create_server(Accepted, sock=listener):
            with socket.create_connection(listener.getsockname()):
                return await delay

    assert asyncio.run(main())


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHos",
        head("/v1/completions", 500) + b"{",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /he",
    ],
    ids=["nothing", "half a header", "half a body", "a request and no other", "a request and half of another"],
)
def test_who_sends_no_more_is_closed(impatient: Served, sent: bytes) -> None:
    with impatient.socket() as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        received(connection)  # ends, because the server closes


@pytest.mark.parametrize("begin", [b"GET /health HTTP/1.1\r\n", head("/v1/completions", 9000)], ids=["header", "body"])
def test_who_sends_drop_by_drop_is_closed(impatient: Served, begin: bytes) -> None:
    with impatient.socket() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(begin)
        for _ in range(8000):
            connection.sendall(b"x")
            time.sleep(0.02)
        pytest.fail("still open after 160 seconds")


def test_headers_without_end_are_refused(strict: Served) -> None:
    with strict.socket() as connection:
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                connection.sendall(b"GET /health HTTP/1.1\r\n" if _ == 0 else b"X-More: " + b"x" * 8000 + b"\r\n")
        assert received(connection)[:12] in (b"HTTP/1.1 431", b"")  # what is sent on may have reset the connection


def test_headers_beyond_the_limit_are_refused_though_they_come_at_once(strict: Served) -> None:
    for header in (b"X-More: " + b"x" * 2**16, b"X: y\r\n" * 2**14, b"Cookie: a\r\n" * 6000):
        with strict.socket() as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n\r\n")
            assert received(connection)[:12] in (b"HTTP/1.1 431", b"")
    with strict.socket() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-More: " + b"x" * 65000 + b"\r\n\r\n")
        assert received_until(connection, b"}").startswith(b"HTTP/1.1 200")


def error_of(response: bytes) -> dict[str, Any]:
    """Return the error of a response read from a socket until the connection's end."""
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"connection: close" in head and b"content-type: application/json" in head, head
    assert f"content-length: {len(body)}".encode() in head
    return dict(json.loads(body)["error"])


@pytest.mark.parametrize("sent", [b"GET /health FTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
def test_what_is_no_http_gets_an_error_of_the_usual_shape(strict: Served, sent: bytes) -> None:
    """The second is how a TLS connection begins."""
    with strict.socket() as connection:
        connection.sendall(sent)
        response = received(connection)
    assert response.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert error_of(response) == {
        "message": "this is not a valid HTTP/1.1 request",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


def test_half_sent_requests_keep_nobody_out(engine: Engine) -> None:
    for served in serve(engine, max_connections=8, header_timeout_s=1000):
        held = [served.socket() for _ in range(40)]
        for connection in held:
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"GET /health HTTP/1.1\r\nHos")
        with served.http() as http:
            assert http.get("/health").status_code == 200
        for connection in held:
            connection.close()


@contextlib.contextmanager
def serve_app(app: Any, **options: Any) -> Iterator[tuple[str, int]]:
    """Any ASGI application behind the server's connections."""
    listener = bind("127.0.0.1", 0)
    engine_client: Any = SimpleNamespace(live=0, close=lambda: None)
    server = Server(app, engine_client, Options(**options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        server.stop()
        thread.join()
        listener.close()


async def begin(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})


def test_connections_with_requests_are_not_given_up() -> None:
    async def hold(scope: Any, receive: Any, send: Any) -> None:
        await begin(send)
        while (await receive())["type"] != "http.disconnect":
            pass

    def ask() -> tuple[socket.socket, bytes]:
        connection = socket.create_connection(address, timeout=WAIT_S)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return connection, connection.recv(1000)

    with serve_app(hold, max_connections=2) as address, contextlib.ExitStack() as stack:
        responses = []
        for _ in range(3):
            connection, response = ask()
            stack.enter_context(connection)
            responses.append(response[:12])
        assert error_of(response)["type"] == "server_error" and b"retry-after: 1" in response
        assert responses == [b"HTTP/1.1 200", b"HTTP/1.1 200", b"HTTP/1.1 503"]


def test_who_reads_nothing_is_closed() -> None:
    ended = threading.Event()

    async def pour(scope: Any, receive: Any, send: Any) -> None:
        await begin(send)
        watcher = asyncio.ensure_future(gone(receive))
        while not watcher.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        ended.set()

    async def gone(receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    with serve_app(pour, stall_timeout_s=0.2) as address, socket.create_connection(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert ended.wait(WAIT_S)


FEW_DESCRIPTORS = """
import resource, types
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from weft.serve.http import loading, log, run
from weft.serve.http.options import Options
async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
log.configure("text")
engine_client = types.SimpleNamespace(live=0, close=lambda: None)
listener = loading.bind("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
run.Server(app, engine_client, Options()).run(sockets=[listener])
"""


def test_more_clients_than_descriptors() -> None:
    command = [sys.executable, "-c", FEW_DESCRIPTORS]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout and server.stderr
    address = ("127.0.0.1", int(server.stdout.readline()))
    held = []
    for _ in range(300):
        held.append(socket.create_connection(address, timeout=WAIT_S))
        with contextlib.suppress(ConnectionError):
            held[-1].sendall(b"GET / HTTP/1.1\r\nHos")
    with socket.create_connection(address, timeout=WAIT_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    for connection in held:
        connection.close()
    server.terminate()
    _, log = server.communicate(timeout=WAIT_S)
    assert server.returncode == 0 and len(log.splitlines()) < 20, log[:2000]


def test_a_body_too_large_is_refused_unread(strict: Served) -> None:
    with strict.socket() as connection:
        connection.sendall(head("/v1/completions", 1001))
        refused = received(connection)  # to the end: what still comes would be taken for another request
        assert refused.startswith(b"HTTP/1.1 413") and b"larger than 1000 bytes" in refused
    with strict.socket() as connection:
        connection.sendall(head("/v1/completions", "chunked") + b"400\r\n" + b" " * 1024 + b"\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_the_key_is_checked_before_the_body_is_read(strict: Served) -> None:
    with strict.socket() as connection:
        connection.sendall(head("/v1/completions", 900, key="wrong") + b"{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 401")
    with strict.http() as http:
        for scheme in ("bearer", "BEARER", "Bearer "):
            assert http.get("/v1/models", headers={"Authorization": f"{scheme} secret"}).status_code == 200
        for header in ("secret", "Basic secret", "Bearer", "Bearer secret2"):
            assert http.get("/v1/models", headers={"Authorization": header}).status_code == 401


def test_a_request_keeps_its_id(strict: Served) -> None:
    with strict.http() as http:
        assert http.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
        made = [http.get("/v1/models").headers["x-request-id"] for _ in range(2)]  # refused, and still named
        assert made[0] != made[1] and all(made)
        assert http.get("/health", headers={"X-Request-Id": "a b"}).headers["x-request-id"] != "a b"
        assert http.head("/health").status_code == 200


def test_web_pages_that_may_call(engine: Engine) -> None:
    ask = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    for served in serve(engine, api_key="secret", cors_origins=("https://page.example",)):
        with served.http() as http:
            allowed = http.options("/v1/completions", headers=ask)
            assert allowed.headers["access-control-allow-origin"] == "https://page.example"
            assert "access-control-allow-origin" not in http.get("/health", headers={"Origin": "https://b"}).headers


STREAM = b'{"prompt": "abc", "stream": true}'


def test_a_server_that_leaves_ends_what_runs(quiet: QuietEngine) -> None:
    for served in serve(quiet, drain_s=0):
        with served.socket() as connection:
            connection.sendall(head("/v1/completions", len(STREAM)) + STREAM)
            quiet.say(output("begun"))
            begun = received_until(connection, b"data: {")
            served.server.stop()
            whole = begun + received(connection)
        events = [line for line in whole.splitlines() if line.startswith(b"data: ")]
        assert events[-1] == b"data: [DONE]" and b"shutting down" in events[-2]
        assert quiet.cancelled == [0]


def test_a_server_that_drains_lets_requests_end(quiet: QuietEngine) -> None:
    for served in serve(quiet, drain_s=1000):
        with served.socket() as connection, served.http() as http:
            connection.sendall(head("/v1/completions", len(STREAM)) + STREAM)
            quiet.say(output("begun"))
            received_until(connection, b"data: {")
            served.server.stop()
            while (response := http.get("/health")).status_code == 200:
                pass
            assert response.json() == {"status": "draining"}
            refused = http.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            quiet.say(output("ended", "stop"))
            end = received_until(connection, b"[DONE]")
        assert b"ended" in end and b"shutting down" not in end and not quiet.cancelled


def test_a_connection_that_was_accepted_last_gets_a_response(
    quiet: QuietEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request was on the way when an API process that had no other left, and the connection was reset."""
    monkeypatch.setattr("weft.serve.http.run.LAST_REQUESTS_S", WAIT_S)
    for served in serve(quiet, drain_s=1000):
        with served.socket() as connection:
            while not served.server.server_state.connections:
                pass
            served.server.stop()
            while served.server.servers[0].is_serving():
                pass
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"draining" in received(connection)


def test_a_request_of_http_1_1_needs_a_host(served: Served) -> None:
    for version, status in ((b"1.1", b"400"), (b"1.0", b"200")):
        with served.socket() as connection:
            connection.sendall(b"GET /v1/models HTTP/" + version + b"\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 " + status)


def test_only_allowed_hosts_are_served(engine: Engine) -> None:
    allowed = ("api.example", "api.example:80", "API.example.", "a.b.example", "localhost:1", "127.0.0.1", "[::1]:80")
    refused = ("evil.example", "b.example", "xapi.example", "api.example.evil", "")
    for served in serve(engine, allowed_hosts=("api.example", "*.b.example")):
        with served.http() as http:
            for hosts, status in ((allowed, 200), (refused, 400)):
                for host in hosts:
                    assert http.get("/v1/models", headers={"Host": host}).status_code == status, host
            assert http.get("/health", headers={"Host": "10.0.0.7:8000"}).status_code == 200
    for host in ("a b", "http://x", "*x", ""):
        with pytest.raises(ValueError, match="allowed_hosts"):
            Options(allowed_hosts=(host,)).check()


def test_http_1_0_gets_no_chunks(quiet: QuietEngine) -> None:
    for served in serve(quiet):
        for version, chunked in ((b"1.0", False), (b"1.1", True)):
            with served.socket() as connection:
                sent = head("/v1/completions", len(STREAM)).replace(b"HTTP/1.1", b"HTTP/" + version)
                connection.sendall(sent + STREAM)
                quiet.say(output("begun"), int(chunked))
                quiet.say(output("ended", "stop"), int(chunked))
                whole = received_until(connection, b"[DONE]") if chunked else received(connection)
            begin, _, body = whole.partition(b"\r\n\r\n")
            assert (b"transfer-encoding: chunked" in begin.lower()) == chunked
            assert body.startswith(b"data: {") != chunked and b"[DONE]" in body


def test_messages_have_a_request_id(served: Served) -> None:
    with served.http() as http:
        response = http.post("/v1/messages", json={}, headers={"X-Request-Id": "mine"})
        assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"
        assert "request-id" not in http.get("/v1/models").headers
