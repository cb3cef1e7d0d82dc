"""The server's log, on stderr: a line an event, as text or JSON, and never a flood of the same."""

from __future__ import annotations

import json
import logging
import logging.config
import time
from collections.abc import Callable
from typing import Any, Literal

from weft.server.options import LogLevel

LogFormat = Literal["text", "json"]
BURST, WINDOW_S = 5, 10.0
"""So many warnings of one kind are written in a window of time."""


class Sparse(logging.Filter):
    """Leaves out warnings and errors of one kind that come too often, and says with the next how many they were."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind, now = (record.name, str(record.msg)[:80]), self._clock()
        began, count = self._seen.get(kind, (now, 0))
        if now - began >= WINDOW_S:
            if count > BURST:
                record.msg = f"{record.msg} ({count - BURST} more like this were left out)"
            began, count = now, 0
        if len(self._seen) > 1000:  # kinds are few; what is made of clients' input must not fill the memory
            self._seen.clear()
        self._seen[kind] = began, count + 1
        return count < BURST


class Formatter(logging.Formatter):
    """`fields` of a record are written as key=value, or as members of the JSON object."""

    def __init__(self, log_format: LogFormat = "text"):
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._json = log_format == "json"

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        if not self._json:
            # json.dumps quotes what has spaces or line breaks, so that a client's text stays on its line.
            pairs = [f"{k}={v if isinstance(v, int | float) else json.dumps(v)}" for k, v in fields.items()]
            return " ".join([super().format(record), *pairs])
        head = {"time": self.formatTime(record), "level": record.levelname, "event": record.getMessage()}
        trace = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps(head | fields | trace, default=str)


def configure(log_format: LogFormat, level: LogLevel = "info") -> None:
    """Sets up the loggers of this process. level: the least of the server's own lines."""
    handler = {"class": "logging.StreamHandler", "formatter": "line", "filters": ["sparse"]}
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": Formatter, "log_format": log_format}},
        "filters": {"sparse": {"()": Sparse}},
        "handlers": {"stderr": handler},
        "loggers": {"weft": {"level": level.upper(), "handlers": ["stderr"], "propagate": False}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
    }
    logging.config.dictConfig(config)
