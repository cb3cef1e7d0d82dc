"""What the one who starts the server decides: each field is an option of `weft serve`, with its docstring as help."""

from __future__ import annotations

import importlib
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error", "critical"]
ReasoningParser = Literal["auto", "think", "off"]
"""Thoughts between <think> tags are split off where the chat template or the tokenizer knows them, always, or never."""

HEADER_TEXT = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
"""What every client can send as part of a header, and every server gets as it was sent."""

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Names that clients on this host have for it."""

MAY_BE_ZERO = ("drain_s", "max_stored_mb")


@dataclass(frozen=True)
class Options:
    """Of the HTTP side. Times are in seconds."""

    api_key: str | None = None
    """Clients must send it as a Bearer token; left out, what WEFT_API_KEY holds, as others can read command lines."""
    served_model_name: tuple[str, ...] = ()
    """The model's names for clients; responses have the first; omitted: its name on the hub, or its directory's or
    file's name."""
    ssl_keyfile: Path | None = None
    """The private key of ssl_certfile, in PEM; left out, it is in that file too."""
    ssl_certfile: Path | None = None
    """A certificate and its chain, in PEM: serve HTTPS only. They are read once, at the start."""
    root_path: str = ""
    """Path prefix under which a proxy shows this server, such as /llm; requests may come with it or without."""
    cors_origins: tuple[str, ...] = ()
    """Web pages that may call the server from a browser, such as https://app.example; * for all."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header by which clients may call the server, such as api.example or *.example; names of the
    loopback interface always may, and so may probes of /health and /metrics. Left out, all."""
    max_body_mb: int = 8
    """Largest request, in MiB; streams pause while it is parsed."""
    max_connections: int = 4096
    """Connections at once; those without a request give way to newcomers. Fewer where the process may not open so many
    files."""
    header_timeout_s: float = 10.0
    """For the headers of a request to arrive."""
    body_timeout_s: float = 120.0
    """For the body of a request to arrive."""
    idle_timeout_s: float = 60.0
    """After which a connection without a request is closed."""
    stall_timeout_s: float = 120.0
    """After which a client that reads nothing of its response is cut off."""
    request_timeout_s: float | None = None
    """For a request, its wait included; left out, it may take any time."""
    drain_s: float = 30.0
    """After SIGTERM or Ctrl-C: how long requests that run may go on."""
    max_stored_mb: int = 64
    """Memory for responses of /v1/responses, to fetch or go on from by their ids, in MiB; the longest unused are
    forgotten; 0 stores none."""
    trust_request_chat_template: bool = False
    """Chats may bring their own chat_template, which is rendered in a sandbox with bounded time and memory."""
    reasoning_parser: ReasoningParser = "auto"
    """Gives what a model writes between <think> and </think> as reasoning_content: auto, where its chat template or
    tokenizer knows these; think, for any model; off, for none: it stays in the text."""
    otlp_traces_endpoint: str | None = None
    """Sends an OpenTelemetry span of each request to this URL, such as http://127.0.0.1:4318/v1/traces (extra otel)."""
    any_whitespace: bool = False
    """JSON of structured outputs and tools may hold whitespace wherever JSON allows it; some models then write blanks
    until max_tokens. Left out, one space may follow a comma or a colon."""
    profile_dir: Path | None = None
    """Let POST /weft/profile?steps=20 watch steps of the ranks, and write their traces to this folder, which
    weft profile --read prints."""

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 2**20)

    @property
    def max_stored_bytes(self) -> int:
        return int(self.max_stored_mb * 2**20)

    @property
    def tls(self) -> ssl.SSLContext | None:
        """What connections are encrypted with; None: nothing. Raises OSError, ValueError."""
        if self.ssl_certfile is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password="")
        return context

    def allows_host(self, header: str) -> bool:
        """Whether a Host header names a host that may be called."""
        name = re.sub(r":\d+$", "", header).lower().rstrip(".")
        allowed = (*LOOPBACK, *map(str.lower, self.allowed_hosts))
        return not self.allowed_hosts or any(
            name == each or each == "*" or (each.startswith("*.") and name.endswith(each[1:])) for each in allowed
        )

    def check(self) -> None:
        """ValueError in one line for a value out of range."""
        for name, value in vars(self).items():
            if type(value) in (int, float) and (value < 0 or (value == 0 and name not in MAY_BE_ZERO)):
                rule = "0 or more" if name in MAY_BE_ZERO else "above 0"
                raise ValueError(f"{name} is {value}; it must be {rule}")
        if self.api_key == "":
            raise ValueError("api_key is empty; give one, or leave it out to let everybody in")
        if self.api_key is not None and not HEADER_TEXT.fullmatch(self.api_key):
            raise ValueError("api_key cannot be sent in an HTTP header; use printable ASCII, with no space at its ends")
        if "" in self.served_model_name:
            raise ValueError("served_model_name is empty; give one, or leave it out")
        if self.root_path and not re.fullmatch(r"(/[^/?#]+)+", self.root_path):
            raise ValueError(f"root_path is {self.root_path!r}; it must begin with / and not end with it, as /llm does")
        self._check_certificate()
        self._check_tracing()
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/]+", origin):
                raise ValueError(f"{origin!r} in cors_origins is no origin such as https://app.example, nor *")
        for host in self.allowed_hosts:
            if not re.fullmatch(r"\*|(\*\.)?[\w.-]+|\[[0-9a-fA-F:.]+\]", host):
                raise ValueError(f"{host!r} in allowed_hosts is no host name such as api.example or *.example, nor *")

    def _check_certificate(self) -> None:
        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None:
                raise ValueError("ssl_keyfile needs ssl_certfile, the certificate of this key")
            return
        try:  # an encrypted key is refused: nobody is there to be asked for its password
            _ = self.tls
        except OSError as error:
            files = " and ".join(str(file) for file in (self.ssl_certfile, self.ssl_keyfile) if file is not None)
            why = f"{error.strerror or error}; they must be PEM files that belong together, the key without a password"
            raise ValueError(f"ssl_certfile and ssl_keyfile ({files}) cannot be used: {why}") from error

    def _check_tracing(self) -> None:
        if (endpoint := self.otlp_traces_endpoint) is None:
            return
        if not re.fullmatch(r"https?://[^/]+/.*", endpoint):
            example = "http://127.0.0.1:4318/v1/traces"
            raise ValueError(f"otlp_traces_endpoint is {endpoint!r}; it must be a URL such as {example}")
        try:
            importlib.import_module("opentelemetry.instrumentation.fastapi")
        except ModuleNotFoundError as error:
            raise ValueError("otlp_traces_endpoint needs OpenTelemetry: pip install 'weft[otel]'") from error
