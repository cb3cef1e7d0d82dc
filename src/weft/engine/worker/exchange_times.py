"""Times of the exchanges of a captured step, each measured alone: nothing inside a replayed graph can be timed.

Each exchange of a plan is repeated in a small graph of its own, with full tensors, and timed by events on either side
of a replay. All ranks enter an exchange together, so times do not include waiting for slow ranks.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from weft.comm.transport import Epilogue, LiveSizes, Transport
from weft.planner.exchange import all_to_allv
from weft.planner.op import BlockOp, Op, StreamOp
from weft.planner.plan import Plan
from weft.planner.spec import Rows
from weft.stream.stats import StepKey, step_key
from weft.stream.step_rows import CapturedRows

CALLS, REPLAYS = 10, 3
Timer = Callable[[Callable[[], Tensor]], float]


@torch.inference_mode()
def graph_seconds(call: Callable[[], Tensor]) -> float:
    """Return seconds of a call on this rank's GPU, from a graph of CALLS calls. Collective if the call is."""
    call()
    torch.cuda.synchronize()
    graph, begin, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / (CALLS * REPLAYS)


@torch.inference_mode()
def host_seconds(call: Callable[[], Tensor]) -> float:
    """Return seconds of a call on CPUs: the median of REPLAYS. Collective if the call is."""
    call()
    times = [time.perf_counter()]
    for _ in range(REPLAYS):
        call()
        times.append(time.perf_counter())
    return statistics.median(end - begin for begin, end in itertools.pairwise(times))


def exchange_times(
    plan: Plan, transports: Mapping[str, Transport], rows: CapturedRows, like: Tensor, timer: Timer = graph_seconds
) -> dict[StepKey, float]:
    """Return seconds of a call of each op on one of the transports, for ops with sizes that follow from counts.

    rows: full, with capacity for the plan's counts; like: a tensor of the activations' width, dtype and device.
    """
    found: dict[object, float] = {}
    times: dict[StepKey, float] = {}
    for site, op in plan.ops(optional=False):
        transport = transports.get(op.transport)
        if transport is None or not op.by_counts:
            continue
        same, call = CALL_OF[type(op)]
        key = same(op), op.transport
        if key not in found:
            found[key] = timer(call(op, transport, rows, like))
        times[step_key(site, op)] = found[key]
    return times


def _edge(op: Any, transport: Transport, rows: CapturedRows, like: Tensor) -> Callable[[], Tensor]:
    edge, width = op.edge, like.shape[1]
    wire, have = edge.src.wire, rows.capacity_of(edge.src.rows)
    x = like.new_zeros(have, wire.row_bytes(width), dtype=torch.uint8) if wire else like.new_zeros(have, width)
    residual, weight = like.new_zeros(rows.capacity_of(edge.dst.rows), width), like.new_ones(width)
    epilogue = Epilogue(residual, weight, 1e-6) if op.op == "finish" else None
    return lambda: rows.carry(edge, x, transport, epilogue)


def _permute(op: Any, transport: Transport, rows: CapturedRows, like: Tensor) -> Callable[[], Tensor]:
    """Return a permutation of the rows per rank that are expected of full tensors."""
    what, world, exchange = op.value, tuple(range(rows.mesh.world)), all_to_allv(rows.mesh.world)
    own = tuple(rows.mesh.row_count(Rows.OWN, rank, rows.capacity) for rank in world)
    if not what.sent_row_bytes:  # counts
        return lambda: transport.exchange(like.new_zeros(len(world), 1), exchange, world, (1,) * len(world) ** 2)
    share = what.row_bytes / what.sent_row_bytes
    live = [round(n * share) for n in (*(own[rows.rank] for _ in world), *own)]
    sizes = LiveSizes(tuple(n for n in own for _ in world), torch.tensor(live, dtype=torch.int32, device=like.device))
    x = like.new_zeros(len(world) * own[rows.rank], what.sent_row_bytes // like.element_size())
    return lambda: transport.exchange(x, exchange, world, sizes)


CALL_OF: dict[type[Op], tuple[Callable[[Any], object], Callable[..., Callable[[], Tensor]]]] = {
    StreamOp: (attrgetter("edge", "op"), _edge),
    BlockOp: (id, _permute),
}
"""Per type of op: a key, equal for ops with the same call, and a function that returns the call on full tensors."""
