"""Interface of attention over a paged cache: its inputs, and the two kernels of a backend.

A backend is a kernel for sequences of one row, a kernel for sequences of several rows, and an entry of the table in
`weft.engine.attention.backend_registry`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from weft.engine.attention.forward_batch import Batch, PromptSpan
from weft.engine.attention.projections import Absorbed
from weft.kernels.float8 import Stored


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries of a layer in a step.

    Args:
        q: `[T, heads, D]`.
        scale: factor of the scores q·k.
        lse: return the log-sum-exp of each row too.
        absorbed: remaining projections of query and output, for a latent cache.
        gathered: q has the heads of all ranks of a dcp group, in rank order. The output always has this rank's heads.
    """

    q: Tensor
    scale: float
    lse: bool = False
    absorbed: Absorbed | None = None
    gathered: bool = False

    def of_rank(self, place: int, ranks: int) -> Queries:
        """Return the heads of the rank at `place` of `ranks` in a dcp group."""
        q = self.q.chunk(ranks, dim=1)[place] if self.gathered else self.q
        absorbed = self.absorbed and self.absorbed.part(place, ranks)
        return Queries(q, self.scale, self.lse, absorbed)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Sequences of one row in a step.

    Args:
        pages: int32 `[B, W]`, page tables; undefined after a sequence's tokens.
        lengths: int32 `[B]`, tokens of each on this rank; 0: its row sees nothing.
        longest: maximum of `lengths` over ranks; None: only the device knows it.
    """

    pages: Tensor
    lengths: Tensor
    longest: int | None = None


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Sequences of several rows in a step. Rows of other sequences are neither read nor written.

    Args:
        batch: the step; `starts` gives the rows of a sequence.
        pages: int32 `[B, W]`, page tables of all sequences of the step.
        page_size: tokens of a page.
        known: the sequences of several rows; None: only the device knows them, as in a CUDA graph.
        held: number of a sequence's first n tokens in these pages, for an int or a tensor; None: all n.
        may_copy: the kernel may copy tokens.
        may_expand: the kernel may expand latent vectors (`PromptKernel.expand`).
    """

    batch: Batch
    pages: Tensor
    page_size: int
    known: tuple[PromptSpan, ...] | None
    held: Callable[[Any], Any] | None = None
    may_copy: bool = True
    may_expand: bool = True

    @property
    def limits(self) -> Tensor:
        """Return int32 `[T]`: a row sees the first `limits` tokens of its sequence in these pages."""
        seen = self.batch.positions + 1
        return (seen if self.held is None else self.held(seen)).int()


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Tensors of a layer's attention.

    Args:
        q: `[T, heads, D]`. A row sees its sequence's tokens up to its own, within the cache's window if it has one.
        keys: `[slots, kv_heads, D]`, where slot = page · page_size + offset.
        values: `[slots, kv_heads, value dim]`.
        scale: factor of the scores q·k.
        out: `[T, heads, value dim]`, filled; 0 for a row that sees nothing.
        lse: float32 `[T, heads]`, filled with the natural logarithm of the sum of exponentials of each row's scaled
            scores, −∞ for a row that sees nothing; None: not requested.
    """

    q: Tensor
    keys: Stored
    values: Stored
    scale: float
    out: Tensor
    lse: Tensor | None

    def part(self, rows: slice | Tensor) -> AttentionInputs:
        """Return the inputs of some rows: views for a slice, otherwise copies, which the caller writes back."""
        q = self.q[rows]
        if isinstance(rows, slice):
            return replace(self, q=q, out=self.out[rows], lse=self.lse if self.lse is None else self.lse[rows])
        shape = *q.shape[:2], self.out.shape[-1]
        lse = None if self.lse is None else self.lse.new_empty(q.shape[:2])
        return replace(self, q=q, out=q.new_empty(shape), lse=lse)


class DecodeKernel(Protocol):
    """Attention of sequences of one row, made with its cache.

    CUDA graphs capture `plan` and `run`, or replay them with the same tensors: nothing may be read back from the device
    if `DecodeRows.longest` is None.
    """

    def plan(self, rows: DecodeRows) -> Any:
        """Return the immutable values that the layers of a step share."""

    def run(self, plan: Any, inputs: AttentionInputs) -> Tensor | None:
        """Fill `inputs.out`. Return the log-sum-exps if requested: `inputs.lse` or another tensor."""


class PromptKernel(Protocol):
    """Attention of sequences of several rows, made with its cache. CUDA graphs capture it like `DecodeKernel`, with
    `PromptRows.known` None. Kernels derive from this class for its defaults."""

    copies: bool = False
    """Prompts attend to copies of their tokens, of up to `MAX_ELEMENTS` elements in a step."""
    captures_sharded: bool = False
    """CUDA graphs may hold prompts with tokens sharded over dcp. `PromptRows.known` is None there, and
    `PromptRows.held` counts a rank's tokens."""

    def plan(self, rows: PromptRows) -> Any:
        """Return the immutable values that the layers of a step share."""

    def run(self, plan: Any, inputs: AttentionInputs) -> Any:
        """Fill these sequences' rows of `inputs.out`, and of `inputs.lse` in place. Return the plan for `expand`."""

    def absorbed_rows(self, plan: Any) -> Tensor | None:
        """Return bool `[T]`: rows that attend with absorbed projections. `expand` fills the others. None: all rows."""
        return None

    def expand(self, plan: Any, inputs: AttentionInputs, plain: Tensor, up: Tensor, out: Tensor) -> None:
        """Fill rows of prompts that attend with keys and values of heads, expanded from latent vectors.

        Args:
            plan: result of `run`.
            inputs: inputs of `run`; the first elements of these rows' queries are undefined.
            plain: `[T, heads, n]`, first elements of queries before the projection.
            up: as in `Absorbed`.
            out: `[T, heads, value dim]`.
        """
