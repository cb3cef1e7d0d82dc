"""Ops of a plan: the exchanges and local work of a step, in order.

A `StreamOp` brings the stream's rows to a read; a `BlockOp` exchanges a value inside the block that has read. Plans,
texts, counts and timers know both as an `Op`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from weft.planner.edges import Edge
from weft.planner.recipes import Gather, Recipe, Value
from weft.planner.row_formats import Wire
from weft.planner.spec import Rows

RESIDUAL, NORMED = "residual", "normed"
LOCAL = {
    "absorb": "add",
    "merge": "add deltas",
    "norm": "norm",
    "read": "read",
    "quantise": "quantise to",
    "pack": "quantise and pack as",
    "unpack": "unpack",
}
"""Names of the stream's local ops in texts."""
EPILOGUES = {"finish": " +norm"}
"""Suffixes of ops that do more with an edge than `move`."""
EdgeBytes = Callable[[Edge, tuple[int, ...]], float]
"""Bytes that the busiest rank receives for an edge with these tokens in each DP group."""


class Op:
    """One op of a plan.

    Attributes:
        kinds: kinds of its collectives, in order; empty for local work.
        by_counts: bytes follow from the rows of all DP groups, not from the contents of the rows.
    """

    __slots__ = ()
    group: str  # name of the communicating group; empty if none is named
    transport: str  # runs its collectives; `local` for local work, `nobody` if none offers them
    us: float  # predicted time
    max_call_rows: int = 0  # larger ops are split into several calls; 0: no limit
    optional: bool = False  # runs only in steps with a row that asks for it
    packed: bool = False  # the rows of a rank travel as one

    @property
    @abstractmethod
    def kinds(self) -> tuple[str, ...]: ...

    @property
    def by_counts(self) -> bool:
        return True

    @abstractmethod
    def brief(self) -> str:
        """Return the op in a few words, without its transport: `reduce_scatterv world → OWN +norm`."""

    def __str__(self) -> str:
        return f"{self.brief()} · {self.transport}"

    @property
    def collectives(self) -> tuple[str, ...]:
        """Kind of each call, in order."""
        return self.kinds

    def steps(self) -> Iterator[Op]:
        """Yield the op itself, or the ops that it is made of, in order."""
        yield self

    @abstractmethod
    def moved(self, edge_bytes: EdgeBytes, counts: tuple[int, ...]) -> float:
        """Return the bytes that the busiest rank receives, for `counts` tokens in each DP group."""

    def named_calls(self, capacity: int, live: int) -> list[tuple[str, int]]:
        """Return `BlockOp.calls` with a name for each; empty for ops `by_counts`."""
        return []

    @abstractmethod
    def as_dict(self, edge_bytes: EdgeBytes, counts: tuple[int, ...]) -> dict[str, Any]:
        """Return the op as plain values."""


@dataclass(frozen=True, slots=True)
class StreamOp(Op):
    """One op that serves a read. A delta's index is its place among the deltas that remain.

    move:   send `operand` (a delta's index, "residual" or "normed") along `edge`.
    merge:  add the delta `operand` to the equally placed delta `into`, which comes before it.
    absorb: add the complete delta `operand` to the residual (the first delta becomes the residual).
    norm:   normalise the residual. wire: its kernel also makes the rows in the format.
    read:   give the residual itself, in place of `norm`.
    finish: move, absorb and norm in one call of a transport: the edge with its epilogue.

    Ops on normalised rows in a format that GEMMs require; right after the norm, the norm's own kernel runs them:

    quantise: make the rows in `wire`'s format, in place.
    pack:     make them, and lay them out as they travel.
    unpack:   separate the parts of rows that have travelled.
    """

    op: Literal["move", "merge", "absorb", "norm", "read", "finish", "quantise", "pack", "unpack"]
    operand: int | str = RESIDUAL
    edge: Edge | None = None
    into: int = 0
    rows: Rows = Rows.OWN
    us: float = 0.0
    transport: str = "local"
    wire: Wire | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.edge.kind,) if self.edge is not None and self.edge.moves else ()

    @property
    def group(self) -> str:  # type: ignore[override]
        return (self.edge.group if self.edge is not None else None) or ""

    def brief(self) -> str:
        if self.edge is None:
            wire = f" {self.wire}" if self.wire and self.op != "norm" else ""
            return f"{LOCAL[self.op]}{wire} on {self.rows.name}"
        of = f"{self.operand}: " if isinstance(self.operand, str) else ""
        over = f" {self.edge.group}" if self.edge.group else ""
        wire = f" in {self.edge.dst.wire}" if self.edge.dst.wire else ""
        owes = f", owes {self.edge.dst.owes}" if self.edge.dst.owes else ""
        return f"{of}{self.edge.kind}{over} → {self.edge.dst.rows.name}{wire}{owes}{EPILOGUES.get(self.op, '')}"

    def moved(self, edge_bytes: EdgeBytes, counts: tuple[int, ...]) -> float:
        return 0.0 if self.edge is None else edge_bytes(self.edge, counts)

    def as_dict(self, edge_bytes: EdgeBytes, counts: tuple[int, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {"op": self.op, "us": finite(self.us)}
        if self.edge is None:
            return result | {"rows": self.rows.name}
        return result | {
            "edge": self.edge.kind,
            "group": self.edge.group,
            "from": str(self.edge.src),
            "to": str(self.edge.dst),
            "operand": self.operand if isinstance(self.operand, str) else f"delta {self.operand}",
            "bytes": int(self.moved(edge_bytes, counts)),
            "transport": self.transport,
        }


def with_formats(steps: Sequence[StreamOp]) -> tuple[StreamOp, ...]:
    """Return the ops of a read, with a `quantise` or `pack` right after the norm merged into the norm's kernel."""
    pairs = zip(steps, (*steps[1:], None), strict=True)
    return tuple(replace(op, wire=then.wire) if then and op.op in ("norm", "finish") else op for op, then in pairs)


@dataclass(frozen=True, slots=True)
class BlockValue:
    """Value that a block exchanges between ranks after it has read the stream."""

    value: Value
    group: str
    packed: bool = False  # the rows of a rank travel as one
    optional: bool = False  # exchanged only in steps with a row that asks for it
    spares: bool = False  # without it, a value that only some rows ask for would be exchanged in every step

    def of(self, tokens: int) -> tuple[Value, str, int]:
        """Return the value, its group, and its rows in a step of `tokens` tokens in each DP group."""
        if self.packed and isinstance(self.value, Gather):
            return replace(self.value, row_bytes=self.value.row_bytes * tokens), self.group, 1
        return self.value, self.group, tokens


@dataclass(frozen=True, slots=True, eq=False)
class BlockOp(Op):
    """Recipe for `rows` rows of a value, with the transport of its collectives and the predicted time.

    parts: ops of a recipe that is made of other values. Compares by identity, since calls in all layers are counted by
    it: `BlockPrices.plan` returns the same object for the same arguments.
    """

    value: Value
    group: str
    ranks: int
    rows: int
    recipe: Recipe
    transport: str
    us: float
    max_call_rows: int
    parts: tuple[BlockOp, ...] = ()
    optional: bool = False
    packed: bool = False

    def steps(self) -> Iterator[BlockOp]:
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.steps()

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.recipe.kinds(self.value, self.ranks)

    @property
    def by_counts(self) -> bool:
        return self.recipe.alike is not None

    def moved(self, edge_bytes: EdgeBytes, counts: tuple[int, ...]) -> int:
        live = self.recipe.alike(self.value, counts) if self.recipe.alike else self.rows
        return sum(moved for _, moved in self.calls(self.rows, live))

    def calls(self, capacity: int, live: float) -> list[tuple[str, int]]:
        """Return (kind, bytes that a rank receives) of each collective. capacity: rows of tensors; live: used rows."""
        result: list[tuple[str, int]] = []
        for begin in range(0, capacity, self.max_call_rows):
            rows = max(0, min(self.max_call_rows, live - begin))
            result += [(kind, int(moved)) for kind, moved in self.recipe.calls(self.value, self.ranks, rows)]
        return result

    @property
    def bytes(self) -> int:
        """Bytes that a rank receives for all rows."""
        return sum(moved for _, moved in self.calls(self.rows, self.rows))

    @property
    def collectives(self) -> tuple[str, ...]:
        return self.kinds * -(-self.rows // self.max_call_rows)

    def named_calls(self, capacity: int, live: int) -> list[tuple[str, int]]:
        return [(f"{self._named(kind)} · {self.transport}", moved) for kind, moved in self.calls(capacity, live)]

    def brief(self) -> str:
        return self._named(" + ".join(self.kinds)) if self.kinds else self.value.what

    def _named(self, kind: str) -> str:
        by = "" if kind == self.recipe.name else f"{self.recipe.name}: "
        return f"{self.value.what}: {by}{kind} {self.group}"

    def as_dict(self, edge_bytes: EdgeBytes, counts: tuple[int, ...]) -> dict[str, Any]:
        return {
            "op": "settle",
            "value": self.value.what,
            "recipe": self.recipe.name,
            "group": self.group,
            "bytes": self.bytes,
            "transport": self.transport,
            "us": finite(self.us),
            "asked": self.optional,
        }


def finite(us: float) -> float | None:
    """Return `us`, or None if an op is not offered: JSON has no infinity."""
    return None if us == math.inf else us
