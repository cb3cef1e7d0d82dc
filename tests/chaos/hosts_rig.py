"""Hosts on one machine: namespaces with a network, a name, /etc/hosts, processes, shared memory of their own.

`PYTHONPATH=tests python -m chaos.hosts_rig COMMAND…` makes two hosts joined by a link, runs the command on both with
`--nnodes 2 --node-rank 0 or 1 --master-addr 10.77.0.1 --cluster-key FILE`, and removes them. It requires root, or
CAP_SYS_ADMIN and CAP_NET_ADMIN, and the programs unshare, nsenter, mount and ip.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
SETUP = """
mount -t tmpfs tmpfs /dev/shm && mount --bind {folder}/hosts /etc/hosts && hostname {name} && ip link set lo up &&
{{ exec 3<&0; cat <&3 >/dev/null & echo ready; wait; }}
"""
"""Script of a host's first process: it reaps processes that lost their parents, and ends with the host's maker."""


class Host:
    """Host of the rig. address: in the network of the rig. link: its end of the link."""

    def __init__(self, number: int, folder: Path):
        self.number, self.folder = number, folder
        self.name, self.address, self.link = f"rig{number}", f"10.77.0.{number + 1}", f"weftrig{number}"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        # As Debian has it: a host's own name is a loopback address there.
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        spaces = ["--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        setup = SETUP.format(folder=folder, name=self.name)
        command = ["unshare", *spaces, "sh", "-c", setup]
        pipe = subprocess.PIPE
        self._first = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self._first.stdout is not None and self._first.stderr is not None
        if self._first.stdout.readline() != "ready\n":
            raise PermissionError(f"no namespaces here: {self._first.stderr.read().strip()}")
        self.pid = started_by(self._first)
        self._space, self._own = os.readlink(f"/proc/{self.pid}/ns/pid"), set[int]()
        self._own = set(self.processes())

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command on this host; `started_by` gives its process, which the host's own processes see."""
        inside = ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", f"--wd={Path.cwd()}"]
        environ = os.environ | {"TMPDIR": str(self.temporary)}
        return subprocess.Popen([*inside, *command], env=environ, text=True, **options)

    def run(self, *command: str) -> str:
        """Run a command on this host; return its output. Raises RuntimeError if it fails."""
        done = self.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = done.communicate()[0]
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {said.strip()}")
        return said

    def cut(self) -> None:
        """Cut the link: packets are lost, and nobody is notified."""
        self.run("ip", "link", "set", self.link, "down")

    def mend(self) -> None:
        """Bring the link back."""
        self.run("ip", "link", "set", self.link, "up")

    @contextmanager
    def network(self) -> Iterator[None]:
        """Put sockets made inside the context, by this thread and threads that it starts, into this host's network."""
        with open("/proc/thread-self/ns/net") as before, open(f"/proc/{self.pid}/ns/net") as here:
            _enter(here.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def processes(self) -> dict[int, str]:
        """Return the live processes that were started on this host: their ids outside, and their commands."""
        found: dict[int, str] = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError):  # it has ended meanwhile
                if (
                    _state(pid) not in "ZX"
                    and pid not in self._own
                    and os.readlink(f"/proc/{pid}/ns/pid") == self._space
                ):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        return found

    def kill_all(self) -> None:
        """End every process that was started on this host, at once."""
        while living := self.processes():
            for pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def left_behind(self, wait_s: float = 0.0) -> dict[str, list[str]]:
        """Return remaining processes, shared memory, temporary files (sockets too); look again for wait_s."""
        deadline = time.monotonic() + wait_s
        while True:
            found = {
                "processes": [f"{pid} {command}" for pid, command in sorted(self.processes().items())],
                "segments": sorted(os.listdir(f"/proc/{self.pid}/root/dev/shm")),
                "files": files_below(self.temporary),
            }
            if not any(found.values()) or time.monotonic() >= deadline:
                return found
            time.sleep(0.2)

    def close(self) -> None:
        """End every process of this host, and so its namespaces."""
        self._first.kill()
        self._first.communicate()


@contextmanager
def joined_hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """Return hosts of one network; the first is its switch. Raises PermissionError if they may not be made."""
    if missing := [name for name in ("unshare", "nsenter", "mount", "ip") if shutil.which(name) is None]:
        raise PermissionError(f"no namespaces here: the programs {', '.join(missing)} are missing")
    hosts: list[Host] = []
    folder = Path(tempfile.mkdtemp(prefix="weft-rig-"))
    try:
        for number in range(count):
            hosts.append(Host(number, folder / str(number)))
        try:
            _join(hosts)
        except RuntimeError as error:
            raise PermissionError(f"no network of namespaces here: {error}") from error
        yield tuple(hosts)
    finally:
        for host in hosts:
            host.close()
        shutil.rmtree(folder, ignore_errors=True)


def _join(hosts: Sequence[Host]) -> None:
    first, *others = hosts
    first.run("ip", "link", "add", first.link, "type", "bridge")
    for other in others:
        port = f"port{other.number}"
        ends = [port, "netns", str(first.pid), "type", "veth", "peer", "name", other.link, "netns", str(other.pid)]
        made = subprocess.run(
            ["ip", "link", "add", *ends], capture_output=True, text=True
        )  # both are seen from outside
        if made.returncode:
            raise RuntimeError(made.stderr.strip())
        first.run("ip", "link", "set", port, "master", first.link, "up")
    for host in hosts:
        host.run("ip", "address", "add", f"{host.address}/24", "dev", host.link)
        host.mend()


def files_below(temporary: Path) -> list[str]:
    """Return the files in a temporary folder, without torch's files of a user who imports its compiler."""
    here = (path for path in temporary.iterdir() if not path.name.startswith("torchinductor_"))
    return sorted(str(path.relative_to(temporary)) for top in here for path in (top, *top.rglob("*")))


def started_by(process: subprocess.Popen[str]) -> int:
    """Return the process that unshare or nsenter started, by its id outside. Raises ProcessLookupError if it ended."""
    while process.poll() is None:
        if found := Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            return int(found[0])
        time.sleep(0.01)
    raise ProcessLookupError(f"{process.args!r} ended with {process.returncode}")


def stopped(process: subprocess.Popen[str], seconds: float) -> bool:
    """Stop the process that nsenter has started for some seconds; return False if it has ended."""
    with suppress(OSError):
        os.kill(started_by(process), signal.SIGSTOP)
        deadline = time.monotonic() + seconds
        # nsenter stops with its child, and lets it go on when it goes on itself.
        while process.poll() is None and (_state(process.pid) != "T" or time.monotonic() < deadline):
            time.sleep(0.01)
        process.send_signal(signal.SIGCONT)
        return process.poll() is None
    return False


def _state(pid: int) -> str:
    """Return a process's state as ps has it. Raises OSError if there is no such process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _enter(network: int) -> None:
    """Move this thread to a network namespace, given as an open file."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(network, CLONE_NEWNET):
        raise PermissionError(f"no entry to a host's network: {os.strerror(ctypes.get_errno())}")


def arguments(host: Host, key: Path, nnodes: int = 2) -> list[str]:
    """Return the arguments of a command on a host."""
    where = ["--nnodes", str(nnodes), "--node-rank", str(host.number), "--master-addr", "10.77.0.1"]
    return [*where, "--cluster-key", str(key)]


def main(command: Sequence[str]) -> int:
    """Run a command on two hosts; return the exit code of the first."""
    with tempfile.TemporaryDirectory() as folder, joined_hosts(2) as hosts:
        (key := Path(folder) / "cluster.key").write_bytes(os.urandom(32).hex().encode())
        started = [host.start(*command, *arguments(host, key)) for host in hosts]
        codes = [process.wait() for process in started]
        return codes[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
