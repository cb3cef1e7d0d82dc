"""The server's process once it serves."""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from typing import Any

import pytest

from server.conftest import Served
from weft.cli import cmd_serve
from weft.server import log, run


def test_no_collection_looks_through_what_was_there_at_the_start_and_threads_get_their_turns(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A collection would hold the interpreter's lock for tenths of a second, and an event loop that reads a burst of
    requests would have it for as long: no stream would get a token meanwhile."""
    frozen, turns, usual = [], [], sys.getswitchinterval()
    monkeypatch.setattr(cmd_serve, "start_engine", lambda *args: nullcontext(served.engine))
    monkeypatch.setattr(cmd_serve, "stop_on_sigterm", lambda: None)
    monkeypatch.setattr(log, "configure", lambda form: None)

    def serves(server: run.Server, sockets: Any) -> None:
        frozen.append(gc.get_freeze_count())
        turns.append(sys.getswitchinterval())

    monkeypatch.setattr(run.Server, "run", serves)
    gc.unfreeze()
    try:
        assert cmd_serve.Command(port=0).run() == 0
    finally:
        gc.unfreeze()
        sys.setswitchinterval(usual)
    assert frozen and frozen[0] > 10_000
    assert turns and turns[0] < usual / 10
    limits = served.engine.config
    sizes = f"{limits.batch_sequences:,} sequences, {limits.batch_tokens:,} tokens a step"
    assert f"a DP group: {sizes}, {limits.cached_tokens:,} tokens in the cache\n" in capsys.readouterr().err
