"""Options of the HTTP server: each field is an option of `weft serve`, with its docstring as help text."""

from __future__ import annotations

import importlib
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weft.engine.config.engine_options import PlainValues

LogLevel = Literal["debug", "info", "warning", "error", "critical"]
ReasoningParser = Literal["auto", "think", "off"]

HEADER_TEXT = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")
"""Text that every client can send in a header unchanged."""

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
"""Names of this host for its own clients."""

MAY_BE_ZERO = ("drain_s", "max_stored_mb")


@dataclass(frozen=True)
class Options(PlainValues):
    """HTTP server and its API. Times are in seconds."""

    api_key: str | None = None
    """Key that clients must send as a Bearer token; omitted: WEFT_API_KEY, as others can read command lines."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model for clients; responses have the first; omitted: the name on the hub, or the file's name."""
    ssl_keyfile: Path | None = None
    """PEM file with the private key of ssl_certfile; omitted: ssl_certfile has the key too."""
    ssl_certfile: Path | None = None
    """PEM file with a certificate and its chain, to serve HTTPS only; it is read once, at the start."""
    root_path: str = ""
    """Path prefix at which a proxy shows this server, such as /llm; requests may have it or not."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server from a browser, such as https://app.example; *: all."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted names in the Host header, such as api.example or *.example; loopback names, /health and /metrics are
    always accepted; omitted: all names."""
    max_body_mb: int = 8
    """Maximum size of a request in MiB; streams pause while it is parsed."""
    max_connections: int = 4096
    """Maximum connections at once; new ones replace idle ones. The process's limit of open files may lower it."""
    header_timeout_s: float = 10.0
    """Maximum seconds to receive the headers of a request."""
    body_timeout_s: float = 120.0
    """Maximum seconds to receive the body of a request."""
    idle_timeout_s: float = 60.0
    """Seconds after which an idle connection is closed."""
    stall_timeout_s: float = 120.0
    """Seconds after which a client that does not read its response is disconnected."""
    request_timeout_s: float | None = None
    """Maximum seconds of a request, including its wait; omitted: unlimited."""
    drain_s: float = 30.0
    """Maximum seconds that running requests may continue after SIGTERM or Ctrl-C."""
    max_stored_mb: int = 64
    """Memory in MiB for stored responses of /v1/responses, which clients fetch or continue by id; the least recently
    used are dropped; 0: none is stored."""
    trust_request_chat_template: bool = False
    """Let requests have their own chat_template, which is rendered in a sandbox with limited time and memory."""
    reasoning_parser: ReasoningParser = "auto"
    """Return text between <think> and </think> as reasoning_content; auto: if the chat template or tokenizer has these
    tags; think: for every model; off: keep it in the text."""
    otlp_traces_endpoint: str | None = None
    """URL that gets an OpenTelemetry span of each request, such as http://127.0.0.1:4318/v1/traces (extra otel)."""
    any_whitespace: bool = False
    """Allow whitespace anywhere in JSON of structured outputs and tools, although some models then write blanks until
    max_tokens; omitted: at most one space after a comma or a colon."""
    profile_dir: Path | None = None
    """Folder for traces of ranks' steps, which POST /weft/profile?steps=20 records and weft profile --read prints;
    omitted: that endpoint is off."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """TLS context of connections; None without a certificate. Raises OSError, ValueError."""
        if self.ssl_certfile is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, password="")
        return context

    def allows_host(self, header: str) -> bool:
        """Return whether a Host header has an accepted name."""
        name = re.sub(r":\d+$", "", header).lower().rstrip(".")
        allowed = (*LOOPBACK, *map(str.lower, self.allowed_hosts))
        return not self.allowed_hosts or any(
            name == rule or rule == "*" or (rule.startswith("*.") and name.endswith(rule[1:])) for rule in allowed
        )

    def check(self) -> None:
        """Raise ValueError in one line for a value out of range."""
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
        try:  # an encrypted key is refused, as nobody can type its password
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
