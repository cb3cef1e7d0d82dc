"""Log of the server on stderr: one line per event, as text or JSON, limited per kind and never blocking."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import logging.config
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, TextIO

from weft.serve.http.options import LogLevel

LogFormat = Literal["text", "json"]
BURST, WINDOW_S = 5, 10.0
"""Maximum warnings of one kind per window, and its seconds."""
MAX_UNWRITTEN = 10_000
"""Maximum lines that wait for the reader of stderr; further lines are dropped and counted."""
FLUSH_S = 1.0
"""Maximum seconds to wait for the last lines to be read."""


class RateLimit(logging.Filter):
    """Filter that drops too frequent warnings and errors of one kind, and adds their number to the next one."""

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
                record.msg = f"{record.msg} ({count - BURST} more like this were omitted)"
            began, count = now, 0
        if len(self._seen) > 1000:  # kinds are few, but kinds made of clients' input must not fill the memory
            self._seen.clear()
        self._seen[kind] = began, count + 1
        return count < BURST


class Formatter(logging.Formatter):
    """Formatter that writes the `fields` of a record as key=value, or as members of a JSON object."""

    def __init__(self, log_format: LogFormat = "text"):
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._json = log_format == "json"

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        if not self._json:
            # json.dumps escapes line breaks, so that a client's text stays on its line.
            pairs = [f"{k}={v if isinstance(v, int | float) else json.dumps(v)}" for k, v in fields.items()]
            return " ".join([super().format(record), *pairs])
        head = {"time": self.formatTime(record), "level": record.levelname, "event": record.getMessage()}
        trace = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps(head | fields | trace, default=str)


class LogStream(io.TextIOBase):
    """Non-blocking stderr: a thread writes its lines, and drops lines once too many wait.

    Args:
        under: stderr to write to; None drops everything.
        log_format: `json` makes each printed line an object.
    """

    def __init__(self, under: TextIO | None, log_format: LogFormat = "text"):
        self.log_format = log_format
        self._under, self._begun, self._lost = under, "", 0
        self._lock = threading.Lock()
        self._lines: queue.Queue[str] = queue.Queue(MAX_UNWRITTEN)
        threading.Thread(target=self._write_lines, name="weft-log", daemon=True).start()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self.put(self._in_format(line))
        return len(text)

    def put(self, line: str) -> None:
        """Queue a formatted line."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            with self._lock:
                self._lost += 1

    def drain(self) -> None:
        """Wait until all lines are written, for at most `FLUSH_S` seconds."""
        if self._begun:
            self.write("\n")
        end = time.monotonic() + FLUSH_S
        while self._lines.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.005)

    def _in_format(self, line: str, level: int = logging.INFO) -> str:
        if self.log_format == "text" or not line:
            return line
        return Formatter("json").format(logging.LogRecord("weft", level, "", 0, "%s", (line,), None))

    def _write_lines(self) -> None:
        while True:
            line = self._lines.get()
            with self._lock:
                lost, self._lost = self._lost, 0
            try:
                if lost:
                    self._write(self._in_format(f"{lost} lines of this log were lost: they were not read in time"))
                self._write(line)
            except (OSError, ValueError):  # a full disk or a closed pipe: keep serving
                with self._lock:
                    self._lost += lost + 1
            self._lines.task_done()

    def _write(self, line: str) -> None:
        if self._under is None:
            return
        try:
            descriptor = self._under.fileno()
        except io.UnsupportedOperation:  # stderr is in memory
            self._under.write(line + "\n")
            return
        data = (line + "\n").encode(errors="replace")
        while data:  # not through stderr's buffer, which would fail again at exit
            data = data[os.write(descriptor, data) :]


class Handler(logging.Handler):
    """Handler that writes records to a `LogStream`."""

    def __init__(self, stream: LogStream):
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._stream.put(self.format(record))
        except Exception:
            self.handleError(record)


def print_error(error: object) -> None:
    """Print the error that ends a command as one line."""
    line = f"weft: {error}"
    if isinstance(sys.stderr, LogStream):
        sys.stderr.put(sys.stderr._in_format(line, logging.ERROR))
    else:
        print(line, file=sys.stderr)


@contextlib.contextmanager
def stderr_as_log(log_format: LogFormat) -> Iterator[None]:
    """Redirect Python's stderr to a `LogStream`, except text on a terminal, which has progress bars."""
    under, stream = sys.stderr, configure(log_format)
    if log_format == "json" or under is None or not under.isatty():
        sys.stderr = stream
    try:
        yield
    finally:
        stream.drain()
        sys.stderr = under


def configure(log_format: LogFormat, level: LogLevel = "info") -> LogStream:
    """Set up the loggers of this process and return their stream to stderr. level: lowest level of Weft's lines."""
    stream = sys.stderr if isinstance(sys.stderr, LogStream) else LogStream(sys.stderr)
    stream.log_format = log_format
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": Formatter, "log_format": log_format}},
        "filters": {"sparse": {"()": RateLimit}},
        "handlers": {"stderr": {"()": Handler, "stream": stream, "formatter": "line", "filters": ["sparse"]}},
        "loggers": {"weft": {"level": level.upper(), "handlers": ["stderr"], "propagate": False}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
    }
    logging.config.dictConfig(config)
    logging.captureWarnings(True)
    return stream
