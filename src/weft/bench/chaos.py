"""Faults at random points of a server under load: no request may be lost, nothing may hang, nothing may stay behind."""

from __future__ import annotations

import http.client
import json
import os
import random
import resource
import signal
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from weft.bench.chaos_clients import Load, ask, questions
from weft.bench.host import describe_host
from weft.bench.server_process import ServerError, ServerProcess, segments

BACK_S = 300.0
"""How long the server may take until it serves again after a fault."""


class Chaos:
    """Injects faults into a server. ranks: of its layout; rng: decides when and how."""

    def __init__(self, served: ServerProcess, ranks: int, rng: random.Random):
        self.served, self.rng = served, rng
        self.half_open: list[socket.socket] = []
        self.faults: dict[str, Callable[[], None]] = {
            **{f"kill rank {r}": partial(self._signal, r, signal.SIGKILL) for r in range(ranks)},
            **{f"stop rank {r} for a while": partial(self._pause, r) for r in range(ranks)},
            "kill the process that forks ranks": self._kill_forker,
            "a client leaves": self._leave,
            "a client reads slowly": self._read_slowly,
            "a client never finishes its headers": self._half_a_header,
            "the log's disk is full": self._full_disk,
        }

    def close(self) -> None:
        """Closes what clients held open."""
        for held in self.half_open:
            held.close()

    def _signal(self, rank: int, number: int) -> None:
        if (pid := self.served.ranks().get(rank)) is not None:
            with suppress(ProcessLookupError):  # another fault was faster
                os.kill(pid, number)

    def _pause(self, rank: int) -> None:
        pid = self.served.ranks().get(rank)
        if pid is None:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.rng.uniform(0.1, 2.0))
            os.kill(pid, signal.SIGCONT)

    def _kill_forker(self) -> None:
        self.served.ranks()  # notes who lives
        if (pid := self.served.forker()) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _open_stream(self) -> socket.socket:
        body = json.dumps({"model": self.served.name, "prompt": "Tom has", "max_tokens": 200, "stream": True})
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        stream = socket.create_connection(("127.0.0.1", self.served.port), timeout=10)
        stream.sendall(f"{head}\r\n\r\n{body}".encode())
        return stream

    def _leave(self) -> None:
        with suppress(OSError), self._open_stream() as stream:
            stream.recv(self.rng.randrange(1, 400))

    def _read_slowly(self) -> None:
        with suppress(OSError), self._open_stream() as stream:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            for _ in range(self.rng.randrange(5, 20)):
                stream.recv(1)
                time.sleep(0.1)

    def _half_a_header(self) -> None:
        held = socket.create_connection(("127.0.0.1", self.served.port), timeout=10)
        held.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Never")
        self.half_open.append(held)

    def _full_disk(self) -> None:
        """No file of the server's process may grow beyond its log's length of now: writes to the log fail."""
        pid, length = self.served.process.pid, max(4096, self.served.log.stat().st_size)
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (length, limits[1]))
        try:
            self._signal(self.rng.randrange(8), signal.SIGKILL)  # something to write about, if there is such a rank
            time.sleep(self.rng.uniform(0.5, 2.0))
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def run(
    arguments: Sequence[str],
    ranks: int,
    faults: int,
    clients: int,
    tokens: int,
    seed: int,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Serves with these arguments of `weft serve`, and does so many faults, each kind about equally often.

    clients: that ask at once; tokens: of an output, at most. Gives the report; `report["passed"]` says whether no
    request was lost and nothing hung or stayed behind. Raises ServerError where the server does not start.
    """
    rng, began, shared = random.Random(seed), time.monotonic(), segments()
    with tempfile.TemporaryDirectory(prefix="weft-chaos-") as name:
        served = ServerProcess(Path(name), [*arguments, "--max-restarts", str(2 * faults + 2)])
        chaos = Chaos(served, ranks, rng)
        try:
            asked = questions(4 * clients, tokens, seed)
            say(f"serving on port {served.port}; asking {len(asked)} questions without faults")
            expected = [ask(served.port, served.name, question) for question in asked]
            before = {"descriptors": served.descriptors(), "memory_mib": round(served.memory_mib())}
            load = Load(served.port, served.name, asked, expected, clients)
            done, back, trouble = _do_faults(served, chaos, faults, rng, say)
            load.stop()
            chaos.close()
            after: dict[str, Any] = {}
            if served.process.poll() is None:
                after = _at_rest(served)
            restarts, code = after.pop("restarts", None), served.end(60.0)
            left = served.left_behind(60.0) | {"segments": _left_segments(shared)}
            log = served.log.read_text(errors="replace").splitlines()
        finally:
            chaos.close()
            if served.process.poll() is None:
                served.kill()
    passed = (
        not any(load.counts[bad] for bad in ("lost", "hung", "different"))
        and not trouble
        and not any(left.values())
        and code == 0
        and after.get("running") == after.get("waiting") == 0
    )
    return {
        "passed": passed,
        "faults": dict(sorted(done.items())),
        "requests": dict(load.counts),
        "errors": load.errors[:20],
        "trouble": trouble,
        "restarts": restarts,
        "recovery_s": _spread(back),
        "longest_pause_s": round(max(load.gaps, default=0.0), 2),
        "left_behind": left,
        "exit_code": code,
        "before": before,
        "after": after,
        "log_tail": [] if passed else log[-20:],
        "seconds": round(time.monotonic() - began),
        "arguments": list(arguments),
        "clients": clients,
        "tokens": tokens,
        "seed": seed,
        "host": describe_host(),
    }


def _do_faults(
    served: ServerProcess, chaos: Chaos, faults: int, rng: random.Random, say: Callable[[str], None]
) -> tuple[Counter[str], list[float], list[str]]:
    """How often each was done, seconds until the server served again, and what went wrong."""
    kinds = list(chaos.faults)
    order = [kinds[i % len(kinds)] for i in range(faults)]
    rng.shuffle(order)
    done: Counter[str] = Counter()
    back: list[float] = []
    for number, kind in enumerate(order):
        time.sleep(rng.uniform(0.0, 1.5))
        say(f"{number + 1} of {faults}: {kind}")
        try:
            chaos.faults[kind]()
            done[kind] += 1
            if rng.random() < 0.8:  # else the next fault comes while the server may still recover from this one
                time.sleep(0.5)
                back.append(served.wait_healthy(BACK_S))
        except (OSError, ServerError) as error:
            return done, back, [f"after fault {number + 1}, {kind}: {error}"]
    try:
        back.append(served.wait_healthy(BACK_S))
    except ServerError as error:
        return done, back, [f"after the last fault: {error}"]
    return done, back, []


def _at_rest(served: ServerProcess) -> dict[str, Any]:
    """What the server holds once nobody asks."""
    deadline = time.monotonic() + 30
    with suppress(OSError, http.client.HTTPException):
        while True:
            state: dict[str, Any] = {
                "running": served.metric("weft_requests_running"),
                "waiting": served.metric("weft_requests_waiting"),
                "restarts": served.metric("weft_restarts_total"),
                "descriptors": served.descriptors(),
                "memory_mib": round(served.memory_mib()),
            }
            if not (state["running"] or state["waiting"]) or time.monotonic() > deadline:
                return state
            time.sleep(0.5)
    return {}


def _left_segments(before: set[str], wait_s: float = 10.0) -> list[str]:
    """Segments that are new and stay: those of other programs come and go."""
    deadline = time.monotonic() + wait_s
    while (new := segments() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    return sorted(new)


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {"median": round(statistics.median(seconds), 2), "max": round(max(seconds), 2)}
