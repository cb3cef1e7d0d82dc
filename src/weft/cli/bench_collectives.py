"""`weft bench collectives`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import Progress

from weft.bench.collectives import EDGES, FLOOR, MIXED, Case, Timing, measure
from weft.bench.host import describe_host
from weft.bench.ranks import run_ranks
from weft.cli.command import UserError
from weft.comm.shm import ShmTuning
from weft.place.cost import host_table, read_tuning

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Command:
    """Time every edge of transport shm beside gloo, DeepSpeed and the machine's copy bandwidth, in one run.

    Each figure is the median over calls, the whole call from Python, of the slowest rank; inputs are rewritten before
    each call. `shm` takes an input that lies anywhere, `zero copy` one in the shared arena, as in the engine. `floor`
    is what reading, adding and writing the same bytes takes with no protocol. Compare ratios: hosts are noisy.

    Examples:
      weft bench collectives                                        everything: some minutes
      weft bench collectives --ranks 2 --sizes 1K 64K 1M --edges all_reduce
      weft bench collectives --peers gloo deepspeed --json results.json
    """

    device: Literal["cpu"] = "cpu"
    """Where the ranks are."""
    ranks: tuple[int, ...] = (2, 4)
    """Numbers of ranks; a process each. With four or more, the mixed edges are measured too."""
    sizes: tuple[str, ...] = ("1K", "4K", "16K", "64K", "256K", "1M", "4M", "16M", "64M")
    """Bytes of the exchange."""
    dtypes: tuple[Literal["bf16", "fp32"], ...] = ("bf16", "fp32")
    edges: tuple[str, ...] = EDGES
    """Which exchanges; left out, all."""
    peers: tuple[Literal["gloo", "deepspeed"], ...] = ("gloo",)
    """Whom to compare with. deepspeed must be installed: README says how."""
    json: Path | None = None
    """Write the figures, and what they were measured on, to this file."""

    def run(self) -> int:
        """Prints a table; writes JSON where asked. Raises UserError."""
        if unknown := set(self.edges) - set(EDGES):
            raise UserError(f"no edge {min(unknown)!r}; one of {', '.join(EDGES)}")
        if min(self.ranks) < 2:
            raise UserError(f"--ranks {min(self.ranks)}: a collective takes two ranks or more")
        sizes = [parse_size(s) for s in self.sizes]
        tuning = ShmTuning(**read_tuning(host_table())) if host_table().is_file() else ShmTuning()
        console = Console(stderr=True)
        timings: list[Timing] = []
        try:
            with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
                for ranks in self.ranks:
                    cases = self._cases(ranks, sizes)
                    task = bar.add_task(f"{ranks} ranks", total=len(cases))
                    for timing in run_ranks(ranks, measure, cases, list(self.peers), tuning):
                        timings.append(timing)
                        print(line(timing), flush=True)
                        bar.advance(task)
        finally:
            if self.json is not None:  # also what an interrupted run has found so far
                head = {"what": "weft bench collectives --device cpu", "host": describe_host(), "tuning": str(tuning)}
                rows = [json.dumps(t.row()) for t in timings]
                head_text = json.dumps(head, indent=1).removesuffix("\n}")
                self.json.write_text(f'{head_text},\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n")
        return 0

    def _cases(self, ranks: int, sizes: list[int]) -> list[Case]:
        mixed = ranks >= 4 and ranks % 2 == 0
        return [
            Case(ranks, edge, dtype, size)
            for edge in self.edges
            if mixed or edge not in MIXED
            for dtype in (self.dtypes if edge != "barrier" else self.dtypes[:1])
            for size in (sizes if edge != "barrier" else sizes[:1])
        ]


def line(timing: Timing) -> str:
    """One row of the table: the case, each carrier's µs, and how many times as long the peers and the floor take."""
    case, best = timing.case, min(us for name, us in timing.us.items() if name.startswith("shm"))
    cells = [
        f"{name} {us:.1f}" + ("" if name.startswith("shm") else f" ({us / best:.2f}×)")
        for name, us in timing.us.items()
    ]
    order = sorted(cells, key=lambda c: c.startswith(FLOOR))
    return f"{case.ranks} ranks  {case.edge:26} {case.dtype} {show_size(case.bytes):>5}  " + "  ".join(order)


def parse_size(text: str) -> int:
    """`64K` → 65536. Raises UserError."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in UNITS else (text, "")
    if not number.isdigit() or not (size := int(number) * UNITS.get(unit, 1)) or size % 16:
        raise UserError(f"size {text!r} is not a number of bytes such as 1K, 64K or 4M, in multiples of 16")
    return size


def show_size(size: int) -> str:
    """65536 → `64K`."""
    return next((f"{size // n}{u}" for u, n in reversed(UNITS.items()) if size % n == 0), str(size))
