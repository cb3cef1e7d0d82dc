"""What the exchanges of a captured step take, each alone: inside a replayed graph nothing can be timed.

Each exchange of a plan is repeated in a small graph of its own, with full tensors, and timed by events on either side
of a replay. Every rank does the same, so that all enter an exchange together: the waiting for slow ranks is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from weft.comm.transport import Epilogue, LiveSizes, Transport
from weft.planner.exchange import all_to_allv
from weft.planner.experts import Permute
from weft.planner.plan import Plan
from weft.planner.plan_step import Step
from weft.planner.settlements import Settled
from weft.planner.spec import Rows
from weft.stream.stats import StepKey, step_key
from weft.stream.step_rows import CapturedRows

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
    """Seconds of a call of each communicating step of a plan, and of what is settled by counts, that one of the
    transports carries.

    rows: full, with capacity for the plan's counts; like: of the activations' width, dtype and device.
    """
    found: dict[object, float] = {}
    times: dict[StepKey, float] = {}
    for site, op in plan.ops(asked=False):
        transport = transports.get(op.transport)
        if transport is None or (isinstance(op, Settled) and not op.by_counts):
            continue
        key = op if isinstance(op, Settled) else (op.edge, op.op == "finish", op.transport)
        if key not in found:
            found[key] = timer(_call(op, transport, rows, like))
        times[step_key(site, op)] = found[key]
    return times


def _call(op: Step | Settled, transport: Transport, rows: CapturedRows, like: Tensor) -> Callable[[], Tensor]:
    if isinstance(op, Settled):
        assert isinstance(op.value, Permute)
        return _permute(op.value, transport, rows, like)
    edge, width = op.edge, like.shape[1]
    assert edge is not None
    wire, have = edge.src.wire, rows.capacity_of(edge.src.rows)
    x = like.new_zeros(have, wire.row_bytes(width), dtype=torch.uint8) if wire else like.new_zeros(have, width)
    residual, weight = like.new_zeros(rows.capacity_of(edge.dst.rows), width), like.new_ones(width)
    epilogue = Epilogue(residual, weight, 1e-6) if op.op == "finish" else None
    return lambda: rows.carry(edge, x, transport, epilogue)


def _permute(what: Permute, transport: Transport, rows: CapturedRows, like: Tensor) -> Callable[[], Tensor]:
    """With as many rows for each rank as are to be expected of full tensors."""
    world, exchange = tuple(range(rows.mesh.world)), all_to_allv(rows.mesh.world)
    own = tuple(rows.mesh.row_count(Rows.OWN, rank, rows.capacity) for rank in world)
    if not what.sent_row_bytes:  # counts
        return lambda: transport.exchange(like.new_zeros(len(world), 1), exchange, world, (1,) * len(world) ** 2)
    share = what.row_bytes / what.sent_row_bytes
    live = [round(n * share) for n in (*(own[rows.rank] for _ in world), *own)]
    sizes = LiveSizes(tuple(n for n in own for _ in world), torch.tensor(live, dtype=torch.int32, device=like.device))
    x = like.new_zeros(len(world) * own[rows.rank], what.sent_row_bytes // like.element_size())
    return lambda: transport.exchange(x, exchange, world, sizes)
