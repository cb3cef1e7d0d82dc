"""Listening sockets of the server: a port or a file."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

QUEUED_BY_KERNEL = 2048
"""Maximum connections that wait to be accepted."""


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; clients wait until it is served. port: 0 for a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Name the protocol: asyncio sets TCP_NODELAY only on sockets with TCP as their protocol.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(QUEUED_BY_KERNEL)  # reserves the port, though requests may not be served for long
    except (OSError, OverflowError) as error:
        listener.close()
        why = error.strerror if isinstance(error, OSError) else "no such port"
        raise OSError(f"{host}:{port} cannot be listened on ({why}); choose another with --host or --port") from error
    return listener


class UnixListener(socket.socket):
    """Listening Unix domain socket, which removes its file when it is closed."""

    def __init__(self, path: Path):
        super().__init__(socket.AF_UNIX)
        self._path = path
        self.bind(str(path))
        self.listen(QUEUED_BY_KERNEL)

    def close(self) -> None:
        if self.fileno() >= 0:
            self._path.unlink(missing_ok=True)
        super().close()


def bind_unix(path: Path) -> socket.socket:
    """Return a listening Unix domain socket; replaces the file of a dead server. Raises OSError in one line."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            if path.is_socket():
                path.unlink()
    try:
        return UnixListener(path)
    except OSError as error:
        raise OSError(f"{path} cannot be listened on ({error.strerror or error}); choose another --uds") from error
