"""Messages between a host's ranks and the process that starts them, over Unix sockets that keep packets whole.

The sender wakes the reading thread directly. ZeroMQ would wake a thread of its own first, at either end: on a rank it
cost as much CPU time per step as the thread that runs steps.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from weft.comm.unix_sockets import address_of

SOCKET = "ranks"
"""Name of the listening socket in the ranks' folder."""
PACKET = 1 << 16
"""Maximum bytes of a message in one packet; the kernel buffers a few unread packets."""
LAST, MORE = b"\0", b"\1"
"""First byte of each packet: whether the message continues in the next one."""


def _packets(message: bytes) -> Iterator[bytes]:
    for first in range(0, len(message) or 1, PACKET):
        yield (MORE if first + PACKET < len(message) else LAST) + message[first : first + PACKET]


def _packet(connected: socket.socket) -> bytes:
    """Receive the next packet; empty if the other end is gone."""
    try:
        return connected.recv(1 + PACKET)
    except ConnectionResetError:  # raised once if the peer left messages unread, before its last packets
        return connected.recv(1 + PACKET)


class RankSocket:
    """A rank's end of the connection, with blocking methods. One thread may send while another receives.

    path: listening socket of the other end. rank: sent as the first message.
    """

    def __init__(self, path: Path, rank: int):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with address_of(path) as address:
            self._socket.connect(address)
        self.send(b"%d" % rank)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Send a message; drop it if the other end is gone."""
        with suppress(ConnectionError):
            for packet in _packets(message):
                self._socket.send(packet)

    def receive(self) -> bytes:
        """Return the next message. Raises EOFError if the other end is gone."""
        parts = []
        while packet := _packet(self._socket):
            parts.append(packet[1:])
            if packet[:1] == LAST:
                return b"".join(parts)
        raise EOFError("the other end of a rank's socket is gone")

    def close(self) -> None:
        """Close the socket. The other end can still read all sent messages."""
        self._socket.close()


@dataclass
class _Connection:
    """Connection to a rank. received: packets of an incomplete message. unsent: packets still to send."""

    socket: socket.socket
    rank: int | None = None
    received: list[bytes] = field(default_factory=list)
    unsent: deque[bytes] = field(default_factory=deque)


class RankSockets:
    """The other end, for all of a host's ranks. Only `receive` blocks, until any rank sends a message.

    The object can be polled: if it is readable, `receive` has work. Any thread may send while one receives. Messages
    from ranks that are gone are received; messages to them are dropped. Raises OSError if the path can hold no socket.
    """

    def __init__(self, path: Path, ranks: Sequence[int]):
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._poll = select.epoll()
        self._by_descriptor: dict[int, _Connection] = {}
        self._by_rank: dict[int, _Connection] = {}
        self._sending = threading.Lock()
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
        """Return the descriptor to poll."""
        return self._poll.fileno()

    def send(self, rank: int, message: bytes) -> None:
        """Send a message to a rank; packets beyond its socket's buffer are sent during `receive`."""
        if (to := self._by_rank.get(rank)) is None:
            return
        with self._sending:
            waits = bool(to.unsent)
            to.unsent.extend(_packets(message))
            if not waits and not self._sent(to):
                self._poll.modify(to.socket, select.EPOLLIN | select.EPOLLOUT)

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next message of any rank; None after timeout_s."""
        until = time.monotonic() + timeout_s
        while ready := self._poll.poll(max(0.0, until - time.monotonic()), 1):
            [(descriptor, events)] = ready
            if descriptor == self._server.fileno():
                self._accept()
            elif (connection := self._by_descriptor.get(descriptor)) is None:  # closed here, open in another process
                if time.monotonic() >= until:
                    return None
            elif events & select.EPOLLOUT:
                with self._sending:
                    if self._sent(connection):
                        self._poll.modify(descriptor, select.EPOLLIN)
            elif (message := self._received(connection)) is not None:
                return message
        return None

    def close(self) -> None:
        """End all connections."""
        self._poll.close()
        for each in (self._server, *(connection.socket for connection in self._by_descriptor.values())):
            each.close()

    def _accept(self) -> None:
        made, _ = self._server.accept()
        made.setblocking(False)
        self._by_descriptor[made.fileno()] = _Connection(made)
        self._poll.register(made, select.EPOLLIN)

    def _received(self, connection: _Connection) -> bytes | None:
        """Read a packet. Returns the message if that was its last packet."""
        if not (packet := _packet(connection.socket)):
            self._by_rank.pop(-1 if connection.rank is None else connection.rank, None)
            with self._sending:  # `send` polls a socket that took nothing, which fails once it is closed
                del self._by_descriptor[connection.socket.fileno()]
                self._poll.unregister(connection.socket)  # close is not enough while a forked process holds the socket
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
        """Send packets until the socket's buffer is full. Returns whether all were sent."""
        try:
            while connection.unsent:
                connection.socket.send(connection.unsent[0])
                connection.unsent.popleft()
        except BlockingIOError:
            return False
        except OSError:  # it is gone
            connection.unsent.clear()
        return True
