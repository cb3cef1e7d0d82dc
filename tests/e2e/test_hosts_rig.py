"""Two hosts that share nothing but a link: a name that is 127.0.1.1, tokens of one host, and a link that is cut."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.here import weft_here
from engine.conftest import WAIT_S
from weft.bench.hosts_rig import Host, arguments, joined_hosts, started_by

WEFT = (sys.executable, "-m", "weft.cli.main")
LAYOUT = ("--attn-dp", "2", "--attn-tp", "2", "--device", "cpu", "--kv-tokens", "2048")
PROMPT = "Tom has 3 apples and buys 4 more."


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, ...]]:
    try:
        with joined_hosts(2) as made:
            yield made
    except PermissionError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (found := tmp_path_factory.mktemp("key") / "cluster.key").write_text("a secret of this test")
    return found


def test_a_name_that_is_127_0_1_1_is_refused(hosts: tuple[Host, ...], key: Path) -> None:
    trap = [*arguments(hosts[0], key), "--master-addr", "rig0"]
    done = hosts[0].start(*WEFT, "doctor", *trap, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = done.communicate()[0]
    assert done.returncode == 1 and "--master-addr rig0 is 127.0.1.1 on this host, by its /etc/hosts: no other" in said


def test_a_host_has_processes_memory_files_and_a_network_of_its_own(hosts: tuple[Host, ...]) -> None:
    first, second = hosts
    left = second.start("sh", "-c", "touch /dev/shm/segment $TMPDIR/file; sleep 100 & wait")
    wait_for(lambda: any(line.endswith(" sleep 100") for line in second.left_behind()["processes"]))
    assert second.left_behind() | {"processes": []} == {"processes": [], "segments": ["segment"], "files": ["file"]}
    assert not any(first.left_behind().values()) and "segment" not in os.listdir("/dev/shm")
    second.kill_all()
    assert left.wait(WAIT_S) and not second.processes()
    second.run("rm", "/dev/shm/segment", str(second.temporary / "file"))
    assert not any(second.left_behind().values())
    with first.network():
        server = socket.create_server((first.address, 0))
    where = first.address, server.getsockname()[1]
    with server, second.network():
        socket.create_connection(where, WAIT_S).close()
        second.cut()
        with pytest.raises(OSError):
            socket.create_connection(where, 0.5)
        second.mend()
        socket.create_connection(where, WAIT_S).close()
    with pytest.raises(OSError):
        socket.create_connection(where, 0.5)


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def curl(host: Host, path: str, *more: str) -> tuple[int, str]:
    """Status and body of a request on a host to its own server."""
    command = ("curl", "-s", "-w", "\n%{http_code}", f"http://127.0.0.1:8000{path}", *more)
    said = host.start(*command, stdout=subprocess.PIPE).communicate()[0]
    body, _, status = said.rpartition("\n")
    return int(status), body


@pytest.mark.nightly
def test_tokens_are_one_hosts_and_a_cut_link_is_survived(hosts: tuple[Host, ...], key: Path, tmp_path: Path) -> None:
    asked = ("--prompt", PROMPT, "--max-tokens", "16", "--json")
    code, out, err = weft_here("generate", *LAYOUT, *asked)
    assert code == 0, err
    expected = json.loads(out)["text"]
    body = json.dumps({"prompt": PROMPT, "max_tokens": 16, "temperature": 0})

    def serve(number: int, name: str) -> subprocess.Popen[str]:
        with open(tmp_path / name, "w") as log:
            return hosts[number].start(*WEFT, "serve", *LAYOUT, *arguments(hosts[number], key), stdout=log, stderr=log)

    def completion() -> str:
        post = ("-H", "Content-Type: application/json", "-d", body)
        status, said = curl(hosts[0], "/v1/completions", *post)
        assert status == 200, said
        return str(json.loads(said)["choices"][0]["text"])

    node0, agent = serve(0, "node0"), serve(1, "agent")
    wait_for(lambda: curl(hosts[0], "/health")[0] == 200)
    assert completion() == expected
    hosts[1].cut()
    assert agent.wait(WAIT_S) == 1
    wait_for(lambda: curl(hosts[0], "/health")[0] == 503)
    hosts[1].mend()
    again = serve(1, "again")
    wait_for(lambda: curl(hosts[0], "/health")[0] == 200)
    assert completion() == expected
    os.kill(started_by(node0), signal.SIGTERM)
    assert node0.wait(WAIT_S) == 0 and again.wait(WAIT_S) == 0
    assert "node 0 at 10.77.0.1:29600 is gone; so are the ranks of this host" in (tmp_path / "agent").read_text()
    assert "node 1 (rig1) has not been heard for 5 s" in (tmp_path / "node0").read_text()
