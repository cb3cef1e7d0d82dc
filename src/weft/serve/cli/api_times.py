"""CPU time of the HTTP server and the controller on this host, which stream tokens of ranks that compute nothing."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from weft.engine.advise.simulate import NO_API, ApiTimes, Clock, ModelledRanks
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.messages.rank_messages import Result
from weft.planner.cost import cache_folder
from weft.serve.app import create_app
from weft.serve.http.engine_client import EngineClient
from weft.serve.http.metrics import Metrics
from weft.serve.http.options import Options
from weft.serve.http.run import Server
from weft.serve.http.sockets import bind
from weft.tune.host import describe_host

STEP_S, CLIENTS, ROUNDS, TOKENS = 1e-3, 4, 8, 32
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


class SlowRanks(ModelledRanks):
    """Ranks that compute nothing for STEP_S, so that each token is written by itself."""

    def collect(self) -> list[Result]:
        """End the oldest step."""
        time.sleep(STEP_S)
        return super().collect()


def api_times(progress: Callable[[str, float], None] | None, again: bool = False) -> ApiTimes:
    """Return the kept times of this host and version, else measured ones; zeros if nothing may be measured.

    progress, again: as in `advise`.
    """
    host = describe_host()
    about = {name: host[name] for name in ("cpu", "cores", "weft", "python")}
    path = cache_folder() / f"api-{socket.gethostname()}.json"
    try:
        kept = json.loads(path.read_text())
        if kept.pop("about") == about and not again:
            return ApiTimes(**kept)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if progress is None:
        return NO_API
    progress("measuring the HTTP server", 0.0)
    found = measure_api()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found) | {"about": about}) + "\n")
    return found


def measure_api() -> ApiTimes:
    """Return the measured CPU times of this process as a server."""
    config = EngineConfig(device="cpu", cpu_bind="off", threads=1)
    groups = (CacheGroup(Rule(), config.num_pages),)
    with (
        bind("127.0.0.1", 0) as bound,
        Engine(config, executor=lambda given: SlowRanks(given, groups, lambda shapes: 0.0, Clock())) as engine,
    ):
        options = Options()
        client = EngineClient(engine, Metrics(engine), options.request_timeout_s)
        server = Server(create_app(client, "weft", options), client, options)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        port = bound.getsockname()[1]
        _cpu_us(port, 1, 1)  # warm
        pairs = [[_cpu_us(port, ROUNDS, tokens) for tokens in (1, TOKENS + 1)] for _ in range(3)]
        server.stop()
        thread.join()
    few, many = map(min, zip(*pairs, strict=True))  # other work of the host only adds
    token_us = max(0.0, many - few) / TOKENS
    return ApiTimes(max(0.0, few - token_us), token_us)


def _cpu_us(port: int, rounds: int, tokens: int) -> float:
    """Return the µs of CPU time of this process for a request with this number of output tokens."""
    arguments: Sequence[Any] = (port, rounds, CLIENTS, tokens)
    before = time.process_time()
    subprocess.run([sys.executable, "-c", CLIENT, *map(str, arguments)], check=True)
    return (time.process_time() - before) * 1e6 / (rounds * CLIENTS)
