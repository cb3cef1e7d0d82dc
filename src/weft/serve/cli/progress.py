"""Progress on stderr: a bar on a terminal, otherwise lines."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

SAY_S = 5.0
"""Seconds between two lines of progress."""


class Start:
    """Progress of a start. what: the current step; part: the fraction done, None if unknown."""

    def __init__(self) -> None:
        self.what = "importing what the engine is made of"
        self.part: float | None = None

    def __str__(self) -> str:
        return self.what if self.part is None else f"{self.what}: {self.part:.0%}"


@contextmanager
def startup_progress(pause_s: float = SAY_S) -> Iterator[Start]:
    """Print the progress of a start every `pause_s` seconds, unless stderr is a terminal."""
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


@contextmanager
def shown_progress(what: str, pause_s: float = SAY_S) -> Iterator[Callable[[str, float], None]]:
    """Show progress, beginning with `what`: a bar on a terminal, otherwise a line every `pause_s` seconds. Yields a
    function of the current step and its fraction done."""
    with startup_progress(pause_s) as start, progress_bar() as bar:
        start.what, task = what, bar.add_task(what, total=1.0)

        def progress(what: str, part: float) -> None:
            start.what, start.part = what, part
            bar.update(task, description=what, completed=part)

        yield progress


def progress_bar(*columns: ProgressColumn) -> Progress:
    """Return a bar that vanishes once done, hidden unless stderr is a terminal. columns: rich's own if omitted."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
