"""Bad frames for the port of the cluster, from who does not know its key: raw bytes, broken and genuine handshakes."""

from __future__ import annotations

import random
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

import zmq

from weft.engine.hosts import secured
from weft.engine.messages.host_messages import Ended, FromRanks, Join, Left, encode

MARK = "of a stranger"
"""Mark of every frame that is a message: no frame with it may be decoded."""
MESSAGES = [
    encode(message)
    for message in (Join(1, MARK, {}, {}, 0.0), FromRanks(1, MARK.encode()), Ended(1, MARK, True), Left(MARK))
]
SIGNATURE = b"\xff\0\0\0\0\0\0\0\x01\x7f"
FRAMES_EACH = 50
"""Frames on one connection."""


def greeting(mechanism: bytes, version: bytes = b"\x03\x00", server: bytes = b"\0") -> bytes:
    """ZMTP's: 64 bytes."""
    return SIGNATURE + version + mechanism.ljust(20, b"\0") + server + bytes(31)


def command(name: bytes, body: bytes) -> bytes:
    """A command frame of ZMTP."""
    content = bytes([len(name)]) + name + body
    return b"\x04" + bytes([len(content)]) + content if len(content) < 256 else _long(6, content)


def message(content: bytes) -> bytes:
    """A message frame of ZMTP."""
    return b"\x00" + bytes([len(content)]) + content if len(content) < 256 else _long(2, content)


def _long(flags: int, content: bytes) -> bytes:
    return bytes([flags]) + struct.pack(">Q", len(content)) + content


def frame(rng: random.Random) -> bytes:
    """Return a frame that no member sends before its handshake has ended."""
    kind = rng.randrange(7)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 300))
    if kind == 1:  # of the right size, with wrong boxes
        return command(b"HELLO", b"\x01\0" + bytes(72) + rng.randbytes(32 + 8 + 80))
    if kind == 2:
        return command(b"INITIATE", rng.randbytes(rng.choice((96 + 8 + 64, rng.randrange(400)))))
    if kind == 3:  # of NULL: a name and an identity
        return command(b"READY", b"\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0")
    if kind == 4:  # more is announced than ever comes
        return bytes([rng.choice((2, 6))]) + struct.pack(">Q", rng.randrange(1 << 63)) + rng.randbytes(20)
    if kind == 5:  # as after the handshake, in the open
        return command(b"MESSAGE", rng.randbytes(8) + rng.choice(MESSAGES))
    return message(rng.choice(MESSAGES))


def raw(port: int, frames: int, rng: random.Random, recorded: Sequence[bytes]) -> None:
    """Send `frames` frames on connections of their own, and now and then a member's recorded ones (`record`)."""
    left = frames
    begins = (b"", greeting(b"CURVE"), greeting(b"NULL"), greeting(b"PLAIN"), greeting(b"CURVE", b"\x02\x00"))
    while left > 0:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as s:
            if rng.random() < 0.1:
                for part in recorded:
                    s.sendall(part)
                    left -= 1
                continue
            s.sendall(rng.choice(begins))
            for _ in range(min(FRAMES_EACH, left)):
                left -= 1
                s.sendall(frame(rng))


def strange_sockets(port: int, rng: random.Random) -> None:
    """ZeroMQ's own handshakes, without a key and with another cluster's."""
    with zmq.Context() as context:
        made = [context.socket(zmq.DEALER), secured.connecting(context, b"what the cluster's is not")]
        for s in made:
            s.linger = 0
            s.connect(f"tcp://127.0.0.1:{port}")
            with suppress(zmq.Again):  # once it is refused, a socket takes nothing
                for _ in range(10):
                    s.send(rng.choice(MESSAGES), zmq.NOBLOCK)
        made[0].poll(100)
        for s in made:
            s.close()


def record(port: int, key: bytes) -> list[bytes]:
    """Return a member's bytes on the wire when it joins and sends one message."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as proxy, zmq.Context() as context:
        member = secured.connecting(context, key)
        member.linger = 0
        member.connect(f"tcp://127.0.0.1:{proxy.getsockname()[1]}")
        member.send(b"no message")
        inside, _ = proxy.accept()
        with inside, socket.create_connection(("127.0.0.1", port)) as server:
            while not any(b"MESSAGE" in part for part in heard):
                for ready in select.select([inside, server], [], [])[0]:
                    part = ready.recv(65536)
                    if ready is inside:
                        heard.append(part)
                    (server if ready is inside else inside).sendall(part)
        member.close()
    return heard
