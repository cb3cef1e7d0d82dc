"""Rendezvous of the ranks of one host: a Unix socket gives all ranks the shared segment's file descriptor.

The segment is a memfd: it has no name, needs no /dev/shm, and is freed with the last process that maps it.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from weft.comm.transport import CommError
from weft.comm.unix_sockets import address_of

MAX_HELLO = 1 << 16


def rendezvous(path: Path, world: int, rank: int, terms: object, size: Callable[[], int], timeout_s: float) -> Meeting:
    """Give all ranks the same segment, within `timeout_s`. Raises CommError with the ranks that are missing or differ.

    Args:
        path: of the socket, in a folder that only this user can reach; rank 0 makes and removes it.
        terms: JSON that must be the same on all ranks.
        size: returns the segment's bytes; only rank 0 calls it.
    """
    deadline = time.monotonic() + timeout_s
    try:
        if rank == 0:
            return _host(path, world, json.dumps(terms), size(), deadline)
        return _join(path, rank, json.dumps(terms), deadline)
    except TimeoutError:
        raise CommError(f"rank {rank}: the ranks did not all arrive at {path} within {timeout_s:g} s") from None
    except OSError as error:
        raise CommError(f"rank {rank}: cannot meet at {path}: {error}") from error


class Meeting:
    """Met ranks: the segment's descriptor `fd` and all ranks' `pids`. A rank calls `ready` before `deadline`, once it
    has mapped the segment; `peers` are its connections."""

    def __init__(self, fd: int, pids: list[int], rank: int, peers: Sequence[socket.socket], deadline: float):
        self.fd, self.pids = fd, pids
        self._rank, self._peers, self._deadline = rank, peers, deadline

    def ready(self) -> None:
        """Return once all ranks have called it. Raises CommError."""
        try:
            for peer in self._peers:
                if self._rank:
                    peer.send(b"y")
                _expect(peer, self._deadline, 1)
            if self._rank == 0:
                for peer in self._peers:
                    peer.send(b"y")
        except OSError as error:
            raise CommError(f"rank {self._rank}: a rank left while the ranks met: {error}") from error
        finally:
            self.close()

    def close(self) -> None:
        """Close the sockets and the descriptor; the mapping stays."""
        for peer in self._peers:
            peer.close()
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self._peers = -1, ()


def pidfds(pids: Sequence[int]) -> list[int]:
    """Return a descriptor per other process that signals its end, −1 for this one. Requires Linux 5.3: CommError."""
    try:
        return [-1 if pid == os.getpid() else os.pidfd_open(pid) for pid in pids]
    except OSError as error:
        raise CommError(f"cannot watch the other ranks' processes (pidfd_open, Linux 5.3): {error}") from error


def _host(path: Path, world: int, terms: str, size: int, deadline: float) -> Meeting:
    # On an error the ranks that arrived must learn of it now, not when the last reference to a socket is dropped.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server, ExitStack() as on_error:
        with suppress(FileNotFoundError):
            path.unlink()  # left by a run that was killed; a live run has another folder
        with address_of(path) as address:
            server.bind(address)
        server.listen(world)
        peers: dict[int, socket.socket] = {}
        pids = {0: os.getpid()}
        try:
            for peer, rank, pid, peer_terms in _callers(server, on_error, deadline) if world > 1 else ():
                if peer_terms != terms:
                    raise CommError(f"rank {rank} has another layout or other sizes than rank 0: {peer_terms}")
                if not 0 < rank < world or rank in peers:
                    raise CommError(f"two processes call themselves rank {rank}")
                peers[rank], pids[rank] = peer, pid
                if len(peers) == world - 1:
                    break
        finally:
            with suppress(FileNotFoundError):
                path.unlink()
        fd = os.memfd_create("weft", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        on_error.callback(os.close, fd)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        everyone = [pids[r] for r in range(world)]
        for peer in peers.values():
            socket.send_fds(peer, [json.dumps(everyone).encode() + b"\n"], [fd])
        on_error.pop_all()
    return Meeting(fd, everyone, 0, list(peers.values()), deadline)


def _callers(
    server: socket.socket, on_error: ExitStack, deadline: float
) -> Iterator[tuple[socket.socket, int, int, str]]:
    """Yield connections with rank, process and terms.

    Rejects a caller that sends anything else; one that sends nothing delays no other.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        try:
            while (remaining := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(remaining):
                    if key.fileobj is server:
                        new = on_error.enter_context(server.accept()[0])
                        selector.register(new, selectors.EVENT_READ, (new, bytearray()))
                        continue
                    caller, text = key.data
                    try:
                        text += (more := caller.recv(65536))
                        if more and not text.endswith(b"\n") and len(text) < MAX_HELLO:
                            continue
                        hello = json.loads(text)
                        peer_hello = int(hello["rank"]), int(hello["pid"]), str(hello["terms"])
                    except (OSError, ValueError, KeyError, TypeError):
                        selector.unregister(caller)
                        caller.close()
                        continue
                    selector.unregister(caller)
                    yield caller, *peer_hello
            raise TimeoutError
        finally:
            for key in selector.get_map().values():
                if key.data:
                    key.data[0].close()


def _join(path: Path, rank: int, terms: str, deadline: float) -> Meeting:
    with ExitStack() as on_error:
        peer = on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        while True:
            _limit(peer, deadline)
            try:
                with address_of(path) as address:
                    peer.connect(address)
                break
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):  # no socket yet, or its queue is full
                time.sleep(0.01)
        peer.sendall(json.dumps({"rank": rank, "pid": os.getpid(), "terms": terms}).encode() + b"\n")
        _limit(peer, deadline)
        text, fds, _, _ = socket.recv_fds(peer, 4096, 1)
        if not fds:
            raise CommError(f"rank {rank}: rank 0 rejected this rank; its own error says why")
        on_error.pop_all()
    return Meeting(fds[0], json.loads(text), rank, [peer], deadline)


def _limit(s: socket.socket, deadline: float) -> None:
    if (remaining := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    s.settimeout(remaining)


def _expect(peer: socket.socket, deadline: float, limit: int) -> bytes:
    _limit(peer, deadline)
    data = peer.recv(limit)
    if not data:
        raise ConnectionError("connection closed")
    return data
