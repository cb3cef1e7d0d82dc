"""Chat templates of the model and of requests, rendered in a process with limited time and memory.

This process also finds the shape of messages that a template accepts."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from weft.engine.grammar.child_process import ChildProcess
from weft.serve.chat.message_shape import Message, MessageShape
from weft.serve.http.errors import ApiError, bad_field

RENDER_S = 2.0
"""Maximum seconds to render a prompt; also to wait for other prompts, for a request's own template."""
PROBE_S = 10.0
"""Maximum seconds for all probes with a template: at most fifty, of a millisecond each on an idle machine."""
START_S = 60.0
"""Maximum seconds for the process to start with its imports."""
KEPT = 64
"""Maximum cached shapes of templates."""


class Templates:
    """Client of one rendering process, restarted after a template that had to be stopped. Thread-safe.

    Args:
        special: the tokenizer's `special_tokens_map`, available in templates.
    """

    def __init__(self, special: Mapping[str, Any]):
        self._special = dict(special)
        self._lock = threading.Lock()
        self.shape = lru_cache(KEPT)(self._shape)
        self.drops = lru_cache(KEPT)(self._drops)
        self._start()

    def render(self, template: str, messages: Sequence[Message], own: bool, **arguments: Any) -> str:
        """Return the text that `template` renders of `messages` and arguments, which are JSON.

        own: true for the model's template, which may wait longer for other prompts than a request's. ApiError 400 if
        the template fails or exceeds a limit, 503 if the wait is too long.
        """
        call = {**self._special, **arguments, "conversations": [messages], "chat_template": template}
        if not own:
            return str(self._made("text", call))
        result = self._result("text", call, RENDER_S, START_S)
        if "error" in result:
            message = f"the model's chat template refuses the messages: {result['error']}"
            raise ApiError(400, message, param="messages")
        return str(result["text"])

    def _shape(self, template: str) -> MessageShape:
        """Return the shape of messages for a template. ApiError as in `render`."""
        call = {"arguments": {**self._special, "chat_template": template}}
        return MessageShape(**self._made("shape", call, PROBE_S))

    def _drops(self, template: str, role: str) -> bool:
        """Return whether the model's template drops messages of a role. ApiError as in `render`."""
        shape = vars(self.shape(template))
        call = {"arguments": {**self._special, "chat_template": template}, "shape": shape, "role": role}
        return bool(self._made("drops", call))

    def _made(self, what: str, asked: Mapping[str, Any], limit_s: float = RENDER_S) -> Any:
        result = self._result(what, asked, limit_s, limit_s)
        if "error" in result:
            raise bad_field("chat_template", f": {result['error']}")
        return result[what]

    def _result(self, what: str, asked: Mapping[str, Any], limit_s: float, wait_s: float) -> dict[str, Any]:
        request = json.dumps({"what": what, **asked}).encode()
        if not self._lock.acquire(timeout=wait_s):
            raise ApiError(503, "chat templates of other requests are being rendered; try again")
        try:
            return self._ask(request, limit_s)
        finally:
            self._lock.release()

    def _start(self) -> None:
        self._process = ChildProcess("weft.serve.chat.template_process")
        weakref.finalize(self, self._process.kill)
        self._ready = False

    def _ask(self, asked: bytes, limit_s: float) -> dict[str, Any]:
        why, connection = f"it takes longer than {limit_s:g} s", self._process.connection
        try:
            if not self._ready and connection.poll(START_S):
                connection.recv_bytes()
                self._ready = True
            connection.send_bytes(asked)
            if connection.poll(limit_s):
                result: dict[str, Any] = json.loads(connection.recv_bytes())
                return result
        except (EOFError, OSError):
            why = "it takes more memory than it may"
        self._process.kill()
        self._process.wait()
        connection.close()
        self._start()
        return {"error": why}
