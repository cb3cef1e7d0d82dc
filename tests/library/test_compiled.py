"""`torch.ops.weft` under torch's compilers and exporters, in one process: what they run of a rank's calls, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.effects import has_effects

from weft.library import custom_ops
from weft.library.custom_ops import with_rank


class Recorded:
    """A communicator's part that ops use, of a rank whose peers all have its tensors; it notes its calls."""

    def __init__(self, rank: int, world_size: int = 2):
        self.rank, self.world_size = rank, world_size
        self.name = with_rank("recorded", rank, world_size)
        self.calls: list[str] = []
        custom_ops.OPEN["recorded"] = self

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls.append(f"all_reduce {float(x.sum()):g}")
        return x * self.world_size

    def all_gatherv(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        self.calls.append(f"all_gatherv {list(counts)}")
        return x.new_ones(sum(counts), *x.shape[1:])

    def reduce_scatterv(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        self.calls.append(f"reduce_scatterv {list(counts)}")
        return x.split(list(counts))[self.rank] * self.world_size

    def stacked_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.calls.append(f"norm {eps:g}")
        return torch.stack((x + residual, x + residual))


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No graph of another test, in memory or on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def a_rank_that_ignores_results(comm: str) -> Callable[[Tensor, list[int]], Tensor]:
    """Make calls whose results are unread, empty or equal, which a graph's passes might drop, merge or swap.

    No kernel is compiled for what is between them: that takes seconds.
    """
    ops = torch.ops.weft

    def step(x: Tensor, counts: list[int]) -> Tensor:
        ops.all_reduce(x, comm)
        part = ops.reduce_scatterv(x, counts, comm) * 2
        ops.all_gatherv(part, counts, comm)
        ops.all_reduce(x, comm)
        total = ops.all_reduce(x, comm)
        ops.all_reduce_add_rms_norm(x, x, x[0], 0.5, comm)
        return total

    return step


STEP = [
    "all_reduce 24",
    "reduce_scatterv [0, 3]",
    "all_gatherv [0, 3]",
    "all_reduce 24",
    "all_reduce 24",
    "norm 0.5",
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_rank_makes_every_call_in_order(backend: str, dynamic: bool) -> None:
    comm = Recorded(0)
    step = torch.compile(a_rank_that_ignores_results(comm.name), backend=backend, dynamic=dynamic, fullgraph=True)
    assert torch.equal(step(torch.ones(3, 8), [0, 3]), torch.full((3, 8), 2.0))
    assert comm.calls == STEP


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_rank_makes_every_call_in_order(strict: bool) -> None:
    comm = Recorded(0)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return a_rank_that_ignores_results(comm.name)(x, [0, 3])

    exported = torch.export.export(Model(), (torch.ones(3, 8),), strict=strict)
    assert not comm.calls
    for program in (exported, exported.run_decompositions()):
        comm.calls.clear()
        assert torch.equal(program.module()(torch.ones(3, 8)), torch.full((3, 8), 2.0))
        assert comm.calls == STEP


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_cache_keeps_ranks_apart(dynamic: bool) -> None:
    """Ranks that compile the same program share a folder; so do calls with other counts."""
    x = torch.arange(7.0)[:, None].expand(7, 8)
    for _ in range(2):
        for rank in (0, 1):
            for counts in ([3, 4], [0, 7]):
                comm = Recorded(rank)
                torch._dynamo.reset()

                def step(x: Tensor, counts: list[int], comm: str = comm.name) -> Tensor:
                    return torch.ops.weft.reduce_scatterv(x, counts, comm)

                given = torch.compile(step, dynamic=dynamic, fullgraph=True)(x, counts)
                assert torch.equal(given, x.split(counts)[rank] * 2)


def test_a_name_without_a_rank_is_refused_where_shapes_depend_on_it() -> None:
    comm = Recorded(1)
    x = torch.ones(3, 8)
    assert torch.equal(torch.ops.weft.all_reduce(x, "recorded"), x * 2)
    with pytest.raises(ValueError, match="pass Communicator"):
        torch.ops.weft.reduce_scatterv(x, [1, 2], "recorded")
    with pytest.raises(RuntimeError, match="a graph of rank 0 runs on rank 1"):
        torch.ops.weft.reduce_scatterv(x, [1, 2], with_rank("recorded", 0, 2))
    assert comm.calls == ["all_reduce 24"]


def test_every_op_is_an_effect() -> None:
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    ops = {getattr(torch.ops.weft, name.split("::")[1]).default for name in names if name.startswith("weft::")}
    assert ops == set(custom_ops.OPS) and all(map(has_effects, ops))
