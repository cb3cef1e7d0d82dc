"""The ways to merge attention over shards of the keys, and to gather what it takes, and what each costs.

Under decode context parallelism every rank of a dcp group attends with all of the group's heads over its own tokens,
and leaves (output, log-sum-exp): a value that owes a softmax merge over dcp. It is settled inside the attention layer,
to each rank's own heads, so it is no placement of the residual stream: its rows are heads of tokens. A plan of it is
one of three ways, with the transport that carries it.

| way | collectives | between them |
|---|---|---|
| ag_rs | all_gatherv of lse, reduce_scatterv | each rank scales its output by its weight, in the output's dtype |
| a2a | all_to_allv of output and lse in one | pack before, combine in rank order and float32 after |
| fused | merge_scatterv | nothing |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from weft.place import exchange
from weft.place.cost import Offer
from weft.place.exchange import Exchange
from weft.place.spec import LayoutError

Way = Literal["ag_rs", "a2a", "fused"]
LSE_BYTES, UNIT_BYTES = 4, 16


@dataclass(frozen=True, slots=True)
class Merge:
    """What is merged: outputs of `heads` heads of the dcp group together, `dim` elements of so many bytes each."""

    heads: int
    dim: int
    element_bytes: int

    def bytes(self, tokens: int) -> int:
        """What a rank's outputs and their lse take."""
        return tokens * self.heads * (self.dim * self.element_bytes + LSE_BYTES)

    def room(self, tokens: int, ranks: int) -> int:
        """No tensor of any way's calls takes more bytes: with every rank's lse, and padded to units of 16 bytes."""
        return tokens * self._token_room(ranks) + 2 * UNIT_BYTES * ranks

    def most_tokens(self, max_bytes: int | None, ranks: int) -> int | float:
        """How many tokens go in a call of tensors of up to so many bytes; None: any."""
        if max_bytes is None:
            return math.inf
        return max(0, max_bytes - self.room(0, ranks)) // self._token_room(ranks)

    def _token_room(self, ranks: int) -> int:
        head = -(-self.dim * self.element_bytes // UNIT_BYTES) * UNIT_BYTES
        return self.heads * (max(head, ranks * LSE_BYTES) + LSE_BYTES)


@dataclass(frozen=True, slots=True)
class MergePlan:
    """A way, who carries its collectives out, predicted time, and bytes that a rank receives.

    tokens: that a call takes at most; more go in several.
    """

    way: Way
    transport: str
    us: float
    bytes: int
    tokens: int


def merge_exchanges(ranks: int) -> set[Exchange]:
    """Every exchange by which `ranks` ranks can merge; none for a single one."""
    kinds = (exchange.all_gatherv, exchange.reduce_scatterv, exchange.all_to_allv, exchange.merge_scatterv)
    return {kind(ranks) for kind in kinds} if ranks > 1 else set()


def merge_plans(merge: Merge, ranks: int, tokens: int, offers: Sequence[Offer]) -> list[MergePlan]:
    """Every way to merge so many tokens over `ranks` ranks that the offers have; quickest first.

    What a transport has no room for goes in several calls, as long as it has room for a token. Local work costs what
    the first offer says. What was not measured comes last, with infinite times.
    """
    found = []
    for offer in offers:
        each = int(min(tokens, merge.most_tokens(offer.max_bytes, ranks)))
        if not each:
            continue
        calls = -(-tokens // each)
        for way, (kinds, local) in _calls(merge, ranks, each, offers[0].cost.local_us).items():
            if not offer.kinds.issuperset(kind for kind, _ in kinds):
                continue
            us = local + sum(offer.cost.collective_us(kind, ranks, moved) for kind, moved in kinds)
            moved = sum(moved for _, moved in kinds) * tokens / each
            found.append(MergePlan(way, offer.transport, us * calls, int(moved), each))
    return sorted(found, key=lambda plan: plan.us)


def _calls(
    merge: Merge, ranks: int, tokens: int, local_us: Callable[[float], float]
) -> dict[Way, tuple[list[tuple[str, float]], float]]:
    """Of each way the collectives, each with the bytes that a rank receives, and the µs of what is between them."""
    of_lses, whole = tokens * merge.heads * LSE_BYTES, merge.bytes(tokens)
    of_outs, others = whole - of_lses, (ranks - 1) / ranks
    gather, scatter = ("all_gatherv", of_lses * (ranks - 1.0)), ("reduce_scatterv", of_outs * others)
    return {
        "ag_rs": ([gather, scatter], local_us(2 * of_outs + ranks * of_lses)),
        "a2a": ([("all_to_allv", whole * others)], local_us(2 * whole) + local_us(whole + whole / ranks)),
        "fused": ([("merge_scatterv", whole * others)], 0.0),
    }


def merge_moves(plan: MergePlan, merge: Merge, ranks: int, room: int, tokens: int) -> list[tuple[str, int]]:
    """The collectives of a merge that went by a plan, in order: kind, and bytes that a rank receives.

    room: of its tensors, in tokens; tokens: those that are live.
    """
    found: list[tuple[str, int]] = []
    for begin in range(0, room, plan.tokens):
        live = max(0, min(plan.tokens, tokens - begin))
        kinds, _ = _calls(merge, ranks, live, lambda moved: 0.0)[plan.way]
        found += [(kind, int(moved)) for kind, moved in kinds]
    return found


def plan_merge(merge: Merge, ranks: int, tokens: int, offers: Sequence[Offer], way: str = "auto") -> MergePlan:
    """The quickest plan, of the way asked for unless that is `auto`; what is asked for need not have been measured.

    Raises LayoutError where there is none, with what there is.
    """
    found = merge_plans(merge, ranks, tokens, offers)
    if way not in ("auto", *get_args(Way)):
        raise LayoutError(f"no way to merge attention is called {way!r}; there are auto, {', '.join(get_args(Way))}")
    for plan in found:
        if way == plan.way or (way == "auto" and plan.us < math.inf):
            return plan
    room = ", ".join(f"{o.transport} has max_bytes={o.max_bytes}" for o in offers if o.max_bytes is not None)
    raise LayoutError(
        f"nothing that {', '.join(o.transport for o in offers)} offer(s) merges attention"
        + ("" if way == "auto" else f" by {way}")
        + f" for {tokens} tokens of {merge.heads} heads over {ranks} ranks (a token takes {merge.room(1, ranks)} bytes"
        + (f"; {room}" if room else "")
        + "); there is "
        + (", ".join(f"{plan.way} on {plan.transport}" for plan in found) or "none")
        + (", none of which weft tune measured here" if found and way == "auto" else "")
    )


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Who gathers, and the predicted time. rows: of each rank that a call takes at most; more go in several."""

    transport: str
    us: float
    rows: int


def plan_gather(row_bytes: int, ranks: int, rows: int, offers: Sequence[Offer]) -> GatherPlan:
    """The quickest way to gather up to so many rows of each of `ranks` ranks.

    Raises LayoutError where no transport has room for a row of each, or none was measured.
    """
    found, padded = [], -(-row_bytes // UNIT_BYTES) * UNIT_BYTES
    for offer in offers:
        each = rows if offer.max_bytes is None else min(rows, offer.max_bytes // (ranks * padded))
        if "all_gatherv" in offer.kinds and each:
            one = offer.cost.collective_us("all_gatherv", ranks, each * (ranks - 1) * row_bytes)
            found.append(GatherPlan(offer.transport, one * -(-rows // each), each))
    if min((plan.us for plan in found), default=math.inf) == math.inf:
        raise LayoutError(
            f"nothing gathers rows of {row_bytes} bytes over {ranks} ranks here: no transport has room for one of each "
            "rank, or weft tune measured none"
        )
    return min(found, key=lambda plan: plan.us)
