"""Attention over shards of the keys, merged: each rank of a dcp group gets its own heads, complete.

Every rank has attended with all heads of the group over its own tokens. `Merger` settles that by the way that the
planner finds quickest (`weft.place.merge`): these are the ways that are built from other exchanges, and that any
transport can take which has them; `fused` is a transport's own `merge_scatterv`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol

from torch import Tensor
from torch.profiler import record_function

from weft.comm.transport import COLLECTIVE, CommError, Ranks, Sizes, Transport, place_in
from weft.kernels import plain
from weft.place import exchange
from weft.place.cost import Offer
from weft.place.exchange import Exchange
from weft.place.merge import GatherPlan, Merge, MergePlan, plan_merge
from weft.place.plan import bucket
from weft.place.spec import Mesh


class Merging(Protocol):
    """What attention calls where its tokens are sharded."""

    def __call__(self, out: Tensor, lse: Tensor, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """out `[T, H, D]`, lse `[T, H]`: of all heads over this rank's tokens. Gives those of its own heads over all:
        `[T, H/n, D]`, `[T, H/n]`. See `Transport.merge_scatterv`.
        """
        ...


@dataclass
class Tally:
    """What attention has exchanged over a dcp group: calls, bytes that a rank received, seconds on this rank, which are
    measured on CPUs only, and predicted ones; by what is done and who carries it.
    """

    steps: dict[str, tuple[int, int, float, float]] = field(default_factory=dict)

    def merged(self, plan: MergePlan, calls: int = 1, seconds: float = 0.0) -> None:
        """Counts merges that went by a plan, and took so long together."""
        self._add(f"merge by {plan.way} · {plan.transport}", calls, plan.bytes, seconds, plan.us)

    def gathered(self, plan: GatherPlan, size: int, calls: int = 1, seconds: float = 0.0) -> None:
        """The same of gathers; size: bytes that a rank receives in one."""
        self._add(f"all_gatherv · {plan.transport}", calls, size, seconds, plan.us)

    def _add(self, step: str, calls: int, size: int, seconds: float, us: float) -> None:
        had = self.steps.get(step, (0, 0, 0.0, 0.0))
        predicted = calls * us / 1e6 if us < math.inf else 0.0
        self.steps[step] = had[0] + calls, had[1] + calls * size, had[2] + seconds, had[3] + predicted


class Merger:
    """Merges over this rank's dcp group, each number of tokens by the quickest way, or all by the way asked for.

    transports: by name; offers: what they cost (`weft.comm.transport.offer_of`). way: auto, ag_rs, a2a or fused. The
    choice depends on the tensors' shapes alone, so every rank of the group comes to the same. A call raises LayoutError
    where no transport has a way for it, CommError as transports do. tally: counts what is called.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        transports: Mapping[str, Transport],
        offers: Sequence[Offer],
        way: str = "auto",
        tally: Tally | None = None,
    ):
        self._tally = tally or Tally()
        self._group = mesh.peers("dcp", rank)
        self._transports, self._offers, self._way = transports, offers, way
        self._plans: dict[tuple[Merge, int], MergePlan] = {}

    def plan(self, merge: Merge, tokens: int) -> MergePlan:
        """How so many tokens, rounded up to a power of two, are merged."""
        (most,) = bucket((tokens,))
        found = self._plans.get((merge, most))
        if found is None:
            found = plan_merge(merge, len(self._group), most, self._offers, self._way)
            self._plans[merge, most] = found
        return found

    def __call__(self, out: Tensor, lse: Tensor, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `Merging` says."""
        tokens, heads, dim = out.shape
        if not tokens:
            return own_heads(out, self._group), own_heads(lse, self._group)
        plan = self.plan(Merge(heads, dim, out.element_size()), tokens)
        began = time.perf_counter()
        merged = self._merge(plan, out, lse, live)
        self._tally.merged(plan, seconds=0.0 if out.is_cuda else time.perf_counter() - began)
        return merged

    def _merge(self, plan: MergePlan, out: Tensor, lse: Tensor, live: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens = len(out)
        if tokens <= plan.tokens:
            return self._call(plan, out, lse, live)
        own, total = own_heads(out, self._group), own_heads(lse, self._group)
        for begin in range(0, tokens, plan.tokens):
            at = slice(begin, begin + plan.tokens)
            here = None if live is None else (live - begin).clamp(0, plan.tokens)
            own[at], total[at] = self._call(plan, out[at], lse[at], here)
        return own, total

    def _call(self, plan: MergePlan, out: Tensor, lse: Tensor, live: Tensor | None) -> tuple[Tensor, Tensor]:
        transport = self._transports[plan.transport]
        if plan.way == "fused":
            with record_function(f"{COLLECTIVE}merge_scatterv"):
                return transport.merge_scatterv(out, lse, self._group, live)
        return (ag_rs if plan.way == "ag_rs" else a2a)(transport, out, lse, self._group)


class TraceMerger:
    """Writes down what attention merges, as often as it does: merges by (heads, dim, bytes an element).

    note: is told of each.
    """

    def __init__(self, ranks: int, note: Callable[[Merge], None] = lambda merge: None):
        self._ranks, self._note = ranks, note
        self.merges: Counter[Merge] = Counter()

    def __call__(self, out: Tensor, lse: Tensor, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `Merging` says, but for the values."""
        merge = Merge(out.shape[1], out.shape[2], out.element_size())
        self.merges[merge] += 1
        self._note(merge)
        return own_heads(out, range(self._ranks)), own_heads(lse, range(self._ranks))


def own_heads(x: Tensor, group: Sequence[int]) -> Tensor:
    """An unfilled tensor for this rank's heads of x `[T, H, …]`. Raises CommError where they do not divide."""
    tokens, heads, *rest = x.shape
    if heads % len(group):
        raise CommError(f"{heads} heads do not divide over a dcp group of {len(group)} ranks")
    return x.new_empty(tokens, heads // len(group), *rest)


def natural(lse: Tensor) -> Tensor:
    """A log-sum-exp to base 2, which some kernels give, to base e, which is Weft's."""
    return lse * math.log(2)


def in_a_range(transport: Transport, x: Tensor, exchange: Exchange, group: Ranks, sizes: Sizes) -> Tensor:
    """`Transport.exchange`, as a range in torch's profiler that names the collective."""
    with record_function(f"{COLLECTIVE}{exchange.kind}"):
        return transport.exchange(x, exchange, group, sizes)


def _kernels(x: Tensor) -> ModuleType:
    """What packs, scales and combines where x is."""
    if x.is_cuda:
        from weft.kernels.triton import merge  # GPUs only: a CPU need not have Triton

        return merge
    return plain


def ag_rs(transport: Transport, out: Tensor, lse: Tensor, group: Ranks) -> tuple[Tensor, Tensor]:
    """Gathers every rank's lse, scales the output by this rank's weight, and reduce-scatters it by heads.

    The terms are rounded to the output's dtype before they are summed.
    """
    place, n = place_in(group, transport.rank), len(group)
    own = own_heads(out, group)
    lses = in_a_range(transport, lse.reshape(1, -1), exchange.all_gatherv(n), group, (1,) * n)
    by_rank = transport.empty(n, own.numel(), like=out)
    total = _kernels(out).scale_shard(out, lses.view(n, *lse.shape), place, by_rank)
    summed = in_a_range(transport, by_rank, exchange.reduce_scatterv(n), group, (1,) * n)
    return summed.view(own.shape), total


def a2a(transport: Transport, out: Tensor, lse: Tensor, group: Ranks) -> tuple[Tensor, Tensor]:
    """Sends every rank its heads, lse and output in one, and combines what comes in rank order and float32."""
    n, kernels, (tokens, heads, dim) = len(group), _kernels(out), out.shape
    own_heads(out, group)
    packed = transport.empty(n, plain.packed_shards(n, tokens, heads, dim, out.dtype)[1], like=out)
    kernels.pack_shard(out, lse, packed)
    came = in_a_range(transport, packed, exchange.all_to_allv(n), group, (1,) * n**2)
    merged: tuple[Tensor, Tensor] = kernels.merge_packed(came, tokens, heads, dim)
    return merged
