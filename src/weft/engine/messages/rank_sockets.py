"""Messages between a host's ranks and the process that starts them, over Unix sockets that keep packets whole.

A thread that reads such a socket is woken by the sender itself. ZeroMQ has a thread of its own at either end, which
each message wakes first: in a step of a rank it took as much CPU time as the thread that runs steps.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from weft.comm.unix_sockets import address_of

SOCKET = "ranks"
"""The file in the ranks' folder."""
PACKET = 1 << 16
"""Bytes of a message in one packet; the kernel holds a few of them that nobody has read yet."""
LAST, MORE = b"\0", b"\1"
"""Before each packet's bytes: whether the message goes on in the next one."""


def _packets(message: bytes) -> Iterator[bytes]:
    for first in range(0, len(message) or 1, PACKET):
        yield (MORE if first + PACKET < len(message) else LAST) + message[first : first + PACKET]


def _packet(connected: socket.socket) -> bytes:
    """The next one; empty where the other end is gone."""
    try:
        return connected.recv(1 + PACKET)
    except ConnectionResetError:  # said once, where the other end has left messages unread; its own come behind that
        return connected.recv(1 + PACKET)


class RankSocket:
    """A rank's end. Methods block. One thread may send while another receives.

    path: of the other end, which listens. rank: is sent first.
    """

    def __init__(self, path: Path, rank: int):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with address_of(path) as address:
            self._socket.connect(address)
        self.send(b"%d" % rank)

    def send(self, message: bytes) -> None:
        """Sends a message; it is dropped where the other end is gone."""
        with suppress(ConnectionError):
            for packet in _packets(message):
                self._socket.send(packet)

    def receive(self) -> bytes:
        """The next message. EOFError where the other end is gone."""
        parts = []
        while packet := _packet(self._socket):
            parts.append(packet[1:])
            if packet[:1] == LAST:
                return b"".join(parts)
        raise EOFError("the other end of a rank's socket is gone")

    def close(self) -> None:
        """What was sent can still be read."""
        self._socket.close()


@dataclass
class _Connection:
    """received: packets of a message that has not come to its end. unsent: packets that the socket did not take yet."""

    socket: socket.socket
    rank: int | None = None
    received: list[bytes] = field(default_factory=list)
    unsent: deque[bytes] = field(default_factory=deque)


class RankSockets:
    """The other end, of all of a host's ranks. No method waits for a rank, but `receive` for a message of any.

    Others may poll this object: where it is readable, `receive` has something to do. What ranks that are gone have sent
    is received; what is sent to them is dropped. Raises OSError where no socket can be at the path.
    """

    def __init__(self, path: Path, ranks: Sequence[int]):
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._poll = select.epoll()
        self._by_descriptor: dict[int, _Connection] = {}
        self._by_rank: dict[int, _Connection] = {}
        try:
            with address_of(path) as address:
                self._server.bind(address)
            self._server.listen(len(ranks))
            self._server.setblocking(False)
            self._poll.register(self._server, select.EPOLLIN)
        except OSError:
            self.close()
            raise

    def fileno(self) -> int:
        """To poll it."""
        return self._poll.fileno()

    def send(self, rank: int, message: bytes) -> None:
        """Sends a message to a rank; what its socket does not take at once is sent while others are received."""
        if (to := self._by_rank.get(rank)) is None:
            return
        waits = bool(to.unsent)
        to.unsent.extend(_packets(message))
        if not waits and not self._sent(to):
            self._poll.modify(to.socket, select.EPOLLIN | select.EPOLLOUT)

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message of any rank; None where none came within timeout_s."""
        until = time.monotonic() + timeout_s
        while ready := self._poll.poll(max(0.0, until - time.monotonic()), 1):
            [(descriptor, events)] = ready
            if descriptor == self._server.fileno():
                self._accept()
            elif (connection := self._by_descriptor.get(descriptor)) is None:  # closed here, open in another process
                if time.monotonic() >= until:
                    return None
            elif events & select.EPOLLOUT:
                if self._sent(connection):
                    self._poll.modify(descriptor, select.EPOLLIN)
            elif (message := self._received(connection)) is not None:
                return message
        return None

    def close(self) -> None:
        """Ends all connections."""
        self._poll.close()
        for each in (self._server, *(connection.socket for connection in self._by_descriptor.values())):
            each.close()

    def _accept(self) -> None:
        made, _ = self._server.accept()
        made.setblocking(False)
        self._by_descriptor[made.fileno()] = _Connection(made)
        self._poll.register(made, select.EPOLLIN)

    def _received(self, connection: _Connection) -> bytes | None:
        """Reads a packet. Returns the message that it ends."""
        if not (packet := _packet(connection.socket)):
            self._by_rank.pop(-1 if connection.rank is None else connection.rank, None)
            del self._by_descriptor[connection.socket.fileno()]
            self._poll.unregister(connection.socket)  # close does not, where a forked process holds the socket, too
            connection.socket.close()
            return None
        connection.received.append(packet[1:])
        if packet[:1] == MORE:
            return None
        message = b"".join(connection.received)
        connection.received.clear()
        if connection.rank is not None:
            return message
        connection.rank = int(message)
        self._by_rank[connection.rank] = connection
        return None

    @staticmethod
    def _sent(connection: _Connection) -> bool:
        """Sends what its socket takes. Returns whether that was all."""
        try:
            while connection.unsent:
                connection.socket.send(connection.unsent[0])
                connection.unsent.popleft()
        except BlockingIOError:
            return False
        except OSError:  # it is gone
            connection.unsent.clear()
        return True
