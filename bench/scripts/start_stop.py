"""How long `weft serve` takes to say something at its start, and with which code it ends: the embedded model on CPUs.

For each case a server is started. Prints a table, and with --json the same as a file: seconds from the start until a
bad option is refused, until /health answers 503, and until it answers 200; and the exit codes after one or two SIGTERMs
in several phases, with a full disk as stderr, and with a pipe as stderr that nobody reads.

    python bench/scripts/start_stop.py
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.tune.host import describe_host

WAIT_S, REFUSED = 300.0, 600
WEFT = (str(Path(sys.executable).with_name("weft")), "serve")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(port: int, stderr: Any = subprocess.DEVNULL) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([*WEFT, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def status(port: int, path: str = "/health", body: bytes | None = None) -> int:
    """Return the status of a request; 0 where nobody answers."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def seconds_until(holds: Callable[[], bool], since: float) -> float:
    while not holds():
        if time.monotonic() - since > WAIT_S:
            raise TimeoutError(f"nothing came within {WAIT_S:g} s")
        time.sleep(0.01)
    return round(time.monotonic() - since, 2)


def end(process: subprocess.Popen[bytes], again_s: float | None = None) -> int:
    """Send SIGTERM, and a second one after a while; return the exit code."""
    process.send_signal(signal.SIGTERM)
    if again_s is not None:
        time.sleep(again_s)
        process.send_signal(signal.SIGTERM)
    return process.wait(WAIT_S)


def measure() -> Iterator[tuple[str, float | int]]:
    """Yield each case with its figure."""
    began = time.monotonic()
    code = subprocess.run([*WEFT, "--attn-tp", "0"], capture_output=True).returncode
    yield "a bad option, s", round(time.monotonic() - began, 2)
    yield "a bad option, code", code
    began, port = time.monotonic(), free_port()
    with server(port) as process:
        yield "503 while loading, s", seconds_until(lambda: status(port) == 503, began)
        yield "200, s", seconds_until(lambda: status(port) == 200, began)
        yield "one SIGTERM, code", end(process)
    for phase, gaps in (("loading", (None, 0.3)), ("serving", (0.01, 0.3, 1.4))):
        wanted = 503 if phase == "loading" else 200
        for gap in gaps:
            with server(port := free_port()) as process:
                seconds_until(lambda port=port, wanted=wanted: status(port) == wanted, time.monotonic())
                yield f"{phase}, two SIGTERMs {gap} s apart, code" if gap else f"{phase}, code", end(process, gap)
    reader, writer = os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    for name, stderr in (("a full disk", full), ("an unread pipe", writer)):
        with server(port := free_port(), stderr) as process:
            seconds_until(lambda port=port: status(port) == 200, time.monotonic())
            for _ in range(REFUSED):
                status(port, "/v1/completions", b"{}")
            yield f"{name} as stderr, /health after {REFUSED} refused requests", status(port)
            yield f"{name} as stderr, code", end(process)
    for descriptor in (reader, writer, full):
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures and the host")
    asked, found = parser.parse_args(), dict[str, float | int]()
    for case, figure in measure():
        found[case] = figure
        print(f"{case:70} {figure}", flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"host": describe_host(), "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
