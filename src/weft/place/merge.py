"""The ways to merge attention over shards of the keys, and what each costs.

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
LSE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Merge:
    """What is merged: outputs of `heads` heads of the dcp group together, `dim` elements of so many bytes each."""

    heads: int
    dim: int
    element_bytes: int

    def bytes(self, tokens: int) -> int:
        """What a rank's outputs and their lse take: of any way, a call's largest tensor takes no more."""
        return tokens * self.heads * (self.dim * self.element_bytes + LSE_BYTES)


@dataclass(frozen=True, slots=True)
class MergePlan:
    """A way, who carries its collectives out, predicted time, and bytes that a rank receives."""

    way: Way
    transport: str
    us: float
    bytes: int


def merge_exchanges(ranks: int) -> set[Exchange]:
    """Every exchange by which `ranks` ranks can merge; none for a single one."""
    kinds = (exchange.all_gatherv, exchange.reduce_scatterv, exchange.all_to_allv, exchange.merge_scatterv)
    return {kind(ranks) for kind in kinds} if ranks > 1 else set()


def merge_plans(merge: Merge, ranks: int, tokens: int, offers: Sequence[Offer]) -> list[MergePlan]:
    """Every way to merge so many tokens over `ranks` ranks that the offers have, and have room for; quickest first.

    Local work costs what the first offer says. What was not measured comes last, with infinite times.
    """
    local_us, whole = offers[0].cost.local_us, merge.bytes(tokens)
    of_lses, of_outs = tokens * merge.heads * LSE_BYTES, whole - tokens * merge.heads * LSE_BYTES
    others = (ranks - 1) / ranks
    ways: dict[Way, list[tuple[str, float]]] = {
        "ag_rs": [("all_gatherv", of_lses * (ranks - 1)), ("reduce_scatterv", of_outs * others)],
        "a2a": [("all_to_allv", whole * others)],
        "fused": [("merge_scatterv", whole * others)],
    }
    between: dict[Way, Callable[[], float]] = {
        "ag_rs": lambda: local_us(2 * of_outs + ranks * of_lses),
        "a2a": lambda: local_us(2 * whole) + local_us(whole + whole / ranks),
        "fused": lambda: 0.0,
    }
    found = []
    for offer in offers:
        for way, calls in ways.items():
            if not offer.kinds.issuperset(kind for kind, _ in calls) or (offer.max_bytes or math.inf) < whole:
                continue
            try:
                us = between[way]() + sum(offer.cost.collective_us(kind, ranks, moved) for kind, moved in calls)
            except LayoutError:  # not measured
                us = math.inf
            found.append(MergePlan(way, offer.transport, us, int(sum(moved for _, moved in calls))))
    return sorted(found, key=lambda plan: plan.us)


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
        + f" for {tokens} tokens of {merge.heads} heads over {ranks} ranks ({merge.bytes(tokens)} bytes"
        + (f"; {room}" if room else "")
        + "); there is "
        + (", ".join(f"{plan.way} on {plan.transport}" for plan in found) or "none")
        + (", none of which weft tune measured here" if found and way == "auto" else "")
    )
