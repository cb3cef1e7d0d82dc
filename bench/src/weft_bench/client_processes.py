"""Clients of `weft_bench.serving`, spread over processes. One process reads some 25,000 tokens a second at most; long
before that, the clients would be measured instead of the server."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait

from weft_bench.serving import LoadedServer, Outcome, Posted, send
from weft_bench.streamed_completion import LoadError

CLIENTS = 32
"""Clients of a process, if there are cores for more processes."""
CORES = 4
"""Cores of this host per process: a server on the same host needs most of them."""
HEAD_START_S = 0.02
"""Seconds until the start, so that all processes hear of it."""


def processes_for(clients: int) -> int:
    """Return the number of processes for `clients` clients on this host."""
    return max(1, min(math.ceil(clients / CLIENTS), len(os.sched_getaffinity(0)) // CORES))


async def send_from(
    processes: int,
    server: LoadedServer,
    jobs: Sequence[Posted],
    max_concurrency: int | None = None,
    done: Callable[[int, Outcome], None] = lambda at, outcome: None,
) -> tuple[list[Outcome], float]:
    """Send requests as `weft_bench.serving.send` does, from several processes that share requests and max_concurrency.

    Raises LoadError if a process ends.
    """
    if processes == 1:
        return await send(server, jobs, max_concurrency, done)
    found, here, started = dict[int, Outcome](), list[Connection](), list[subprocess.Popen[bytes]]()
    try:
        for _ in range(processes):
            mine, theirs = Pipe()
            # No process of `multiprocessing`: that would import its parent's main module, and torch with it.
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            started.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
            theirs.close()
            here.append(mine)
        for i, connection in enumerate(here):
            share = None if max_concurrency is None else len(range(i, max_concurrency, processes))
            connection.send((server.unconnected(), jobs[i::processes], share))
        for connection in here:
            await asyncio.to_thread(connection.recv)  # it is ready
        began = time.perf_counter() + HEAD_START_S  # the same clock in all processes of a host
        for connection in here:
            connection.send(began)
        left = {connection: len(jobs[i::processes]) for i, connection in enumerate(here)}
        while waiting := [connection for connection in here if left[connection]]:
            for ready in await asyncio.to_thread(wait, waiting):
                assert isinstance(ready, Connection)
                place, outcome = ready.recv()
                left[ready] -= 1
                at = place * processes + here.index(ready)
                found[at] = outcome
                done(at, outcome)
        return [found[at] for at in range(len(jobs))], time.perf_counter() - began
    except (EOFError, ConnectionError) as error:
        raise LoadError("a process with clients has ended") from error
    finally:
        for process in started:
            process.terminate()
            process.wait()


def _clients(connection: Connection) -> None:
    """Send the requests that come through a connection, and each outcome back."""
    server, jobs, share = connection.recv()

    async def run() -> None:
        async with server:
            connection.send(None)
            await send(server, jobs, share, lambda at, outcome: connection.send((at, outcome)), connection.recv())

    asyncio.run(run())


if __name__ == "__main__":
    _clients(Connection(int(sys.argv[1])))
