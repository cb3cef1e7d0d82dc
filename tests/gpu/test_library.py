"""The library on GPUs, a process each: random calls of every operation, dtype and size, compiled and eager, and graphs
that replay with other counts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from library.random_calls import LARGE, random_calls, same
from library.test_mixed import BACKENDS, mixed_calls
from library.worlds import numbers
from weft.kernels.torch_reference import rms_norm, softmax_merge
from weft.library.communicator import Communicator

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
CAPACITY, WIDTH = 24, 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rank_main(rank: int, world: int, directory: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    work(*args)
    dist.destroy_process_group()


def run_gpus(directory: Path, work: Callable[..., None], *args: Any) -> None:
    """A process a GPU."""
    world = min(GPUS, 8)
    mp.spawn(rank_main, (world, str(directory), work, args), nprocs=world)


def test_compiled_and_eager_calls_in_turn(tmp_path: Path) -> None:
    run_gpus(tmp_path, mixed_calls, 6, 4000, BACKENDS, "cuda")


def test_random_calls_equal_torchs(tmp_path: Path) -> None:
    run_gpus(tmp_path, random_calls, 300, LARGE)


def counts_in_graphs(rounds: int) -> None:
    """All operations with counts, of one graph a dtype, with counts that change between its replays."""
    draw = random.Random(5)
    with Communicator(max_bytes=1 << 20) as comm, torch.cuda.stream(torch.cuda.Stream()) as _:
        rank, world, stream = comm.rank, comm.world_size, torch.cuda.current_stream()
        for dtype in DTYPES:
            counts, live = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (world, 1))
            own = torch.zeros(CAPACITY, WIDTH, dtype=dtype, device="cuda")
            every = torch.zeros(world * CAPACITY, WIDTH, dtype=dtype, device="cuda")
            residual = torch.rand(CAPACITY, WIDTH).to(dtype)
            weight = torch.rand(WIDTH).to(dtype) + 0.5
            heads = torch.zeros(CAPACITY, 2 * world, WIDTH, dtype=dtype, device="cuda")
            lse = torch.zeros(CAPACITY, 2 * world, device="cuda")
            norm = residual.cuda(), weight.cuda(), 1e-5

            def calls() -> tuple[torch.Tensor, ...]:
                return (
                    comm.all_gatherv(own, counts, capacity=CAPACITY),  # noqa: B023
                    comm.reduce_scatterv(every, counts, capacity=CAPACITY),  # noqa: B023
                    comm.all_reduce(own),  # noqa: B023
                    *comm.all_reduce_add_rms_norm(own, *norm),  # noqa: B023
                    *comm.reduce_scatterv_add_rms_norm(every, counts, *norm, capacity=CAPACITY),  # noqa: B023
                    *comm.lse_reduce_scatter(heads, lse, live=live),  # noqa: B023
                )

            calls()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                results = calls()
            for at in range(rounds):
                rows = [draw.choice((0, 1, 3, CAPACITY, draw.randrange(CAPACITY + 1))) for _ in range(world)]
                seed, total = draw.randrange(1 << 20), sum(rows)
                owns = [numbers(seed + r, CAPACITY, WIDTH, dtype=dtype) for r in range(world)]
                all_rows = [numbers(seed + 99 + r, total, WIDTH, dtype=dtype) for r in range(world)]
                outs = [numbers(seed + 199 + r, *heads.shape, dtype=dtype) for r in range(world)]
                lses = [numbers(seed + 299 + r, *lse.shape) for r in range(world)]
                counts.copy_(torch.tensor(rows))
                live.fill_(tokens := draw.randrange(CAPACITY + 1))
                own.copy_(owns[rank])
                every[:total] = all_rows[rank].cuda()
                heads.copy_(outs[rank])
                lse.copy_(lses[rank])
                for result in results:
                    result.fill_(float("nan"))
                graph.replay()
                stream.synchronize()
                gathered, scattered, summed, normed, added, own_normed, own_added, merged, merged_lse = results
                mine, context = slice(rows[rank]), (dtype, at, rows)
                assert same(gathered[:total], torch.cat([x[:n] for x, n in zip(owns, rows, strict=True)])), context
                segment = torch.stack([x.float() for x in all_rows]).sum(0).to(dtype).split(rows)[rank]
                assert same(scattered[mine], segment), context
                whole = torch.stack([x.float() for x in owns]).sum(0).to(dtype)
                assert same(summed, whole), context
                for result, new, total_of in ((normed, added, whole), (own_normed[mine], own_added[mine], segment)):
                    expected = residual[: len(total_of)] + total_of
                    assert same(new, expected), context
                    close = dict(rtol=max(1e-2, 3 * torch.finfo(dtype).eps), atol=1e-5)  # both round twice
                    torch.testing.assert_close(result.cpu(), rms_norm(expected, weight, 1e-5), **close)
                wanted = softmax_merge(torch.stack(outs).double(), torch.stack(lses).double())
                for result, exact in zip((merged, merged_lse), wanted, strict=True):
                    exact = exact[:tokens, 2 * rank : 2 * rank + 2].float()
                    torch.testing.assert_close(result[:tokens].cpu().float(), exact, rtol=1e-2, atol=1e-5)
            comm.check()
    dist.barrier()


def test_graphs_replay_with_other_counts(tmp_path: Path) -> None:
    run_gpus(tmp_path, counts_in_graphs, 200)
