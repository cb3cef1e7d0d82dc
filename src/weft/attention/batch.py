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

    tokens, positions: int64 `[T]`. slots: int64 `[T]`, where each row's key and value go (page · page_size + offset).
    decodes: the sequences of one row, as (rows `[D]`, slots `[D, longest]`, mask `[D, longest]`), or None.
    prefills: the others, as (first row, rows, context, slots of every visible token `[context + rows]`).
    sample_rows: int64 `[S]`.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    decodes: tuple[Tensor, Tensor, Tensor] | None
    prefills: tuple[tuple[int, int, int, Tensor], ...]
    sample_rows: Tensor

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
        prefills: list[tuple[int, int, int, Tensor]] = []
        single: list[tuple[int, Tensor]] = []
        sampled: list[int] = []
        first = 0
        for seq in seqs:
            visible = seq.context + seq.rows
            if len(seq.pages) * page_size < visible:
                raise ValueError(f"{len(seq.pages)} pages of {page_size} do not hold {visible} tokens")
            seen = (torch.tensor(seq.pages)[:, None] * page_size + offsets).flatten()[:visible]
            slots.append(seen[seq.context :])
            if seq.rows == 1:
                single.append((first, seen))
            elif seq.rows:
                prefills.append((first, seq.rows, seq.context, seen.to(device)))
            if seq.sample:
                sampled.append(first + seq.rows - 1)
            first += seq.rows
        decodes = None
        if single:
            lengths = torch.tensor([len(seen) for _, seen in single])
            padded = torch.nn.utils.rnn.pad_sequence([seen for _, seen in single], batch_first=True)
            mask = torch.arange(padded.shape[1]) < lengths[:, None]
            # Pad with a slot that was written: masked or not, attention multiplies it, and 0 · NaN is NaN.
            padded = torch.where(mask, padded, padded[:, :1])
            decodes = (torch.tensor([r for r, _ in single]).to(device), padded.to(device), mask.to(device))
        return Batch(
            torch.tensor(tokens, dtype=torch.int64, device=device),
            torch.tensor(positions, dtype=torch.int64, device=device),
            torch.cat(slots).to(device) if slots else torch.empty(0, dtype=torch.int64, device=device),
            decodes,
            tuple(prefills),
            torch.tensor(sampled, dtype=torch.int64, device=device),
        )
