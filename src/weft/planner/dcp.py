"""Break-even of decode context parallelism: time saved in reading the cache, against the cost of its exchanges.

Without dcp each rank reads all tokens that its heads see. With it a rank reads a share of them, but each layer gathers
queries and merges outputs. The plan's cost model predicts both. A further gain is not counted: a group's cache holds
`dcp` times the tokens, so more or longer sequences run at once.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from weft.planner.prices import BlockPrices
from weft.planner.recipes import Gather, Merge, Prompt, Value
from weft.planner.show import columns

T = TypeVar("T")
KEYS_SHARE, LATENT_SHARE = 0.6, 0.3
"""Fractions of the memory bandwidth that decode attention reaches on keys and values, and on latent vectors (one H200:
bench/results/gpu_kernels_h200_2026-11-22.json)."""
PROBE_BYTES = 1 << 26
"""Size from which doubling the bytes adds time by bandwidth alone in a local kernel."""
MAX_TOKENS = 1 << 24
"""Maximum length of a sequence that is considered."""


@dataclass(frozen=True)
class ShardedContext:
    """Decode step of one sequence with tokens sharded over `ranks` ranks, for all layers."""

    ranks: int
    values: Sequence[Value]  # values exchanged by attention, in order
    tokens: Mapping[int, int]  # bytes of a cached token in a layer → number of such layers
    kept_bytes: int  # bytes of a cached token in caches of keys and values
    latent_bytes: int  # bytes of a cached token in caches of latent vectors

    def exchange_us(self, batch: int, prices: BlockPrices) -> float:
        """Return the µs to gather queries and merge outputs of `batch` sequences. Raises LayoutError."""
        return sum(prices.cheapest(value, "dcp", batch).us for value in self.values)

    def saved_us(self, prices: BlockPrices) -> float:
        """Return the µs saved per token of a sequence, as each rank reads 1 / `ranks` of the tokens."""
        local_us = prices.local_us
        byte_us = (local_us(2 * PROBE_BYTES) - local_us(PROBE_BYTES)) / PROBE_BYTES
        read_us = byte_us * (self.kept_bytes / KEYS_SHARE + self.latent_bytes / LATENT_SHARE)
        return read_us * (1 - 1 / self.ranks)

    def pays_from(self, batch: int, prices: BlockPrices) -> int:
        """Return the tokens in each of `batch` sequences from which a step is faster with dcp."""
        return math.ceil(self.exchange_us(batch, prices) / (self.saved_us(prices) * batch))

    def merges_from(self, rows: int, prices: BlockPrices) -> int | None:
        """Return the cached tokens from which a prompt's next `rows` are merged instead of gathering the tokens seen.

        None: never. The most frequent kind of layer decides.
        """
        queries = Counter(value.row_bytes for value in self.values if isinstance(value, Gather))
        merged = Counter(value for value in self.values if isinstance(value, Merge))
        query, token, merge = _usual(queries), _usual(self.tokens), _usual(merged)
        if merge is None or token is None:
            return None

        def merges(cached: int) -> bool:
            prompt = Prompt(-(-(cached + rows) // self.ranks), token, query or 0, merge)
            found = prices.find(prompt, "dcp", rows)
            return found is not None and found.recipe.name == "merge"

        found = bisect.bisect_left(range(MAX_TOKENS), True, key=merges)
        return found if found < MAX_TOKENS else None


def _usual(found: Mapping[T, int]) -> T | None:
    """Return the most frequent key; None if there is none."""
    return max(found, key=lambda each: found[each], default=None)


def dcp_dict(context: ShardedContext, batch: int, prices: BlockPrices) -> dict[str, Any]:
    """Return the tokens of each of `batch` sequences from which dcp pays, and the µs of the step's exchanges.

    prompt_merges_from: cached tokens from which `batch` rows of a prompt are merged; null for never.
    """
    if not batch:
        return {"pays_from": None, "us": None, "prompt_merges_from": None}
    return {
        "pays_from": context.pays_from(batch, prices),
        "us": context.exchange_us(batch, prices),
        "prompt_merges_from": context.merges_from(batch, prices),
    }


def dcp_text(context: ShardedContext, batches: Sequence[int], prices: BlockPrices) -> str:
    """Return `dcp_dict` as a text, for several numbers of sequences."""
    rows = [("  sequences in each DP group", "pays from tokens in each", "exchanges of a step")]
    prompts = [("  rows of a prompt", "what they see is gathered, but merged on top of")]
    for n in filter(None, batches):
        pays, us = context.pays_from(n, prices), context.exchange_us(n, prices)
        rows.append((f"  {n:,}", f"{pays:,}", f"{us:,.0f} µs"))
        cached = context.merges_from(n, prices)
        prompts.append((f"  {n:,}", "no number of tokens" if cached is None else f"{cached:,} tokens or more"))
    ranks = context.ranks
    title = f"dcp={ranks}: the cache of a DP group holds {ranks} × as many tokens; a step of one is quicker"
    return "\n".join([title, *columns(rows), *columns(prompts)])
