"""Threads as the system shows them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from weft.engine.config.threads import cpu_by_thread, name_thread


def test_a_thread_has_its_name_and_its_own_cpu_time() -> None:
    busy, done, names = threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        name_thread("weft-fifteen-by")
        names.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text())
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        busy.set()
        done.wait(10)

    others = Path(f"/proc/self/task/{os.getpid()}/comm").read_text()
    thread = threading.Thread(target=work)
    thread.start()
    assert busy.wait(10)
    taken = cpu_by_thread()
    done.set()
    thread.join()
    assert names == ["weft-fifteen-by\n"] and Path(f"/proc/self/task/{os.getpid()}/comm").read_text() == others
    assert 0.05 <= taken["weft-fifteen-by"] <= sum(taken.values())
    while "weft-fifteen-by" in cpu_by_thread():  # join returns before the system has removed the thread
        time.sleep(0.001)
    assert sum(taken.values()) <= time.process_time()


def test_a_name_that_would_be_cut_is_refused() -> None:
    with pytest.raises(AssertionError, match="too long"):
        name_thread("weft-of-sixteen-")
