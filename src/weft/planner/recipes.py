"""Values that blocks exchange between ranks, and the recipes that exchange them: one table.

| value | from | to | recipe | collectives | between them |
|---|---|---|---|---|---|
| Gather | a rank's rows | the rows of all ranks of the group | all_gatherv | all_gatherv | nothing |
| Merge | all heads of the group over a rank's keys, with log-sum-exp: owes a softmax merge | own heads, complete | ag_rs | all_gatherv of lse, reduce_scatterv | each rank scales its output by its weight, in the output's dtype |
| | | | a2a | all_to_allv of output and lse in one | pack before, combine in rank order and float32 after |
| | | | fused | merge_scatterv | nothing |
| Permute | rows of each rank for others | the other ranks' rows for it | all_to_allv | all_to_allv | nothing |
| Kernel | data of a rank | its result | local | none | itself |
| Dispatch | own rows, for experts of any rank | own rows, with their experts' sums | all_to_allv | three Permutes: counts, rows with their experts, results | two Kernels: pack before, add after |
| Prompt | tokens that prompts see, parts of them on each rank | own heads' outputs over all | gather | a Gather of the tokens | a Kernel: copy before |
| | | | merge | a Gather of queries and a Merge of outputs | nothing |

Queries of a dcp group, cached tokens that prompts see, sums of squares of heads that are normalised together, logits
and best tokens of a split vocabulary (an argmax over the ranks) are gathers.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from weft.planner import exchange
from weft.planner.exchange import Exchange
from weft.planner.experts import Dispatch, Kernel, Permute
from weft.planner.spec import Mesh

QUERIES, TOKENS = "queries", "cached tokens"
"""Names in plans of the values that attention gathers."""
LSE_BYTES, UNIT_BYTES = 4, 16


@dataclass(frozen=True, slots=True)
class Gather:
    """Rows of `row_bytes` bytes of each rank, for all ranks of the group."""

    what: str  # name in plans
    row_bytes: int
    relaid: bool = False  # the received rows are copied once more, into another layout
    live: bool = False  # only the device knows each rank's rows, so transports must accept `LiveSizes`

    def bytes(self, rows: int, ranks: int) -> int:
        """Return the bytes of a call's largest tensor: all ranks' rows, padded to units of 16 bytes."""
        return rows * ranks * (-(-self.row_bytes // UNIT_BYTES) * UNIT_BYTES)


@dataclass(frozen=True, slots=True)
class Merge:
    """Attention outputs of all `heads` heads of the dcp group, with `dim` elements each; a row is one token."""

    heads: int
    dim: int
    element_bytes: int
    what: ClassVar[str] = "outputs"

    def row_bytes(self) -> int:
        """Bytes of a token's outputs and their lse."""
        return self.heads * (self.dim * self.element_bytes + LSE_BYTES)

    def bytes(self, rows: int, ranks: int) -> int:
        """Return the bytes of the largest tensor of any recipe's calls: all ranks' lse, padded to units of 16 bytes."""
        head = -(-self.dim * self.element_bytes // UNIT_BYTES) * UNIT_BYTES
        return rows * self.heads * (max(head, ranks * LSE_BYTES) + LSE_BYTES) + 2 * UNIT_BYTES * ranks


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens seen by a step's prompts, sharded over the ranks; a row is one of the step's tokens."""

    seen: int  # maximum number of these tokens on a rank, of `token_bytes` bytes each
    token_bytes: int
    query_bytes: int  # bytes of a row's queries on a rank; 0: each rank computes the queries of all
    merge: Merge  # merge of the outputs
    what: ClassVar[str] = "what prompts see"

    def gathered(self, ranks: int, rows: int) -> Parts:
        """Return the parts of `gather`: each rank gets all tokens seen, and attends with its own heads."""
        copy = Kernel("copy cached tokens", 2.0 * self.token_bytes)
        return (copy, self.seen), (Gather(TOKENS, self.token_bytes), self.seen)

    def merged(self, ranks: int, rows: int) -> Parts:
        """Return the parts of `merge`: each rank attends with all heads over its own tokens, as in decode steps."""
        queries = ((Gather(QUERIES, self.query_bytes, relaid=True), rows),) if self.query_bytes else ()
        return *queries, (self.merge, rows)

    def bytes(self, rows: int, ranks: int) -> int:
        """Return the bytes of the largest tensor, for either recipe."""
        parts = (*self.gathered(ranks, rows), *self.merged(ranks, rows))
        return max(value.bytes(n, ranks) for value, n in parts)


Value = Gather | Merge | Permute | Kernel | Dispatch | Prompt
Parts = tuple[tuple[Value, int], ...]
"""Values, and the number of rows of each."""
Calls = list[tuple[str, float]]
"""Collectives in order: kind and bytes that a rank receives."""


class Recipe(NamedTuple):
    """One recipe for a kind of value.

    Attributes:
        calls: (value, ranks, rows) → its collectives; none for a recipe with parts.
        touched: (value, ranks, rows) → bytes that each kernel between them reads and writes.
        alike: (value, counts) → rows with the same bytes, for bytes that follow from the rows of all DP groups.
        parts: (value, ranks, rows) → the other values that the recipe is made of.
    """

    name: str
    calls: Callable[[Any, int, float], Calls] = lambda value, ranks, rows: []
    touched: Callable[[Any, int, int], list[float]] = lambda value, ranks, rows: []
    once: bool = False  # `touched` is one kernel after all calls, if rows go in several calls
    whole: bool = False  # rows are never split over several calls
    live: bool = False  # in a captured step only the device knows the sizes, so transports must accept `LiveSizes`
    alike: Callable[[Any, tuple[int, ...]], float] | None = None
    parts: Callable[[Any, int, int], Parts] | None = None

    def kinds(self, value: Value, ranks: int) -> tuple[str, ...]:
        """Return the kinds of its collectives, for rows that fit one call."""
        return tuple(kind for kind, _ in self.calls(value, ranks, 1))


def _gather_calls(value: Gather, ranks: int, rows: float) -> Calls:
    return [("all_gatherv", rows * (ranks - 1) * value.row_bytes)]


def _gather_touched(value: Gather, ranks: int, rows: int) -> list[float]:
    return [2.0 * value.row_bytes * rows * ranks] if value.relaid else []


def _outputs(value: Merge, rows: float) -> tuple[float, float]:
    """Return the bytes of a rank's outputs, and of their lse."""
    lses = rows * value.heads * LSE_BYTES
    return rows * value.row_bytes() - lses, lses


def _ag_rs_calls(value: Merge, ranks: int, rows: float) -> Calls:
    outs, lses = _outputs(value, rows)
    return [("all_gatherv", lses * (ranks - 1.0)), ("reduce_scatterv", outs * (ranks - 1) / ranks)]


def _ag_rs_touched(value: Merge, ranks: int, rows: int) -> list[float]:
    outs, lses = _outputs(value, rows)
    return [2 * outs + ranks * lses]


def _at_once(kind: str) -> Callable[[Merge, int, float], Calls]:
    return lambda value, ranks, rows: [(kind, sum(_outputs(value, rows)) * (ranks - 1) / ranks)]


def _a2a_touched(value: Merge, ranks: int, rows: int) -> list[float]:
    total_bytes = sum(_outputs(value, rows))
    return [2 * total_bytes, total_bytes + total_bytes / ranks]


def _permute_calls(value: Permute, ranks: int, tokens: float) -> Calls:
    return [("all_to_allv", (ranks - 1) * (value.fixed_bytes + tokens / value.shared * value.row_bytes))]


def _kernel_touched(value: Kernel, ranks: int, rows: int) -> list[float]:
    return [rows * value.row_bytes, *[0.0] * value.launches]


RECIPES: dict[type[Value], tuple[Recipe, ...]] = {
    Gather: (Recipe("all_gatherv", _gather_calls, _gather_touched, once=True),),
    Merge: (
        Recipe("ag_rs", _ag_rs_calls, _ag_rs_touched),
        Recipe("a2a", _at_once("all_to_allv"), _a2a_touched),
        Recipe("fused", _at_once("merge_scatterv")),
    ),
    Permute: (Recipe("all_to_allv", _permute_calls, whole=True, live=True, alike=Permute.alike),),
    Kernel: (Recipe("local", touched=_kernel_touched),),
    Dispatch: (Recipe("all_to_allv", parts=Dispatch.parts),),
    Prompt: (Recipe("gather", parts=Prompt.gathered), Recipe("merge", parts=Prompt.merged)),
}
"""Table of recipes; other engines use the first. `weft.stream.block_exchanges` carries them out."""


def block_exchanges(mesh: Mesh) -> set[Exchange]:
    """Return all exchanges of a mesh that merge attention or send rows to experts; the stream has the gathers."""
    kinds = (exchange.all_gatherv, exchange.reduce_scatterv, exchange.all_to_allv, exchange.merge_scatterv)
    merges = {kind(mesh.dcp) for kind in kinds} if mesh.dcp > 1 else set()
    return merges | ({exchange.all_to_allv(mesh.world)} if mesh.world > 1 else set())
