"""Listening sockets of the server, a port or a file, and the placeholder server while the model loads: every request
gets 503."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

log = logging.getLogger(__name__)
QUEUED_BY_KERNEL = 2048
"""Maximum connections that wait to be accepted."""
MAX_UNREAD, MAX_CLIENTS = 2**20, 64
"""Maximum bytes to read of a refused body, so that its client reads the refusal; maximum connections at once."""
RETRY_S = 5
"""Seconds after which clients should retry."""
SHUTDOWN_POLL_S = 0.05


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


class Refusal(BaseHTTPRequestHandler):
    """Response to every request: 503 in the shape of the server's errors, or of its states for `/health`.

    It uses only the standard library, as the server's packages take seconds to import.
    """

    protocol_version = "HTTP/1.1"
    timeout = 10.0  # seconds for each read and write

    def _refuse(self) -> None:
        path = self.path.partition("?")[0].removeprefix(cast(Loading, self.server).root_path)
        message = "the model is still loading; try again"
        body: dict[str, Any] = {"message": message, "type": "server_error", "param": None, "code": "loading"}
        body = {"error": body}
        if path.startswith("/v1/messages"):
            body = {"type": "error", "error": {"type": "overloaded_error", "message": message}}
        if path != "/health":
            fields = {"path": path, "outcome": "refused", "status": 503, "reason": message}
            client = self.client_address[0] if self.client_address else None
            log.info("request", extra={"fields": fields | {"client": client}})
        self._respond(503, {"status": "loading"} if path == "/health" else body)
        if self.command != "HEAD":
            length = self.headers.get("Content-Length", "0")
            self.rfile.read(min(int(length) if length.isdecimal() else 0, MAX_UNREAD))

    def _respond(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Retry-After", str(RETRY_S))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # any method
            return self._refuse
        raise AttributeError(name)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Respond to a malformed request, as `BaseHTTPRequestHandler.send_error`."""
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        self.close_connection, self.request_version = True, self.protocol_version  # the version may be the fault
        self._respond(code, {"error": error})

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing: `_refuse` has written the log."""


class Loading(ThreadingHTTPServer):
    """Server that refuses requests on a listening socket, on threads, until the context ends; the socket stays open.

    tls: context of encrypted connections. root_path: see `Options.root_path`.
    """

    daemon_threads, block_on_close = True, False

    def __init__(self, listener: socket.socket, tls: ssl.SSLContext | None = None, root_path: str = ""):
        super().__init__(listener.getsockname(), Refusal, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self._tls, self.root_path = tls, root_path
        self._places = threading.Semaphore(MAX_CLIENTS)

    def process_request(self, request: object, client_address: object) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)  # type: ignore[arg-type]
        else:  # idle clients must not fill the process with threads
            self.shutdown_request(request)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._tls is None:
            return super().finish_request(request, client_address)
        request.settimeout(Refusal.timeout)
        with self._tls.wrap_socket(request, server_side=True) as encrypted:
            super().finish_request(encrypted, client_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing: a disconnected client is no fault of the server."""

    def __enter__(self) -> Loading:
        self.socket.setblocking(False)  # a client that has disconnected must not block the end
        threading.Thread(target=self.serve_forever, args=(SHUTDOWN_POLL_S,), name="weft-loading", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
