"""Prices of a plan's ops: collectives by the transports' offers, and local kernels of a rank.

The stream's prices are for `tokens` tokens in every DP group, as plans are made for buckets. A block's value leaves no
debt: it costs as much as the cheapest recipe (`weft.planner.recipes`) on the cheapest transport.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache

from weft.planner.chain import Chain, Counts
from weft.planner.cost import Offer
from weft.planner.edges import Edge
from weft.planner.edges import rows_received as rows_of_edge
from weft.planner.exchange import rows_received
from weft.planner.op import NORMED, BlockOp, Op, StreamOp
from weft.planner.recipes import RECIPES, Gather, Recipe, Value
from weft.planner.row_formats import Wire
from weft.planner.spec import LayoutError, Mesh, Placement, Rows

Recipes = Mapping[type[Value], str]
"""Recipe for each kind of value, by name; `auto` or missing: the cheapest."""


class Prices:
    """Times of a mesh's collectives, by the transports' offers, and of local kernels, by the first offer."""

    def __init__(self, mesh: Mesh, offers: Sequence[Offer]):
        self.mesh, self.offers = mesh, tuple(offers)

    def local_us(self, touched: float) -> float:
        """Return the µs of a local kernel."""
        return self.offers[0].cost.local_us(touched)

    def serves(self, offer: Offer, group: str | None) -> bool:
        """Return True if a transport serves exchanges of a group."""
        return offer.serves(self.mesh.size(group), self.mesh.hosts_of(group))

    def calls_us(self, offer: Offer, group: str | None, calls: Iterable[tuple[str, float]]) -> float:
        """Return the µs of a group's collectives by one transport; calls: kind and bytes that a rank receives."""
        ranks, hosts = self.mesh.size(group), self.mesh.hosts_of(group)
        return sum(offer.cost.collective_us(kind, ranks, moved, hosts) for kind, moved in calls)


class BlockPrices(Prices):
    """Cheapest ops for the values that a model's blocks exchange on a mesh, each for a number of rows.

    Plans are made for rows rounded up to a power of two, so that all ranks of a group make the same plan from shared
    numbers. captured: for captured steps, where only the device knows some sizes.
    """

    def __init__(self, mesh: Mesh, offers: Sequence[Offer], recipes: Recipes | None = None, captured: bool = False):
        super().__init__(mesh, offers)
        self.recipes, self._captured = dict(recipes or {}), captured
        for kind, choice in self.recipes.items():
            known = ["auto", *(recipe.name for recipe in RECIPES[kind])]
            if choice not in known:
                raise LayoutError(
                    f"no recipe to {kind.__name__.lower()} is called {choice!r}; there are {', '.join(known)}"
                )
        self.find, self.naive = lru_cache(1 << 12)(self._find), lru_cache(1 << 12)(self._find_naive)

    def plan(self, value: Value, group: str, rows: int) -> BlockOp:
        """Return the op to run for up to `rows` rows of each rank of a group: `cheapest` for the rounded rows."""
        return self.cheapest(value, group, 1 << max(rows - 1, 0).bit_length())

    def _find_naive(self, value: Value, group: str, rows: int) -> BlockOp:
        """Return the op of other engines: the first recipe of the table, by the fastest transport.

        For comparison only, so it never fails: a call that no transport offers has an infinite time, by `nobody`.
        """
        recipe = RECIPES[type(value)][0]
        nobody = BlockOp(value, group, self.mesh.size(group), rows, recipe, "nobody", math.inf, rows)
        return next((op for op in self.options(value, group, rows) if op.recipe is recipe), nobody)

    def options(self, value: Value, group: str, rows: int) -> list[BlockOp]:
        """Return all recipes on all transports that serve the group and have capacity for a row; fastest first.

        A recipe that is made of other values uses the cheapest op of each, on any transport.
        """
        ranks, found = self.mesh.size(group), []
        for recipe in RECIPES[type(value)]:
            if recipe.parts is not None:
                parts = [self.find(part, group, n) for part, n in recipe.parts(value, ranks, rows)]
                some = tuple(filter(None, parts))
                if len(some) == len(parts):
                    us = sum(part.us for part in some)
                    found.append(BlockOp(value, group, ranks, rows, recipe, "", us, rows, some))
                continue
            for offer in self.offers:
                limit = self._max_rows(value, ranks, rows, offer.max_bytes)
                able = self._has(offer, recipe, value, ranks) and self.serves(offer, group)
                if not able or not limit or (recipe.whole and limit < rows):
                    continue
                us, cuts = 0.0, [(times, part) for times, part in ((rows // limit, limit), (1, rows % limit)) if part]
                for times, part in cuts:
                    us += times * self.calls_us(offer, group, recipe.calls(value, ranks, part))
                for times, part in [(1, rows)] if recipe.once else cuts:
                    us += times * sum(map(self.local_us, recipe.touched(value, ranks, part)))
                by = offer.transport if recipe.kinds(value, ranks) else "local"
                found.append(BlockOp(value, group, ranks, rows, recipe, by, us, limit))
        return sorted(found, key=lambda op: op.us)

    def _has(self, offer: Offer, recipe: Recipe, value: Value, ranks: int) -> bool:
        counting = offer.live_sizes or not (recipe.live and self._captured)
        counting &= offer.live_sizes or not (isinstance(value, Gather) and value.live)
        return counting and offer.kinds.issuperset(recipe.kinds(value, ranks))

    def _max_rows(self, value: Value, ranks: int, rows: int, max_bytes: int | None) -> int:
        if max_bytes is None or value.bytes(rows, ranks) <= max_bytes:
            return rows
        fixed = value.bytes(0, ranks)
        return int(min(rows, max(0, max_bytes - fixed) // (value.bytes(1, ranks) - fixed)))

    def _find(self, value: Value, group: str, rows: int) -> BlockOp | None:
        """Return the cheapest option of the requested recipe, even if unmeasured; None if there is none."""
        choice = self.recipes.get(type(value), "auto")
        for op in self.options(value, group, rows):
            if choice == op.recipe.name or (choice == "auto" and op.us < math.inf):
                return op
        return None

    def cheapest(self, value: Value, group: str, rows: int) -> BlockOp:
        """Return the op of `find`. Raises LayoutError with the available recipes if there is none."""
        op = self.find(value, group, rows)
        if op is None:
            raise LayoutError(self._refusal(value, group, rows))
        return op

    def _refusal(self, value: Value, group: str, rows: int, of: str = "") -> str:
        """Return the text of the error. of: name of the value that it is part of."""
        choice, ranks = self.recipes.get(type(value), "auto"), self.mesh.size(group)
        recipes = [recipe for recipe in RECIPES[type(value)] if choice in ("auto", recipe.name)]
        for part, n in recipes[0].parts(value, ranks, rows) if recipes[0].parts else ():
            if self.find(part, group, n) is None:
                return self._refusal(part, group, n, f" of {value.what}")
        kinds = " or ".join(" + ".join(recipe.kinds(value, ranks)) for recipe in recipes)
        kinds += " with row counts on the device" * (recipes[0].live and self._captured)
        whole, takes = recipes[0].whole, value.bytes(rows if recipes[0].whole else 1, ranks)
        why = [f"{f'{rows} rows take' if whole else 'a row takes'} {takes} bytes"] if takes else []
        for offer in self.offers:
            if not self.serves(offer, group):
                why.append(f"{offer.transport} serves fewer ranks or hosts")
            elif not any(self._has(offer, recipe, value, ranks) for recipe in recipes):
                why.append(f"{offer.transport} has no {kinds}")
            elif offer.max_bytes is not None:
                why.append(f"{offer.transport} has max_bytes={offer.max_bytes}")
        found, names = self.options(value, group, rows), ", ".join(offer.transport for offer in self.offers)
        by, because = "" if choice == "auto" else f" by {choice}", f" ({'; '.join(why)})" if why else ""
        return (
            f"no enabled transport ({names}) can run {value.what}{of}{by} for {rows} rows "
            f"over {group}={ranks}{because}; there is "
            + (", ".join(f"{op.recipe.name} on {op.transport}" for op in found) or "none")
            + (", not measured here by weft tune" if found and choice == "auto" else "")
            + ("; leave --moe-exchange at auto, or plan for fewer tokens" if whole else "")
        )


class StreamPrices(Prices):
    """Bytes, times and transports of the stream's ops in a chain's plans.

    slices_copy: a slice copies its rows, as in a CUDA graph, where the host does not know their first row; otherwise it
    is a view, and free.
    """

    def __init__(self, mesh: Mesh, chain: Chain, offers: Sequence[Offer], slices_copy: bool):
        super().__init__(mesh, offers)
        self.chain, self.slices_copy = chain, slices_copy
        self._home = {rows: mesh.placement(rows) for rows in mesh.row_kinds}
        self._priced = cache(self._price)
        self.bytes_received = lru_cache(1 << 16)(self._bytes_received)

    def _bytes_received(self, edge: Edge, counts: Counts) -> float:
        """Return the bytes that the busiest rank receives.

        A rank's bytes are linear in its own group's tokens, so the busiest is in the largest or the smallest group.
        """
        ranks = {self.mesh.leader(counts.index(n)) for n in (min(counts), max(counts))}
        return max(rows_of_edge(edge, self.mesh, r, counts) for r in ranks) * self._row_bytes(edge.src.wire)

    def received(self, op: Op, counts: Counts) -> int:
        """Return the bytes that the busiest rank receives for an op of a plan."""
        return int(op.moved(self.bytes_received, counts))

    def _price(self, edge: Edge, tokens: int, finish: bool = False) -> tuple[float, str]:
        """Return (µs, transport) of the fastest; infinite if none has the capacity or none was measured.

        finish: with residual add and norm in the same call.
        """
        if not edge.moves:
            return (self._local_us(edge.dst, 2, tokens) if self.slices_copy else 0.0), "local"
        times, reorder_us = [], self._reorder_us(edge, tokens)
        calls, needed = [(edge.kind, self._bytes_moved(edge, tokens))], self._needed_bytes(edge, tokens)
        touched = 4 * self._max_bytes(edge.dst, tokens)  # reads delta and residual, writes residual and norm
        for offer in self.offers:
            able = edge.kind in offer.kinds and self.serves(offer, edge.group)
            able &= offer.max_bytes is None or needed <= offer.max_bytes
            if finish:
                able &= edge.kind in offer.epilogues
                able &= offer.max_normed_bytes is None or self._row_bytes() <= offer.max_normed_bytes
            if able:
                us = self.calls_us(offer, edge.group, calls) + reorder_us
                times.append((us + offer.cost.epilogue_us(touched) if finish else us, offer.transport))
        return min(times, default=(math.inf, "nobody"))

    def _reorder_us(self, edge: Edge, tokens: int) -> float:
        """Return the µs of a copy of the rows of all segments; 0 if these are in rank order."""
        if not edge.reorders(self.mesh):
            return 0.0
        return max(self._local_us(p, 2, tokens) for p in (edge.src, edge.dst))

    def _needed_bytes(self, edge: Edge, tokens: int) -> int:
        return max(self._max_bytes(p, tokens) for p in (edge.src, edge.dst))

    def _bytes_moved(self, edge: Edge, tokens: int) -> float:
        """Return the bytes that each rank receives: `_bytes_received` without a look at single ranks."""
        assert edge.exchange is not None
        rows = self.mesh.extent(self.mesh.gathered(edge.segment_rows)) * tokens / self.mesh.attn_tp
        return rows_received(edge.exchange, [rows] * edge.exchange.segments, 0) * self._row_bytes(edge.src.wire)

    def _local_us(self, at: Placement, touches: int, tokens: int) -> float:
        return self.local_us(touches * self._max_bytes(at, tokens))

    def _max_bytes(self, at: Placement, tokens: int) -> int:
        return self._max_rows(at.rows, tokens) * self._row_bytes(at.wire)

    def _max_rows(self, rows: Rows, tokens: int) -> int:
        """Return the maximum rows of any rank: the first's, as a group's first ranks hold the remainder."""
        gathered, groups = self.mesh.gathered(rows), self.mesh.gathered(self.mesh.rows(Rows.GROUP))
        whole = self.mesh.extent(gathered & ~groups)
        peers = self.mesh.peers(self.mesh.named(gathered & groups), 0)
        return whole * sum(self.mesh.row_count(Rows.OWN, rank, (tokens,)) for rank in peers)

    def _row_bytes(self, wire: Wire | None = None) -> int:
        return wire.row_bytes(self.chain.width) if wire else self.chain.width * self.chain.element_bytes

    def _move(self, operand: int | str, edge: Edge, tokens: int) -> StreamOp:
        us, transport = self._priced(edge, tokens)
        return StreamOp("move", operand, edge, us=us, transport=transport)

    def _add_us(self, rows: Rows, tokens: int) -> float:
        return self._local_us(self._home[rows], 3, tokens)

    def _norm(self, rows: Rows, tokens: int, added: bool) -> StreamOp:
        """Return the norm's op. added: right after an addition to the residual, in the same kernel."""
        at = self._home[rows]
        us = self._local_us(at, 2, tokens)
        if added:
            us = min(us, max(0.0, self._local_us(at, 4, tokens) - self._add_us(rows, tokens)))
        return StreamOp("norm", rows=rows, us=us)

    def _format_bytes(self, rows: Rows, wire: Wire, tokens: int) -> int:
        return self._max_rows(rows, tokens) * sum(wire.format.parts(self.chain.width))

    def _quantise(self, rows: Rows, wire: Wire, tokens: int, with_norm: bool) -> StreamOp:
        """Return the op that quantises. with_norm: in the norm's kernel, which has read the rows."""
        cost, moved = self.offers[0].cost, self._format_bytes(rows, wire, tokens)
        us = cost.epilogue_us(moved) if with_norm else cost.local_us(self._max_bytes(self._home[rows], tokens) + moved)
        return StreamOp("quantise", NORMED, rows=rows, us=us, wire=wire)

    def _laid_out_us(self, rows: Rows, wire: Wire, tokens: int, kernels: int = 1) -> float:
        """Return the µs of kernels that pack or unpack rows."""
        touched = self._format_bytes(rows, wire, tokens) + self._max_rows(rows, tokens) * self._row_bytes(wire)
        return self.local_us(touched) + (kernels - 1) * self.local_us(0)

    def _pack(self, rows: Rows, wire: Wire, tokens: int, with_norm: bool) -> StreamOp:
        us = self._quantise(rows, wire, tokens, with_norm).us + self._laid_out_us(rows, wire, tokens)
        return StreamOp("pack", NORMED, rows=rows, us=us, wire=wire)
