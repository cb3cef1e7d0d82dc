"""What a plan is made of: the steps by which a read is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.place.edges import Edge
from weft.place.spec import Rows

RESIDUAL, NORMED = "residual", "normed"


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

    def __str__(self) -> str:
        if self.edge is not None:
            what = self.operand if isinstance(self.operand, str) else f"delta {self.operand}"
            epilogue = " + residual + norm" if self.op == "finish" else ""
            by = f" by {self.transport}" if self.edge.moves else ""
            return f"{self.edge}{epilogue} [{what}]{by}"
        if self.op == "norm":
            return f"norm on {self.rows.name}"
        return f"{self.op} delta {self.operand} on {self.rows.name}"
