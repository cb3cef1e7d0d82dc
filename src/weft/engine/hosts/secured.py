"""Sockets between hosts, secured by CURVE: without the cluster's key, nobody can send or read messages.

Both ends derive their key pairs from the secret in the key file, so hosts share only this file.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from weft.engine.config.config import EngineError

MIN_KEY_BYTES = 16
MAX_MESSAGE_BYTES = 64 << 20
"""Maximum size of a message: a stranger's announced size is not allocated."""
PING_MS, SILENT_MS = 1000, 5000
"""Interval and limit of ZeroMQ's heartbeats; its own thread sends them, so a busy host still replies."""
HOW_TO_MAKE_ONE = "make one with: head -c 32 /dev/urandom | base64 > cluster.key"


def read_key(path: Path) -> bytes:
    """Read the secret, without the white space around it. Raises EngineError."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise EngineError(f"--cluster-key {path} cannot be read: {error.strerror}; {HOW_TO_MAKE_ONE}") from error
    if len(key) < MIN_KEY_BYTES:
        raise EngineError(f"--cluster-key {path} has fewer than {MIN_KEY_BYTES} bytes; {HOW_TO_MAKE_ONE}")
    return key


class _Allowed:
    """Key check for the authenticator: it accepts the one key derived from the secret."""

    def __init__(self, public: bytes):
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


def authenticator(context: zmq.Context[zmq.Socket[bytes]], key: bytes) -> ThreadAuthenticator:
    """Start an authenticator that admits only agents with the secret. Stop it before the context ends."""
    socket = ThreadAuthenticator(context)
    socket.start()
    socket.configure_curve_callback("*", _Allowed(_pair(key, b"agent")[1]))
    return socket


def listening(context: zmq.Context[zmq.Socket[bytes]], key: bytes) -> zmq.Socket[bytes]:
    """Return node 0's socket, not bound yet."""
    socket = context.socket(zmq.ROUTER)
    socket.curve_secretkey, socket.curve_publickey = _pair(key, b"node 0")
    socket.curve_server = True
    return _limited(socket)


def connecting(context: zmq.Context[zmq.Socket[bytes]], key: bytes) -> zmq.Socket[bytes]:
    """Return an agent's socket, not connected yet."""
    socket = context.socket(zmq.DEALER)
    socket.curve_secretkey, socket.curve_publickey = _pair(key, b"agent")
    socket.curve_serverkey = _pair(key, b"node 0")[1]
    return _limited(socket)


def endpoint(address: str, port: int) -> str:
    """Return an endpoint in ZeroMQ's form."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def _limited(made: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    made.setsockopt(zmq.IPV6, 1)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    made.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
    made.setsockopt(zmq.SNDHWM, 0)
    made.setsockopt(zmq.RCVHWM, 0)
    made.setsockopt(zmq.LINGER, 1000)
    return made


def _pair(key: bytes, owner: bytes) -> tuple[bytes, bytes]:
    """Return the secret and the public key of an end."""
    secret = z85.encode(hmac.digest(key, b"weft " + owner, hashlib.sha256))
    return secret, zmq.curve_public(secret)
