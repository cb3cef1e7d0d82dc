"""Conversion of a step's message to the tensors of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.engine.attention.forward_batch import Batch, PageTables, StateSlots
from weft.engine.kernels.staging import on_device
from weft.engine.kv.cache_spec import Rule


@dataclass(frozen=True, slots=True)
class SeqRows:
    """Rows of one sequence in a step.

    Args:
        rows: number of new tokens.
        context: number of tokens that have run already.
        sample: number of its last rows that need logits.
        tables: per cache group, the page table, long enough for all tokens, or (slot of the state before, after).
    """

    rows: int
    context: int
    tables: Sequence[Sequence[int]]
    sample: int


def build_batch(
    tokens: Sequence[int],
    seqs: Sequence[SeqRows],
    page_size: int,
    rules: Sequence[Rule] = (Rule(),),
    device: torch.device | str = "cpu",
) -> Batch:
    """Build the batch of `seqs` with consecutive `tokens`. page_size, rules: of the cache groups. Raises ValueError if
    the rows do not add up to the tokens, or a page table is too short."""
    if len(tokens) != sum(s.rows for s in seqs):
        raise ValueError(f"{len(tokens)} tokens for {sum(s.rows for s in seqs)} rows")
    positions: list[int] = []
    starts: list[int] = [0]
    sampled: list[int] = []
    for seq in seqs:
        positions += range(seq.context, seq.context + seq.rows)
        starts.append(len(positions))
        sampled += range(len(positions) - seq.sample, len(positions))
    tables = [
        _state_slots(seqs, group, device) if rule.state else _page_tables(seqs, group, page_size, device)
        for group, rule in enumerate(rules)
    ]
    return Batch(
        on_device(tokens, torch.int64, device),
        on_device(positions, torch.int64, device),
        on_device(starts, torch.int32, device),
        on_device([s.context + s.rows for s in seqs], torch.int32, device),
        tuple(tables),
        on_device(sampled, torch.int64, device),
        tuple((s.rows, s.context) for s in seqs),
    )


def _page_tables(seqs: Sequence[SeqRows], group: int, page_size: int, device: torch.device | str) -> PageTables:
    width = max((len(s.tables[group]) for s in seqs), default=0)
    padded, slots = [], []
    for seq in seqs:
        pages, visible = seq.tables[group], seq.context + seq.rows
        if len(pages) * page_size < visible:
            raise ValueError(f"{len(pages)} pages of {page_size} do not hold {visible} tokens")
        padded.append([*pages, *[0] * (width - len(pages))])
        slots += [pages[at // page_size] * page_size + at % page_size for at in range(seq.context, visible)]
    table = on_device(padded, torch.int32, device).reshape(len(seqs), width)
    return PageTables(table, on_device(slots, torch.int64, device))


def _state_slots(seqs: Sequence[SeqRows], group: int, device: torch.device | str) -> StateSlots:
    return StateSlots(*(on_device([s.tables[group][i] for s in seqs], torch.int64, device) for i in (0, 1)))
