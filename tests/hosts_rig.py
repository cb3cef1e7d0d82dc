"""Hosts on one machine: namespaces with a network, a name, /etc/hosts, processes, shared memory of their own.

`python tests/hosts_rig.py COMMAND…` makes two hosts joined by a link, runs the command on both with `--nnodes 2
--node-rank 0 or 1 --master-addr 10.77.0.1 --cluster-key FILE`, and removes them. It takes root, or CAP_SYS_ADMIN and
CAP_NET_ADMIN, and the programs unshare, nsenter, mount and ip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SETUP = """
mount -t tmpfs tmpfs /dev/shm && mount --bind {folder}/hosts /etc/hosts && hostname {name} && ip link set lo up &&
echo ready && exec sleep infinity
"""


class Host:
    """A host of the rig. address: in the network of the rig. link: its end of the link."""

    def __init__(self, number: int, folder: Path):
        self.name, self.address, self.link = f"rig{number}", f"10.77.0.{number + 1}", f"weftrig{number}"
        self.folder = folder
        (folder / "tmp").mkdir(parents=True)
        # As Debian has it: a host's own name is a loopback address there.
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")
        spaces = ["--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        setup = SETUP.format(folder=folder, name=self.name)
        command = ["unshare", *spaces, "sh", "-c", setup]
        self._first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._first.stdout is not None and self._first.stderr is not None
        if self._first.stdout.readline() != "ready\n":
            raise PermissionError(f"no namespaces here: {self._first.stderr.read().strip()}")
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        self.pid = int(children.read_text().split()[0])

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Starts a command on this host."""
        inside = ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", f"--wd={Path.cwd()}"]
        environ = os.environ | {"TMPDIR": str(self.folder / "tmp")}
        return subprocess.Popen([*inside, *command], env=environ, text=True, **options)

    def run(self, *command: str) -> str:
        """Runs a command on this host; gives what it prints. Raises RuntimeError where it fails."""
        done = self.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said = done.communicate()[0]
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {said.strip()}")
        return said

    def close(self) -> None:
        """Ends every process of this host, and so its namespaces."""
        self._first.kill()
        self._first.communicate()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that a link joins. Raises PermissionError where they may not be made."""
    if missing := [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]:
        raise PermissionError(f"no {', '.join(missing)} here")
    hosts: list[Host] = []
    folder = Path(tempfile.mkdtemp(prefix="weft-rig-"))
    try:
        for number in (0, 1):
            hosts.append(Host(number, folder / str(number)))
        first, second = hosts
        end = ["ip", "link", "add", first.link, "netns", str(first.pid), "type", "veth"]
        made = subprocess.run(
            [*end, "peer", "name", second.link, "netns", str(second.pid)], capture_output=True, text=True
        )
        if made.returncode:
            raise PermissionError(f"no link here: {made.stderr.strip()}")
        for host in hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", host.link)
            host.run("ip", "link", "set", host.link, "up")
        yield first, second
    finally:
        for host in hosts:
            host.close()
        shutil.rmtree(folder, ignore_errors=True)


def arguments(host: Host, key: Path) -> list[str]:
    """The arguments of a command on a host."""
    node = host.name.removeprefix("rig")
    return ["--nnodes", "2", "--node-rank", node, "--master-addr", "10.77.0.1", "--cluster-key", str(key)]


def main(command: Sequence[str]) -> int:
    """Runs a command on two hosts; gives the exit code of the first."""
    with tempfile.TemporaryDirectory() as folder, two_hosts() as hosts:
        (key := Path(folder) / "cluster.key").write_bytes(os.urandom(32).hex().encode())
        started = [host.start(*command, *arguments(host, key)) for host in hosts]
        codes = [process.wait() for process in started]
        return codes[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
