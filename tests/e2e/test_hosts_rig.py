"""Two hosts that share nothing but a link: a name that is 127.0.1.1, tokens of one host, and a link that is cut."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chaos.__main__ import main
from chaos.chaos_hosts import HostsChaos, KeptAgent
from chaos.hosts_rig import Host, arguments, joined_hosts, started_by
from chaos.server_process import ServerError
from chaos.test_chaos import losses
from e2e.here import weft_here
from engine.conftest import WAIT_S

WEFT = (sys.executable, "-m", "weft.serve.cli.main")
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


def test_an_agent_is_kept_and_a_host_that_was_switched_off_comes_back(hosts: tuple[Host, ...], tmp_path: Path) -> None:
    """Chaos's own parts, with a shell in place of an agent."""
    log = tmp_path / "log"
    agent = KeptAgent(hosts[1], ["sh", "-c", "echo begun; sleep 1000"], log)
    heard = threading.Event()
    health: Any = SimpleNamespace(serving=True, heard=lambda *_: heard.wait(WAIT_S))
    chaos = HostsChaos(cast(Any, None), health, hosts, [agent], {}, random.Random(0))

    def begun(times: int) -> Callable[[], bool]:
        return lambda: log.exists() and log.read_text() == "begun\n" * times

    wait_for(begun(1))
    wait_for(lambda: chaos.kill_agent() is not None)
    wait_for(begun(2))
    wait_for(lambda: chaos.stop_agent(0.2, 0.3) is not None)
    wait_for(lambda: chaos.kill_agent() is not None)  # nobody waits for one that is stopped
    wait_for(begun(3))
    (hosts[1].temporary / "left").touch()
    off = threading.Thread(target=chaos.lose_host)
    off.start()
    wait_for(lambda: not hosts[1].processes())
    assert begun(3)() and agent.pid is None, "it is not started while the host is off"
    with hosts[0].network(), pytest.raises(OSError):
        socket.create_connection((hosts[1].address, 1), 0.5)
    heard.set()
    off.join()
    wait_for(begun(4))
    assert not hosts[1].left_behind()["files"]
    hosts[1].run("touch", "/dev/shm/segment")
    with pytest.raises(ServerError, match="segments are left of processes that were killed: segment"):
        chaos.lose_host()
    hosts[1].run("rm", "/dev/shm/segment")
    hosts[1].mend()  # the failure left it off, and other tests share it
    agent.let_end()
    hosts[1].kill_all()
    assert agent.end(WAIT_S) == -signal.SIGKILL


@pytest.mark.parametrize(
    "said, code, refused", [("other weights", 1, True), ("other weights", 0, False), ("", 1, False)]
)
def test_a_process_that_is_not_refused_is_seen(hosts: tuple[Host, ...], said: str, code: int, refused: bool) -> None:
    chaos = HostsChaos(*([cast(Any, None)] * 2), hosts, [], {}, random.Random(0))
    command = ["sh", "-c", f"echo waiting for node 0; echo {said}; exit {code}"]
    if refused:
        moment = chaos.be_refused(command, "has|other .*")
        assert moment.heard is not None and moment.heard >= moment.at
    else:
        with pytest.raises(ServerError, match=f"a process that must be refused ended with {code}: {said}"):
            chaos.be_refused(command, "has|other .*")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_chaos_over_two_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind of fault once; `make chaos ARGS="--hosts 2 --faults 60"` is the long form."""
    kinds = 16
    asked = ["--hosts", "2", "--faults", str(kinds), "--bound-factor", "60", "--json", str(tmp_path / "report.json")]
    code = main([*asked, "--clients", "2", "--tokens", "24"])
    found = json.loads((tmp_path / "report.json").read_text())
    assert code == 0 and found["passed"], json.dumps(found, indent=1)
    assert {row["count"] for row in found["faults"].values()} == {1} and len(found["faults"]) == kinds
    assert found["exit_codes"] == {"node 0": 0, "node 1": 0} and found["requests"]["completed"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", ["--hosts 2", "--hosts 3 --attn-dp 2 --attn-tp 3 --ep 6"])
def test_ranks_of_several_hosts_are_lost_for_good(tmp_path: Path, layout: str) -> None:
    found = losses(tmp_path / "report.json", layout, 3)
    assert found["exit_codes"] == dict.fromkeys([f"node {node}" for node in range(found["hosts"])], 0)
    assert len(found["losses"]) == 3


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


@pytest.mark.nightly
@pytest.mark.parametrize(
    "count, layout",
    [
        (4, "--attn-dp 4 --ep 4"),
        (4, "--attn-tp 4 --ep 2 --split-vocabulary on --moe-exchange dispatch"),
        (2, "--attn-tp 4 --ep 4 --split-vocabulary on --moe-exchange dispatch"),
    ],
)
def test_tokens_of_more_hosts_are_one_hosts(key: Path, count: int, layout: str) -> None:
    """`engine/test_agents_greedy.py` has all layouts, on hosts that share more."""
    asked = ("generate", "--prompt", PROMPT, "--max-tokens", "16", "--json", "--device", "cpu", "--kv-tokens", "2048")
    code, out, err = weft_here(*asked)
    assert code == 0, err
    try:
        with joined_hosts(count) as made:
            started = [
                host.start(*WEFT, *asked, *layout.split(), *arguments(host, key, count), stdout=subprocess.PIPE)
                for host in made
            ]
            said = [process.communicate()[0] for process in started]
            assert [process.returncode for process in started] == [0] * count
            assert json.loads(said[0])["text"] == json.loads(out)["text"] and not any(said[1:])
            assert not any(any(host.left_behind().values()) for host in made)
    except PermissionError as error:
        pytest.skip(str(error))


@pytest.mark.nightly
def test_a_profile_has_the_ranks_of_both_hosts(hosts: tuple[Host, ...], key: Path, tmp_path: Path) -> None:
    small = ("--attn-dp", "2", "--attn-tp", "2", "--device", "cpu", "--batch", "4", "--context", "20", "--steps", "3")
    watched = ("profile", *small, "--output", str(tmp_path / "found"))
    both = [host.start(*WEFT, *watched, *arguments(host, key), stdout=subprocess.PIPE) for host in hosts]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0] and "collectives of a step" in said[0] and not said[1]
    found = json.loads((tmp_path / "found" / "profile.json").read_text())
    assert len(found["cpu_us_a_step"]["rank"]) == 4
    assert any("torchdist/gloo" in row["what"] for row in found["collectives"])
    with gzip.open(tmp_path / "found" / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert {e["pid"] for e in events if e["name"].startswith("weft step")} == {0, 1, 2, 3}
