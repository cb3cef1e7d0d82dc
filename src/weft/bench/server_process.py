"""`weft serve` as a subprocess, watched from outside: its ranks, what it holds, and what it leaves behind."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

START_S = 600.0


class ServerError(RuntimeError):
    """The server did not start, or did not come back: one line."""


class ServerProcess:
    """A server in `folder`: its log there, its temporary files in a folder of its own there."""

    def __init__(self, folder: Path, arguments: Sequence[str]):
        self.log, self.temporary = folder / "serve.log", folder / "tmp"
        self.temporary.mkdir()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weft.cli.main", "serve", *arguments, "--port", "0"],
                env=os.environ | {"TMPDIR": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.seen: set[tuple[int, str]] = set()
        self.name, self.port = self._wait_for_address()

    def _wait_for_address(self) -> tuple[str, int]:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"serving (\S+) on http://127\.0\.0\.1:(\d+)", self.log.read_text(errors="replace")):
                return found[1], int(found[2])
            time.sleep(0.1)
        self.kill()
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["no word"]
        raise ServerError(f"weft serve did not start: {lines[-1]}")

    def ranks(self) -> dict[int, int]:
        """Process id of each rank that lives, by rank; notes every process of the server on the way."""
        found = {}
        for child in _children(self.process.pid):
            self._see(child)
            for pid in _children(child):
                self._see(pid)
                try:
                    log = os.readlink(f"/proc/{pid}/fd/1")
                except OSError:
                    continue
                if named := re.search(r"rank-(\d+)\.log", log):
                    found[int(named[1])] = pid
        return found

    def forker(self) -> int | None:
        """Process id of the one that forks the ranks."""
        return next(iter(_children(self.process.pid)), None)

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
        """Status and body. Raises OSError, http.client.HTTPException."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    def wait_healthy(self, timeout_s: float) -> float:
        """Seconds until /health gives 200. Raises ServerError where that takes too long, or the server has ended."""
        began = time.monotonic()
        status, body = 0, "nothing"
        while time.monotonic() - began < timeout_s and self.process.poll() is None:
            try:
                status, body = self.get("/health")
            except (OSError, http.client.HTTPException) as error:
                body = str(error)
            if status == 200:
                return time.monotonic() - began
            time.sleep(0.1)
        ended = self.process.poll()
        raise ServerError(f"the server ended with {ended}" if ended is not None else f"/health still says {body}")

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        values = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", self.get("/metrics", 60)[1], re.MULTILINE)
        return sum(map(float, values))

    def descriptors(self) -> int:
        """Files and sockets that the server's process holds open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def memory_mib(self) -> float:
        """Resident memory of the server's process."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def end(self, timeout_s: float) -> int | None:
        """SIGTERM; the exit code, or None where it had to be killed."""
        self.ranks()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.wait()

    def left_behind(self, wait_s: float = 10.0) -> dict[str, list[str]]:
        """Processes that were the server's and still live, and files of its temporary folder."""
        deadline = time.monotonic() + wait_s
        while True:
            processes = [str(pid) for pid, started in sorted(self.seen) if _started(pid) == started]
            # torch keeps one cache folder a user, for whoever imports its compiler; it is not this server's.
            here = (p for p in self.temporary.iterdir() if not p.name.startswith("torchinductor_"))
            files = sorted(str(p.relative_to(self.temporary)) for top in here for p in (top, *top.rglob("*")))
            if not (processes or files) or time.monotonic() > deadline:
                return {"processes": processes, "files": files}
            time.sleep(0.2)

    def _see(self, pid: int) -> None:
        if started := _started(pid):
            self.seen.add((pid, started))


def segments() -> set[str]:
    """Names of shared memory segments on this host; semaphores, which also lie there, are none."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def _children(pid: int) -> list[int]:
    """Child processes, whichever of its threads started them."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def _started(pid: int) -> str | None:
    """When a process began, which distinguishes it from a later one of the same number; None where none lives."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
