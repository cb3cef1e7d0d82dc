"""From where decode context parallelism pays: what a step saves of reading the cache, and what its exchanges cost.

Without dcp every rank reads all tokens that its heads see; with it a share of them, but each layer gathers queries and
merges outputs. Both are predicted by the cost model of the plan. That a group's cache holds so many times as many
tokens is another gain, which this does not weigh: more sequences run at once, or longer ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.place.cost import Offer
from weft.place.merge import Merge, MergePlan, plan_gather, plan_merge
from weft.place.show import columns, size_text

KEYS_SHARE, LATENT_SHARE = 0.6, 0.3
"""Of the memory's bandwidth, what decode attention reaches that reads keys and values, and latent vectors (one H200:
benchmarks/results/gpu_kernels_h200_2026-11-22.json)."""
PROBE_BYTES = 1 << 26
"""Between so many bytes and twice as many, local work takes the bandwidth's time and nothing else."""


@dataclass(frozen=True)
class Dealt:
    """What a decode step of one sequence does where tokens are dealt out over `ranks` ranks, all layers together.

    queries: of how many layers a row's queries take so many bytes on a rank. merges: of how many layers attention is
    merged so. kept_bytes, latent_bytes: of a cached token, in caches of keys and values, and of latent vectors.
    """

    ranks: int
    queries: Mapping[int, int]
    merges: Mapping[Merge, int]
    kept_bytes: int
    latent_bytes: int

    def exchange_us(self, batch: int, offers: Sequence[Offer], way: str = "auto") -> float:
        """What gathering queries and merging outputs of so many sequences takes.

        Raises LayoutError as `plan_gather` and `plan_merge`.
        """
        gathers = sum(count * self._gather_us(size, batch, offers) for size, count in self.queries.items())
        return gathers + sum(count * plan.us for count, _, plan in self.merge_plans(batch, offers, way))

    def saved_us(self, offers: Sequence[Offer]) -> float:
        """What a cached token less to read for every rank but one of `ranks` saves, for each token of a sequence."""
        local_us = offers[0].cost.local_us
        byte_us = (local_us(2 * PROBE_BYTES) - local_us(PROBE_BYTES)) / PROBE_BYTES
        read_us = byte_us * (self.kept_bytes / KEYS_SHARE + self.latent_bytes / LATENT_SHARE)
        return read_us * (1 - 1 / self.ranks)

    def pays_from(self, batch: int, offers: Sequence[Offer], way: str = "auto") -> int:
        """From how many tokens on in each of so many sequences a step is quicker with dcp than without."""
        return math.ceil(self.exchange_us(batch, offers, way) / (self.saved_us(offers) * batch))

    def merge_plans(self, batch: int, offers: Sequence[Offer], way: str = "auto") -> list[tuple[int, Merge, MergePlan]]:
        """How each merge of so many sequences goes, with the layers that do it. Raises LayoutError as `plan_merge`."""
        planned = [(merge, plan_merge(merge, self.ranks, batch, offers, way)) for merge in self.merges]
        return [(self.merges[merge], merge, plan) for merge, plan in planned]

    def _gather_us(self, row_bytes: int, rows: int, offers: Sequence[Offer]) -> float:
        gathered = 2 * row_bytes * rows * self.ranks  # read, and written head by head
        return plan_gather(row_bytes, self.ranks, rows, offers).us + offers[0].cost.local_us(gathered)


def dcp_dict(dealt: Dealt, batch: int, offers: Sequence[Offer]) -> dict[str, Any]:
    """For so many sequences: tokens of each from which on dcp pays, and the step's exchanges in µs; null for none.

    merges: how attention is merged, layers of equal shape together; bytes: that a rank receives in one.
    """
    if not batch:
        return {"pays_from": None, "us": None, "merges": []}
    merges = [{"layers": n} | asdict(merge) | asdict(plan) for n, merge, plan in dealt.merge_plans(batch, offers)]
    return {"pays_from": dealt.pays_from(batch, offers), "us": dealt.exchange_us(batch, offers), "merges": merges}


def dcp_text(dealt: Dealt, batches: Sequence[int], offers: Sequence[Offer]) -> str:
    """The same for reading."""
    rows = [("  sequences in each DP group", "pays from tokens in each", "exchanges of a step")]
    for n in filter(None, batches):
        rows.append((f"  {n:,}", f"{dealt.pays_from(n, offers):,}", f"{dealt.exchange_us(n, offers):,.0f} µs"))
    merges = [("  merge of attention", "by", "bytes a rank", "")]
    for n in filter(None, batches):
        for layers, merge, plan in dealt.merge_plans(n, offers):
            what = f"  {n:,} × {merge.heads} heads × {merge.dim}, {layers} layers"
            merges.append((what, f"{plan.way} on {plan.transport}", size_text(plan.bytes), f"{plan.us:,.1f} µs"))
    ranks = dealt.ranks
    return "\n".join(
        [
            f"dcp={ranks}: the cache of a DP group holds {ranks} × as many tokens; a step of one is quicker",
            *columns(rows),
            *columns(merges),
        ]
    )
