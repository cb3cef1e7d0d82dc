"""The planner for your own model, which reads a stream and adds to it: `weft.trace`, `weft.plan`, `weft.Stream`.

    traced = weft.trace(model, mesh, torch.empty(0, width), width=width)
    plan = weft.plan(traced, rows, comm)
    model(weft.Stream(plan, comm, rows), x)

`weft.stream.stream` documents the stream; this module joins a trace, its planners and a communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from weft.comm.transport import offer_of
from weft.comm.transport_registry import PEER, SHM
from weft.library.communicator import Communicator
from weft.planner.chain import Chain, Counts, bucket
from weft.planner.cost import costs as cost_model
from weft.planner.cost import host_costs
from weft.planner.plan import Plan, Planner
from weft.planner.spec import Mesh, PlacementError
from weft.stream.step_rows import StepRows
from weft.stream.stream import Stream as PlannedStream
from weft.stream.stream import TraceStream

RowCounts = int | Sequence[int]
"""Tokens of each DP group of a mesh, or one number for all of them."""


class Traced:
    """A model's chain of reads and adds on a mesh. It caches its planners, and they cache their plans."""

    def __init__(self, mesh: Mesh, chain: Chain):
        self.mesh, self.chain = mesh, chain
        self._planners: dict[tuple[str, int | None, str], Planner] = {}

    def planner(self, device: str, comm: Communicator | None, costs: str) -> Planner:
        """Return the planner for the offers of `comm`, or of any communicator on cpu or cuda. costs: see `plan`."""
        entry = comm.transport.entry if comm else PEER if device == "cuda" else SHM
        key = entry.name, entry.max_bytes, costs
        if key not in self._planners:
            model = host_costs(device == "cuda", [entry.name]) if costs == "auto" else cost_model(costs)
            offer = offer_of(entry, self.mesh, model.of(entry.name, self.mesh.world))
            self._planners[key] = Planner(self.mesh, self.chain, [offer])
        return self._planners[key]


def trace(
    model: Callable[..., object],
    mesh: Mesh,
    *inputs: Tensor,
    width: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Traced:
    """Return the reads and adds of `model(stream, *inputs)`, from a run on inputs without rows; nothing is exchanged.

    width, dtype, device: of the residual's rows. Raises PlacementError if the model adds values that do not match, or
    exchanges values inside a block, like the layers of `weft.engine.models`: these require the engine.
    """

    def form(number: int) -> TraceStream:
        traced = TraceStream(mesh, width, dtype, torch.device(device), number)
        with torch.no_grad():
            model(traced, *inputs)
        return traced

    first = form(0)
    others = tuple(form(number).chain().reads for number in range(1, first.forms))
    chain = replace(first.chain(), others=others)
    site = next((read.site for reads in chain.forms for read in reads if read.inside), None)
    if site is not None:
        raise PlacementError(f"the block after {site} settles values between ranks itself; only the engine plans these")
    return Traced(mesh, chain)


def plan(
    traced: Traced,
    rows: RowCounts,
    comm: Communicator | None = None,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    costs: str = "auto",
) -> Plan:
    """Return the cheapest collectives for a step of `rows` tokens, rounded up to a power of two; equal on all ranks.

    Raises ValueError for rows, a device or a communicator of another mesh, LayoutError and PlacementError as
    `weft.planner.plan.Planner`.

    Args:
        comm: communicator that will run them; None: any on `device`.
        costs: preset, or table FILE.json of `weft tune`; auto: this host's table, if there is one.
    """
    counts = _counts(traced.mesh, rows)
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; a plan is for cpu or cuda")
    if comm is not None:
        _check_mesh(traced.mesh, comm)
    return traced.planner(comm.device.type if comm else device, comm, costs).plan(counts)


class Stream(PlannedStream):
    """One forward pass of this rank along a plan; see `weft.stream.stream.Stream` for `read`, `add` and `finish`.

    rows: of this step, the same on all ranks. Raises ValueError if the plan is for other rows, ranks or another device,
    or gradients are on: they do not pass through.
    """

    def __init__(self, plan: Plan, comm: Communicator, rows: RowCounts):
        counts, transport = _counts(plan.mesh, rows), comm.transport
        _check_mesh(plan.mesh, comm)
        if bucket(counts) != plan.counts:
            raise ValueError(
                f"the plan is for {max(plan.counts)} tokens a group, this step has {list(counts)}; plan for these"
            )
        others = {step.transport for _, step, _ in plan.moves()} - {transport.entry.name}
        if others:
            raise ValueError(
                f"the plan takes {', '.join(others)}, not {transport.entry.name}; give weft.plan the communicator"
            )
        if torch.is_grad_enabled():
            raise ValueError("gradients do not pass through a stream; walk the plan under torch.inference_mode()")
        super().__init__(plan, {transport.entry.name: transport}, StepRows(plan.mesh, comm.rank, counts))


def _counts(mesh: Mesh, rows: RowCounts) -> Counts:
    counts = tuple(rows) if isinstance(rows, Sequence) else (rows,) * mesh.attn_dp
    if len(counts) != mesh.attn_dp or not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ValueError(f"rows must be {mesh.attn_dp} counts of 0 or more, one for each DP group, not {rows}")
    return counts


def _check_mesh(mesh: Mesh, comm: Communicator) -> None:
    if comm.mesh != mesh:
        raise ValueError(f"the model was traced on {mesh}, the communicator is of {comm.mesh}; make it with mesh=")
