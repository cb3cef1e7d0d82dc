"""Hosts and their agents, over loopback: who is let in, what is refused in one line, and hosts that are lost."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from engine.conftest import WAIT_S
from engine.test_engine import GREEDY, config, expected, prompts
from engine.test_faults import wait_until
from weft.comm import torchdist
from weft.comm.ports import reserve
from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.controller.engine import Engine
from weft.engine.controller.startup import resolve_defaults
from weft.engine.hosts import addresses, agents, digests, secured
from weft.engine.hosts.agent import HostAgent
from weft.engine.hosts.agents import Agents
from weft.engine.models.config_json.fields import ModelError
from weft.engine.output.request_output import RequestOutput
from weft.engine.processes import rank_processes
from weft.engine.processes.fork_client import ForkServer
from weft.planner.spec import Mesh
from weft.serve.cli.cmd_doctor import between_hosts
from weft.tune.cpu_costs import opening_of

__all__ = ["expected"]
FORK = multiprocessing.get_context("fork")
IP_LOCAL_PORT_RANGE = 51  # of linux/in.h


@contextmanager
def reserved_ports() -> Iterator[int]:
    """Reserve a port and the next one, on which a test's processes may listen, and no other program's."""
    with ExitStack() as stack:
        while True:
            port = stack.enter_context(reserve()).getsockname()[1]
            second = stack.enter_context(socket.socket())
            with suppress(OSError, OverflowError):
                second.bind(("", port + 1))  # alone: another test's reservation is an error
                for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                    second.setsockopt(socket.SOL_SOCKET, option, 1)
                break
        yield port


def is_given(port: int) -> bool:
    """Tell whether a program that listens on any port, or connects from any, gets this one: it may have no other."""
    for ask in ("bind", "connect"):
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as asking:
            try:
                asking.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port))
            except OSError:
                pytest.skip("a socket's range of ports requires Linux 6.3")
            with suppress(OSError):
                asking.bind(("127.0.0.1", 0)) if ask == "bind" else asking.connect(server.getsockname())
                return True
    return False


@pytest.fixture
def cluster(model_dir: Path, tmp_path: Path) -> Iterator[EngineConfig]:
    """Two hosts of two ranks, on loopback."""
    (key := tmp_path / "cluster.key").write_text("a secret of this test\n")
    layout: Any = dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2, nnodes=2, device="cpu", executor="process")
    with reserved_ports() as port:
        meeting: Any = dict(master_addr="127.0.0.1", master_port=port, cluster_key=key, join_timeout_s=WAIT_S)
        yield resolve_defaults(config(model_dir, **layout, **meeting))


def serve(config: EngineConfig, said: Path) -> None:
    """An agent's process."""
    rank_processes.ForkServer = ForkServer  # type: ignore[attr-defined, misc]  # not that of the tests' process

    def say(line: str) -> None:
        with open(said, "a") as file:
            file.write(f"{line}\n")

    try:
        HostAgent(config, say).run()
    except EngineError as error:
        say(f"weft: {error}")
        os._exit(1)
    os._exit(0)


@contextmanager
def host(config: EngineConfig, said: Path) -> Iterator[Any]:
    """Node 1 as a process. said: the lines that its agent says."""
    process = FORK.Process(target=serve, args=(replace(config, node_rank=1), said))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def ranks_of(agent: int) -> list[int]:
    """Process ids of the ranks of an agent."""
    children = [int(p) for p in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
    return [int(p) for child in children for p in Path(f"/proc/{child}/task/{child}/children").read_text().split()]


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_two_hosts_serve_one_hosts_tokens_and_survive_a_rank_and_a_host(
    cluster: EngineConfig, expected: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def tokens() -> list[tuple[int, ...]]:
        return [result.token_ids for result in engine.generate(prompts(), GREEDY)]

    with host(cluster, tmp_path / "first") as first, Engine(cluster) as engine:
        assert tokens() == expected
        before = ranks_of(first.pid)
        assert len(before) == 2 == len(engine._executor.processes)
        os.kill(before[1], signal.SIGKILL)
        assert wait_until(lambda: engine.stats().failures == 1)
        assert tokens() == expected
        assert "rank 3 was killed by signal 9 (node 1," in caplog.text
        begun, ended = threading.Event(), threading.Event()

        def callback(output: RequestOutput) -> None:  # on the engine's thread: no output ends before the host
            if not begun.is_set():
                first.kill()
                first.join()
                begun.set()
            if output.take().finish_reason:
                ended.set()

        engine.submit(prompts()[0], GREEDY, callback)
        assert begun.wait(WAIT_S) and wait_until(lambda: engine.state == "restarting")
        assert f"node 1 ({socket.gethostname()}) has not been heard for 5 s; in" in caplog.text
        with host(cluster, tmp_path / "second") as second:
            assert ended.wait(WAIT_S), "requests wait for the host"
            assert tokens() == expected
            assert engine.stats().failures == 2 and not any(map(alive, before))
            left = ranks_of(second.pid)
            engine.close()
            second.join(WAIT_S)
            assert second.exitcode == 0 and not any(map(alive, left))
    assert (tmp_path / "second").read_text().splitlines()[1:] == [
        f"node 1: joined 127.0.0.1:{cluster.master_port}",
        "node 1: node 0 has ended",
    ]


@contextmanager
def agent_thread(config: EngineConfig, node: int = 1) -> Iterator[list[str]]:
    """An agent in this process; gives the lines that it says, the last one its error."""
    said: list[str] = []

    def main() -> None:
        try:
            HostAgent(replace(config, node_rank=node), said.append).run()
        except (EngineError, ModelError) as error:
            said.append(str(error))

    thread = threading.Thread(target=main)
    thread.start()
    try:
        yield said
    finally:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def hear(agents: Agents, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not until():
        assert time.monotonic() < deadline
        if agents.socket.poll(50):
            agents.receive()


def changed(name: str, value: str) -> Callable[[EngineConfig], dict[str, str]]:
    facts = digests.facts

    def other(config: EngineConfig) -> dict[str, str]:
        return facts(config) | {name: value}

    return other


@pytest.mark.parametrize(
    "name, text",
    [
        ("weft", "has other weft: 1, where node 0 has .*; install the same on every host"),
        ("config.json", "has other config.json: 1, where node 0 has .*; copy the same model directory to every host"),
        ("weights", "has other weights: 1, where node 0 has .*; copy the same model directory to every host"),
    ],
)
def test_a_host_that_has_something_else_is_refused(
    cluster: EngineConfig, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    node0 = Agents(cluster)
    monkeypatch.setattr(digests, "facts", changed(name, "1"))
    with agent_thread(cluster) as said:
        hear(node0, lambda: len(said) == 2)
    node0.close()
    assert re.fullmatch(rf"node 1 \(.*\) {text}", said[1]) and node0.missing == [1]


def test_a_host_with_other_options_is_refused(cluster: EngineConfig) -> None:
    node0 = Agents(cluster)
    with agent_thread(replace(cluster, max_running=4)) as said:
        hear(node0, lambda: len(said) == 2)
    node0.close()
    assert "was started with --max-running 4, node 0 with 8; give both the same" in said[1]


def test_a_second_host_of_the_same_number_is_refused_while_the_first_is_there(cluster: EngineConfig) -> None:
    node0 = Agents(cluster)
    with agent_thread(cluster) as first:
        hear(node0, lambda: not node0.missing)
        with agent_thread(cluster) as second:
            hear(node0, lambda: len(second) == 2)
        assert "is there already; give each host another --node-rank" in second[1]
        assert not node0.missing and node0.gone() is None
        node0.close()
    assert first[-1] == "node 1: node 0 has ended"


def test_an_agent_that_was_given_up_ends_so_that_it_can_be_started_again(
    cluster: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped for longer than it may be silent, and its connection is still there."""
    node0 = Agents(cluster)
    with agent_thread(cluster) as said:
        hear(node0, lambda: len(said) == 2)
        with monkeypatch.context() as patched:
            patched.setattr(agents, "SILENT_S", -1.0)
            assert "has not been heard" in (node0.gone() or ("",))[0] and node0.missing == [1]
        hear(node0, lambda: len(said) == 3)
        assert said[2] == "this host was not heard for 5 s, and node 0 has given it up; start it again"
        with agent_thread(cluster):
            hear(node0, lambda: not node0.missing)
            node0.close()


def test_an_agent_with_another_key_is_not_heard_and_says_so(cluster: EngineConfig, tmp_path: Path) -> None:
    (other := tmp_path / "other.key").write_text("the secret of another cluster")
    node0 = Agents(cluster)
    with agent_thread(replace(cluster, cluster_key=other)) as said:
        hear(node0, lambda: len(said) == 2)
    assert "does not know this --cluster-key: the file must be the same on every host" in said[1]
    assert node0.missing == [1]
    node0.close()


def test_no_message_is_decoded_before_it_is_authenticated(
    cluster: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes at random, ZeroMQ without a key, and another cluster's key; who knows the secret still joins."""
    decoded: list[bytes] = []
    monkeypatch.setattr(agents.messages, "decode_from_agent", lambda frame: decoded.append(frame))
    node0, rng = Agents(cluster), random.Random(1)
    for _ in range(50):
        with socket.create_connection(("127.0.0.1", cluster.master_port)) as s, suppress(OSError):
            s.sendall(rng.choice((b"", b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00CURVE")) + rng.randbytes(rng.randrange(400)))
    with zmq.Context() as context:
        plain = context.socket(zmq.DEALER)
        stranger = secured.connecting(context, b"what the cluster's is not")
        for s in (plain, stranger):
            s.linger = 0
            s.connect(f"tcp://127.0.0.1:{cluster.master_port}")
            with suppress(zmq.Again):  # once it is refused, a socket takes nothing
                for _ in range(100):
                    s.send(rng.randbytes(rng.randrange(100)), zmq.NOBLOCK)
        for _ in range(5):
            if node0.socket.poll(100):
                node0.receive()
        assert not decoded
        member = secured.connecting(context, secured.read_key(cluster.cluster_key or Path()))
        member.connect(f"tcp://127.0.0.1:{cluster.master_port}")
        member.send(b"a frame")
        hear(node0, lambda: bool(decoded))
        assert decoded == [b"a frame"]
        member.close()
        plain.close()
        stranger.close()
    node0.close()


def test_frames_of_a_member_that_are_no_messages_have_no_effect(cluster: EngineConfig) -> None:
    node0, rng = Agents(cluster), random.Random(2)
    with zmq.Context() as context:
        member = secured.connecting(context, secured.read_key(cluster.cluster_key or Path()))
        member.connect(f"tcp://127.0.0.1:{cluster.master_port}")
        for _ in range(200):
            member.send_multipart([rng.randbytes(rng.randrange(60)) for _ in range(rng.randrange(1, 4))])
        with agent_thread(cluster):
            hear(node0, lambda: not node0.missing)
            node0.close()
        member.close()


def be_node_0(config: EngineConfig, end: Any) -> None:
    node0 = Agents(config)
    hear(node0, end.is_set)
    os.kill(os.getpid(), signal.SIGKILL)


def doctors(cluster: EngineConfig, of_node_1: EngineConfig) -> tuple[list[str], list[str]]:
    """Return the findings of `weft doctor` on each of two hosts."""

    def found(config: EngineConfig) -> list[str]:
        return [f"{finding.level} {finding.what} {finding.why}".strip() for finding in between_hosts(config)]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(found, (replace(cluster, node_rank=0), replace(of_node_1, node_rank=1)))
    return first, second


def test_doctors_of_two_hosts_meet(cluster: EngineConfig) -> None:
    first, second = doctors(cluster, cluster)
    for said in (first, second):
        assert said[0] == "ok interface lo, address 127.0.0.1, on the way to 127.0.0.1 (127.0.0.1)"
    assert "ok node 1 is there, with the same versions and model; its clock is" in first[-1]
    assert second[-1] == f"ok node 0 has the same versions and model, and is reached at {cluster.master_port + 1} too"


def test_doctors_name_what_differs(cluster: EngineConfig, tmp_path: Path) -> None:
    shutil.copytree(cluster.model, tmp_path / "model")
    with open(tmp_path / "model" / "config.json", "a") as file:
        file.write("\n")
    first, second = doctors(cluster, replace(cluster, model=tmp_path / "model"))
    wrong = r"node 1 \(.*\) has other config.json: .*; copy the same model directory to every host"
    assert re.fullmatch(f"bad node 1 is refused {wrong}", first[-1])
    assert re.fullmatch(f"bad node 1 of 2 {wrong}", second[-1])


def test_an_agent_joins_a_node_0_that_comes_later_or_anew(cluster: EngineConfig) -> None:
    node0 = Agents(cluster)
    with agent_thread(cluster) as said:
        assert node0.socket.poll(int(WAIT_S * 1000))  # its first words, which nobody reads
        node0.close()
        node0 = Agents(cluster)
        hear(node0, lambda: not node0.missing)
        node0.close()
    assert [line.split(":")[1].split()[0] for line in said] == ["waiting", "joined", "node"]


def test_an_agent_ends_with_node_0(cluster: EngineConfig) -> None:
    end = FORK.Event()
    node0 = FORK.Process(target=be_node_0, args=(cluster, end))
    node0.start()
    with agent_thread(cluster) as said:
        assert wait_until(lambda: len(said) == 2)
        end.set()
        node0.join(WAIT_S)
    assert said[-1] == f"node 0 at 127.0.0.1:{cluster.master_port} is gone; so are the ranks of this host"


def test_a_node_0_that_nobody_comes_to_names_who_is_missing(cluster: EngineConfig) -> None:
    with pytest.raises(EngineError, match=r"node 1 did not come to 127\.0\.0\.1:\d+ within 0\.2 s; start the same"):
        Engine(replace(cluster, join_timeout_s=0.2))
    with pytest.raises(EngineError, match=r"node 0 was not heard at 127\.0\.0\.1:\d+ within 0\.2 s"):
        HostAgent(replace(cluster, join_timeout_s=0.2, node_rank=1), lambda line: None).run()


def test_an_address_that_node_0_cannot_have(cluster: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    node0 = Agents(cluster)
    with pytest.raises(EngineError, match=r":\d+ is taken; choose another with --master-port"):
        Agents(cluster)
    node0.close()
    with pytest.raises(EngineError, match="is no address of this host; node 0 runs where --master-addr is"):
        Agents(replace(cluster, master_addr="192.0.2.1"))
    monkeypatch.setattr(addresses, "resolve", lambda name, port: "127.0.1.1")
    with pytest.raises(EngineError, match=r"--master-addr a-host is 127\.0\.1\.1 on this host, by its /etc/hosts: no"):
        Agents(replace(cluster, master_addr="a-host"))
    with pytest.raises(EngineError, match=r"--master-addr a-host is 127\.0\.1\.1 on this host, by its /etc/hosts: no"):
        HostAgent(replace(cluster, master_addr="a-host", node_rank=1), lambda line: None)


def test_no_program_is_given_the_stores_port_while_node_0_runs(cluster: EngineConfig, tmp_path: Path) -> None:
    """Before rank 0 listens on it, and between two of its starts: else the next start would fail."""
    with reserved_ports() as master:
        node0 = Agents(replace(cluster, master_port=master))
    device, port = torch.device("cpu"), master + 1
    rank0 = opening_of(Mesh(1, 1, 1, 1), 0, tmp_path, device, 1, {}, store=("127.0.0.1", port))
    for _ in range(2):
        assert not is_given(port)
        store = torchdist._store(rank0, "127.0.0.1", port)
        store.set("key", "value")
        del store
    assert not is_given(port)
    node0.close()
    assert is_given(port)


def test_a_port_of_the_store_on_which_another_program_listens_is_named(cluster: EngineConfig) -> None:
    with (
        socket.create_server(("127.0.0.1", cluster.store_port)),
        pytest.raises(EngineError, match=rf"port {cluster.store_port}, for the ranks' store, is taken .*--master-port"),
    ):
        Agents(cluster)


def test_interfaces() -> None:
    assert "127.0.0.1" in addresses.interfaces()["lo"] and addresses.interface_to("127.0.0.1", 1) == "lo"
    with pytest.raises(EngineError, match=r"this host has no interface eth99; it has .*lo \(127\.0\.0\.1"):
        addresses.check_interface("eth99")
    with pytest.raises(EngineError, match=r"--master-addr no\.such\.host\.invalid is no host that this one knows"):
        addresses.resolve("no.such.host.invalid", 1)


def test_keys_that_cannot_be(tmp_path: Path) -> None:
    (short := tmp_path / "short").write_text("0123456789\n")
    with pytest.raises(EngineError, match="has fewer than 16 bytes; make one with: head -c 32"):
        secured.read_key(short)
    with pytest.raises(EngineError, match="cannot be read: No such file or directory; make one with"):
        secured.read_key(tmp_path / "none")


def test_digests_see_a_header_and_sampled_weights(
    cluster: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "BLOCK", 64)  # of a small file
    (copy := tmp_path / "model").mkdir()
    for path in cluster.model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    same = digests.facts(replace(cluster, model=copy))
    assert same == digests.facts(cluster)
    size = (cluster.model / "model.safetensors").stat().st_size
    weights = [("model.safetensors", "weights", at) for at in (size - 64, size - 1, size // 2 - 32, size // 2 + 31)]
    for name, what, at in (*weights, ("config.json", "config.json", -1)):
        data = (copy / name).read_bytes()
        (copy / name).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at:][1:])
        assert [k for k, v in digests.facts(replace(cluster, model=copy)).items() if v != same[k]] == [what]
        (copy / name).write_bytes(data)
