"""Completion that an OpenAI-compatible server streams: its text, its token counts, and the time of each chunk."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

TEXTS = ("content", "reasoning_content", "reasoning", "text")
"""Keys of a delta with text. Servers that know both names of a thought send it under both."""
PIECES = {*TEXTS, "tool_calls", "function_call", "refusal", "audio"}
"""Keys of a delta that bring output."""


class LoadError(Exception):
    """A completion that failed or was cut short; the message says how."""


@dataclass
class StreamedCompletion:
    """Received part of one completion or chat.

    Attributes:
        times: time of each piece, on the reader's clock. A piece is an event with tokens, even if their text is
            empty; in
            a chat, an event with a delta that has more than a role.
        unknown: keys of deltas that are not in PIECES; they count too.
        reason: the finish_reason.
        prompt_tokens, completion_tokens: the usage, if the server sends it.
        done: the stream has ended with [DONE].
    """

    text: str = ""
    times: list[float] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    done: bool = False
    _begun: bytes = field(default=b"", repr=False, compare=False)  # an incomplete line

    def feed(self, data: bytes, now: float) -> None:
        """Read bytes as they arrive from a connection. Raises LoadError as `take` does."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        for line in lines:
            self.take(line, now)

    def take(self, line: bytes, now: float) -> None:
        """Read a line of server-sent events. Raises LoadError for an error event, and for one that is not JSON."""
        if not line.startswith(b"data:"):
            return
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError:
            raise LoadError(f"not JSON: {data[:200]!r}") from None
        if "error" in event:
            raise LoadError(f"error event: {event['error']}")
        if usage := event.get("usage"):
            self.prompt_tokens, self.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event.get("choices") or ():
            if "delta" in choice:  # a chat begins with an event that names the role and brings no token
                delta = {name: part for name, part in (choice["delta"] or {}).items() if part and name != "role"}
                self.unknown |= delta.keys() - PIECES
                texts = (delta.get(name) for name in TEXTS)
                text, piece = "".join(dict.fromkeys(t for t in texts if isinstance(t, str))), bool(delta)
            else:
                text = choice.get("text") or ""
                piece = bool(text) or not choice.get("finish_reason")
            self.text += text
            self.reason = choice.get("finish_reason") or self.reason
            if piece:
                self.times.append(now)
