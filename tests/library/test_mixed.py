"""Random programs of collectives, compiled and eager in turn, on ranks that each ignore other results."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from library.worlds import numbers, run_ranks, same_bits
from weft.library.communicator import Communicator

WIDTH, CALLS = 8, 8
BACKENDS = ("aot_eager", "inductor", "eager")


@dataclass(frozen=True)
class Call:
    """One collective of a program, the same on all ranks. seed: of its inputs."""

    op: str
    counts: tuple[int, ...]
    seed: int

    def given(self, rank: int) -> Tensor:
        """The input of a rank."""
        rows = self.counts[rank] if self.op == "all_gatherv" else sum(self.counts)
        return numbers(self.seed + rank, rows, WIDTH)

    def run(self, comm: Communicator, x: Tensor) -> Tensor:
        if self.op == "all_reduce":
            return comm.all_reduce(x)
        if self.op == "norm":
            return comm.all_reduce_add_rms_norm(x, x, x.new_ones(WIDTH), 1e-6)[1]
        return getattr(comm, self.op)(x, list(self.counts))

    def expected(self, rank: int) -> Tensor:
        """The result of `run`, of all ranks' inputs times two."""
        every = [self.given(r) * 2 for r in range(len(self.counts))]
        if self.op == "all_gatherv":
            return torch.cat(every)
        total = torch.stack(every).sum(0)
        if self.op == "reduce_scatterv":
            return total.split(self.counts)[rank]
        return total + every[rank] if self.op == "norm" else total


@dataclass(frozen=True)
class Program:
    """Calls in their order, the compiled and the plain function that make them, and what this rank reads of them."""

    calls: tuple[Call, ...]
    read: tuple[int, ...]
    plain: Callable[[list[Tensor]], list[Tensor]]
    compiled: Callable[[list[Tensor]], list[Tensor]]


def program(comm: Communicator, draw: random.Random, own: random.Random, backend: str) -> Program:
    """draw: the same on all ranks; own: this rank's."""
    ops = ("all_reduce", "all_gatherv", "reduce_scatterv", "norm")
    calls = tuple(
        Call(draw.choice(ops), tuple(draw.choices((0, 0, 1, 3), k=comm.world_size)), draw.randrange(1 << 30))
        for _ in range(CALLS)
    )
    read = tuple(i for i in range(CALLS) if own.random() < 0.5)

    def run(inputs: list[Tensor]) -> list[Tensor]:
        results = [call.run(comm, x * 2) for call, x in zip(calls, inputs, strict=True)]
        return [results[i] + 1 for i in read]

    return Program(calls, read, run, torch.compile(run, backend=backend, fullgraph=True, dynamic=draw.random() < 0.5))


def mixed_calls(programs: int, total: int, backends: tuple[str, ...], device: str = "cpu") -> None:
    """So many programs, run in random order until all ranks have made `total` calls."""
    with (
        torch._dynamo.config.patch(recompile_limit=2 * programs),  # they share their code
        Communicator(max_bytes=1 << 16, timeout_s=900) as comm,
    ):
        draw, own = random.Random(37), random.Random(comm.rank)
        made = [program(comm, draw, own, backends[i % len(backends)]) for i in range(programs)]
        inputs = [[call.given(comm.rank).to(device) for call in each.calls] for each in made]
        expected = [[each.calls[i].expected(comm.rank).to(device) + 1 for i in each.read] for each in made]
        for _ in range(total // CALLS):
            at, eager, between = draw.randrange(programs), draw.random() < 0.3, draw.random() < 0.2
            given = (made[at].plain if eager else made[at].compiled)(inputs[at])
            assert len(given) == len(expected[at])
            assert all(same_bits(a, b) for a, b in zip(given, expected[at], strict=True)), (at, eager)
            if between:
                comm.broadcast(inputs[at][0].new_ones(2), draw.randrange(comm.world_size))
        comm.barrier()
        comm.check()
    dist.barrier()


@pytest.mark.nightly
def test_compiled_and_eager_calls_in_turn(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, mixed_calls, 2, 400, ("aot_eager", "eager"))


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_hundred_thousand_compiled_and_eager_calls(
    world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "graphs"))  # of all ranks
    run_ranks(world, tmp_path, mixed_calls, 12, 100_000, BACKENDS)
