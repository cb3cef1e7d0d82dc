"""CPU time of the HTTP server and the controller on this host, which stream tokens of ranks that compute nothing."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from weft.engine.advise.candidates import ClientLoad
from weft.engine.advise.simulate import NO_API, ApiTimes, Clients, slow_engine
from weft.engine.hosts.digests import source_version
from weft.planner.cost import cache_folder
from weft.serve.app import create_app
from weft.serve.http.engine_client import EngineClient
from weft.serve.http.loading import bind
from weft.serve.http.metrics import Metrics
from weft.serve.http.options import Options
from weft.serve.http.run import Server
from weft.serve.http.shared import Shared
from weft.tune.host import describe_host

CLIENTS, ROUNDS, TOKENS = 4, 8, 32
CLIENT = """
import http.client, json, sys, threading
port, rounds, clients, tokens = map(int, sys.argv[1:])
body = json.dumps(dict(prompt="word " * 64, max_tokens=tokens, ignore_eos=True, stream=True, temperature=0))
def client():
    for _ in range(rounds):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert b"[DONE]" in connection.getresponse().read()
threads = [threading.Thread(target=client) for _ in range(clients)]
[t.start() for t in threads], [t.join() for t in threads]
"""
"""Clients, in a process of their own."""


def api_times(progress: Callable[[str, float], None] | None, again: bool = False, http: bool = True) -> ApiTimes:
    """Return the kept times of this host and source, else measured ones; zeros if nothing may be measured.

    progress, again: as in `advise`. http: of the HTTP server too, not only of the controller.
    """
    host = describe_host()
    about = {name: host[name] for name in ("cpu", "cores", "python")} | {"weft": source_version()}
    path = cache_folder() / f"{'api' if http else 'controller'}-{socket.gethostname()}.json"
    try:
        kept = json.loads(path.read_text())
        if kept.pop("about") == about and not again:
            return ApiTimes(**kept)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if progress is None:
        return NO_API
    progress(f"measuring the {'HTTP server' if http else 'controller'}", 0.0)
    found = measure_api() if http else measure_controller()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found) | {"about": about}) + "\n")
    return found


def measure_controller() -> ApiTimes:
    """Return the measured CPU times of this process as a controller with callbacks as clients."""
    with slow_engine() as engine:

        def cpu_us(tokens: int) -> float:
            clients = Clients(ClientLoad(64, tokens, CLIENTS), ROUNDS * CLIENTS, 256, time.perf_counter)
            clients.submit, before = engine.submit_all, time.process_time()
            clients.begin()
            clients.ended.wait()
            return (time.process_time() - before) * 1e6 / (ROUNDS * CLIENTS)

        return replace(_split(cpu_us), http=False)


def measure_api() -> ApiTimes:
    """Return the measured CPU times of this process as a server."""
    with bind("127.0.0.1", 0) as bound, slow_engine() as engine:
        options = Options()
        shared = Shared(engine, metrics := Metrics(engine), options, "weft")
        client = EngineClient(engine, metrics, options.request_timeout_s)
        server = Server(create_app(client, shared, "weft", options), client, options)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()

        def cpu_us(tokens: int) -> float:
            arguments, before = (bound.getsockname()[1], ROUNDS, CLIENTS, tokens), time.process_time()
            subprocess.run([sys.executable, "-c", CLIENT, *map(str, arguments)], check=True)
            return (time.process_time() - before) * 1e6 / (ROUNDS * CLIENTS)

        found = _split(cpu_us)
        server.stop()
        thread.join()
    return found


def _split(cpu_us: Callable[[int], float]) -> ApiTimes:
    """Return the times of a request and of a token, from µs of a request by its number of output tokens."""
    cpu_us(1)  # warm
    pairs = [[cpu_us(tokens) for tokens in (1, TOKENS + 1)] for _ in range(3)]
    few, many = map(min, zip(*pairs, strict=True))  # other work of the host only adds
    token_us = max(0.0, many - few) / TOKENS
    return ApiTimes(max(0.0, few - token_us), token_us)
