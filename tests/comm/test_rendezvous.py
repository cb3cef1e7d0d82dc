"""Meeting of ranks: callers that are no ranks, and ranks that cannot all be right."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from weft.comm.rendezvous import Meeting, rendezvous
from weft.comm.transport import CommError

WAIT_S = 240.0
RUBBISH = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\n",
    b"17\n",
    b'{"rank": 1}\n',
    b'{"rank": [], "pid": 1, "terms": ""}\n',
    b"\xff\n",
]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


@pytest.fixture
def strangers() -> Iterator[ExitStack]:
    with ExitStack() as strangers:
        yield strangers


def call(path: Path, strangers: ExitStack, text: bytes = b"") -> socket.socket:
    """A stranger that has come, once somebody listens."""
    caller = strangers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            caller.connect(str(path))
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    caller.sendall(text)
    return caller


def come(pool: ThreadPoolExecutor, path: Path, rank: int, timeout_s: float = WAIT_S, world: int = 2) -> Future[Meeting]:
    return pool.submit(rendezvous, path, world, rank, ["terms"], lambda: 4096, timeout_s)


def expect_sent_off(stranger: socket.socket) -> None:
    stranger.settimeout(WAIT_S)
    assert stranger.recv(1) == b""


def expect_met(*coming: Future[Meeting]) -> None:
    met = [c.result(WAIT_S) for c in coming]
    assert len({os.fstat(m.fd).st_ino for m in met}) == 1  # the same segment
    assert all(m.pids == [os.getpid()] * len(met) for m in met)
    for m in met:
        m.close()


@pytest.mark.parametrize("text", RUBBISH, ids=str)
def test_who_sends_rubbish_is_sent_off(
    text: bytes, tmp_path: Path, pool: ThreadPoolExecutor, strangers: ExitStack
) -> None:
    path = tmp_path / "door"
    host = come(pool, path, 0)
    stranger = call(path, strangers, text)
    stranger.shutdown(socket.SHUT_WR)
    expect_sent_off(stranger)
    expect_met(host, come(pool, path, 1))


def test_who_never_ends_a_line_is_sent_off(tmp_path: Path, pool: ThreadPoolExecutor, strangers: ExitStack) -> None:
    path = tmp_path / "door"
    host = come(pool, path, 0)
    stranger = call(path, strangers, b"x" * (1 << 16))
    expect_sent_off(stranger)
    expect_met(host, come(pool, path, 1))


def test_who_says_nothing_keeps_no_one(tmp_path: Path, pool: ThreadPoolExecutor, strangers: ExitStack) -> None:
    path = tmp_path / "door"
    host = come(pool, path, 0)
    silent = [call(path, strangers, text) for text in (b"", b'{"rank": ', b"")]
    expect_met(host, come(pool, path, 1))
    for stranger in silent:  # none is left hanging
        with suppress(ConnectionResetError):
            expect_sent_off(stranger)


def test_strangers_alone_are_no_meeting(tmp_path: Path, pool: ThreadPoolExecutor, strangers: ExitStack) -> None:
    path = tmp_path / "door"
    for seconds in (0.3, 3.0, 30.0):  # a stranger that stands still comes too late for a short wait
        host, came = come(pool, path, 0, timeout_s=seconds), False
        stranger = strangers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        while not (came or host.done()):
            with suppress(OSError):
                stranger.connect(str(path))
                came = True
        with pytest.raises(CommError, match=rf"rank 0: the ranks did not all arrive at .*door within {seconds:g} s"):
            host.result(WAIT_S)
        assert not path.exists()
        if came:
            return
    raise AssertionError("no stranger came in time")


def test_a_queue_before_the_door_is_waited_for(tmp_path: Path, pool: ThreadPoolExecutor, strangers: ExitStack) -> None:
    path = tmp_path / "door"
    door = strangers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    door.bind(str(path))
    door.listen(0)
    call(path, strangers)
    with pytest.raises(CommError, match=r"rank 1: the ranks did not all arrive at .*door within 0\.2 s"):
        come(pool, path, 1, timeout_s=0.2).result(WAIT_S)


def test_two_that_claim_one_rank(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    path = tmp_path / "door"
    host, *others = [come(pool, path, rank, world=3) for rank in (0, 1, 1)]
    with pytest.raises(CommError, match="two processes call themselves rank 1"):
        host.result(WAIT_S)
    for other in others:
        with pytest.raises(CommError, match=r"rejected this rank|cannot meet"):
            other.result(WAIT_S)
