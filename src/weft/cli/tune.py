"""`weft tune`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress

from weft.bench.host import describe_host
from weft.bench.ranks import run_ranks
from weft.bench.tune import find_sizes, price, price_locals
from weft.cli.command import UserError
from weft.comm.shm import MAX_RANKS
from weft.place.cost import host_table

SIZES = [1 << p for p in range(12, 25, 2)]


@dataclass(frozen=True)
class Command:
    """Measure this host, and write the table by which the planner chooses transports and edges.

    The engine reads the table from then on, unless --cost names another; `weft plan --cost TABLE.json` shows what it
    makes of it. Run it while the machine is idle, with as many ranks as will be served with.

    Examples:
      weft tune                        2 and 4 ranks, all transports: about a minute
      weft tune --ranks 8 --out eight.json
    """

    ranks: tuple[int, ...] = (2, 4)
    """Numbers of ranks to measure."""
    transports: tuple[Literal["shm", "gloo"], ...] = ("shm", "gloo")
    """What to measure; the engine's --transport auto needs both."""
    out: Path | None = None
    """Where to write the table; left out, where the engine looks for it."""

    def run(self) -> int:
        """Writes the table and says where. Raises UserError."""
        if not all(2 <= n <= MAX_RANKS for n in self.ranks):
            raise UserError(f"--ranks takes numbers from 2 to {MAX_RANKS}")
        out = self.out or host_table()
        console = Console(stderr=True)
        transports: dict[str, list[dict[str, Any]]] = {}
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("sizes for shm", total=None)
            [tuning] = list(run_ranks(min(self.ranks), find_sizes, min(self.ranks)))
            [points] = list(run_ranks(1, price_locals, SIZES))
            for world in sorted(self.ranks):
                bar.update(task, description=f"{world} ranks")
                for row in run_ranks(world, price, world, list(self.transports), SIZES, tuning):
                    transports.setdefault(row.pop("transport"), []).append(row)
        table = {"host": describe_host(), "shm_tuning": tuning, "transports": transports} | points
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(table, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"cannot write {out}: {error}; choose another with --out") from error
        rows = sum(len(found) for found in transports.values())
        print(
            f"{out}: {rows} times of {', '.join(transports)}; shm takes two hops above {tuning['two_hop_bytes']} bytes"
        )
        return 0
