"""The log: a line an event, never a flood."""

from __future__ import annotations

import json
import logging

from weft.server.log import BURST, WINDOW_S, Formatter, Sparse


def record(text: str, level: int = logging.WARNING, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("weft", level, __file__, 1, text, (), None)
    made.fields = fields
    return made


def test_repeats_are_left_out_and_counted() -> None:
    now = 0.0
    sparse = Sparse(clock=lambda: now)
    assert [sparse.filter(record("full")) for _ in range(100)] == [True] * BURST + [False] * (100 - BURST)
    assert sparse.filter(record("another")) and sparse.filter(record("full", logging.INFO))
    now = WINDOW_S
    later = record("full")
    assert sparse.filter(later) and later.getMessage() == f"full ({100 - BURST} more like this were left out)"


def test_a_line_is_text_or_json() -> None:
    made = record("request", logging.INFO, id="a\nb", tokens=3, seconds=0.5)
    assert Formatter("text").format(made).endswith('INFO request id="a\\nb" tokens=3 seconds=0.5')
    read = json.loads(Formatter("json").format(made))
    assert (read["level"], read["event"], read["id"], read["tokens"]) == ("INFO", "request", "a\nb", 3)
