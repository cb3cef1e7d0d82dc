"""From where decode context parallelism pays: what a step saves of reading the cache, and what its exchanges cost.

Without dcp every rank reads all tokens that its heads see; with it a share of them, but each layer gathers queries and
merges outputs. Both are predicted by the cost model of the plan. That a group's cache holds so many times as many
tokens is another gain, which this does not weigh: more sequences run at once, or longer ones.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from weft.place.recipes import Gather, Merge, Prompt, Value
from weft.place.settlements import Settlements
from weft.place.show import columns

T = TypeVar("T")
KEYS_SHARE, LATENT_SHARE = 0.6, 0.3
"""Of the memory's bandwidth, what decode attention reaches that reads keys and values, and latent vectors (one H200:
benchmarks/results/gpu_kernels_h200_2026-11-22.json)."""
PROBE_BYTES = 1 << 26
"""Between so many bytes and twice as many, local work takes the bandwidth's time and nothing else."""
MAX_TOKENS = 1 << 24
"""No sequence is thought to be longer."""


@dataclass(frozen=True)
class ShardedContext:
    """What a decode step of one sequence does where tokens are sharded over `ranks` ranks, all layers together.

    settlements: of attention, in order. tokens: of how many layers a cached token takes so many bytes. kept_bytes,
    latent_bytes: of a cached token, in caches of keys and values, and of latent vectors.
    """

    ranks: int
    settlements: Sequence[Value]
    tokens: Mapping[int, int]
    kept_bytes: int
    latent_bytes: int

    def exchange_us(self, batch: int, settlements: Settlements) -> float:
        """What gathering queries and merging outputs of so many sequences takes. Raises LayoutError."""
        return sum(settlements.cheapest(value, "dcp", batch).us for value in self.settlements)

    def saved_us(self, settlements: Settlements) -> float:
        """What a cached token less to read for every rank but one of `ranks` saves, for each token of a sequence."""
        local_us = settlements.local_us
        byte_us = (local_us(2 * PROBE_BYTES) - local_us(PROBE_BYTES)) / PROBE_BYTES
        read_us = byte_us * (self.kept_bytes / KEYS_SHARE + self.latent_bytes / LATENT_SHARE)
        return read_us * (1 - 1 / self.ranks)

    def pays_from(self, batch: int, settlements: Settlements) -> int:
        """From how many tokens on in each of so many sequences a step is quicker with dcp than without."""
        return math.ceil(self.exchange_us(batch, settlements) / (self.saved_us(settlements) * batch))

    def merges_from(self, rows: int, settlements: Settlements) -> int | None:
        """On top of how many cached tokens a prompt's next `rows` are merged instead of gathering what they see; None:
        of no number. By the layers that there are most of.
        """
        queries = Counter(value.row_bytes for value in self.settlements if isinstance(value, Gather))
        merged = Counter(value for value in self.settlements if isinstance(value, Merge))
        query, token, merge = _usual(queries), _usual(self.tokens), _usual(merged)
        if merge is None or token is None:
            return None

        def merges(cached: int) -> bool:
            asked = Prompt(-(-(cached + rows) // self.ranks), token, query or 0, merge)
            found = settlements.find(asked, "dcp", rows)
            return found is not None and found.recipe.name == "merge"

        found = bisect.bisect_left(range(MAX_TOKENS), True, key=merges)
        return found if found < MAX_TOKENS else None


def _usual(found: Mapping[T, int]) -> T | None:
    """What there is most of."""
    return max(found, key=lambda each: found[each], default=None)


def dcp_dict(context: ShardedContext, batch: int, settlements: Settlements) -> dict[str, Any]:
    """For so many sequences: tokens of each from which on dcp pays, and the step's exchanges in µs; null for none.

    prompt_merges_from: on top of how many cached tokens as many rows of a prompt are merged; null for no number.
    """
    if not batch:
        return {"pays_from": None, "us": None, "prompt_merges_from": None}
    return {
        "pays_from": context.pays_from(batch, settlements),
        "us": context.exchange_us(batch, settlements),
        "prompt_merges_from": context.merges_from(batch, settlements),
    }


def dcp_text(context: ShardedContext, batches: Sequence[int], settlements: Settlements) -> str:
    """The same for reading."""
    rows = [("  sequences in each DP group", "pays from tokens in each", "exchanges of a step")]
    prompts = [("  rows of a prompt", "what they see is gathered, but merged on top of")]
    for n in filter(None, batches):
        pays, us = context.pays_from(n, settlements), context.exchange_us(n, settlements)
        rows.append((f"  {n:,}", f"{pays:,}", f"{us:,.0f} µs"))
        cached = context.merges_from(n, settlements)
        prompts.append((f"  {n:,}", "no number of tokens" if cached is None else f"{cached:,} tokens or more"))
    ranks = context.ranks
    title = f"dcp={ranks}: the cache of a DP group holds {ranks} × as many tokens; a step of one is quicker"
    return "\n".join([title, *columns(rows), *columns(prompts)])
