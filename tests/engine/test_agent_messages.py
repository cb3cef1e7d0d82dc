"""Reactions of node 0 and agents to each message at any time; the test says what the members send."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from engine.conftest import WAIT_S
from engine.test_agents import cluster, hear
from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.hosts import agents, digests, secured
from weft.engine.hosts.agent import HostAgent
from weft.engine.hosts.agents import Agents
from weft.engine.messages.host_messages import (
    Alive,
    Ended,
    FromAgent,
    FromRanks,
    Join,
    Leave,
    Left,
    Start,
    Stopped,
    StopRanks,
    ToAgent,
    ToRanks,
    Welcome,
    decode_to_agent,
    encode,
)

__all__ = ["cluster"]


class Member:
    """An agent that has no ranks. host: as it calls itself."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: EngineConfig, host: str, node: int = 1):
        assert config.cluster_key is not None
        self.socket = secured.connecting(context, secured.read_key(config.cluster_key))
        self.socket.linger = 0
        self.socket.connect(f"tcp://127.0.0.1:{config.master_port}")
        self.say(Join(node, host, digests.facts(config), digests.options(config), 0.0))

    def say(self, *messages: FromAgent) -> None:
        for message in messages:
            self.socket.send(encode(message))

    def hears(self) -> ToAgent:
        assert self.socket.poll(int(WAIT_S * 1000)), "nothing came"
        return decode_to_agent(self.socket.recv())


@pytest.fixture
def context() -> Iterator[Any]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@contextmanager
def host_agent(config: EngineConfig, say: Callable[[str], None]) -> Iterator[Any]:
    """An agent that closes its sockets if the test fails, too: the collection of garbage would wait for them."""
    agent: Any = HostAgent(config, say)
    try:
        yield agent
    finally:
        agent._socket.disable_monitor()
        agent._context.destroy(linger=0)


@contextmanager
def node_0(config: EngineConfig) -> Iterator[Agents]:
    node0 = Agents(config)
    try:
        yield node0
    finally:
        node0.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members say nothing by themselves, also when node 0 ends."""
    monkeypatch.setattr(agents, "SILENT_S", WAIT_S)
    monkeypatch.setattr(agents, "LEAVE_S", 0.0)


def test_node_0_ends_once_its_agents_have_left(
    cluster: EngineConfig, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that node 0 has not read would reset the connection, and the request to leave would be lost."""
    monkeypatch.setattr(agents, "LEAVE_S", WAIT_S)
    node0, member = Agents(cluster), Member(context, cluster, "b")
    hear(node0, lambda: not node0.missing)
    assert isinstance(member.hears(), Welcome)
    heard, decode = list[FromAgent](), agents.messages.decode_from_agent
    monkeypatch.setattr(agents.messages, "decode_from_agent", lambda frame: heard.append(decode(frame)) or heard[-1])
    member.say(*[Alive()] * 50)
    member.socket.send_multipart([b"no", b"message"])
    ending = threading.Thread(target=node0.close)
    ending.start()
    assert isinstance(member.hears(), Leave)
    member.say(Left("node 0 has ended"))
    ending.join(WAIT_S)
    assert not ending.is_alive() and len(heard) == 51 and isinstance(heard[-1], Left)


def test_messages_of_an_earlier_start_are_not_taken_for_this_ones(cluster: EngineConfig, context: Any) -> None:
    with node_0(cluster) as node0:
        member = Member(context, cluster, "first")
        hear(node0, lambda: not node0.missing)
        node0.start({}, None, 2)
        assert [member.hears(), member.hears()] == [Welcome(), Start(2, {}, None)]
        member.say(FromRanks(1, b"old"), Ended(1, "rank 2 ended", True), FromRanks(2, b"new"))
        received: list[bytes] = []
        while not received:
            assert node0.socket.poll(int(WAIT_S * 1000))
            received += filter(None, [node0.receive()])
        assert received == [b"new"] and node0.gone() is None
        member.say(Ended(2, "rank 3 ended", False))
        hear(node0, lambda: node0.gone() is not None)
        assert node0.gone() == ("rank 3 ended", (2, 3)) and node0.gone(killed=True) is None
        member.say(Ended(2, "rank 2 was killed", True, (2,)))
        hear(node0, lambda: node0.gone(killed=True) is not None)
        assert node0.gone(killed=True) == ("rank 2 was killed", (2,))
        node0.start({}, None, 3)
        assert node0.gone() is None, "of ranks that were started anew"
        left = [Stopped(3), Stopped(2)]

        def waiting() -> None:
            if node0._agents[1].stopped == (0, 2)[len(left) % 2]:
                member.say(left.pop())

        node0.stop(waiting)
        assert not left, "ranks of this start are waited for"
        assert not node0.missing, "and no longer"
        assert [member.hears(), member.hears()] == [Start(3, {}, None), StopRanks(3)]


@pytest.mark.parametrize("how", ["left", "silent"])
def test_a_host_that_waits_takes_the_place_of_one_that_is_lost(
    cluster: EngineConfig, context: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with node_0(cluster) as node0:
        first = Member(context, cluster, "first")
        hear(node0, lambda: not node0.missing)
        second = Member(context, cluster, "second")
        hear(node0, lambda: bool(node0._candidates))
        if how == "left":
            first.say(Left("was stopped"))
            hear(node0, lambda: node0._lost is not None)
            assert node0.gone() == ("node 1 (first) was stopped", (2, 3))
        else:
            with monkeypatch.context() as patched:
                patched.setattr(agents, "SILENT_S", -1.0)
                gone = node0.gone()
            assert gone == ("node 1 (first) has not been heard for -1 s", (2, 3))
        assert node0.missing == [] and second.hears() == Welcome()
        node0.wait_for_all(WAIT_S, lambda: None)
        assert node0.gone() is None
        second.say(Ended(0, "rank 3 ended", False, (3,)))
        hear(node0, lambda: node0.gone() is not None)
        assert node0.gone() == ("rank 3 ended", (3,))


def test_node_0_waits_for_all_hosts_and_meanwhile_gives_up_one_that_is_silent(
    cluster: EngineConfig, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, missing = replace(cluster, nnodes=4), list[list[int]]()
    with node_0(config) as node0:
        first = Member(context, config, "first")  # its socket is closed with the last reference
        hear(node0, lambda: node0.missing == [2, 3])

        def waiting() -> None:
            missing.append(node0.missing)
            monkeypatch.setattr(agents, "SILENT_S", -1.0 if node0.missing == [2, 3] else WAIT_S)
            if not members and node0.missing == [1, 2, 3]:
                members.extend(Member(context, config, "another", node) for node in (3, 2, 1))

        members: list[Member] = []
        node0.wait_for_all(WAIT_S, waiting)
        assert missing[0] == [2, 3] and [1, 2, 3] in missing and not node0.missing and node0.gone() is None
        assert [member.hears() for member in (first, *members)] == [Welcome()] * 4


def test_node_0_stops_without_a_host_that_is_silent(
    cluster: EngineConfig, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node_0(cluster) as node0:
        member = Member(context, cluster, "first")
        hear(node0, lambda: not node0.missing)
        node0.start({}, None, 1)
        waits: list[None] = []

        def waiting() -> None:
            waits.append(None)
            monkeypatch.setattr(agents, "SILENT_S", -1.0)

        node0.stop(waiting)
        assert waits and node0.missing == [1]
        member.say(Left("was stopped"))  # when it is nobody's
        hear(node0, lambda: not node0.socket.poll(0))
        assert node0.gone() == ("node 1 (first) has not been heard for -1 s", (2, 3))


def test_a_node_without_ranks_may_leave_and_join(cluster: EngineConfig, context: Any) -> None:
    with node_0(cluster) as node0:
        node0.config = replace(cluster, attn_dp=1, ep=1, nnodes=1, places=((0, 1), ()))
        assert not node0.missing
        member = Member(context, cluster, "first")
        assert node0.socket.poll(int(WAIT_S * 1000)) and node0.receive() is None and member.hears() == Welcome()
        node0.start({}, None, 2)
        assert member.hears() == Start(2, {}, None), "it says what follows for this node"
        member.say(Left("was stopped"))
        hear(node0, lambda: not node0._agents)
        assert node0.gone() is None
        node0.config = cluster
        with pytest.raises(EngineError, match="node 1 did not come") as missing:
            node0.wait_for_all(0.0, lambda: None)
        assert missing.value.ranks == (2, 3) and missing.value.for_good


@pytest.mark.parametrize("places, ranks, cores", [([[0, 1], [1]], (1,), "0-1"), ([[0, 1], []], None, None)])
def test_an_agent_starts_the_ranks_that_are_left(cluster: EngineConfig, places: Any, ranks: Any, cores: Any) -> None:
    said: list[str] = []
    launched: list[tuple[Any, ...]] = []
    each = dict(attn_dp=1, attn_tp=2, ep=None, moe_tp=None, nnodes=sum(map(bool, places)), cpu_bind="off")
    config = replace(cluster, **each, places=tuple(map(tuple, places))).to_dict() | {"node_rank": 0}
    with host_agent(replace(cluster, node_rank=1, cpu_bind="0|0-1"), said.append) as agent:
        agent._ranks = SimpleNamespace(
            stop=lambda grace_s: None, prepare=lambda: None, launch=lambda *launch: launched.append(launch)
        )
        agent._start(Start(3, config, None))
    assert [(c.cpu_bind, number, of_node) for c, number, of_node in launched] == [(cores, 3, ranks)] * bool(ranks)
    assert said == ["node 1: runs no ranks until all hosts start anew: others are lost for good"] * (not ranks)


def test_an_agent_hands_on_messages_of_its_start_alone(cluster: EngineConfig) -> None:
    sent: list[tuple[int | None, bytes]] = []
    with host_agent(replace(cluster, node_rank=1), lambda line: None) as agent:
        agent._ranks = SimpleNamespace(
            running=True,
            send=lambda *message: sent.append(message),
            send_all=lambda encoded: sent.append((None, encoded)),
        )
        agent._number = 2
        for number, rank in ((1, None), (2, None), (3, None), (1, 3), (2, 3)):
            assert agent._follow(encode(ToRanks(number, rank, b"%d" % number)))
        agent._ranks.running = False
        assert agent._follow(encode(ToRanks(2, None, b"2")))
    assert sent == [(None, b"2"), (3, b"2")]


def test_node_0_numbers_what_it_sends_to_ranks(cluster: EngineConfig, context: Any) -> None:
    with node_0(cluster) as node0:
        member = Member(context, cluster, "first")
        hear(node0, lambda: not node0.missing)
        node0.start({}, "a table", 7)
        node0.send(1, 3, b"to one")
        node0.send(1, None, b"to all")
        node0.send(2, None, b"to nobody")
        heard = [member.hears() for _ in range(4)]
    assert heard == [Welcome(), Start(7, {}, "a table"), ToRanks(7, 3, b"to one"), ToRanks(7, None, b"to all")]


def test_a_message_that_is_none_is_no_sign_of_life(cluster: EngineConfig, context: Any) -> None:
    with node_0(cluster) as node0:
        member = Member(context, cluster, "first")
        hear(node0, lambda: not node0.missing)
        heard = node0._agents[1].heard
        member.socket.send(msgspec.msgpack.encode({"type": "Hello"}))
        assert node0.socket.poll(int(WAIT_S * 1000)) and node0.receive() is None
        assert node0._agents[1].heard == heard and node0.gone() is None
