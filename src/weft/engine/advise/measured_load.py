"""A load on started engines of a layout, without HTTP: its figures correct the layout's times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection
from signal import SIG_IGN, SIGINT, signal
from typing import Any

from weft.engine.advise.advice import Limits, Prediction, predict
from weft.engine.advise.candidates import ClientLoad, measured_servers
from weft.engine.advise.measure import described, kept_path, step_times
from weft.engine.advise.simulate import NO_API, ApiTimes, Clients, figures
from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.controller.engine import Engine

MAX_ROUND_S, STOP_S = 600.0, 10.0
RoundFigures = tuple[tuple[float, float], tuple[float, float], float]
"""TTFT, ITL and output tokens per second, as `figures` returns them."""


@contextmanager
def started_servers(configs: Sequence[EngineConfig]) -> Iterator[list[Connection]]:
    """Start an engine for each of `configs`, and yield a connection to each, for `run_load`. Raises errors of a start.

    Each has a process of its own, next to its clients: in one process servers would wait for each other's Python.
    """
    spawning = get_context("spawn")
    with ExitStack() as stack:
        connections = list[Connection]()
        for config in configs:
            ours, theirs = spawning.Pipe()
            process = spawning.Process(target=_serve, args=(config, theirs), daemon=True)
            process.start()
            theirs.close()
            for end in (process.join, process.terminate, lambda wait=process.join: wait(STOP_S), ours.close):
                stack.callback(end)
            connections.append(ours)
        for connection in connections:
            _receive(connection)
        yield connections


def _serve(config: EngineConfig, connection: Connection) -> None:
    """Run each load that comes through a connection on an engine, and send its clients' times, until it is closed."""
    signal(SIGINT, SIG_IGN)  # Ctrl-C in a terminal reaches the parent too
    try:
        with Engine(config) as engine:
            connection.send([])
            while True:
                load, requests, seed = connection.recv()
                clients = Clients(load, requests, engine.model_config.vocab_size, time.perf_counter, seed)
                clients.submit = engine.submit_all
                clients.begin()
                if not clients.ended.wait(MAX_ROUND_S):
                    raise EngineError(f"{requests} requests did not end in {MAX_ROUND_S:.0f} s")
                connection.send(clients.times)
    except EOFError:
        pass
    except Exception as error:
        with suppress(ConnectionError):  # the caller has ended
            connection.send(error)  # the caller raises it


def _receive(connection: Connection) -> list[list[float]]:
    """Return the times that a server sends. Raises its error."""
    try:
        found: list[list[float]] | Exception = connection.recv()
    except (EOFError, ConnectionResetError) as error:
        raise EngineError("the process of a server was ended from outside") from error
    if isinstance(found, Exception):
        raise found
    return found


def run_load(
    servers: Sequence[Connection], load: ClientLoad, requests: int, seconds: float, rounds: int = 2
) -> RoundFigures:
    """Return the figures of the quickest round, after one that warms up.

    Args:
        servers: of `started_servers`, each with this load.
        load: clients of one server.
        requests: requests of a round and a server.
        seconds: time after which no round begins, but for the minimum.
        rounds: minimum rounds.

    Raises EngineError for a round that does not end.
    """
    found, until = list[RoundFigures](), time.monotonic() + seconds
    while len(found) <= rounds or time.monotonic() < until:
        for server in servers:
            with suppress(BrokenPipeError):  # `_receive` raises it
                server.send((load, requests, hash((load, len(found)))))  # no load finds prefixes of another
        times = list(chain.from_iterable(map(_receive, servers)))  # by the host's one clock
        found.append(figures(times, min(request[0] for request in times)))
    return max(found[1:], key=lambda each: each[2])


def correct(prediction: Prediction, load: ClientLoad, seconds: float, api: ApiTimes = NO_API) -> dict[str, Any]:
    """Run a load on a layout for some seconds, keep the factor that corrects its times, and return both figures.

    api: time of the controller.
    """
    candidate, given = prediction.candidate, prediction.candidate.given
    cores = measured_servers(candidate.cores, given)
    own = load.per_server(candidate.replicas)
    configs = [replace(given, cpu_bind=given.cpu_bind if each == "auto" else each) for each in cores]
    with started_servers(configs) as servers:
        ttft, itl, rate = run_load(servers, own, 4 * own.concurrency, seconds)
    rate *= load.servers(candidate.replicas) / len(cores)
    table = step_times(candidate, load)
    ours = predict(candidate, table, load, Limits(), 4 * load.concurrency, api).figures
    table.factor *= ours.tokens_s / rate
    table.write(kept_path(described(candidate)))
    both = {
        "tokens_s": (ours.tokens_s, rate),
        "ttft_ms": (ours.ttft_ms[0], ttft[0]),
        "itl_ms": (ours.itl_ms[0], itl[0]),
    }
    pairs = {name: {"predicted": round(a, 3), "measured": round(b, 3)} for name, (a, b) in both.items()}
    return {"layout": str(candidate), **pairs, "factor": round(table.factor, 4)}
