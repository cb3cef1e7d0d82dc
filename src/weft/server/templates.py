"""Chat templates that requests bring: rendered in jinja's sandbox, in a process that is bounded in time and memory."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Mapping
from typing import Any

from weft.server import template_process
from weft.server.errors import ApiError

RENDER_S = 2.0
"""For a template, and for the wait for those of others."""
START_S = 60.0
"""For the process, which imports what renders."""


class Templates:
    """One process, which starts now, and again after a template that had to be stopped. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._start()

    def render(self, template: str, arguments: Mapping[str, Any]) -> str:
        """The text that a template makes of messages and so on, which are JSON.

        ApiError 400 for a template that fails or takes more than it may, 503 where others' are being rendered.
        """
        if not self._lock.acquire(timeout=RENDER_S):
            raise ApiError(503, "chat templates of other requests are being rendered; try again")
        try:
            result = self._ask(json.dumps({**arguments, "chat_template": template}).encode())
        finally:
            self._lock.release()
        if "error" in result:
            raise ApiError(400, f"chat_template: {result['error']}", param="chat_template")
        return str(result["text"])

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(target=template_process.serve, args=(there,), daemon=True)
        self._process.start()
        there.close()
        self._ready = False

    def _ask(self, asked: bytes) -> dict[str, str]:
        why = f"it takes longer than {RENDER_S:g} s"
        try:
            if not self._ready and self._connection.poll(START_S):
                self._connection.recv_bytes()
                self._ready = True
            self._connection.send_bytes(asked)
            if self._connection.poll(RENDER_S):
                result: dict[str, str] = json.loads(self._connection.recv_bytes())
                return result
        except (EOFError, OSError):
            why = "it takes more memory than it may"
        self._process.kill()
        self._process.join()
        self._connection.close()
        self._start()
        return {"error": why}
