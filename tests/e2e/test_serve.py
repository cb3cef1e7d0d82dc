"""`weft serve` as a process, until its end: what its clients hear, its exit code, its log, and what is left."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weft.bench.server_process import ServerProcess, forker_of

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
def streaming(server: ServerProcess) -> Iterator[http.client.HTTPResponse]:
    """An answer that has begun, of 128 choices one after the other, which takes minutes at the least."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = {"prompt": "Tom has", "max_tokens": 480, "ignore_eos": True, "n": 128, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": f"bearer {KEY}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    output = connection.getresponse()
    assert output.status == 200 and output.readline().startswith(b"data: {")
    yield output
    connection.close()


def events(log: str) -> list[str]:
    """Of a log in JSON, after the lines that say that it serves; a last line that is none is the report."""
    lines = log.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("generation_config.json: "))
    return [json.loads(line)["event"] if line.startswith("{") else line for line in lines[begin + 1 :]]


def test_ctrl_c_twice_while_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends it to the server's process group, in which no rank is. Who is impatient sends it twice."""
    monkeypatch.setenv("WEFT_API_KEY", KEY)
    with serving(tmp_path, "--drain-s", "1000") as server, streaming(server) as output:
        with http_without_key(server) as refused:
            assert refused.status == 401
        group = os.getpgid(server.process.pid)
        for pid in (forker_of(server.pid), *server.ranks().values()):
            assert pid is not None and os.getpgid(pid) != group
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


@contextmanager
def http_without_key(server: ServerProcess) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/v1/models")
    yield connection.getresponse()
    connection.close()


def test_ranks_that_fail_too_often_end_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-restarts", "0") as server, streaming(server) as output:
        os.kill(server.ranks()[0], signal.SIGKILL)
        said = [line for line in output.read().splitlines() if line]
        assert said[-1] == b"data: [DONE]" and b"rank 0 was killed by signal 9" in said[-2]
        assert server.process.wait(60) == 1
        assert not any(server.left_behind().values())
        log = server.log.read_text()
    assert log.splitlines()[-1].startswith("weft: rank 0 was killed by signal 9") and "Traceback" not in log
    assert events(log).count("request") == 1 and len(events(log)) <= 4
