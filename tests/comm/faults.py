"""Scenarios in which ranks of a shared-memory world are killed, stopped, interrupted, or leave; see `comm.forks`."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from comm.forks import Fork, arenas
from weft.comm.host_memory import NOTE_BYTES, HostMemory
from weft.comm.shm import ShmTransport, ShmTuning
from weft.planner.spec import Mesh

MESH = Mesh(1, 3, 3, 1)
WORLD = tuple(range(3))
WIDTH = 64
# Small enough that calls of a few rows take every path.
TUNING = ShmTuning(slot_bytes=8192, two_shot_bytes=4096, zero_copy_bytes=2048, chunk_bytes=8192)
KILLS, EARLY_KILLS = 30, 15


class NotMet(Exception):
    """A rank ended before it had met the others."""


def connect(rank: int, folder: Path, mesh: Mesh = MESH, timeout_s: float = 240.0) -> ShmTransport:
    return ShmTransport(mesh, rank, folder / "meet", timeout_s=timeout_s, block_bytes=1 << 20, tuning=TUNING)


def random_call(transport: ShmTransport, draw: random.Random) -> None:
    """A call that every rank draws alike; checks what it gives."""
    rank, world = transport.rank, len(WORLD)
    rows = draw.choice([1, 3, 40, 200])
    x = torch.full((rows * world, WIDTH), float(rank + 1))
    if draw.randrange(2):
        x = transport.empty(*x.shape, like=x).copy_(x)
    kind, sizes = draw.randrange(6), (rows,) * world
    if kind == 0:
        assert (transport.all_reduce(x, WORLD) == 6).all()
    elif kind == 1:
        assert (transport.reduce_scatterv(x, WORLD, sizes) == 6).all()
    elif kind == 2:
        got = transport.all_gatherv(x, WORLD, (rows * world,) * world)
        assert got[:: rows * world, 0].tolist() == [1, 2, 3]
    elif kind == 3:
        assert transport.all_to_allv(x, WORLD, sizes, sizes)[::rows, 0].tolist() == [1, 2, 3]
    elif kind == 4:
        assert (transport.broadcast(x, WORLD, 1) == 2).all()
    else:
        transport.barrier(WORLD)


def busy(rank: int, folder: Path, seed: int, timeout_s: float, ready: int) -> None:
    """Meet, say so, and call until something fails."""
    draw = random.Random(seed)
    transport = connect(rank, folder, timeout_s=timeout_s)
    try:
        if ready >= 0:
            os.write(ready, b"x")
        while True:
            random_call(transport, draw)
    finally:
        transport.close()


def shared_files() -> set[str]:
    """Weft's, that is: other programs' come and go."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else ()
    return {name for name in names if "weft" in name}


def held_in_shm() -> list[str]:
    """Return the files of /dev/shm that this process has open or mapped."""
    held = Path("/proc/self/maps").read_text().split()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            held.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in held if name.startswith("/dev/shm")]


def all_met(mains: list[Callable[[int], object]]) -> list[Fork]:
    """Fork a process each; return when each has written a byte to the descriptor that it is given. Raise NotMet."""
    heard, ready = os.pipe()
    forks = [Fork(partial(main, ready)) for main in mains]
    os.close(ready)
    met = all(os.read(heard, 1) == b"x" for _ in forks)
    os.close(heard)
    if not met:
        end(forks)
        raise NotMet
    return forks


def end(forks: list[Fork]) -> None:
    for fork in forks:
        fork.signal(signal.SIGKILL)
    for fork in forks:
        fork.reap()


def busy_ranks(folder: Path, seed: int, timeout_s: float = 240.0) -> list[Fork]:
    return all_met([partial(busy, r, folder, seed, timeout_s) for r in WORLD])


def expect_lost(fork: Fork, rank: int) -> None:
    """Check that a survivor raises PeerLost of that rank, long before its own time-out: only a hang takes a minute."""
    outcome = fork.outcome()
    assert outcome is not None and outcome.classes[0] == "PeerLost", outcome
    assert outcome.lost == rank and f"rank {rank} is gone" in outcome.error, outcome
    assert not outcome.mapped


def one_is_killed(folder: Path) -> None:
    for seed in range(KILLS):
        draw = random.Random(1000 + seed)
        forks, victim = busy_ranks(folder, seed), draw.choice(WORLD)
        time.sleep(draw.uniform(0, 0.02))
        forks[victim].signal(signal.SIGKILL)
        if draw.randrange(2):  # else it stays a zombie, which is just as dead
            forks[victim].reap()
        for rank in WORLD:
            if rank != victim:
                expect_lost(forks[rank], victim)
        for fork in forks:
            fork.reap()
        assert not os.listdir(folder)
    assert not shared_files()


def one_is_killed_early(folder: Path) -> list[str]:
    """While the ranks meet. Gives the kinds of error that were seen."""
    seen = set()
    for seed in range(EARLY_KILLS):
        draw = random.Random(2000 + seed)
        forks = [Fork(partial(busy, r, folder, seed, 0.5, -1)) for r in WORLD]
        victim = draw.choice(WORLD)
        time.sleep(draw.uniform(0, 0.015))
        forks[victim].signal(signal.SIGKILL)
        for rank in WORLD:
            if rank != victim:
                outcome = forks[rank].outcome()
                assert outcome is not None and "CommError" in outcome.classes, outcome
                seen.add(outcome.classes[0])
        for fork in forks:
            fork.reap()
        # Rank 0 makes the socket: if it is killed, the socket stays, and the next round meets there.
        assert victim == 0 or not os.listdir(folder)
    assert not shared_files()
    return sorted(seen)


def all_are_killed(folder: Path) -> None:
    for seed in range(5):
        forks = busy_ranks(folder, seed)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none may see another's end
            for fork in forks:
                fork.signal(number)
        for fork in forks:
            assert fork.outcome() is None
            fork.reap()
    assert not shared_files() and not os.listdir(folder)


def one_is_stopped(folder: Path) -> None:
    """The others name it. On a busy machine a rank that is well may stand still for longer than a short time-out, and
    be the one that is waited for in vain: then a longer one must do."""
    for seed in range(4):
        assert any(stopped_is_named(folder, seed, timeout_s) for timeout_s in (0.5, 4.0, 32.0)), seed


def stopped_is_named(folder: Path, seed: int, timeout_s: float) -> bool:
    """Return whether a stopped rank, and no other, was waited for in vain."""
    try:
        forks, victim = busy_ranks(folder, seed, timeout_s), seed % 3
    except NotMet:
        return False
    forks[victim].signal(signal.SIGSTOP)
    for rank in WORLD:
        if rank == victim:
            continue
        outcome = forks[rank].outcome()
        assert outcome is not None and outcome.classes[0] in ("CommTimeout", "PeerLost") and not outcome.mapped, outcome
        assert f"rank {rank}: " in outcome.error, outcome
        if f"waited {timeout_s:g} s for rank {victim}" not in outcome.error:
            assert f"rank {victim}" not in outcome.error, outcome
            end(forks)
            return False
        assert outcome.classes[0] == "CommTimeout", outcome
    forks[victim].signal(signal.SIGCONT)
    outcome = forks[victim].outcome()
    assert outcome is not None and outcome.classes[0] == "PeerLost", outcome  # the others left
    for fork in forks:
        fork.reap()
    return True


def interrupted(folder: Path) -> None:
    def waits(rank: int, ready: int) -> None:
        transport = connect(rank, folder, Mesh(1, 2, 2, 1))
        os.write(ready, b"x")
        if rank == 1:
            time.sleep(600)
        transport.barrier((0, 1))

    forks = all_met([partial(waits, r) for r in (0, 1)])
    time.sleep(0.1)
    forks[0].signal(signal.SIGINT)
    outcome = forks[0].outcome()
    assert outcome is not None and outcome.classes[0] == "KeyboardInterrupt", outcome
    forks[1].signal(signal.SIGKILL)
    for fork in forks:
        fork.reap()


def groups_end_apart(folder: Path) -> None:
    """A rank that is done may leave while others still call one another."""

    def pair(rank: int, ready: int) -> float:
        transport = connect(rank, folder, Mesh(2, 2, 2, 2))
        os.write(ready, b"x")
        transport.barrier((0, 1, 2, 3))
        group = (0, 1) if rank < 2 else (2, 3)
        if rank == 3:
            time.sleep(0.5)
        try:
            return float(transport.all_reduce(torch.full((1, 1), float(rank)), group))
        finally:
            transport.close()

    forks = all_met([partial(pair, r) for r in range(4)])
    outcomes = [fork.outcome() for fork in forks]
    assert [o and o.value for o in outcomes] == [1, 1, 5, 5], outcomes
    for fork in forks:
        fork.reap()


def one_leaves(folder: Path) -> None:
    """A rank that left is lost to those who then call it, though its process lives."""

    def leaves(rank: int, ready: int) -> None:
        transport = connect(rank, folder)
        os.write(ready, b"x")
        transport.barrier(WORLD)
        if rank != 1:
            try:
                transport.all_reduce(torch.ones(1, 1), WORLD)
            finally:
                transport.close()
        transport.close()
        time.sleep(600)

    forks = all_met([partial(leaves, r) for r in WORLD])
    for rank in (0, 2):
        expect_lost(forks[rank], 1)
    forks[1].signal(signal.SIGKILL)
    for fork in forks:
        fork.reap()


def two_worlds(folder: Path) -> None:
    """Each with its own folder; that a rank of one is killed is nothing to the other."""
    for name in ("a", "b"):
        (folder / name).mkdir()
    doomed, well = (busy_ranks(folder / name, 5) for name in ("a", "b"))
    time.sleep(0.05)
    doomed[1].signal(signal.SIGKILL)
    for rank in (0, 2):
        expect_lost(doomed[rank], 1)
    time.sleep(0.2)
    well[2].signal(signal.SIGKILL)
    for rank in (0, 1):
        expect_lost(well[rank], 2)
    for fork in (*doomed, *well):
        fork.reap()


def host_memory_waits(folder: Path) -> None:
    """No rank passes a barrier before the last has come, over and over; notes arrive; who is done may leave."""
    (folder / "seen").mkdir()

    def rank_main(rank: int, ready: int) -> list[bytes]:
        memory = HostMemory(Mesh(2, 2, 2, 2), rank, folder / "meet", 240.0)
        os.write(ready, b"x")
        notes = memory.gather_notes(bytes([rank]) * NOTE_BYTES)
        for index in range(50):
            (folder / "seen" / f"{index} {rank}").touch()
            memory.barrier((0, 1, 2, 3))
            assert all((folder / "seen" / f"{index} {other}").exists() for other in range(4)), index
        if rank == 3:
            time.sleep(0.3)  # by then the first two have left
        memory.barrier((0, 1) if rank < 2 else (2, 3))
        memory.close()
        memory.close()
        return notes

    forks = all_met([partial(rank_main, r) for r in range(4)])
    outcomes = [fork.outcome() for fork in forks]
    assert all(o and o.value == [bytes([r]) * NOTE_BYTES for r in range(4)] for o in outcomes), outcomes
    for fork in forks:
        fork.reap()


def waits_for_rank_1(how: str, folder: Path, timeout_s: float, rank: int, ready: int) -> None:
    memory = HostMemory(MESH, rank, folder / "meet", timeout_s)
    os.write(ready, b"x")
    if rank == 1 and how == "left":
        memory.close()
    if rank == 1:
        time.sleep(600)
    try:
        memory.barrier(WORLD)
    finally:  # else who comes later may hear of this rank's end
        memory.close()


def host_memory_loses(folder: Path) -> None:
    """A killed rank, and one that left, are lost to who waits for them; a late one is named, as in `one_is_stopped`."""
    for how in ("killed", "left"):
        forks = all_met([partial(waits_for_rank_1, how, folder, 240.0, r) for r in WORLD])
        if how == "killed":
            forks[1].signal(signal.SIGKILL)
        for rank in (0, 2):
            expect_lost(forks[rank], 1)
        end(forks)
    assert any(late_is_named(folder, timeout_s) for timeout_s in (0.3, 3.0, 30.0))
    assert not shared_files()


def late_is_named(folder: Path, timeout_s: float) -> bool:
    """Return whether the ranks met, and rank 1 and no other was waited for in vain."""
    try:
        forks = all_met([partial(waits_for_rank_1, "late", folder, timeout_s, r) for r in WORLD])
    except NotMet:
        return False
    errors = []
    for rank in (0, 2):
        outcome = forks[rank].outcome()
        assert outcome is not None and outcome.classes[0] in ("CommTimeout", "PeerLost"), outcome
        errors.append(outcome.error)
    end(forks)
    return all(f"waited {timeout_s:g} s for rank 1" in error for error in errors)


def only_memfd(folder: Path) -> None:
    """No variable of the environment is needed, and no file in /dev/shm, not even while the ranks run."""
    assert set(os.environ) <= {"PATH", "HOME", "PYTHONPATH", "LC_CTYPE"}, os.environ

    def looks(rank: int, ready: int) -> tuple[int, list[str], int]:
        transport = connect(rank, folder)
        os.write(ready, b"x")
        for seed in range(20):
            random_call(transport, random.Random(seed))
        found = arenas(), held_in_shm(), len(shared_files())
        transport.barrier(WORLD)
        transport.close()
        return found

    forks = all_met([partial(looks, r) for r in WORLD])
    for fork in forks:
        outcome = fork.outcome()
        assert outcome is not None and outcome.value == (1, [], 0) and not outcome.mapped, outcome
        fork.reap()
