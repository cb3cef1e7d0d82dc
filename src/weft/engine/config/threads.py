"""The threads of a process as the system shows them: `top -H`, `ps -L`, `/proc/PID/task/TID/comm`."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

PR_SET_NAME = 15
MAX_BYTES = 15
PER_THREAD = 6
"""Low bits of a thread's CPU clock id, below the complement of its number: scheduler time (clock_getres(2))."""


def name_thread(name: str) -> None:
    """Name the calling thread, in at most 15 bytes; the main thread's name is the process's. Raises OSError.

    Python itself names threads for the system only from 3.14 on.
    """
    assert len(name.encode()) <= MAX_BYTES, f"{name} is too long for the name of a thread"
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NAME, name.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def cpu_by_thread() -> dict[str, float]:
    """Return seconds of CPU time of this process's threads, summed by name."""
    times: dict[str, float] = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{thread}/comm").read_text().rstrip("\n")
            seconds = time.clock_gettime(~int(thread) << 3 | PER_THREAD)
        except OSError:  # it has ended
            continue
        times[name] = times.get(name, 0.0) + seconds
    return times
