"""What the exchanges of a captured step take, each alone: inside a replayed graph nothing can be timed.

Each exchange of a plan is repeated in a small graph of its own, with full tensors, and timed by events on either side
of a replay. Every rank does the same, so that all enter an exchange together: the waiting for slow ranks is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from weft.comm.rows import CapturedRows
from weft.comm.stats import StepKey, step_key
from weft.comm.transport import Epilogue, LiveSizes, Transport
from weft.place.edges import Edge
from weft.place.plan import Plan
from weft.place.spec import Rows

CALLS, REPLAYS = 10, 3
Timer = Callable[[Callable[[], Tensor]], float]


@torch.inference_mode()
def graph_seconds(call: Callable[[], Tensor]) -> float:
    """Of one call on this rank's GPU, of several in a graph. Collective, where the call is."""
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


def exchange_times(
    plan: Plan, transports: Mapping[str, Transport], rows: CapturedRows, like: Tensor, timer: Timer = graph_seconds
) -> dict[StepKey, float]:
    """Seconds of a call of each communicating step of a plan that one of the transports carries.

    rows: full, with room for the plan's counts; like: of the activations' width, dtype and device.
    """
    found: dict[tuple[Edge, bool, str], float] = {}
    times: dict[StepKey, float] = {}
    for read, step, edge in plan.moves():
        transport = transports.get(step.transport)
        if transport is None or edge.exchange is None:
            continue
        normed = step.op == "finish"
        if (key := (edge, normed, step.transport)) not in found:
            found[key] = timer(_call(edge, transport, rows, like, normed))
        times[step_key(read.site, step)] = found[key]
    return times


def _call(edge: Edge, transport: Transport, rows: CapturedRows, like: Tensor, normed: bool) -> Callable[[], Tensor]:
    width = like.shape[1]
    if edge.load is not None:
        return _permute(edge, transport, rows, like)
    x = like.new_zeros(rows.room(edge.src.rows), width)
    residual, weight = like.new_zeros(rows.room(edge.dst.rows), width), like.new_ones(width)
    epilogue = Epilogue(residual, weight, 1e-6) if normed else None
    return lambda: rows.carry(edge, x, transport, epilogue)


def _permute(edge: Edge, transport: Transport, rows: CapturedRows, like: Tensor) -> Callable[[], Tensor]:
    """With as many rows for each rank as are to be expected of full tensors."""
    exchange, world = edge.exchange, tuple(range(rows.mesh.world))
    assert exchange is not None and edge.load is not None
    own = tuple(rows.mesh.row_count(Rows.OWN, rank, rows.capacity) for rank in world)
    if not edge.load.most_row_bytes:  # counts
        return lambda: transport.exchange(like.new_zeros(len(world), 1), exchange, world, (1,) * len(world) ** 2)
    share = edge.load.row_bytes / edge.load.most_row_bytes
    live = [round(n * share) for n in (*(own[rows.rank] for _ in world), *own)]
    sizes = LiveSizes(tuple(n for n in own for _ in world), torch.tensor(live, dtype=torch.int32, device=like.device))
    x = like.new_zeros(len(world) * own[rows.rank], edge.load.most_row_bytes // like.element_size())
    return lambda: transport.exchange(x, exchange, world, sizes)
