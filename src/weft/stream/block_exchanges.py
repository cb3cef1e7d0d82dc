"""Exchanges of values inside blocks, by the plan's recipe and transport.

The plan gives the recipe, the transport and the rows of a call (`weft.planner.op.BlockOp`). This module cuts values
into calls, exchanges, times and counts them. A recipe is a row of the planner's table and a function of `MERGES`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor
from torch.profiler import record_function

from weft.comm.transport import COLLECTIVE, CommError, LiveSizes, Ranks, Sizes, Transport, place_in
from weft.kernels import stream_ops as ops
from weft.kernels.torch_reference import packed_shards
from weft.planner import exchange
from weft.planner.chain import Counts
from weft.planner.exchange import Exchange
from weft.planner.experts import Dispatch
from weft.planner.op import BlockOp, BlockValue
from weft.planner.plan import ReadPlan
from weft.planner.prices import BlockPrices
from weft.planner.recipes import RECIPES, Gather, Merge, Prompt, Value
from weft.planner.spec import Mesh, PlacementError, Rows
from weft.stream.dispatch import Exchanging, Work, all_to_allv
from weft.stream.stats import StepTimes
from weft.stream.step_rows import StepRows

Calls = tuple[int, int, float, float]
"""Totals of an op: calls, bytes that a rank received, seconds on this rank (on CPUs only), predicted seconds."""
Merged = tuple[Tensor, Tensor]
"""This rank's heads of attention, complete, `[T, H/n, D]`, and their log-sum-exp `[T, H/n]`."""


class BlockExchanges:
    """Exchanges of a rank inside blocks.

    `ran` counts calls by `site` and op, except calls with bytes that follow from a step's counts: the plan counts
    these.

    Args:
        prices: source of the ops to run; `planned_by` replaces it for a while.
        site: read of the stream that precedes an exchange.
    """

    def __init__(self, mesh: Mesh, rank: int, transports: Mapping[str, Transport], prices: BlockPrices):
        self.mesh, self.rank, self.prices = mesh, rank, prices
        self._transports = transports
        self.site = ""
        self._planned: tuple[BlockOp, ...] = ()  # the ops of the read's block
        self.ran: dict[tuple[str, BlockOp], Calls] = {}

    @contextmanager
    def planned_by(self, prices: BlockPrices) -> Iterator[None]:
        """Run the ops of these prices inside the context, for steps that are captured."""
        before, self.prices = self.prices, prices
        try:
            yield
        finally:
            self.prices = before

    def begin(self, counts: Counts, rows: StepRows, times: StepTimes | None) -> None:
        """Begin a pass of the model. counts: tokens of its plan. times: not None if the pass is timed."""
        self._counts, self._rows, self._times = counts, rows, times

    def serve(self, read: ReadPlan) -> None:
        """Serve a read of the pass; later exchanges follow it."""
        self.site, self._planned = read.read.site, read.inside

    def dispatch(self, x: Tensor, weight: Tensor, expert: Tensor, experts: int, work: Work) -> Tensor:
        """Send this rank's own rows to the ranks of their experts; return the results `[T, width]`.

        All ranks of the world must call. Raises CommError; PlacementError if the plan has no such dispatch here.

        Args:
            x: `[T, width]`, this rank's own rows.
            weight, expert: `[T, k]`.
            experts: total number of experts.
            work: each rank calls it with the rows that it received.
        """
        if self._rows.idle:  # no rank has a row, and all know it: skip rows and experts
            return x.new_empty(x.shape)
        what = Dispatch.on(self.mesh, experts, expert.shape[1], x.shape[1] * x.element_size())
        found = [op for op in self._planned if op.value == what]
        if not found:
            raise PlacementError(f"the block after {self.site} runs {what}, which is not in the plan here")
        ops, world = {op.value.what: op for op in found[0].steps()}, tuple(range(self.mesh.world))

        def carry(name: str, x: Tensor, sizes: Sizes | LiveSizes) -> Tensor:
            op = ops[name]
            with nullcontext() if self._times is None else self._times.timed(self._counts, self.site, op):
                return self._transports[op.transport].exchange(x, exchange.all_to_allv(len(world)), world, sizes)

        def empty(name: str, *shape: int, like: Tensor) -> Tensor:
            return self._transports[ops[name].transport].empty(*shape, like=like)

        capacity = tuple(self.mesh.row_count(Rows.OWN, rank, self._rows.capacity) for rank in world)
        by = Exchanging(self.mesh, self.rank, capacity, carry, empty)
        return DISPATCHES[found[0].recipe.name](by, x, weight, expert, experts, work)

    def recipe(self, what: Prompt, group: str, rows: int) -> str:
        """Return the name of the cheapest recipe for exactly `rows` rows; the caller exchanges its parts one by one.

        It is the same on all ranks. Raises LayoutError if there is none.
        """
        return self.prices.cheapest(what, group, rows).recipe.name

    def gather(self, what: Gather, group: str, x: Tensor, sizes: Sizes | LiveSizes) -> Tensor:
        """Return all ranks' rows of the group `[sum(sizes), width]`, in rank order.

        Raises CommError, and LayoutError if no transport has the capacity for one row of each rank.

        Args:
            x: this rank's rows `[own, width]`.
            sizes: rows of each rank; LiveSizes if `what` is live, of up to `rows_of_call` rows.
        """
        calls, sizes = sizes, sizes.capacity if isinstance(sizes, LiveSizes) else sizes
        if not sum(sizes):
            return x
        plan, ranks = self._plan(what, group, max(sizes)), self.mesh.peers(group, self.rank)
        transport, kind = self._transports[plan.transport], exchange.all_gatherv(len(ranks))
        with self._counted(plan, (sum(sizes) - min(sizes)) * x.shape[1] * x.element_size(), x):
            if plan.max_call_rows >= max(sizes) or calls is not sizes:
                return run_traced(transport, x, kind, ranks, calls)
            out = x.new_empty(sum(sizes), x.shape[1])
            into = out.split(list(sizes))
            for begin in range(0, max(sizes), plan.max_call_rows):
                part = tuple(min(plan.max_call_rows, max(0, size - begin)) for size in sizes)
                received = run_traced(transport, x[begin : begin + plan.max_call_rows], kind, ranks, part)
                for run, rank_rows in zip(received.split(list(part)), into, strict=True):
                    rank_rows[begin : begin + len(run)] = run
        return out

    def rows_of_call(self, what: Gather, group: str, rows: int) -> int:
        """Return the plan's maximum rows of each rank per call for `rows` rows; 0 if no transport has them."""
        op = self.prices.find(what, group, rows)
        return 0 if op is None else min(op.max_call_rows, rows)

    def merge(self, group: str, out: Tensor, lse: Tensor, live: Tensor | None = None) -> Merged:
        """Merge attention over the ranks' shards of the keys.

        out `[T, H, D]`, lse `[T, H]`: all heads over this rank's keys. live: see `Transport.merge_scatterv`.
        """
        ranks, (tokens, heads, dim) = self.mesh.peers(group, self.rank), out.shape
        if not tokens:
            return own_heads(out, ranks), own_heads(lse, ranks)
        what = Merge(heads, dim, out.element_size())
        plan = self._plan(what, group, tokens)
        merge, transport = MERGES[plan.recipe.name], self._transports[plan.transport]
        with self._counted(plan, sum(moved for _, moved in plan.calls(tokens, tokens)), out):
            if tokens <= plan.max_call_rows:
                return merge(transport, out, lse, ranks, live)
            share, total = own_heads(out, ranks), own_heads(lse, ranks)
            for begin in range(0, tokens, plan.max_call_rows):
                at = slice(begin, begin + plan.max_call_rows)
                part_live = None if live is None else (live - begin).clamp(0, plan.max_call_rows)
                share[at], total[at] = merge(transport, out[at], lse[at], ranks, part_live)
        return share, total

    def _plan(self, what: Gather | Merge, group: str, rows: int) -> BlockOp:
        """Return the step's plan for a value, of the largest DP group; else, as in prompts, the cheapest for `rows`."""
        for op in self._planned:
            if op.group == group and op.rows >= rows and _covers(op.value, what):
                return op
        return self.prices.plan(what, group, rows)

    @contextmanager
    def _counted(self, plan: BlockOp, moved: int, x: Tensor) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds = 0.0 if x.is_cuda else time.perf_counter() - began
        key = self.site, plan
        calls, size, spent, predicted = self.ran.get(key, (0, 0, 0.0, 0.0))
        us = plan.us if plan.us < float("inf") else 0.0
        self.ran[key] = calls + 1, size + moved, spent + seconds, predicted + us / 1e6


def _covers(planned: Value, what: Value) -> bool:
    """Return True if the plan of a value serves this one: a rank may have fewer packed rows than planned."""
    if isinstance(planned, Gather) and isinstance(what, Gather):
        alike = (planned.what, planned.relaid, planned.live) == (what.what, what.relaid, what.live)
        return alike and planned.row_bytes >= what.row_bytes
    return planned == what


class TraceExchanges(BlockExchanges):
    """Recorder of the values that a traced model's blocks exchange after each read, in order. Exchanges nothing."""

    def __init__(self, mesh: Mesh):
        super().__init__(mesh, 0, {}, BlockPrices(mesh, ()))
        self.found: list[BlockValue] = []

    def gather(self, what: Gather, group: str, x: Tensor, sizes: Sizes | LiveSizes) -> Tensor:
        self.found.append(BlockValue(what, group))
        return x

    def rows_of_call(self, what: Gather, group: str, rows: int) -> int:
        return rows

    def merge(self, group: str, out: Tensor, lse: Tensor, live: Tensor | None = None) -> Merged:
        self.found.append(BlockValue(Merge(out.shape[1], out.shape[2], out.element_size()), group))
        ranks = range(self.mesh.size(group))
        return own_heads(out, ranks), own_heads(lse, ranks)

    def dispatch(self, x: Tensor, weight: Tensor, expert: Tensor, experts: int, work: Work) -> Tensor:
        what = Dispatch.on(self.mesh, experts, expert.shape[1], x.shape[1] * x.element_size())
        self.found.append(BlockValue(what, "world"))
        return work(x, weight, expert)

    def recipe(self, what: Prompt, group: str, rows: int) -> str:
        return RECIPES[type(what)][0].name  # a trace is of a decode step, which has no prompts


def own_heads(x: Tensor, group: Sequence[int]) -> Tensor:
    """Return an unfilled tensor for this rank's heads of x `[T, H, …]`. Raises CommError if they do not divide."""
    tokens, heads, *rest = x.shape
    if heads % len(group):
        raise CommError(f"{heads} heads do not divide over a group of {len(group)} ranks")
    return x.new_empty(tokens, heads // len(group), *rest)


def run_traced(transport: Transport, x: Tensor, exchange: Exchange, group: Ranks, sizes: Sizes | LiveSizes) -> Tensor:
    """Run `Transport.exchange` as a range in torch's profiler that names the collective."""
    with record_function(f"{COLLECTIVE}{exchange.kind}"):
        return transport.exchange(x, exchange, group, sizes)


def ag_rs(transport: Transport, out: Tensor, lse: Tensor, group: Ranks, live: Tensor | None = None) -> Merged:
    """Merge as `Transport.merge_scatterv`: gather lse, scale outputs by this rank's weight, reduce-scatter by heads.

    The terms are rounded to the output's dtype before the sum.
    """
    place, n = place_in(group, transport.rank), len(group)
    share = own_heads(out, group)
    lses = run_traced(transport, lse.reshape(1, -1), exchange.all_gatherv(n), group, (1,) * n)
    by_rank = transport.empty(n, share.numel(), like=out)
    total = ops.scale_shard(out, lses.view(n, *lse.shape), place, by_rank)
    summed = run_traced(transport, by_rank, exchange.reduce_scatterv(n), group, (1,) * n)
    return summed.view(share.shape), total


def a2a(transport: Transport, out: Tensor, lse: Tensor, group: Ranks, live: Tensor | None = None) -> Merged:
    """Merge as `Transport.merge_scatterv`: exchange heads, lse and output once; merge in rank order and float32."""
    n, (tokens, heads, dim) = len(group), out.shape
    own_heads(out, group)
    packed = transport.empty(n, packed_shards(n, tokens, heads, dim, out.dtype)[1], like=out)
    ops.pack_shard(out, lse, packed)
    received = run_traced(transport, packed, exchange.all_to_allv(n), group, (1,) * n**2)
    return ops.merge_packed(received, tokens, heads, dim)


def fused(transport: Transport, out: Tensor, lse: Tensor, group: Ranks, live: Tensor | None = None) -> Merged:
    """Run `Transport.merge_scatterv`, in one call."""
    with record_function(f"{COLLECTIVE}merge_scatterv"):
        return transport.merge_scatterv(out, lse, group, live)


MERGES: dict[str, Callable[..., Merged]] = {"ag_rs": ag_rs, "a2a": a2a, "fused": fused}
"""Function of each recipe of a merge."""
DISPATCHES: dict[str, Callable[..., Tensor]] = {"all_to_allv": all_to_allv}
"""Function of each recipe of a dispatch."""
