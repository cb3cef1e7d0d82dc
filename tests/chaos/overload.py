"""Send twice the requests that a server can complete, for a given time: its memory must stay flat.

    PYTHONPATH=tests python -m chaos.overload --minutes 30 --json bench/results/overload.json

First clients that wait for each output measure the capacity. Then requests arrive at twice that rate, whether or not
earlier ones have ended. Flat: in the second half, memory grows by less than 1 % of its size, and 2 MiB.
"""

from __future__ import annotations

import http.client
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from chaos.clients import Load, ask, questions
from chaos.server_process import ServerProcess
from weft.tune.host import describe_host
from weft_bench.streamed_completion import LoadError

SAMPLE_S = 5.0
MAX_OPEN = 400
"""Maximum open requests of this script; further ones are counted as not sent."""


@dataclass(frozen=True)
class Options:
    """Options. minutes: of overload. arguments: further ones of `weft serve`."""

    minutes: float = 30.0
    json: Path | None = None
    arguments: tuple[str, ...] = ("--max-waiting", "64", "--max-running", "16")


def main(options: Options) -> int:
    with tempfile.TemporaryDirectory(prefix="weft-overload-") as folder:
        served = ServerProcess(Path(folder), options.arguments)
        try:
            report = measure(served, options)
        finally:
            code = served.end(60.0)
    report |= {"exit_code": code, "arguments": options.arguments, "host": describe_host()}
    text = json.dumps(report, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0 if report["flat"] and code == 0 else 1


def measure(served: ServerProcess, options: Options) -> dict[str, Any]:
    asked = questions(32, 48, seed=0)
    expected = [ask(served.port, served.name, question) for question in asked]
    began = time.monotonic()
    load = Load(served.port, served.name, asked, expected, clients=24)
    time.sleep(20.0)
    load.stop()
    capacity = load.counts["completed"] / (time.monotonic() - began)
    print(f"capacity: {capacity:.2f} answers a second; twice that from now on", file=sys.stderr, flush=True)

    outcomes: Counter[str] = Counter()
    lock, room = threading.Lock(), threading.Semaphore(MAX_OPEN)

    def one(at: int) -> None:
        try:
            outcome = "completed" if ask(served.port, served.name, asked[at]) == expected[at] else "different"
        except LoadError as error:
            outcome = "refused" if "status 429" in str(error) else "lost"
        except (OSError, http.client.HTTPException):
            outcome = "lost"
        with lock:
            outcomes[outcome] += 1
        room.release()

    samples: list[dict[str, float]] = []
    start = time.monotonic()
    for number in range(int(2 * capacity * options.minutes * 60)):
        time.sleep(max(0.0, start + number / (2 * capacity) - time.monotonic()))
        if room.acquire(blocking=False):
            threading.Thread(target=one, args=(number % len(asked),), daemon=True).start()
        else:
            outcomes["not sent"] += 1
        if time.monotonic() - start > len(samples) * SAMPLE_S:
            samples.append({"s": round(time.monotonic() - start), "server_mib": round(served.memory_mib(), 1)})
    for _ in range(MAX_OPEN):  # until all have been answered
        room.acquire(timeout=300)
    half = [s["server_mib"] for s in samples[len(samples) // 2 :]]
    fifth = max(1, len(half) // 5)
    first, last = statistics.median(half[:fifth]), statistics.median(half[-fifth:])
    return {
        "flat": last - first < max(2.0, 0.01 * first) and not outcomes["lost"] and not outcomes["different"],
        "capacity_answers_s": round(capacity, 2),
        "outcomes": dict(outcomes),
        "second_half_mib": {"first": first, "last": last},
        "samples": samples,
    }


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
