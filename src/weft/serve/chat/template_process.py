"""A process that renders chat templates: `python -m weft.serve.chat.template_process DESCRIPTOR PID`.

Its memory is limited, and it is killed where it takes too long (`weft.serve.chat.templates`).

It imports little, so that it is there soon, and talks in JSON: whatever a template does, what comes of it is data.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from weft.serve.chat import message_shape
from weft.serve.chat.message_shape import MessageShape, Render

MEMORY = 2**28
"""Bytes that templates may take."""
MAX_TEXT = 2**24
"""Characters of a prompt."""
MAX_ERROR = 500
"""Characters of an error, which may hold the prompt."""


def serve(connection: Connection, server: int) -> None:
    """Send `ready`, then a JSON object for each that comes, until the server ends or closes its end.

    Requests have `what` (`text`, `shape` or `drops`), and what that takes; responses have that name, or `error`. Ends
    where memory does not suffice, as compiled templates are kept: they may be what fills it.
    """
    try:
        servers_end = os.pidfd_open(server)  # a process that the server has forked holds a copy of its connection
    except ProcessLookupError:  # it has ended already
        return
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
        what = request.pop("what")
        try:
            result = {what: _made(what, request, render_jinja_template)}
        except MemoryError:
            return
        except Exception as error:
            result = {"error": str(error)[:MAX_ERROR] or type(error).__name__}
        connection.send_bytes(json.dumps(result).encode())


def _made(what: str, request: dict[str, Any], render_template: Callable[..., Any]) -> Any:
    if what == "text":
        text = str(render_template(**request)[0][0])
        if len(text) > MAX_TEXT:
            raise ValueError(f"it makes more than {MAX_TEXT} characters")
        return text
    render = _probe(request["arguments"], render_template)
    if what == "shape":
        return asdict(message_shape.find(render))
    return message_shape.drops(render, MessageShape(**request["shape"]), request["role"])


def _probe(arguments: dict[str, Any], render_template: Callable[..., Any]) -> Render:
    def render(messages: Any, tools: Any) -> str | None:
        try:
            asked = {"conversations": [messages], "tools": tools or None, "add_generation_prompt": True}
            return str(render_template(**arguments, **asked)[0][0])
        except MemoryError:
            raise
        except Exception:  # a template may refuse messages with whatever it likes
            return None

    return render


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
