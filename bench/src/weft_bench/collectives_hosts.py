"""Times of the exchanges of plans over hosts, compared with flat collectives and with predictions, by ranks on CPUs.

Flat: each exchange is one call of gloo over all ranks. Planned: the cheapest path of shm inside hosts and gloo across
them. Each runs as in a model, with the additions and norms in between. They take turns, so a disturbance of the hosts
affects both.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.comm.shm import ShmTuning
from weft.comm.transport import Ranks, Transport, offer_of
from weft.comm.transport_registry import GLOO, SHM
from weft.engine.config.config import EngineConfig
from weft.engine.worker.open_transports import cost_model, table_file
from weft.planner.chain import Chain, Read
from weft.planner.cost import ETHERNET, Cost, costs, over_network, read_tuning
from weft.planner.plan import Plan, Planner
from weft.planner.spec import Mesh, Rows
from weft.stream.hidden import Hidden
from weft.stream.step_rows import StepRows
from weft.stream.stream import Stream
from weft.tune.cpu_costs import DTYPE, ROW_BYTES, WIDTH, opening_of
from weft.tune.ranks import HostContext, Report, all_cores, slowest
from weft_bench.collectives import show_size

EXCHANGES = ("all_reduce", "reduce_scatter", "all_gather", "layer")
"""Exchanges over all ranks; layer: the exchanges of a layer of attention and experts."""
FLAT, PLANNED = "flat", "planned"
CALLS, ROUNDS = 5, 5


@dataclass(frozen=True)
class RoundTimes:
    """Times of an exchange by one kind of plan.

    Attributes:
        bytes: size of all ranks' rows together.
        steps: steps of the plan.
        us: the slowest rank's median of each round, in µs.
        predicted_us: time by the cost model.
    """

    exchange: str
    bytes: int
    by: str
    steps: list[str]
    us: list[float]
    predicted_us: float

    def row(self) -> dict[str, object]:
        """Return the row for JSON."""
        return vars(self) | {"us": [round(us, 1) for us in self.us], "predicted_us": round(self.predicted_us, 1)}


@dataclass(frozen=True)
class Flat:
    """Cost of collectives over all ranks. Collectives over fewer ranks cost infinity, so that no plan uses them."""

    cost: Cost
    world: int

    @property
    def name(self) -> str:
        return self.cost.name

    def collective_us(self, kind: str, ranks: int, bytes_moved: float, hosts: int = 1) -> float:
        return self.cost.collective_us(kind, ranks, bytes_moved, hosts) if ranks == self.world else math.inf

    def local_us(self, bytes_touched: float) -> float:
        return self.cost.local_us(bytes_touched)

    def epilogue_us(self, bytes_touched: float) -> float:
        return self.cost.epilogue_us(bytes_touched)


@dataclass
class ReadNorm:
    """Norm of a read."""

    path: str
    weight: Tensor
    eps: float = 1e-6


def chain_of(exchange: str, mesh: Mesh) -> Chain:
    """Return the reads and adds of an exchange."""
    group, world, own = (mesh.placement(rows) for rows in (Rows.GROUP, Rows.WORLD, Rows.OWN))
    attention, experts = mesh.placement(Rows.GROUP, owes="attn_tp"), mesh.placement(Rows.WORLD, owes="world")
    reads = {
        "all_reduce": (Read("norm", world, (experts,)),),
        "reduce_scatter": (Read("norm", own, (experts,)),),
        "all_gather": (Read("norm", world, (own,)),),
        "layer": (
            Read("attention", group, (group,)),
            Read("experts", world, (attention,)),
            Read("norm", group, (experts,)),
        ),
    }
    return Chain(reads[exchange], WIDTH, DTYPE.itemsize)


def plans_of(exchange: str, size: int, mesh: Mesh, table: str) -> dict[str, Plan]:
    """Return the plan of each kind. table: a cost model by name or path."""
    model, chain = over_network(costs(table), ETHERNET), chain_of(exchange, mesh)
    shm, gloo = (offer_of(entry, mesh, model.of(entry.name, mesh.world)) for entry in (SHM, GLOO))
    tokens = max(1, size // ROW_BYTES // mesh.attn_dp)
    offers = {FLAT: [replace(gloo, cost=Flat(gloo.cost, mesh.world))], PLANNED: [shm, gloo]}
    return {by: Planner(mesh, chain, some).plan((tokens,) * mesh.attn_dp) for by, some in offers.items()}


def described(config: EngineConfig, cases: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Return node 0's message to all ranks: see `measure`. Raises LayoutError."""
    return cost_described(config) | {"cases": cases}


def cost_described(config: EngineConfig) -> dict[str, Any]:
    """Return a cost model's name, the text of a table that replaces it, and the tuning of shm. Raises LayoutError."""
    path, model = table_file(config), cost_model(config)
    table = path.read_text() if path is not None and model.name == str(path) else None
    tuning = ShmTuning() if path is None else read_tuning(path, "shm_tuning", ShmTuning)
    return {"cost": "cpu" if config.cost == "auto" else config.cost, "table": table, "tuning": asdict(tuning)}


@contextmanager
def transports_over_hosts(
    rank: int, directory: Path, here: HostContext, said: dict[str, Any], largest: int
) -> Iterator[tuple[str, Transport, Transport]]:
    """Open shm and gloo; yield the name or path of the cost model, and both. Collective.

    said: values of `cost_described`. largest: bytes of the largest tensor.
    """
    cost = said["cost"]
    if said["table"] is not None:
        (path := directory / "cost.json").write_text(said["table"])
        cost = str(path)
    options = {"shm_tuning": ShmTuning(**said["tuning"])}
    opening = opening_of(here.mesh, rank, directory, torch.device("cpu"), largest, options, store=here.store)
    with all_cores():  # gloo's threads must not wait for this one
        shm, gloo = SHM.open(opening), GLOO.open(opening)
    yield cost, shm, gloo
    for transport in (shm, gloo):
        transport.close()


def line(flat: RoundTimes, planned: RoundTimes) -> str:
    """Format a line: µs of both kinds, the predictions, and the ratio of flat to planned."""
    flat_us, us = statistics.median(flat.us), statistics.median(planned.us)
    ratio = statistics.median(a / b for a, b in zip(flat.us, planned.us, strict=True))
    case = f"{planned.exchange:14} {show_size(planned.bytes):>5}"
    found = f"flat {flat_us:9,.0f} µs (predicted {flat.predicted_us:9,.0f})"
    return f"{case}  {found}  planned {us:9,.0f} µs (predicted {planned.predicted_us:9,.0f})  {ratio:.2f}×"


def measure(rank: int, directory: Path, report: Report, here: HostContext, said: dict[str, Any]) -> None:
    """Run a rank's part; rank 0 reports RoundTimes of each kind for each case.

    said: values of `cost_described`; cases: pairs of exchange and bytes.
    """
    mesh, cases, group = here.mesh, said["cases"], tuple(range(here.mesh.world))
    gc.disable()
    with transports_over_hosts(rank, directory, here, said, max(size for _, size in cases)) as (cost, shm, gloo):
        for exchange, size in cases:
            plans = plans_of(exchange, size, mesh, cost)
            found: dict[str, list[float]] = {by: [] for by in plans}
            runs = {by: _run(plan, rank, shm, gloo) for by, plan in plans.items()}
            for round_ in range(ROUNDS + 1):
                for by, run in runs.items():
                    us = _median_us(run, gloo, group)
                    if round_:  # the first warms up
                        found[by].append(us)
            gc.collect()
            if rank == 0:
                for by, plan in plans.items():
                    predicted = sum(step.us for read in plan.reads for step in read.steps)
                    moves = [f"{edge.kind} {edge.group} · {step.transport}" for _, step, edge in plan.moves()]
                    report(RoundTimes(exchange, size, by, moves, found[by], predicted))


def _run(plan: Plan, rank: int, shm: Transport, gloo: Transport) -> Callable[[], object]:
    mesh, rows = plan.mesh, StepRows(plan.mesh, rank, plan.counts)
    used = {step.transport for _, step, _ in plan.moves()}
    mine = {entry.name: transport for entry, transport in ((SHM, shm), (GLOO, gloo)) if entry.name in used}
    home = mine.get(SHM.name, gloo)
    deltas = []
    for read in plan.reads:
        made = []
        for placement in read.read.deltas:
            like = torch.empty(0, dtype=DTYPE)
            x = home.empty(mesh.row_count(placement.rows, rank, plan.counts), WIDTH, like=like).fill_(1 + rank)
            made.append(Hidden(x, placement, mesh, "delta"))
        deltas.append(made)
    norms = [ReadNorm(read.read.site, torch.ones(WIDTH, dtype=DTYPE)) for read in plan.reads]

    @torch.inference_mode()
    def run() -> None:
        stream = Stream(plan, mine, rows)
        for read, added, norm in zip(plan.reads, deltas, norms, strict=True):
            for delta in added:
                stream.add(delta)
            stream.read(norm, read.read.target.rows)
        stream.finish()

    return run


def _median_us(run: Callable[[], object], meeting: Transport, group: Ranks) -> float:
    """Return the slowest rank's median over some calls; all ranks meet before each."""
    times = []
    for _ in range(CALLS):
        meeting.barrier(group)
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return slowest([statistics.median(times) * 1e6], meeting, group)[0]
