"""What the one who starts the server decides."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ReasoningParser = Literal["auto", "think", "off"]
"""Thoughts between <think> tags are split off where the chat template or the tokenizer knows them, always, or never."""

HEADER_TEXT = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
"""What every client can send as part of a header, and every server gets as it was sent."""


MAY_BE_ZERO = ("drain_s", "max_stored_bytes")


@dataclass(frozen=True)
class Options:
    """Of the HTTP side; ValueError in one line for a value out of range. The time-outs are in seconds.

    api_key: clients must send it as a Bearer token. cors_origins: web pages that may call, "*" for all. max_body_bytes:
    of a request. max_connections: at once; fewer where the process may not open so many files. header_timeout_s,
    body_timeout_s: for a request to arrive. idle_timeout_s: a kept connection without a request. stall_timeout_s: a
    client that reads nothing of its response. request_timeout_s: until the whole answer; None: it may take any time.
    drain_s: how long requests may go on after SIGTERM. max_stored_bytes: of responses that clients may go on from; 0:
    none are stored. trust_request_chat_template: whether chats may bring their own
    chat template; else that is refused. reasoning_parser: whose thoughts are told apart from text.
    any_whitespace: in JSON of structured outputs, wherever JSON allows it, without end; else a space after a comma or
    a colon at most. profile_dir: where `POST /weft/profile` writes; None: it is refused.
    """

    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 2**20
    max_connections: int = 4096
    header_timeout_s: float = 10.0
    body_timeout_s: float = 120.0
    idle_timeout_s: float = 60.0
    stall_timeout_s: float = 120.0
    request_timeout_s: float | None = None
    drain_s: float = 30.0
    max_stored_bytes: int = 64 * 2**20
    trust_request_chat_template: bool = False
    reasoning_parser: ReasoningParser = "auto"
    any_whitespace: bool = False
    profile_dir: Path | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) in (int, float) and (value < 0 or (value == 0 and name not in MAY_BE_ZERO)):
                rule = "0 or more" if name in MAY_BE_ZERO else "above 0"
                raise ValueError(f"{name} is {value}; it must be {rule}")
        if self.api_key == "":
            raise ValueError("api_key is empty; give one, or leave it out to let everybody in")
        if self.api_key is not None and not HEADER_TEXT.fullmatch(self.api_key):
            raise ValueError("api_key cannot be sent in an HTTP header; use printable ASCII, with no space at its ends")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/]+", origin):
                raise ValueError(f"{origin!r} in cors_origins is no origin such as https://app.example, nor *")
