"""Process that renders chat templates: `python -m weft.serve.chat.template_process DESCRIPTOR PID`.

Its memory is limited, and `weft.serve.chat.templates` kills it after a time-out. It imports little, to start soon,
and replies in JSON: whatever a template does, its result is data.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from weft.engine.grammar.child_process import requests
from weft.serve.chat import message_shape
from weft.serve.chat.message_shape import MessageShape, Render

MEMORY = 2**28
"""Maximum bytes of memory for templates."""
MAX_TEXT = 2**24
"""Maximum characters of a prompt."""
MAX_ERROR = 500
"""Maximum characters of an error, which may contain the prompt."""


def serve(connection: Connection, server: int) -> None:
    """Send `ready`, then a JSON response per request of the server.

    Requests have `what` (`text`, `shape` or `drops`) and its arguments; responses have the value under this name, or
    `error`. The process ends if memory does not suffice, as the cached compiled templates may fill it.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    connection.send_bytes(b"ready")
    for asked in requests(connection, server):
        request = json.loads(asked)
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
        except Exception:  # a template may refuse messages with any exception
            return None

    return render


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
