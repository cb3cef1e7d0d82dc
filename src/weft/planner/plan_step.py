"""The steps by which a plan serves a read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.planner.edges import Edge
from weft.planner.row_formats import Wire
from weft.planner.spec import Rows

RESIDUAL, NORMED = "residual", "normed"
LOCAL = {
    "absorb": "add",
    "merge": "add deltas",
    "norm": "norm",
    "quantise": "quantise to",
    "pack": "quantise and pack as",
    "unpack": "unpack",
}
"""Local steps in a few words."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a read.

    move:   send `operand` (a delta's index, "residual" or "normed") along `edge`.
    merge:  add the delta `operand` to the equally placed delta `into`, which stands before it.
    absorb: add the complete delta `operand` to the residual (the first delta becomes the residual).
    norm:   normalise the residual.
    finish: move, absorb and norm in one call of a transport: the edge with its epilogue.

    Of normalised rows that products take in a format. Right after the norm, the norm's own kernel makes them:

    quantise: make the rows in `wire`'s format, in place.
    pack:     make them, and lay them out as they travel.
    unpack:   separate the parts of rows that have travelled.

    A delta's index is its place among those that are left. transport: the transport of the edge. us: predicted time.
    """

    op: Literal["move", "merge", "absorb", "norm", "finish", "quantise", "pack", "unpack"]
    operand: int | str = RESIDUAL
    edge: Edge | None = None
    into: int = 0
    rows: Rows = Rows.OWN
    us: float = 0.0
    transport: str = "local"
    wire: Wire | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its collective, if it has one."""
        return (self.edge.kind,) if self.edge is not None and self.edge.moves else ()

    @property
    def group(self) -> str:
        """The group of its collective; empty where none is named."""
        return (self.edge.group if self.edge is not None else None) or ""

    def brief(self) -> str:
        """The step in a few words, without its transport: `reduce_scatterv world → OWN +norm`."""
        if self.edge is None:
            return f"{LOCAL[self.op]}{f' {self.wire}' if self.wire else ''} on {self.rows.name}"
        of = f"{self.operand}: " if isinstance(self.operand, str) else ""
        over = f" {self.edge.group}" if self.edge.group else ""
        wire = f" in {self.edge.dst.wire}" if self.edge.dst.wire else ""
        owes = f", owes {self.edge.dst.owes}" if self.edge.dst.owes else ""
        norm = " +norm" if self.op == "finish" else ""
        return f"{of}{self.edge.kind}{over} → {self.edge.dst.rows.name}{wire}{owes}{norm}"

    def __str__(self) -> str:
        return f"{self.brief()} · {self.transport}"
