"""Sockets that the server listens on: a port, or a file."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

QUEUED_BY_KERNEL = 2048
"""Connections that may wait to be accepted."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; clients wait until it is served. Raises OSError where the port is taken; port 0 takes a free
    one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only on connections with a socket that says that it is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(QUEUED_BY_KERNEL)  # from now on the port is taken, though it may be long until requests are
    except (OSError, OverflowError) as error:
        listener.close()
        why = error.strerror if isinstance(error, OSError) else "no such port"
        raise OSError(f"{host}:{port} cannot be listened on ({why}); choose another with --host or --port") from error
    return listener


class UnixListener(socket.socket):
    """A listening Unix domain socket. Its file is removed when it is closed."""

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
    """A listening Unix domain socket; the file of a server that is gone is replaced. Raises OSError in one line."""
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
