"""Child processes that reply to requests over a connection, and end when their parent does."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait


class ChildProcess(subprocess.Popen[bytes]):
    """`python -m MODULE DESCRIPTOR PID`: descriptor of its end of `connection`, and this process.

    It has a session of its own, so that Ctrl-C reaches this process alone.
    """

    def __init__(self, module: str):
        self.connection, end = multiprocessing.Pipe()
        command = [sys.executable, "-m", module, str(end.fileno()), str(os.getpid())]
        none = subprocess.DEVNULL
        super().__init__(command, pass_fds=[end.fileno()], stdin=none, stdout=none, stderr=none, start_new_session=True)
        end.close()


def requests(connection: Connection, parent: int) -> Iterator[bytes]:
    """Yield a child's requests, until its parent ends or closes its end."""
    try:
        parents_end = os.pidfd_open(parent)  # a forked process of the parent has a copy of the connection
    except ProcessLookupError:  # the parent has already ended
        return
    while parents_end not in wait([connection, parents_end]):
        try:
            yield connection.recv_bytes()
        except EOFError:
            return
