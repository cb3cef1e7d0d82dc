"""From where decode context parallelism pays: what a step saves of reading the cache, and what its exchanges cost.

Without dcp every rank reads all tokens that its heads see; with it a share of them, but each layer gathers queries and
merges outputs. Both are predicted by the cost model of the plan. That a group's cache holds so many times as many
tokens is another gain, which this does not weigh: more sequences run at once, or longer ones.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

from weft.place.cost import Offer
from weft.place.merge import Merge, MergePlan, merge_moves, plan_gather, plan_merge
from weft.place.plan import bucket
from weft.place.show import columns, size_text
from weft.place.spec import LayoutError

T = TypeVar("T")
Prefill = Literal["gather", "merge"]
"""How prompts attend: a rank gathers the tokens that they see, and attends with its own heads; or it attends with the
heads of all over its own tokens, as answers do, and the parts are merged."""

KEYS_SHARE, LATENT_SHARE = 0.6, 0.3
"""Of the memory's bandwidth, what decode attention reaches that reads keys and values, and latent vectors (one H200:
benchmarks/results/gpu_kernels_h200_2026-11-22.json)."""
PROBE_BYTES = 1 << 26
"""Between so many bytes and twice as many, local work takes the bandwidth's time and nothing else."""
MOST_TOKENS = 1 << 24
"""No sequence is thought to be longer."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a layer's attention exchanges in a step with prompts, over `ranks` ranks.

    rows: of the step. seen: of the tokens that its prompts see, the most that a rank holds. query_bytes: of a row's
    queries on a rank; 0: each makes those of all. token_bytes: of a cached token. merge: of the outputs.
    """

    ranks: int
    rows: int
    seen: int
    query_bytes: int
    token_bytes: int
    merge: Merge

    def us(self, form: Prefill, offers: Sequence[Offer], way: str = "auto") -> float:
        """Predicted time of the exchanges, and of what is copied for them. Raises LayoutError where there is no way."""
        if form == "gather":
            gathered = plan_gather(self.token_bytes, self.ranks, self.seen, offers).us
            return gathered + offers[0].cost.local_us(2 * self.token_bytes * self.seen)
        us = plan_merge(self.merge, self.ranks, self.rows, offers, way).us
        if self.query_bytes:
            us += plan_gather(self.query_bytes, self.ranks, self.rows, offers).us
            us += offers[0].cost.local_us(2 * self.query_bytes * self.rows * self.ranks)
        return us

    def quickest(self, offers: Sequence[Offer], way: str = "auto") -> Prefill:
        """The form that takes less; the one that there is where the other has no way. way: to merge."""
        return "merge" if self._or_never("merge", offers, way) < self._or_never("gather", offers, way) else "gather"

    def _or_never(self, form: Prefill, offers: Sequence[Offer], way: str) -> float:
        try:
            return self.us(form, offers, way)
        except LayoutError:
            return math.inf


@dataclass(frozen=True)
class Dealt:
    """What a decode step of one sequence does where tokens are dealt out over `ranks` ranks, all layers together.

    queries: of how many layers a row's queries take so many bytes on a rank. merges: of how many layers attention is
    merged so. tokens: of how many layers a cached token takes so many bytes. kept_bytes, latent_bytes: of a cached
    token, in caches of keys and values, and of latent vectors. order: what is gathered, by bytes of a row, and merged,
    one after the other, each with how many reads of the stream come before it.
    """

    ranks: int
    queries: Mapping[int, int]
    merges: Mapping[Merge, int]
    tokens: Mapping[int, int]
    kept_bytes: int
    latent_bytes: int
    order: Sequence[tuple[int, int | Merge]] = ()

    def moves(
        self, room: int, rows: int, offers: Sequence[Offer], way: str = "auto"
    ) -> list[tuple[int, str, str, int]]:
        """The collectives of a step of one row a sequence, in order: how many reads of the stream come before, kind,
        transport, and bytes that a rank receives. room: of the step's tensors, in rows; rows: those that are live.

        Raises LayoutError as `plan_gather` and `plan_merge`.
        """
        found: list[tuple[int, str, str, int]] = []
        for reads, what in self.order if room else ():
            if isinstance(what, Merge):
                (most,) = bucket((room,))
                merged = plan_merge(what, self.ranks, most, offers, way)
                moved = merge_moves(merged, what, self.ranks, room, rows)
                found += [(reads, kind, merged.transport, size) for kind, size in moved]
            else:
                gathered, others = plan_gather(what, self.ranks, room, offers), self.ranks - 1
                live = [max(0, min(gathered.rows, rows - begin)) for begin in range(0, room, gathered.rows)]
                found += [(reads, "all_gatherv", gathered.transport, others * what * n) for n in live]
        return found

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

    def merges_from(self, rows: int, offers: Sequence[Offer], way: str = "auto") -> int | None:
        """On top of how many cached tokens a prompt's next `rows` are merged instead of gathering what they see; None:
        of no number. By the layers that there are most of.
        """
        query, token, merge = _usual(self.queries), _usual(self.tokens), _usual(self.merges)
        if merge is None or token is None:
            return None
        asked = Prompts(self.ranks, rows, 0, query or 0, token, merge)

        def merges(cached: int) -> bool:
            return replace(asked, seen=-(-(cached + rows) // self.ranks)).quickest(offers, way) == "merge"

        found = bisect.bisect_left(range(MOST_TOKENS), True, key=merges)
        return found if found < MOST_TOKENS else None

    def merge_plans(self, batch: int, offers: Sequence[Offer], way: str = "auto") -> list[tuple[int, Merge, MergePlan]]:
        """How each merge of so many sequences goes, with the layers that do it. Raises LayoutError as `plan_merge`."""
        planned = [(merge, plan_merge(merge, self.ranks, batch, offers, way)) for merge in self.merges]
        return [(self.merges[merge], merge, plan) for merge, plan in planned]

    def _gather_us(self, row_bytes: int, rows: int, offers: Sequence[Offer]) -> float:
        gathered = 2 * row_bytes * rows * self.ranks  # read, and written head by head
        return plan_gather(row_bytes, self.ranks, rows, offers).us + offers[0].cost.local_us(gathered)


def _usual(found: Mapping[T, int]) -> T | None:
    """What there is most of."""
    return max(found, key=lambda each: found[each], default=None)


def dcp_dict(dealt: Dealt, batch: int, offers: Sequence[Offer]) -> dict[str, Any]:
    """For so many sequences: tokens of each from which on dcp pays, and the step's exchanges in µs; null for none.

    merges: how attention is merged, layers of equal shape together; bytes: that a rank receives in one.
    prompt_merges_from: on top of how many cached tokens as many rows of a prompt are merged; null for no number.
    """
    if not batch:
        return {"pays_from": None, "us": None, "merges": [], "prompt_merges_from": None}
    merges = [{"layers": n} | asdict(merge) | asdict(plan) for n, merge, plan in dealt.merge_plans(batch, offers)]
    return {
        "pays_from": dealt.pays_from(batch, offers),
        "us": dealt.exchange_us(batch, offers),
        "merges": merges,
        "prompt_merges_from": dealt.merges_from(batch, offers),
    }


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
    prompts = [("  rows of a prompt", "what they see is gathered, but merged on top of")]
    for n in filter(None, batches):
        cached = dealt.merges_from(n, offers)
        prompts.append((f"  {n:,}", "no number of tokens" if cached is None else f"{cached:,} tokens or more"))
    ranks = dealt.ranks
    return "\n".join(
        [
            f"dcp={ranks}: the cache of a DP group holds {ranks} × as many tokens; a step of one is quicker",
            *columns(rows),
            *columns(merges),
            *columns(prompts),
        ]
    )
