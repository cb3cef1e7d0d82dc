"""Timing of calls of transport peer, and of others, on the GPUs of this host.

A figure is µs per call: the median over replays of a CUDA graph of many calls, of the slowest rank. Inputs rotate, so
that no call finds its own in a cache. Before it is timed, peer's result is compared with NCCL's, gathered in float32.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.peer import PeerTransport, check_peer_access
from weft.comm.peer_launch import PeerTuning
from weft.comm.torchdist import TorchDistTransport
from weft.comm.transport import CommError, Epilogue, LiveSizes, finish
from weft.planner.exchange import (
    Exchange,
    all_gatherv,
    all_reduce,
    all_reduce_all_gatherv,
    all_to_allv,
    input_rows,
    parts,
    reduce_scatterv,
    reduce_scatterv_all_reduce,
    result_rows,
)
from weft.planner.spec import Mesh
from weft.tune.call_times import DTYPES, MIXED

REPLAYS, WARM, GRAPH_ROUNDS = 6, 2, 5  # of a graph in each of its rounds
CALLS, SMALL_CALLS, SMALL = 20, 100, 1 << 20  # in a graph; more up to SMALL bytes, as ranks begin some µs apart
INPUTS = 4  # different inputs of a case
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    """Call to time, with `hidden` elements per row.

    The mixed edges run on half the ranks' DP groups of two; ragged ones have skewed sizes with the same mean. rows:
    input of a rank (gathers, all_reduce, all_to_all from each) or result (scatters).
    """

    ranks: int
    edge: str
    dtype: str
    hidden: int
    rows: int

    def __str__(self) -> str:
        return f"{self.ranks} GPUs  {self.edge:31} {self.dtype} {self.hidden:5} × {self.rows:<5}"

    @property
    def plain(self) -> str:
        """Name of the edge without norm and sizes."""
        return self.edge.removesuffix("+norm").removesuffix(" ragged")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each rank; of each DP group for the mixed edges."""
        if self.edge.endswith("ragged"):  # 7/4, 5/4, 3/4, 1/4 of the mean, and again
            return tuple(max(1, self.rows * (7 - 2 * (i % 4)) // 4) for i in range(self.ranks))
        return (self.rows,) * (self.ranks // 2 if self.edge.startswith(MIXED) else self.ranks)

    @property
    def calls(self) -> int:
        """Number of calls in a graph."""
        return SMALL_CALLS if self.input_bytes <= SMALL else CALLS

    @property
    def exchange(self) -> Exchange:
        """Exchange of the edge."""
        n, pairs = self.ranks, self.ranks // 2
        known = (
            *(make(n) for make in (all_reduce, reduce_scatterv, all_gatherv, all_to_allv)),
            *(make(pairs, 2) for make in (all_reduce_all_gatherv, reduce_scatterv_all_reduce)),
        )
        return next(exchange for exchange in known if exchange.kind == self.plain)

    @property
    def segments(self) -> tuple[int, ...]:
        """Rows of each segment of the exchange."""
        if self.plain == "all_reduce":
            return (self.rows,)
        return self.sizes * self.ranks if self.plain == "all_to_allv" else self.sizes

    @property
    def capacity(self) -> tuple[int, ...]:
        """Capacity of each segment; in ragged gathers, the largest segment for all."""
        ragged = self.edge == "all_gatherv ragged"
        return (max(self.sizes),) * self.ranks if ragged else self.segments

    @property
    def inputs(self) -> int:
        """Rows of a rank's input."""
        return input_rows(self.exchange, self.capacity, 0)

    @property
    def input_bytes(self) -> int:
        """Bytes of a rank's input."""
        return self.inputs * self.hidden * DTYPES[self.dtype].itemsize


def mesh_of(world: int) -> Mesh:
    """Return a mesh with two ranks an attention group if there are four or more, as the mixed edges require."""
    return Mesh(world // 2, 2, world, 1) if world >= 4 and world % 2 == 0 else Mesh(1, world, world, 1)


@dataclass
class World:
    """A rank's end of a measurement: torch.distributed over NCCL, by which the ranks agree, and transport peer."""

    mesh: Mesh
    rank: int
    device: torch.device
    torchdist: TorchDistTransport
    peer: PeerTransport

    @classmethod
    def open(cls, rank: int, world: int, directory: Path, max_bytes: int) -> World:
        """Open both transports. Collective."""
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # NCCL has threads of its own
        device, mesh = torch.device("cuda", rank), mesh_of(world)
        torch.cuda.set_device(device)
        check_peer_access(world, rank)
        torchdist = TorchDistTransport(mesh, rank, f"file://{directory}/nccl", backend="nccl")
        dist.all_reduce(torch.zeros(1, device=device))  # NCCL connects with the first call
        peer = PeerTransport(mesh, rank, directory / "peer", device, max_bytes=max_bytes)
        return cls(mesh, rank, device, torchdist, peer)

    def close(self) -> None:
        """Close both transports. Collective."""
        self.peer.check()
        self.peer.close()
        self.torchdist.close()


def peer_us(case: Case, here: World, tunings: Sequence[PeerTuning]) -> list[float]:
    """Return the µs per call of peer, by each tuning. Collective."""
    inputs = make_inputs(case, here)
    return replays_us([peer_graph("peer", case, here, tuning, inputs) for tuning in tunings])


@dataclass(frozen=True)
class CaseInputs:
    """Inputs of a case. expected: result of a call with the first of xs, without the norm."""

    xs: list[Tensor]
    norm: Epilogue | None
    expected: Tensor


def make_inputs(case: Case, here: World) -> CaseInputs:
    dtype = DTYPES[case.dtype]
    xs = [torch.randn(case.inputs, case.hidden, device=here.device).to(dtype) for _ in range(INPUTS)]
    norm = _epilogue(case, here.rank, here.device) if case.edge.endswith("+norm") else None
    return CaseInputs(xs, norm, _expected(case, xs[0], here.mesh, here.rank))


def peer_graph(name: str, case: Case, here: World, tuning: PeerTuning, given: CaseInputs) -> Graph:
    here.peer.tuning = tuning
    ragged = case.edge.endswith("ragged")
    live = LiveSizes(case.capacity, torch.tensor(case.sizes, dtype=torch.int32, device=here.device))
    sizes = live if ragged else case.segments
    calls = [partial(here.peer.exchange, x, case.exchange, here.peer.on_host, sizes, given.norm) for x in given.xs]
    check_result(case, name, calls[0](), given)
    return capture(calls, case.calls)


def _epilogue(case: Case, rank: int, device: torch.device) -> Epilogue:
    torch.manual_seed(7)  # the same on every rank
    dtype = DTYPES[case.dtype]
    weight = torch.randn(case.hidden, device=device).to(dtype)
    rows = result_rows(case.exchange, case.capacity, rank)
    return Epilogue(torch.randn(rows, case.hidden, device=device).to(dtype), weight, 1e-6)


def _expected(case: Case, x: Tensor, mesh: Mesh, rank: int) -> Tensor:
    """Return the result by definition, from every rank's input in float32."""
    gathered = torch.empty(mesh.world * x.shape[0], case.hidden, device=x.device)
    dist.all_gather_into_tensor(gathered, x.float())
    inputs = gathered.view(mesh.world, x.shape[0], case.hidden)
    out = inputs.new_zeros(result_rows(case.exchange, case.segments, rank), case.hidden)
    for part in parts(case.exchange, case.segments):
        if rank in part.readers:
            terms = inputs[list(part.sources), part.source_row : part.source_row + part.rows]
            out[part.reader_row : part.reader_row + part.rows] = terms.sum(0)
    return out


def check_result(case: Case, name: str, got: Tensor, given: CaseInputs) -> None:
    expected, norm = given.expected, given.norm
    if norm is not None:
        expected, got = finish(expected.to(norm.residual.dtype), norm)[1].float(), got[1]
    require_close(case, name, got[: expected.shape[0]], expected)


def require_close(case: Any, name: str, got: Tensor, expected: Tensor) -> None:
    """Raise CommError if `got`, by `name`, differs from the float32 `expected`. case: has a dtype, and a text."""
    error = float((got.float() - expected).norm() / expected.norm())
    if not error <= TOLERANCE[DTYPES[case.dtype]]:
        raise CommError(f"{name} gave a wrong result for {case}: relative error {error:.1e}")


@dataclass(frozen=True)
class Graph:
    """Captured graph of `count` calls, the stream to replay it on, and the calls, which own its tensors."""

    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream
    calls: Sequence[Callable[[], object]]
    count: int


def graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median µs per call of a captured graph that cycles through them, of the slowest rank. Collective."""
    return replays_us([capture(calls)])[0]


def capture(calls: Sequence[Callable[[], object]], count: int = CALLS) -> Graph:
    """Return a graph of `count` calls, cycling through these, on a stream after the current one. Collective."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # vLLM's calls must not meet on a GPU: a rank may wait for ever
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                calls[i % len(calls)]()
    return Graph(graph, stream, calls, count)


def replays_us(graphs: Sequence[Graph]) -> list[float]:
    """Return the median µs per call of each graph over alternating replays, of the slowest rank. Collective."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(GRAPH_ROUNDS):
        for g, samples in zip(graphs, times, strict=True):
            with torch.cuda.stream(g.stream):
                samples += [events_us(g.stream, g.graph.replay) / g.count for _ in range(WARM + REPLAYS)][WARM:]
    return slowest_us([statistics.median(samples) for samples in times])


def events_us(stream: torch.cuda.Stream, run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    run()
    end.record(stream)
    stream.synchronize()
    return float(start.elapsed_time(end) * 1e3)


def slowest_us(us: list[float]) -> list[float]:
    slowest = torch.tensor(us, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()
