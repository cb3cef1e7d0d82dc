"""Warm-up steps of a rank on a GPU, so that no request waits for the compilation of a kernel.

Triton compiles a kernel for each block size. Block sizes follow from the numbers of a step's rows, sequences, sequences
of one row, and sampled tokens: powers of two, with limits at powers of two. So the steps have prompts of every such
number, mixed with decode rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.engine.config.config import EngineConfig
from weft.engine.kv.cache_spec import CacheGroup
from weft.engine.kv.tokens import token_bytes
from weft.engine.messages.rank_messages import Chunk, GroupRows, Join, Sampling, Step
from weft.engine.worker.memory import dummy_tables

OTHERS = (1023,)
"""Numbers of rows in addition to powers of two and their successors: some tiles need 1,024 rows or more."""


def sizes(max_rows: int) -> list[int]:
    """Return numbers of rows up to `max_rows` that trigger every compilation of kernels."""
    powers = [1 << i for i in range(max_rows.bit_length())]
    return sorted({n for n in (*powers, *(n + 1 for n in powers), *OTHERS, max_rows) if n <= max_rows})


def warm_steps(
    config: EngineConfig,
    groups: Sequence[CacheGroup],
    longest: int,
    split: bool = False,
    merges_from: Callable[[int], int | None] = lambda rows: None,
) -> list[Step]:
    """Return the steps, the same on every rank. They overwrite rows of the table, and pages.

    Args:
        groups: groups of the caches.
        longest: maximum tokens of a sequence.
        split: the vocabulary is split; then every other step samples from full rows.
        merges_from: returns the number of cached tokens from which a prompt's rows are merged over dcp, as in every
            other step; None: never.
    """
    world, steps = config.attn_dp, []
    for number, rows in enumerate(sizes(config.batch_tokens * world)):
        odd = number % 2 == 1
        sampling = Sampling(seed=1, min_p=0.1 if odd or not split else 0.0)
        counts = [rows // world + (group < rows % world) for group in range(world)]
        merged = merges_from if odd else lambda rows: None
        steps.append(Step(number, tuple(_rows(config, groups, longest, n, sampling, merged, odd) for n in counts)))
    return steps


def _rows(
    config: EngineConfig,
    groups: Sequence[CacheGroup],
    longest: int,
    left: int,
    sampling: Sampling,
    merges_from: Callable[[int], int | None],
    samples: bool,
) -> GroupRows:
    """Return a DP group's rows of a step: decode rows, and prompts with the rest of `left` rows.

    Args:
        merges_from: as for `warm_steps`.
        samples: prompts sample a token even if there are decode rows.
    """
    chunks, joins = list[Chunk](), list[Join]()

    def join(context: int, tokens: int) -> int:
        row = len(joins)
        tables = dummy_tables(groups, row, context + tokens, config.interleave.span)
        joins.append(Join(row, row, context, tuple(tables), sampling))
        return row

    decode_rows = min(left // 2, max(0, config.batch_sequences - -(-left // longest)))
    decoded = tuple(join(min(1, longest - 1), 1) for _ in range(decode_rows))
    left -= decode_rows
    while left and len(joins) < config.batch_sequences:
        prompt = min(left, longest)
        merged = merges_from(prompt) or 0
        row = join(merged if merged + prompt <= longest else 0, prompt)
        chunks.append(Chunk(row, token_bytes([0] * prompt), samples or not decode_rows))
        left -= prompt
    return GroupRows(decoded, tuple(chunks), tuple(joins))
