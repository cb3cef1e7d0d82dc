"""A completion as an OpenAI-compatible server streams it: its text, its token counts, and when each chunk came."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


class LoadError(Exception):
    """A completion that failed or was cut short; the message says how."""


@dataclass
class StreamedCompletion:
    """What has come so far of one completion or chat.

    times: of each piece, on the clock of who reads: an event that brings tokens, though their text may still be empty.
    reason: the finish_reason. prompt_tokens, completion_tokens: the usage, where the server sends it. done: the stream
    has ended as it must, with [DONE].
    """

    text: str = ""
    times: list[float] = field(default_factory=list)
    reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    done: bool = False
    _begun: bytes = field(default=b"", repr=False, compare=False)  # a line of which the end has not come yet

    def feed(self, data: bytes, now: float) -> None:
        """Takes bytes as they come from a connection. Raises LoadError as `take` does."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        for line in lines:
            self.take(line, now)

    def take(self, line: bytes, now: float) -> None:
        """Takes a line of server-sent events. Raises LoadError for an error event, and for what is none at all."""
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
                text = choice["delta"].get("content") or choice["delta"].get("reasoning_content") or ""
                piece = bool(text)
            else:
                text = choice.get("text") or ""
                piece = bool(text) or not choice.get("finish_reason")
            self.text += text
            self.reason = choice.get("finish_reason") or self.reason
            if piece:
                self.times.append(now)
