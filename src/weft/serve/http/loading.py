"""Placeholder server while the model loads: the port is bound at once, and every request gets 503."""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, cast

log = logging.getLogger(__name__)
MAX_UNREAD, MAX_CLIENTS = 2**20, 64
"""Maximum bytes to read of a refused body, so that its client reads the refusal; maximum connections at once."""
RETRY_S = 5
"""Seconds after which clients should retry."""
SHUTDOWN_POLL_S = 0.05


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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()
