"""One step's rows of one DP group, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SeqRows:
    """The rows of one sequence in a step.

    rows: its new tokens; context: its tokens that are in the cache already; pages: its page table, long enough for
    both; sample: whether logits are wanted for its last row.
    """

    rows: int
    context: int
    pages: Sequence[int]
    sample: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """A step of one DP group: T rows in B sequences, S of which are sampled. Zero rows are a legal batch.

    tokens, positions: int64 `[T]`; the rows of a sequence follow one another.
    pages: int32 `[B, W]`, the page table of each sequence; what lies behind its last token may be any number.
    lengths: int32 `[B]`, the cached tokens that a sequence's last row sees, its own included. 0: a padding sequence,
    which has one row, sees nothing and attends to zeros.
    slots: int64 `[T]`, where each row's key and value are stored (page · page_size + offset); −1: nowhere.
    sample_rows: int64 `[S]`.
    spans: (rows, context) of each sequence, known to the host; None where every sequence has one row and only the
    tensors know more, as inside a CUDA graph, whose tensors have the shape of its capacity.
    """

    tokens: Tensor
    positions: Tensor
    pages: Tensor
    lengths: Tensor
    slots: Tensor
    sample_rows: Tensor
    spans: tuple[tuple[int, int], ...] | None

    @staticmethod
    def build(
        tokens: Sequence[int],
        positions: Sequence[int],
        seqs: Sequence[SeqRows],
        page_size: int,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """Raises ValueError where the sequences do not add up to the tokens or a page table is too short."""
        if not len(tokens) == len(positions) == sum(s.rows for s in seqs):
            raise ValueError(f"{len(tokens)} tokens, {len(positions)} positions, {sum(s.rows for s in seqs)} rows")
        offsets = torch.arange(page_size)
        slots: list[Tensor] = []
        sampled: list[int] = []
        first = 0
        for seq in seqs:
            visible = seq.context + seq.rows
            if len(seq.pages) * page_size < visible:
                raise ValueError(f"{len(seq.pages)} pages of {page_size} do not hold {visible} tokens")
            pages = torch.tensor(seq.pages[seq.context // page_size : -(-visible // page_size)], dtype=torch.int64)
            start = seq.context % page_size
            slots.append((pages[:, None] * page_size + offsets).flatten()[start : start + seq.rows])
            if seq.sample:
                sampled.append(first + seq.rows - 1)
            first += seq.rows
        width = max((len(s.pages) for s in seqs), default=0)
        table = [[*s.pages, *[0] * (width - len(s.pages))] for s in seqs]
        return Batch(
            torch.tensor(tokens, dtype=torch.int64, device=device),
            torch.tensor(positions, dtype=torch.int64, device=device),
            torch.tensor(table, dtype=torch.int32, device=device).reshape(len(seqs), width),
            torch.tensor([s.context + s.rows for s in seqs], dtype=torch.int32, device=device),
            torch.cat(slots).to(device) if slots else torch.empty(0, dtype=torch.int64, device=device),
            torch.tensor(sampled, dtype=torch.int64, device=device),
            tuple((s.rows, s.context) for s in seqs),
        )
