"""Faults of a server with all ranks on this host: of its ranks, its clients and its disk."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from chaos.faults import RANK_S, Fault, Moment
from chaos.health import Health
from chaos.server_process import ServerProcess, forker_of, segments


class OneHostChaos:
    """Server on one host, and its faults. ranks: of its layout; shared: segments that were there before it."""

    def __init__(self, served: ServerProcess, health: Health, ranks: int, rng: random.Random, shared: set[str]):
        self.served, self.health = served, health
        self._rng, self._shared = rng, shared
        self._half_open: list[socket.socket] = []
        self.faults = kinds(self, ranks)

    def release(self) -> None:
        """Close the connections that clients held open."""
        for held in self._half_open:
            held.close()

    def end(self) -> tuple[dict[str, int | None], dict[str, dict[str, list[str]]]]:
        """End the server. Return its exit code, and what is left of it, by host."""
        code = self.served.end(60.0)
        return {"node 0": code}, {"node 0": self.served.left_behind(60.0) | {"segments": self._left_segments()}}

    def logs(self) -> dict[str, str]:
        """Return the server's log, by host."""
        return {"node 0": self.served.log.read_text(errors="replace")}

    def ranks(self) -> list[dict[int, int]]:
        """Return the process id of each live rank, by host and rank."""
        return [self.served.ranks()]

    def signal(self, rank: int, number: int) -> Moment | None:
        """Send a rank a signal."""
        return None if (pid := self.served.ranks().get(rank)) is None else send(pid, number)

    def pause(self, rank: int) -> None:
        """Stop a rank for a while."""
        if (pid := self.served.ranks().get(rank)) is not None:
            with suppress(ProcessLookupError):
                stop_for_a_while(pid, self._rng.uniform(0.1, 2.0))

    def kill_forker(self) -> Moment | None:
        """Kill the process that forks ranks."""
        self.served.ranks()  # notes who lives
        return None if (pid := forker_of(self.served.pid)) is None else send(pid, signal.SIGKILL)

    def leave(self) -> None:
        """Send a request as a client that leaves."""
        with suppress(OSError), self._open_stream() as stream:
            stream.recv(self._rng.randrange(1, 400))

    def read_slowly(self) -> None:
        """Read a stream as a client that reads a byte now and then."""
        with suppress(OSError), self._open_stream() as stream:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            for _ in range(self._rng.randrange(5, 20)):
                stream.recv(1)
                time.sleep(0.1)

    def half_a_header(self) -> None:
        """Send half of a request's headers as a client that stays."""
        held = socket.create_connection(("127.0.0.1", self.served.port), timeout=10)
        held.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Never")
        self._half_open.append(held)

    def full_disk(self) -> None:
        """Fill the disk: no file of the server's process may grow beyond its log's current length, so writes to it
        fail."""
        pid, length = self.served.pid, max(4096, self.served.log.stat().st_size)
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (length, limits[1]))
        try:
            self.signal(self._rng.randrange(8), signal.SIGKILL)  # something to write about, if there is such a rank
            time.sleep(self._rng.uniform(0.5, 2.0))
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)

    def _open_stream(self) -> socket.socket:
        body = json.dumps({"model": self.served.name, "prompt": "Tom has", "max_tokens": 200, "stream": True})
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        stream = socket.create_connection(("127.0.0.1", self.served.port), timeout=10)
        stream.sendall(f"{head}\r\n\r\n{body}".encode())
        return stream

    def _left_segments(self, wait_s: float = 10.0) -> list[str]:
        """Return segments that are new and stay: other programs' segments come and go."""
        deadline = time.monotonic() + wait_s
        while (new := segments() - self._shared) and time.monotonic() < deadline:
            time.sleep(0.2)
        return sorted(new)


def kinds(chaos: OneHostChaos, ranks: int) -> dict[str, Fault]:
    """Return the kinds of faults on one host."""
    return {
        **{f"kill rank {r}": Fault(partial(chaos.signal, r, signal.SIGKILL), RANK_S) for r in range(ranks)},
        **{f"stop rank {r} for a while": Fault(partial(chaos.pause, r)) for r in range(ranks)},
        "kill the process that forks ranks": Fault(chaos.kill_forker, RANK_S),
        "a client leaves": Fault(chaos.leave),
        "a client reads slowly": Fault(chaos.read_slowly),
        "a client never finishes its headers": Fault(chaos.half_a_header),
        "the log's disk is full": Fault(chaos.full_disk),
    }


def send(pid: int, number: int) -> Moment | None:
    """Send a process a signal; return None if it has ended."""
    at = time.monotonic()
    with suppress(ProcessLookupError):  # another fault was faster
        os.kill(pid, number)
        return Moment(at)
    return None


def stop_for_a_while(pid: int, seconds: float) -> None:
    """Stop a process and let it go on. Raises ProcessLookupError if it has ended."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


@contextmanager
def one_host(
    folder: Path, model: Path | None, options: Sequence[str], ranks: int, rng: random.Random
) -> Iterator[OneHostChaos]:
    """Serve a model with these options of `weft serve`, its log in `folder`. Raises ServerError.

    model: its directory; None if the options name a preset.
    """
    shared = segments()
    served = ServerProcess(folder, [*([] if model is None else [str(model)]), *options])
    health = Health(served)
    chaos = OneHostChaos(served, health, ranks, rng, shared)
    try:
        yield chaos
    finally:
        health.stop()
        chaos.release()
        served.kill()
