"""Run of a measurement with one process per rank; rank 0's findings arrive as they are made."""

from __future__ import annotations

import os
import queue
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from typing import Any

import torch
import torch.multiprocessing as mp

from weft.comm.transport import CommError, Ranks, Transport
from weft.planner.exchange import all_gatherv
from weft.planner.spec import LayoutError, Mesh

Report = Callable[[Any], None]


@dataclass(frozen=True)
class HostContext:
    """Settings of a rank of several hosts."""

    mesh: Mesh
    interface: str  # network interface on the way to node 0
    store: tuple[str, int]  # host and port at which rank 0 serves torch.distributed's store
    plugins: tuple[str, ...]
    model: Path  # its directory on this host


def slowest(us: Iterable[float], meeting: Transport, group: Ranks) -> list[float]:
    """Return each figure's maximum over a group's ranks. Collective over `meeting`."""
    own = torch.tensor([list(us)], dtype=torch.float64)
    return meeting.exchange(own, all_gatherv(len(group)), group, (1,) * len(group)).amax(0).tolist()


@contextmanager
def all_cores() -> Iterator[None]:
    """Free this thread, and threads that it starts, from its one core: gloo's threads starve next to a caller there."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def run_ranks(world: int | Sequence[int], work: Callable[..., None], *args: Any) -> Iterator[Any]:
    """Run `work(rank, directory, report, *args)` in a process per rank; yield all reports, in order.

    world: number of ranks, or their numbers on this host. Each process keeps to one thread and one core. directory:
    meeting place of the ranks. Raises CommError with the first rank's error; the other ranks are stopped.
    """
    ranks = range(world) if isinstance(world, int) else world
    context = mp.get_context("spawn")
    reports = context.Queue()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as directory:
        processes = [
            context.Process(target=_main, args=(rank, place, Path(directory), reports, work, args), daemon=True)
            for place, rank in enumerate(ranks)
        ]
        for process in processes:
            process.start()
        try:
            running = len(ranks)
            while running:
                try:
                    kind, what = reports.get(timeout=1)
                except queue.Empty:
                    dead = [p.exitcode for p in processes if p.exitcode not in (None, 0)]
                    if dead:
                        raise CommError(f"a rank of the measurement ended with exit code {dead[0]}") from None
                    continue
                if kind == "error":
                    raise CommError(what)
                if kind == "report":
                    yield what
                running -= kind == "done"
        finally:
            for process in processes:
                if process.exitcode is None and running:
                    process.terminate()
                process.join()


def _main(
    rank: int, place: int, directory: Path, reports: Any, work: Callable[..., None], args: tuple[Any, ...]
) -> None:
    signal(SIGINT, SIG_IGN)  # Ctrl-C in a terminal reaches the parent too
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[place % len(cores)]})
    torch.set_num_threads(1)
    try:
        work(rank, directory, lambda what: reports.put(("report", what)), *args)
        reports.put(("done", rank))
    except BaseException as error:
        if not isinstance(error, CommError | LayoutError):
            traceback.print_exc()
        reports.put(("error", f"rank {rank}: {type(error).__name__}: {error}"))
        reports.close()
        reports.join_thread()
        os._exit(1)
