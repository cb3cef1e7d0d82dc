"""The library on GPUs, a process each: random calls, compiled and eager, and graphs that replay with other counts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from library.test_mixed import BACKENDS, mixed_calls
from library.worlds import numbers, same_bits
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


def counts_in_graphs(rounds: int) -> None:
    """Gathers and scattered sums of one graph a dtype, with counts that change between its replays."""
    draw = random.Random(5)
    with Communicator(max_bytes=1 << 20) as comm, torch.cuda.stream(torch.cuda.Stream()) as _:
        rank, world, stream = comm.rank, comm.world_size, torch.cuda.current_stream()
        for dtype in DTYPES:
            counts = torch.zeros(world, dtype=torch.int32, device="cuda")
            own = torch.zeros(CAPACITY, WIDTH, dtype=dtype, device="cuda")
            every = torch.zeros(world * CAPACITY, WIDTH, dtype=dtype, device="cuda")

            def calls(
                own: torch.Tensor = own, every: torch.Tensor = every, counts: torch.Tensor = counts
            ) -> tuple[torch.Tensor, ...]:
                return (
                    comm.all_gatherv(own, counts, capacity=CAPACITY),
                    comm.reduce_scatterv(every, counts, capacity=CAPACITY),
                    comm.all_reduce(own),
                )

            calls()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                gathered, scattered, summed = calls()
            for at in range(rounds):
                rows = [draw.choice((0, 1, 3, CAPACITY, draw.randrange(CAPACITY + 1))) for _ in range(world)]
                seed, total = draw.randrange(1 << 20), sum(rows)
                owns = [numbers(seed + r, CAPACITY, WIDTH, dtype=dtype) for r in range(world)]
                all_rows = [numbers(seed + 99 + r, total, WIDTH, dtype=dtype) for r in range(world)]
                counts.copy_(torch.tensor(rows))
                own.copy_(owns[rank])
                every[:total] = all_rows[rank].cuda()
                for result in (gathered, scattered, summed):
                    result.fill_(float("nan"))
                graph.replay()
                stream.synchronize()
                wanted = torch.cat([x[:n] for x, n in zip(owns, rows, strict=True)])
                assert same_bits(gathered[:total].cpu(), wanted), (dtype, at, rows)
                segment = torch.stack([x.float() for x in all_rows]).sum(0).to(dtype).split(rows)[rank]
                assert same_bits(scattered[: rows[rank]].cpu(), segment), (dtype, at, rows)
                assert same_bits(summed.cpu(), torch.stack([x.float() for x in owns]).sum(0).to(dtype))
            comm.check()
    dist.barrier()


def test_graphs_replay_with_other_counts(tmp_path: Path) -> None:
    run_gpus(tmp_path, counts_in_graphs, 200)
