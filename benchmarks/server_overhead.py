"""What the HTTP server costs: beside a step of the engine at one request, and in core time at many streams.

    python benchmarks/server_overhead.py [--streams 500] [--json FILE]

Starts `weft serve` with the embedded model on one rank. Overhead: the median time of a one-token completion on a kept
connection, less the median time between the tokens of a stream, which is a step of an engine that is at work. As an
idle engine takes longer to begin and end a step, the same completion is asked of an engine in this process too, in
turns of 30: server_ms is what the server adds to that. Core use: CPU time of the serving process (its ranks are others)
while the streams run, by the tokens that came.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from weft.assets import embedded_model_dir
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.request import SamplingParams

PROMPT, TURN, RUNNING = [5], 30, 512
STEADY = {"temperature": 0, "ignore_eos": True, "prompt": PROMPT}


class Client:
    """One kept connection."""

    def __init__(self, port: int):
        self._port = port

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def ask(self, **body: object) -> list[float]:
        """When each piece of the response's body came, in seconds."""
        text = json.dumps(STEADY | body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
        self.writer.write(f"{head}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
        headers = await self.reader.readuntil(b"\r\n\r\n")
        assert headers.startswith(b"HTTP/1.1 200"), headers
        if length := re.search(rb"content-length: (\d+)", headers):
            await self.reader.readexactly(int(length[1]))
            return [time.perf_counter()]
        times = []
        while size := int(await self.reader.readline(), 16):
            await self.reader.readexactly(size + 2)
            times.append(time.perf_counter())
        await self.reader.readline()
        return times


async def overhead(port: int, engine: Engine, requests: int) -> dict[str, float]:
    """Milliseconds at one request."""
    client = Client(port)
    await client.open()
    single, alone, gaps = [], [], []
    for round_ in range(requests):
        began = time.perf_counter()
        [ended] = await client.ask(max_tokens=1)
        single.append(ended - began)
        if round_ % TURN == 0:
            times = (await client.ask(max_tokens=50, stream=True))[:-2]  # the last holds no token, nor does [DONE]
            gaps += [b - a for a, b in itertools.pairwise(times)]
            alone += [ask_engine(engine) for _ in range(TURN)]
    step, one, bare = (1e3 * statistics.median(seconds) for seconds in (gaps, single, alone))
    return {
        "one_token_ms": one,
        "step_ms": step,
        "overhead_ms": one - step,
        "engine_one_token_ms": bare,
        "server_ms": one - bare,
    }


def ask_engine(engine: Engine) -> float:
    """Seconds that an engine takes for the same completion without a server."""
    came = threading.Event()
    began = time.perf_counter()
    engine.submit(PROMPT, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True), lambda answer: came.set())
    came.wait()
    return time.perf_counter() - began


async def core_use(port: int, pid: int, streams: int, tokens: int = 40) -> dict[str, float]:
    """Core seconds of the serving process for each 1,000 tokens a second, while so many streams run."""
    clients = [Client(port) for _ in range(streams)]
    await asyncio.gather(*(c.open() for c in clients))
    before, began = cpu_seconds(pid), time.perf_counter()
    await asyncio.gather(*(c.ask(max_tokens=tokens, stream=True) for c in clients))
    seconds, used = time.perf_counter() - began, cpu_seconds(pid) - before
    return {"tokens_per_s": streams * tokens / seconds, "cores_per_1000_tokens_per_s": used / (streams * tokens) * 1e3}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its children left out."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    command = [sys.executable, "-m", "weft.cli.main", "serve", "--port", "0", "--max-running", str(RUNNING)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            line = next(line for line in server.stderr if "serving" in line)
            port = int(re.search(r":(\d+) ", line)[1])  # type: ignore[index]
            loop = asyncio.new_event_loop()
            threading.Thread(target=server.stderr.read, daemon=True).start()  # the log must not fill the pipe
            with Engine(EngineConfig(embedded_model_dir(), max_running=RUNNING)) as engine:
                found = loop.run_until_complete(overhead(port, engine, options.requests))
            found |= loop.run_until_complete(core_use(port, server.pid, options.streams))
        finally:
            server.terminate()
            server.wait(60)
    found |= {"streams": options.streams, "exit_code": server.returncode}
    report = {"cores": os.cpu_count(), "python": platform.python_version()} | {
        k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()
    }
    print(json.dumps(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
