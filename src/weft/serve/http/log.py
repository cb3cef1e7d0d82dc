"""The server's log, on stderr: a line an event, as text or JSON, never a flood of the same, and never waited for."""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TextIO

from weft.serve.http.options import LogLevel

LogFormat = Literal["text", "json"]
BURST, WINDOW_S = 5, 10.0
"""Number of warnings of one kind that are written in a window of time."""
MAX_UNWRITTEN = 10_000
"""Lines that may wait for whoever reads stderr; further ones are dropped and counted."""
FLUSH_S = 1.0
"""Time for the last lines at the end, if stderr is not read."""


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


class LogStream(io.TextIOBase):
    """A stderr that nobody waits for: a thread writes its lines, and lines that find too many before them are dropped.

    Args:
        under: the stderr that is written to; None drops everything.
        log_format: `json` makes an object of each line that is printed.
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
        """Writes a line as it is."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            with self._lock:
                self._lost += 1

    def fail(self, line: str) -> None:
        """Writes a line that says why the process ends."""
        self.put(self._in_format(line, logging.ERROR))

    def drain(self) -> None:
        """Waits until all is written, for `FLUSH_S` at most."""
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
            except (OSError, ValueError):  # a full disk, or nobody is there: serving goes on
                with self._lock:
                    self._lost += lost + 1
            self._lines.task_done()

    def _write(self, line: str) -> None:
        if self._under is None:
            return
        try:
            descriptor = self._under.fileno()
        except io.UnsupportedOperation:  # a stderr in memory
            self._under.write(line + "\n")
            return
        data = (line + "\n").encode(errors="replace")
        while data:  # not through the stderr's buffer, which would fail again at exit
            data = data[os.write(descriptor, data) :]


class Handler(logging.Handler):
    """Writes records to a `LogStream`."""

    def __init__(self, stream: LogStream):
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._stream.put(self.format(record))
        except Exception:
            self.handleError(record)


def print_error(error: object) -> None:
    """Prints the one line of what ends a command."""
    line = f"weft: {error}"
    if isinstance(sys.stderr, LogStream):
        sys.stderr.fail(line)
    else:
        print(line, file=sys.stderr)


def asked_format(arguments: Sequence[str]) -> LogFormat:
    """The format that a command line asks for, before it is parsed: errors in it have that format too."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--log-format", "--log_format", default="text")
    with contextlib.suppress(argparse.ArgumentError):
        return "json" if parser.parse_known_args(arguments)[0].log_format == "json" else "text"
    return "text"


@contextlib.contextmanager
def stderr_as_log(log_format: LogFormat) -> Iterator[None]:
    """Sends all that Python writes to stderr through a `LogStream`. A terminal that reads text keeps its stderr, for
    progress bars."""
    under, stream = sys.stderr, configure(log_format)
    if log_format == "json" or under is None or not under.isatty():
        sys.stderr = stream
    try:
        yield
    finally:
        stream.drain()
        sys.stderr = under


def configure(log_format: LogFormat, level: LogLevel = "info") -> LogStream:
    """Sets up the loggers of this process, and returns what they write to: stderr, or a new stream to it. level: the
    least of the server's own lines."""
    stream = sys.stderr if isinstance(sys.stderr, LogStream) else LogStream(sys.stderr)
    stream.log_format = log_format
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": Formatter, "log_format": log_format}},
        "filters": {"sparse": {"()": Sparse}},
        "handlers": {"stderr": {"()": Handler, "stream": stream, "formatter": "line", "filters": ["sparse"]}},
        "loggers": {"weft": {"level": level.upper(), "handlers": ["stderr"], "propagate": False}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
    }
    logging.config.dictConfig(config)
    logging.captureWarnings(True)
    return stream
