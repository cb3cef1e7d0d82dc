"""Messages between ranks and the process that starts them."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.engine.messages.rank_sockets import PACKET, RankSocket, RankSockets

SIZES = (0, 1, 300, PACKET - 1, PACKET, PACKET + 1, 3 * PACKET + 5, 40 * PACKET)
LARGE = 100 * PACKET
"""Bytes that no socket takes before anybody reads."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A path longer than a socket's address may be, in the folder of a TMPDIR."""
    (folder := tmp_path / ("deep" * 30)).mkdir()
    return folder / "ranks"


@pytest.fixture
def ends(path: Path) -> Iterator[tuple[RankSockets, list[RankSocket]]]:
    sockets = RankSockets(path, (4, 5))
    ranks = [RankSocket(path, rank) for rank in (5, 4)]  # in any order
    for rank in ranks:
        rank.send(b"ready")
    assert [next_of(sockets), next_of(sockets)] == [b"ready"] * 2
    yield sockets, ranks[::-1]
    for each in (sockets, *ranks):
        each.close()


def next_of(sockets: RankSockets) -> bytes:
    message = sockets.receive(10)
    assert message is not None, "nothing came"
    return message


def message(size: int) -> bytes:
    return bytes(range(256)) * (size // 256) + b"." * (size % 256)


def test_messages_of_all_sizes_come_whole_and_in_order(ends: tuple[RankSockets, list[RankSocket]]) -> None:
    sockets, ranks = ends
    for at, rank in enumerate(ranks):
        for size in SIZES:
            sockets.send(4 + at, message(size))
        sent = threading.Thread(target=lambda rank=rank: [rank.send(message(size)) for size in SIZES])
        sent.start()
        assert [next_of(sockets) for _ in SIZES] == [message(size) for size in SIZES]
        sent.join()
        while select.select([sockets], [], [], 0)[0]:  # what the rank's socket did not take is sent as it reads
            sockets.receive(0)
        done = threading.Event()
        sending = threading.Thread(target=lambda done=done: [sockets.receive(0.01) for _ in iter(done.is_set, True)])
        sending.start()
        assert [rank.receive() for _ in SIZES] == [message(size) for size in SIZES]
        done.set()
        sending.join()
    assert sockets.receive(0) is None


def test_a_rank_that_does_not_read_keeps_nobody_waiting(ends: tuple[RankSockets, list[RankSocket]]) -> None:
    """Nor one that waits until its own message is read."""
    sockets, (first, second) = ends
    sockets.send(4, message(LARGE))
    sockets.send(4, b"then")
    sending = threading.Thread(target=first.send, args=(message(LARGE),))
    sending.start()
    second.send(b"hello")
    found = [next_of(sockets), next_of(sockets)]
    assert sorted(found, key=len) == [b"hello", message(LARGE)]
    sending.join()
    got: list[bytes] = []
    reading = threading.Thread(target=lambda: got.extend([first.receive(), first.receive()]))
    reading.start()
    while len(got) < 2 and sockets.receive(0.01) is None:
        pass
    reading.join()
    assert got == [message(LARGE), b"then"]


def test_what_a_rank_said_before_it_ended_is_heard(ends: tuple[RankSockets, list[RankSocket]]) -> None:
    sockets, (first, second) = ends
    sockets.send(4, b"never read")
    first.send(b"last")
    first.close()
    assert sockets.receive(10) == b"last" and sockets.receive(0.01) is None
    for size in (1, LARGE):
        sockets.send(4, message(size))  # is dropped
    sockets.send(3, b"to a rank that never came")
    sockets.send(5, b"still here")
    assert second.receive() == b"still here"
    second.send(b"yes")
    assert next_of(sockets) == b"yes"


def test_a_rank_may_end_while_a_message_to_it_waits(
    ends: tuple[RankSockets, list[RankSocket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread has found its buffer full as another one hears of its end, and does not close its socket yet."""
    sockets, (first, _) = ends
    sent, receiving = RankSockets._sent, threading.Thread(target=sockets.receive, args=(0.01,))

    def meanwhile(connection: Any) -> bool:
        if not (took := sent(connection)):
            first.close()
            receiving.start()
            receiving.join(0.1)
        return took

    monkeypatch.setattr(RankSockets, "_sent", staticmethod(meanwhile))
    sockets.send(4, message(LARGE))
    receiving.join()
    sockets.send(4, b"to nobody")
    assert 4 not in sockets._by_rank


def test_a_rank_sees_that_the_other_end_is_gone(ends: tuple[RankSockets, list[RankSocket]]) -> None:
    sockets, (first, second) = ends
    sockets.send(4, b"last")
    second.send(b"never read")
    sockets.close()
    assert first.receive() == b"last"
    for rank in (first, second):
        with pytest.raises(EOFError):
            rank.receive()
        rank.send(message(LARGE))  # is dropped


def test_others_can_poll_for_messages(ends: tuple[RankSockets, list[RankSocket]]) -> None:
    sockets, (first, _) = ends
    began = time.monotonic()
    assert sockets.receive(0.05) is None and time.monotonic() - began >= 0.05
    assert select.select([sockets], [], [], 0)[0] == []
    first.send(b"one")
    first.send(b"two")
    for expected in (b"one", b"two"):
        assert select.select([sockets], [], [], 10)[0] == [sockets]
        assert sockets.receive(0) == expected
    assert select.select([sockets], [], [], 0)[0] == []


def hold_copies(ranks: list[RankSocket], ready: int) -> None:
    """A forked process: holds copies of the other end's sockets until it is killed."""
    for rank in ranks:
        rank.close()
    os.write(ready, b"x")
    signal.pause()


def test_a_rank_ends_though_a_forked_process_holds_its_connection(ends: tuple[RankSockets, list[RankSocket]]) -> None:
    sockets, ranks = ends
    ready, to = os.pipe()
    holder = multiprocessing.get_context("fork").Process(target=hold_copies, args=(ranks, to))
    holder.start()
    try:
        assert os.read(ready, 1) == b"x"
        ranks[0].send(b"last")
        ranks[0].close()
        assert next_of(sockets) == b"last" and sockets.receive(0.01) is None
        assert select.select([sockets], [], [], 0)[0] == []
        sockets.send(5, b"still here")
        assert ranks[1].receive() == b"still here"
        ranks[1].close()
        assert sockets.receive(0.01) is None and select.select([sockets], [], [], 0)[0] == []
    finally:
        holder.kill()
        holder.join()
        os.close(ready)
        os.close(to)


def test_a_number_that_is_no_connection_keeps_no_message_back(ends: tuple[RankSockets, list[RankSocket]]) -> None:
    """epoll reports a closed number for as long as a copy of its descriptor is open somewhere."""
    sockets, (first, _) = ends
    ready, to = os.pipe()
    sockets._poll.register(ready, select.EPOLLIN)
    copy = os.dup(ready)
    os.close(ready)
    os.write(to, b"x")
    assert sockets.receive(0.01) is None
    for _ in range(3):
        first.send(b"one")
        assert next_of(sockets) == b"one"
    os.close(copy)
    os.close(to)
