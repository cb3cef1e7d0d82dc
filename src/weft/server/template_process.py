"""The process that renders chat templates of requests: it may take so much memory, and is killed where it takes too
long (`weft.server.templates`).

It imports little, so that it is there soon, and talks in JSON: whatever a template does, what comes of it is data.
"""

from __future__ import annotations

import json
import os
import resource
import signal
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path

MEMORY = 2**28
"""Bytes that templates may take."""
MAX_TEXT = 2**24
"""Characters of a prompt."""
MAX_ERROR = 500
"""Characters of an error, which may hold the prompt."""


def serve(connection: Connection) -> None:
    """Says `ready`, then renders until the server ends or closes its end: arguments of `render_jinja_template` to
    {"text"} or {"error"}. Ends where memory does not suffice, as compiled templates are kept: they may be what fills
    it."""
    server = parent_process()
    assert server is not None and server.pid is not None
    servers_end = os.pidfd_open(server.pid)  # a process that the server has forked holds a copy of its connection
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which lets its requests end
    from transformers.utils.chat_template_utils import render_jinja_template

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    connection.send_bytes(b"ready")
    while servers_end not in wait([connection, servers_end]):
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            text = render_jinja_template(**request)[0][0]
            result = {"text": text} if len(text) <= MAX_TEXT else {"error": f"it makes more than {MAX_TEXT} characters"}
        except MemoryError:
            return
        except Exception as error:
            result = {"error": str(error)[:MAX_ERROR] or type(error).__name__}
        connection.send_bytes(json.dumps(result).encode())
