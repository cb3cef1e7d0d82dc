"""Calls whose live rows differ from time to time, made again and again: by a graph that is replayed, or one by one.

Every exchange over every group of a mesh, with an epilogue and without, takes part. Tensors have room for the most rows
there may be; what lies beyond the live ones is NaN in inputs and residuals, and so is seen wherever it is taken along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.peer import PeerTransport
from weft.comm.transport import Epilogue, LiveSizes, Ranks, finish
from weft.planner import exchange as exchanges
from weft.planner.axes import GROUP_NAMES
from weft.planner.exchange import Exchange, input_rows, parts, result_rows
from weft.planner.spec import Mesh

Step = Callable[[], None]
LIMIT, WIDTH, CASES = 6, 72, 61
NORM_ERROR = 0.02
"""Tolerance of a normalised element, as a share of the largest: bfloat16 holds eight bits."""


@dataclass(frozen=True)
class LiveCall:
    """An exchange over a group, each segment of up to MOST rows."""

    exchange: Exchange
    group: Ranks
    norm: bool
    seed: int

    @property
    def capacity(self) -> tuple[int, ...]:
        permutes = self.exchange.direction == "permute"
        return (LIMIT,) * (self.exchange.ranks**2 if permutes else self.exchange.segments)

    def counts(self, case: int, rank: int) -> tuple[int, ...]:
        """The live rows, as the rank's device memory holds them: in a permute those that it sends and those it gets."""
        live, n = self.live(case), self.exchange.ranks
        if self.exchange.direction != "permute":
            return live
        place = self.group.index(rank)
        return live[place * n : (place + 1) * n] + live[place::n]

    def live(self, case: int) -> tuple[int, ...]:
        """Rows of each segment: none, all there is room for, then any numbers, with an empty one now and then."""
        if case < 2:
            return tuple(LIMIT * case for _ in self.capacity)
        sampled = torch.randint(
            0, LIMIT + 1, (len(self.capacity),), generator=self._generator(case, self.group[0])
        ).tolist()
        return tuple(0 if (case + i) % 5 == 0 else rows for i, rows in enumerate(sampled))

    def input(self, case: int, rank: int) -> Tensor:
        """Small whole numbers, so that sums are exact; NaN beyond the live rows."""
        place = self.group.index(rank)
        x = self._numbers(case, rank, input_rows(self.exchange, self.capacity, place))
        x[input_rows(self.exchange, self.live(case), place) :] = float("nan")
        return x

    def residual(self, case: int, rank: int) -> Tensor:
        """Return a residual like the input."""
        place = self.group.index(rank)
        residual = self._numbers(case, 64 + rank, result_rows(self.exchange, self.capacity, place))
        residual[result_rows(self.exchange, self.live(case), place) :] = float("nan")
        return residual

    def wanted(self, case: int, rank: int) -> Tensor:
        """The result's live rows; NaN beyond."""
        place, live = self.group.index(rank), self.live(case)
        xs = [self.input(case, r).float() for r in self.group]
        out = torch.full((result_rows(self.exchange, self.capacity, place), WIDTH), float("nan"))
        for part in parts(self.exchange, live):
            if place in part.readers:
                terms = [xs[r][part.source_row : part.source_row + part.rows] for r in part.sources]
                out[part.reader_row : part.reader_row + part.rows] = torch.stack(terms).sum(0)
        if not self.norm:
            return out.bfloat16()
        return finish(out.bfloat16(), Epilogue(self.residual(case, rank), weight(), 1e-6))

    def _numbers(self, case: int, who: int, rows: int) -> Tensor:
        return torch.randint(-8, 9, (rows, WIDTH), generator=self._generator(case, who)).bfloat16()

    def _generator(self, case: int, who: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed * CASES + case) * 128 + who)


def weight() -> Tensor:
    return torch.linspace(-2, 2, WIDTH).bfloat16()


def live_calls(mesh: Mesh, rank: int) -> Iterator[LiveCall]:
    """On every rank of a group the same ones in the same order."""
    groups = [g for g in dict.fromkeys(mesh.peers(name, rank) for name in GROUP_NAMES) if len(g) > 1]
    made: list[tuple[Exchange, Ranks]] = []
    for group in groups:
        n = len(group)
        kinds = (exchanges.all_gatherv, exchanges.reduce_scatterv, exchanges.all_reduce, exchanges.all_to_allv)
        made += [(make(n), group) for make in kinds]
    if mesh.attn_dp > 1 and mesh.attn_tp > 1:
        world = tuple(range(mesh.world))
        for mixed in (exchanges.all_reduce_all_gatherv, exchanges.reduce_scatterv_all_reduce):
            made.append((mixed(mesh.attn_dp, mesh.attn_tp), world))
    for seed, (exchange, group) in enumerate(made):
        for norm in (False, True)[: 1 + (exchange.combine == "sum")]:
            yield LiveCall(exchange, group, norm, seed)


def replay(
    transport: PeerTransport,
    mesh: Mesh,
    device: torch.device,
    rounds: int,
    again: Callable[[PeerTransport, Step], Step],
) -> None:
    """All live calls, made again with other counts and contents each time; every time is checked, sums exactly.

    again: what makes these calls again, such as a graph of them, replayed.
    """
    rank, calls = transport.rank, list(live_calls(mesh, transport.rank))
    cases = range(min(rounds, CASES))
    lives = [[torch.tensor(c.counts(k, rank), dtype=torch.int32, device=device) for c in calls] for k in cases]
    inputs = [[c.input(k, rank).to(device) for c in calls] for k in cases]
    residuals = [[c.residual(k, rank).to(device) for c in calls] for k in cases]
    wanted = [[c.wanted(k, rank).to(device) for c in calls] for k in cases]
    counts, xs, held = ([t.clone() for t in given[0]] for given in (lives, inputs, residuals))
    outs = [torch.empty_like(t) for t in wanted[0]]
    norm_weight = weight().to(device)
    bad = torch.zeros((), dtype=torch.int64, device=device)

    def step() -> None:
        for call, x, count, residual, out in zip(calls, xs, counts, held, outs, strict=True):
            epilogue = Epilogue(residual, norm_weight, 1e-6) if call.norm else None
            sizes = LiveSizes(call.capacity, count)
            out.copy_(transport.exchange(x, call.exchange, call.group, sizes, epilogue))

    repeat = again(transport, step)
    for step_index in range(rounds):
        k = step_index * 17 % len(cases)
        for now, later in ((counts, lives[k]), (xs, inputs[k]), (held, residuals[k])):
            for tensor, given in zip(now, later, strict=True):
                tensor.copy_(given)
        for out in outs:
            out.fill_(float("inf"))
        repeat()
        for number, (call, out, want) in enumerate(zip(calls, outs, wanted[k], strict=True)):
            bad += (wrong(call, out, want) & (bad == 0)) * (step_index * 100 + number + 1)
        if step_index % 1000 == 999 or step_index == rounds - 1:
            transport.check()
            if first := int(bad):
                step_index, number = divmod(first - 1, 100)
                raise AssertionError(f"rank {rank}, turn {step_index}: a wrong result of {calls[number]}")


def wrong(call: LiveCall, out: Tensor, want: Tensor) -> Tensor:
    """Return whether an element is wrong; NaN in `want` accepts any value."""
    if not call.norm:
        return ((out != want) & ~want.isnan()).any()
    limit = want[1].nan_to_num().abs().amax()
    off = ~((out[1] - want[1]).abs() <= NORM_ERROR * limit) & ~want[1].isnan()
    return ((out[0] != want[0]) & ~want[0].isnan()).any() | off.any()
