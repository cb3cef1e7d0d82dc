"""Made-up steps that a rank on a GPU runs before it is ready, so that no request waits for the compilation of a kernel.

Triton compiles a kernel for each block size. Block sizes follow from a step's rows, from the numbers of its sequences
and of those with one row, and from the number of sampled tokens: by powers of two, and limits at such. So the steps
have prompts of every such number, with decode rows among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.engine.config.config import EngineConfig
from weft.engine.kv.cache_spec import CacheGroup
from weft.engine.kv.tokens import token_bytes
from weft.engine.messages.rank_messages import Chunk, GroupRows, Join, Sampling, Step

OTHERS = (1023,)
"""Numbers of rows beside powers of two and those one above: some tiles are for 1,024 rows and more."""


def sizes(max_rows: int) -> list[int]:
    """Numbers of rows up to `max_rows` that meet what kernels are compiled for."""
    powers = [1 << i for i in range(max_rows.bit_length())]
    return sorted({n for n in (*powers, *(n + 1 for n in powers), *OTHERS, max_rows) if n <= max_rows})


def warm_steps(
    config: EngineConfig,
    groups: Sequence[CacheGroup],
    longest: int,
    split: bool = False,
    merges_from: Callable[[int], int | None] = lambda rows: None,
) -> list[Step]:
    """The steps, the same on every rank. They overwrite rows of the table, and pages.

    Args:
        groups: of the caches.
        longest: tokens that a sequence may have.
        split: the vocabulary is split; then every other step samples from full rows.
        merges_from: the number of cached tokens from which a prompt of so many rows is merged over dcp, as in every
            other step; None: never.
    """
    world, steps = config.attn_dp, []
    for number, rows in enumerate(sizes(config.batch_tokens * world)):
        odd = number % 2 == 1
        sampling = Sampling(1.0, 1.0, 0, 1, min_p=0.1 if odd or not split else 0.0)
        made = []
        for group in range(world):
            make = _Rows(config, groups, sampling, [], [], [])
            count = rows // world + (group < rows % world)
            decode_rows = min(count // 2, max(0, config.batch_sequences - -(-count // longest)))
            for _ in range(decode_rows):
                make.output(min(1, longest - 1))
            left = count - decode_rows
            while left and len(make.joins) < config.batch_sequences:
                prompt = min(left, longest)
                merged = (merges_from(prompt) or 0) if odd else 0
                make.prompt(prompt, merged if merged + prompt <= longest else 0, odd or not decode_rows)
                left -= prompt
            made.append(GroupRows(tuple(make.decode_rows), tuple(make.chunks), tuple(make.joins)))
        steps.append(Step(number, tuple(made)))
    return steps


@dataclass
class _Rows:
    """A DP group's rows of a step as they are made."""

    config: EngineConfig
    groups: Sequence[CacheGroup]
    sampling: Sampling
    joins: list[Join]
    decode_rows: list[int]
    chunks: list[Chunk]

    def output(self, context: int) -> None:
        """Adds a decode row of a sequence with so many tokens."""
        self.decode_rows.append(self._join(context, 1))

    def prompt(self, count: int, context: int, samples: bool) -> None:
        """Adds a prompt of `count` tokens on top of the context."""
        self.chunks.append(Chunk(self._join(context, count), token_bytes([0] * count), samples))

    def _join(self, context: int, count: int) -> int:
        row, pages = len(self.joins), -(-(context + count) // self.config.interleave.span)
        tables = [(-1, -1) if g.rule.state else tuple((row + i) % g.size for i in range(pages)) for g in self.groups]
        self.joins.append(Join(row, row, context, tuple(tables), self.sampling))
        return row
