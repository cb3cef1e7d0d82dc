"""The log: a line an event, never a flood."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import warnings

from weft.serve.cli.command import requested_format
from weft.serve.http.log import (
    BURST,
    MAX_UNWRITTEN,
    WINDOW_S,
    Formatter,
    LogStream,
    RateLimit,
    print_error,
    stderr_as_log,
)


def record(text: str, level: int = logging.WARNING, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("weft", level, __file__, 1, text, (), None)
    made.fields = fields
    return made


def test_repeats_are_left_out_and_counted() -> None:
    now = 0.0
    sparse = RateLimit(clock=lambda: now)
    assert [sparse.filter(record("full")) for _ in range(100)] == [True] * BURST + [False] * (100 - BURST)
    assert sparse.filter(record("another")) and sparse.filter(record("full", logging.INFO))
    now = WINDOW_S
    later = record("full")
    assert sparse.filter(later) and later.getMessage() == f"full ({100 - BURST} more like this were omitted)"


def test_a_line_is_text_or_json() -> None:
    made = record("request", logging.INFO, id="a\nb", tokens=3, seconds=0.5)
    assert Formatter("text").format(made).endswith('INFO request id="a\\nb" tokens=3 seconds=0.5')
    read = json.loads(Formatter("json").format(made))
    assert (read["level"], read["event"], read["id"], read["tokens"]) == ("INFO", "request", "a\nb", 3)


def test_a_full_disk_and_a_pipe_that_nobody_reads_hold_nobody_up() -> None:
    with open("/dev/full", "w") as full:
        stream = LogStream(full)
        print("lost", file=stream, flush=True)
        stream.drain()
    read, written = os.pipe()
    with open(read, "rb") as reader, open(written, "w") as pipe:
        stream = LogStream(pipe)
        total = MAX_UNWRITTEN + 20_000  # more than the pipe and the queue hold
        for at in range(total):
            stream.put(f"line {at}")
        seen = lost = 0
        while seen + lost < total:
            line = reader.readline()
            seen, lost = seen + line.startswith(b"line"), lost + (int(line.split()[0]) if b"were lost" in line else 0)
    assert lost > 5000 and seen + lost == total


def test_all_that_is_printed_is_json_from_the_first_line_on() -> None:
    err = io.StringIO()
    logging.captureWarnings(False)  # a test before may have begun it, and pytest has undone what it did
    with contextlib.redirect_stderr(err):
        with stderr_as_log(requested_format(["--port", "0", "--log-format", "json"])):
            print("two\nlines", file=sys.stderr, flush=True)
            warnings.showwarning(UserWarning("a warning"), UserWarning, "file.py", 1)  # pytest keeps what is warned
            logging.getLogger("weft.any").info("event", extra={"fields": {"n": 1}})
            logging.getLogger("uvicorn.error").error("an error")
            print_error("it ends")
        assert sys.stderr is err
    lines = [json.loads(line) for line in err.getvalue().splitlines()]
    assert [line["event"] for line in lines[:2]] == ["two", "lines"]
    assert "a warning" in lines[2]["event"] and lines[3] == lines[3] | {"event": "event", "n": 1}
    assert [(line["level"], line["event"]) for line in lines[4:]] == [("ERROR", "an error"), ("ERROR", "weft: it ends")]
    assert requested_format(["--log-format=json"]) == requested_format(["--log_format", "json"]) == "json"
    assert requested_format(["--log-format"]) == "text"
