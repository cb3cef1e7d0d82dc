"""`weft serve` as a subprocess, watched from outside: its ranks, its resources, and what it leaves behind."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from chaos.hosts_rig import Host, files_below, started_by

SERVE = (sys.executable, "-m", "weft.serve.cli.main", "serve")
START_S = 600.0


class ServerError(RuntimeError):
    """Failure of a server to start, or to come back: one line."""


class ServerProcess:
    """Server in `folder`: its log there, its temporary files in a folder of its own there.

    host: of the rig, on which it runs; this thread must be in that one's network, and the folder has the log alone.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], host: Host | None = None):
        self.log = folder / "serve.log"
        self.temporary = folder / "tmp" if host is None else host.temporary
        self.temporary.mkdir(exist_ok=True)
        command = [*SERVE, *arguments, "--port", "0"]
        with open(self.log, "wb") as log:
            if host is None:
                environ = os.environ | {"TMPDIR": str(self.temporary)}
                self.process = subprocess.Popen(
                    command, env=environ, text=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            else:
                self.process = host.start(*command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.pid = self.process.pid if host is None else started_by(self.process)
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
        """Return the process id of each live rank of its own host, by rank; note every process on the way."""
        for child in children(self.pid):
            for pid in (child, *children(child)):
                self._see(pid)
        return ranks_of(self.pid)

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
        """Return status and body. Raises OSError, http.client.HTTPException."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    def wait_healthy(self, timeout_s: float) -> float:
        """Return the seconds until /health gives 200. Raises ServerError if that takes too long, or the server has
        ended."""
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
        """Return the sum of a metric's samples."""
        values = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", self.get("/metrics", 60)[1], re.MULTILINE)
        return sum(map(float, values))

    def descriptors(self) -> int:
        """Return the files and sockets that the server's process holds open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def memory_mib(self) -> float:
        """Return the resident memory of the server's process."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def end(self, timeout_s: float) -> int | None:
        """Send SIGTERM; return the exit code, or None if it had to be killed."""
        self.ranks()
        os.kill(self.pid, signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        """Kill it at once."""
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait()

    def left_behind(self, wait_s: float = 10.0) -> dict[str, list[str]]:
        """Return processes that were the server's and still live, and files of its temporary folder."""
        deadline = time.monotonic() + wait_s
        while True:
            processes = [str(pid) for pid, started in sorted(self.seen) if _started(pid) == started]
            files = files_below(self.temporary)
            if not (processes or files) or time.monotonic() > deadline:
                return {"processes": processes, "files": files}
            time.sleep(0.2)

    def _see(self, pid: int) -> None:
        if started := _started(pid):
            self.seen.add((pid, started))


def segments() -> set[str]:
    """Return names of shared memory segments on this host; semaphores, which also lie there, are none."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def forker_of(pid: int) -> int | None:
    """Return the process id of the forker of a server's or an agent's ranks; None if there is none."""
    return next(iter(children(pid)), None)


def ranks_of(pid: int) -> dict[int, int]:
    """Return the process id of each live rank of a host, by rank. pid: of the server or agent."""
    found = {}
    for forked in (forked for forker in children(pid) for forked in children(forker)):
        with suppress(OSError):  # it has ended meanwhile
            if named := re.search(r"rank-(\d+)\.log", os.readlink(f"/proc/{forked}/fd/1")):
                found[int(named[1])] = forked
    return found


def children(pid: int) -> list[int]:
    """Return child processes, whichever of its threads started them."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def _started(pid: int) -> str | None:
    """Return when a process began, which distinguishes it from a later one of the same number; None if none lives."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
