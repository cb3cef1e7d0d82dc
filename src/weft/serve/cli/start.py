"""Start of a command's engine, with its progress on stderr."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import tyro

from weft.serve.cli.progress import progress_bar, startup_progress

LAYOUT_HELP = (
    "given: the layout options below; auto: the best layout for this host, by times that weft advise measured on it, "
    "else the cheapest by the cost table. auto keeps sizes that you give, such as --attn-tp 2."
)
LayoutChoice = Annotated[Literal["given", "auto"], tyro.conf.arg(help=LAYOUT_HELP)]


def with_layout(config: Any, choice: LayoutChoice) -> Any:
    """Return a configuration with the layout of --layout. One that is chosen is printed on stderr, with the reason."""
    if choice == "auto":
        from weft.engine.advise.advice import choose_layout

        config, line = choose_layout(config)
        print(line, file=sys.stderr, flush=True)
    return config


def start_engine(config: Any, kv_events: Any = None) -> Any:
    """Return a started engine, and show its progress on stderr. kv_events: as in `Engine`."""
    with startup_progress() as start:
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from transformers.utils import logging as transformers_logging

        from weft.engine.controller.engine import Engine
        from weft.engine.worker.open_transports import lacks_cost_table

        if lacks_cost_table(config):
            from weft.serve.cli.cmd_tune import tune_first

            tune_first(config.ranks_of_host)
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
        with progress_bar(*columns) as bar:
            # Without a total the bar swings: it moves while processes start, as their progress cannot be counted.
            start.what = f"starting {config.mesh.world} rank(s)"
            task = bar.add_task(start.what, total=None)

            def progress(what: str, part: float) -> None:
                start.what, start.part = what, part
                bar.update(task, description=what, completed=part, total=1.0)

            return Engine(config, progress, kv_events)
