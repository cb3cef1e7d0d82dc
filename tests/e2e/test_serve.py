"""`weft serve` as a process, until its end: what its clients hear, its exit code, its log, and what is left."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from chaos.server_process import ServerProcess, children, forker_of
from weft.comm.ports import reserve

KEY = "a key that no command line shows"


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[ServerProcess]:
    server = ServerProcess(folder, ["--log-format", "json", "--max-running", "1", *arguments])
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


@contextmanager
def streaming(server: ServerProcess, n: int = 128) -> Iterator[http.client.HTTPResponse]:
    """An answer that has begun, of n choices one after the other; 128 take minutes at the least."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = {"prompt": "Tom has", "max_tokens": 480, "ignore_eos": True, "n": n, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": f"bearer {KEY}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    output = connection.getresponse()
    assert output.status == 200 and output.readline().startswith(b"data: {")
    yield output
    connection.close()


def events(log: str) -> list[str]:
    """Events of a log in JSON, after those that say that it serves: every line is an object, from the first one on."""
    found = [json.loads(line)["event"] for line in log.splitlines()]
    begin = next(at for at, event in enumerate(found) if event.startswith("generation_config.json: "))
    return found[begin + 1 :]


@pytest.mark.parametrize("api_servers", [pytest.param("1", marks=pytest.mark.nightly), "2"])
def test_ctrl_c_twice_while_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api_servers: str) -> None:
    """A terminal sends it to the server's process group, in which no rank is. Who is impatient sends it twice. Each
    other process gets signals of both kinds before, as systemd may send them."""
    monkeypatch.setenv("WEFT_API_KEY", KEY)
    arguments = "--drain-s", "1000", "--api-servers", api_servers
    with serving(tmp_path, *arguments) as server, streaming(server) as output:
        with http_without_key(server) as refused:
            assert refused.status == 401
        group = os.getpgid(server.process.pid)
        for pid in (forker_of(server.pid), *server.ranks().values()):
            assert pid is not None and os.getpgid(pid) != group
        signal_others(server)
        server.process.send_signal(signal.SIGINT)
        while "draining" not in server.get("/health")[1]:  # two signals at once would be one
            pass
        server.process.send_signal(signal.SIGINT)
        said = [line for line in output.read().splitlines() if line]
        assert said[-1] == b"data: [DONE]" and b"shutting down" in said[-2]
        assert server.process.wait(60) == 0
        assert not any(server.left_behind().values())
        log = events(server.log.read_text())
    assert log == ["request", "request"], "one line for what was refused, one for the request, and none for the end"


def signal_others(server: ServerProcess) -> None:
    """Send signals of both kinds to each process but the server's own."""
    others = {*children(server.pid), *server.ranks().values()}
    assert others > {*api_processes(server), *server.ranks().values()}
    for pid in others:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)


@contextmanager
def http_without_key(server: ServerProcess) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/v1/models")
    yield connection.getresponse()
    connection.close()


@pytest.mark.nightly
@pytest.mark.parametrize("api_servers", ["1", "2"])
def test_ranks_that_fail_too_often_end_the_server(tmp_path: Path, api_servers: str) -> None:
    arguments = "--max-restarts", "0", "--api-servers", api_servers
    with serving(tmp_path, *arguments) as server, streaming(server) as output:
        os.kill(server.ranks()[0], signal.SIGKILL)
        said = [line for line in output.read().splitlines() if line]
        assert said[-1] == b"data: [DONE]" and b"rank 0 was killed by signal 9" in said[-2]
        assert server.process.wait(60) == 1
        assert not any(server.left_behind().values())
        log = server.log.read_text()
    assert events(log)[-1].startswith("weft: rank 0 was killed by signal 9") and "Traceback" not in log
    assert events(log).count("request") == 1 and len(events(log)) <= 4


def api_processes(server: ServerProcess) -> set[int]:
    server.ranks()  # notes all processes
    return {
        pid for pid in children(server.pid) if b"weft.serve.api_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_api_processes_go_with_their_server(tmp_path: Path, number: signal.Signals) -> None:
    """Also those that replace others, after all were killed at once; on SIGTERM once the last stream has ended."""
    with serving(tmp_path, "--drain-s", "1000", "--api-servers", "2") as server:
        killed = api_processes(server)
        with streaming(server) as lost:
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises((http.client.HTTPException, ConnectionError)):
                lost.read()
        while len(api_processes(server) - killed) < 2:
            time.sleep(0.1)
        with streaming(server, n=2) as output:
            assert len(api_processes(server)) == 2
            server.process.send_signal(number)
            if number == signal.SIGTERM:
                said = [line for line in output.read().splitlines() if line]
                assert said[-1] == b"data: [DONE]"
                ends = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in said[:-1]]
                assert ends.count("length") == 2
        assert server.process.wait(60) == (0 if number == signal.SIGTERM else -number)
        left = server.left_behind()
        assert not left["processes"] and (number == signal.SIGKILL or not left["files"])
        with pytest.raises(ConnectionError):
            server.get("/health")


@pytest.mark.nightly
@pytest.mark.parametrize("api_servers", ["1", "2"])
def test_a_signal_for_all_processes_is_one_for_the_server(tmp_path: Path, api_servers: str) -> None:
    """Each other process gets signals of both kinds before the server gets one, as systemd may send them. By day
    `test_ctrl_c_twice_while_busy` sends them."""
    with serving(tmp_path, "--drain-s", "1000", "--api-servers", api_servers) as server:
        with streaming(server, n=1) as output:
            signal_others(server)
            server.process.send_signal(signal.SIGTERM)
            said = [line for line in output.read().splitlines() if line]
        assert said[-1] == b"data: [DONE]" and b"error" not in said[-2]
        assert b'"finish_reason":"length"' in said[-2]
        assert "was killed by signal" not in server.log.read_text()
        assert server.process.wait(60) == 0
        assert not any(server.left_behind().values())


@contextmanager
def started(stderr: Any, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Callable[..., tuple[int, bytes]]]]:
    """The command as a shell starts it, from its first moment, and what asks it."""
    reserved = reserve()
    port = reserved.getsockname()[1]
    command = [Path(sys.executable).with_name("weft"), "serve", "--port", str(port), *options]
    process = subprocess.Popen(command, stderr=stderr)

    def ask(path: str = "/health") -> tuple[int, bytes]:
        while process.poll() is None:
            with suppress(ConnectionError):  # the port is not taken yet
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
                connection.request("GET", path)
                response = connection.getresponse()
                return response.status, response.read()
        raise AssertionError(f"it ended with {process.returncode}")

    try:
        yield process, ask
    finally:
        process.kill()
        process.wait()
        reserved.close()


@pytest.mark.nightly
@pytest.mark.parametrize("api_servers", ["1", "2"])
def test_health_says_loading_first_and_two_signals_end_each_phase(api_servers: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        for phase in ("loading", "serving"):
            with started(subprocess.DEVNULL, "--api-servers", api_servers) as (process, ask):
                assert ask() == (503, b'{"status": "loading"}')
                while phase == "serving" and ask()[0] != 200:
                    pass
                process.send_signal(number)
                process.send_signal(number)
                while process.poll() is None:
                    process.send_signal(number)
                assert process.wait() == 0, (number, phase)


@pytest.mark.nightly
@pytest.mark.parametrize("nobody_reads", ["a pipe", "/dev/full"])
def test_a_log_that_cannot_be_written_stops_nothing(nobody_reads: str) -> None:
    read, written = os.pipe()
    with (
        open(read, "rb"),
        open(written if nobody_reads == "a pipe" else "/dev/full", "wb") as stderr,
        started(stderr) as (process, ask),
    ):
        while ask()[0] != 200:
            pass
        assert {ask("/v1/nothing")[0] for _ in range(2000)} == {404}
        assert ask() == (200, b'{"status":"ok"}')
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
