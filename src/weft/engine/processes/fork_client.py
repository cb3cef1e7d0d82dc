"""The controller's end of `weft.engine.processes.fork_server`, and of each rank's process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.engine.config.config import EngineError

CODE_S = 4.0
"""Maximum seconds to wait for a rank's exit code from the fork server, once the rank has ended.

The end of the server is noticed at once. A rank without a code counts as killed, so a short limit would be wrong on a
busy machine. The limit is below the silence after which an agent counts as lost.
"""


class RankProcess:
    """A rank's process: a child of the fork server, not of this process."""

    def __init__(self, pid: int, server: ForkServer):
        self.pid, self._server = pid, server
        self._code: int | None = None
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended already
            self._pidfd = -1

    def poll(self) -> int | None:
        """Return the exit code, as `subprocess.Popen.poll` does; None while the rank runs."""
        return self.wait(0)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the rank's end. Returns its exit code; None after timeout_s."""
        if self._code is None and (self._pidfd < 0 or _readable(self._pidfd, timeout_s)):
            # Without a code the rank was killed together with its fork server.
            self._code = self._server.code_of(self.pid, -signal.SIGKILL)
            if self._pidfd >= 0:
                os.close(self._pidfd)
            self._pidfd = -1
        return self._code

    def kill(self) -> None:
        """Send SIGKILL, if the rank still runs."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class ForkServer:
    """Client of a fork server. Methods raise EngineError if it is gone.

    directory: of its error log; the server removes it at its end.
    """

    def __init__(self, directory: Path):
        self._log = directory / "forks.log"
        with open(self._log, "wb") as log:
            # A session of its own, so that Ctrl-C reaches the controller alone and it can stop the ranks in order.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weft.engine.processes.fork_server", str(directory), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                bufsize=0,
                env={"GOMP_SPINCOUNT": "1000"} | os.environ,  # spinning on shared cores took a prompt 20 times as long
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._pending = b""
        self._codes: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._ready = False

    @property
    def alive(self) -> bool:
        """True while it can fork ranks."""
        return self._process.poll() is None

    def request(self, directory: Path, rank: int) -> None:
        """Request a rank; `forked` returns its process."""
        self._pids.pop(rank, None)
        try:
            self._in.write(json.dumps({"directory": str(directory), "rank": rank}).encode() + b"\n")
        except OSError:
            self._gone()

    def forked(self, rank: int, timeout_s: float) -> RankProcess | None:
        """Return the process of a requested rank; None after timeout_s."""
        if rank not in self._pids:
            self._read(timeout_s)
        return RankProcess(pid, self) if (pid := self._pids.get(rank)) else None

    def code_of(self, pid: int, unknown: int) -> int:
        """Return the exit code of a rank that has ended; `unknown` if the server is gone."""
        deadline = time.monotonic() + CODE_S
        while pid not in self._codes and (left := deadline - time.monotonic()) > 0:
            try:
                self._read(left)
            except EngineError:
                break
        return self._codes.pop(pid, unknown)  # the system may reuse the number

    def close(self) -> None:
        """End the server and its ranks, and remove its directory. May be called twice."""
        self._in.close()
        if not self._ready:  # it still imports and would notice late; it has no ranks to end
            self._process.kill()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()

    def _read(self, timeout_s: float) -> None:
        if self._out.closed or not _readable(self._out.fileno(), timeout_s):
            return
        data = os.read(self._out.fileno(), 65536)
        if not data:
            self._gone()
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            said: dict[str, Any] = json.loads(line)
            self._ready = True
            if "code" in said:
                self._codes[said["pid"]] = said["code"]
            elif "rank" in said:
                self._pids[said["rank"]] = said["pid"]

    def _gone(self) -> None:
        code = self._process.wait()
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise EngineError(f"the process that forks ranks {how}" + (f": {lines[-1]}" if lines else ""))


def _readable(fd: int, timeout_s: float | None) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else max(0, int(timeout_s * 1000))))
