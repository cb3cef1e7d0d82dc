"""Starts the engine of a command, with a progress bar on stderr, or lines where that is no terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SAY_S = 5.0
"""Seconds between two lines that say how far the start is."""


class Start:
    """How far it is. what: is being done; part: the fraction of it that is done, None where nothing can be counted."""

    def __init__(self) -> None:
        self.what = "importing what the engine is made of"
        self.part: float | None = None

    def __str__(self) -> str:
        return self.what if self.part is None else f"{self.what}: {self.part:.0%}"


def start_engine(config: Any, kv_events: Any = None) -> Any:
    """A started engine, with a progress bar on stderr while it loads. kv_events: as `Engine` takes it."""
    with start_said() as start:
        return _start_engine(config, kv_events, start)


@contextmanager
def start_said(pause_s: float = SAY_S) -> Iterator[Start]:
    """Says every few seconds how far a start is, unless stderr is a terminal."""
    start, ended = Start(), threading.Event()

    def say() -> None:
        while not ended.wait(pause_s):
            print(f"weft: {start}", file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        threading.Thread(target=say, name="weft-start", daemon=True).start()
    try:
        yield start
    finally:
        ended.set()


def _start_engine(config: Any, kv_events: Any, start: Start) -> Any:
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from transformers.utils import logging as transformers_logging

    from weft.cli.progress import progress_bar
    from weft.engine.engine import Engine
    from weft.engine.worker.open_transports import untuned

    if untuned(config):
        from weft.cli.cmd_tune import tune_first

        tune_first(config.ranks_of_host)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with progress_bar(*columns) as bar:
        # Without a total the bar swings, so that it moves while processes start, of which nothing can be counted.
        start.what = f"starting {config.mesh.world} rank(s)"
        task = bar.add_task(start.what, total=None)

        def progress(what: str, part: float) -> None:
            start.what, start.part = what, part
            bar.update(task, description=what, completed=part, total=1.0)

        return Engine(config, progress, kv_events)
