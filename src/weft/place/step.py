"""What a plan is made of: the steps by which a read is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.place.edges import Edge
from weft.place.spec import Rows

RESIDUAL, NORMED = "residual", "normed"
LOCAL = {"absorb": "add", "merge": "add deltas", "norm": "norm"}
"""Local steps in few words."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a read.

    move:   send `operand` (a delta's index, "residual" or "normed") along `edge`.
    merge:  add the delta `operand` to the equally placed delta `into`, which stands before it.
    absorb: add the complete delta `operand` to the residual (the first delta becomes the residual).
    norm:   normalise the residual.
    finish: move, absorb and norm in one call of a transport: the edge with its epilogue.

    A delta's index is its place among those that are left. transport: who carries the edge out. us: predicted time.
    """

    op: Literal["move", "merge", "absorb", "norm", "finish"]
    operand: int | str = RESIDUAL
    edge: Edge | None = None
    into: int = 0
    rows: Rows = Rows.OWN
    us: float = 0.0
    transport: str = "local"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of its collective, if it has one."""
        return (self.edge.kind,) if self.edge is not None and self.edge.moves else ()

    @property
    def group(self) -> str:
        """Of its collective; empty where none is named."""
        return (self.edge.group if self.edge is not None else None) or ""

    def brief(self) -> str:
        """The step in few words, without who carries it out: `reduce_scatterv world → OWN +norm`."""
        if self.edge is None:
            return f"{LOCAL[self.op]} on {self.rows.name}"
        of = f"{self.operand}: " if isinstance(self.operand, str) else ""
        over = f" {self.edge.group}" if self.edge.group else ""
        owes = f", owes {self.edge.dst.owes}" if self.edge.dst.owes else ""
        norm = " +norm" if self.op == "finish" else ""
        return f"{of}{self.edge.kind}{over} → {self.edge.dst.rows.name}{owes}{norm}"

    def __str__(self) -> str:
        return f"{self.brief()} · {self.transport}"
