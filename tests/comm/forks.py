"""Ranks as forked processes that tests kill, stop and interrupt: milliseconds each, as torch is already there.

A nursery is a fresh process with an almost empty environment, which loads everything once. It forks a process for each
scenario, a function that takes a folder and forks ranks in turn.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import weft

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Outcome:
    """Result of a process: its value, or its error with the classes' names.

    mapped: its mappings of an arena at the end, when the value or the error and all that they held are gone.
    """

    value: Any = None
    error: str = ""
    classes: tuple[str, ...] = ()
    lost: int | None = None
    mapped: int = 0


def arenas() -> int:
    """This process's mappings of an arena."""
    return Path("/proc/self/maps").read_text().count("memfd:weft")


def _outcome(main: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(main())
    except BaseException as error:
        text = str(error) if type(error).__module__.startswith("weft") else traceback.format_exc()
        classes = tuple(c.__name__ for c in type(error).__mro__)
        return Outcome(None, text, classes, getattr(error, "rank", None))


class Fork:
    """A process that runs `main` and sends its outcome. It dies with its parent."""

    def __init__(self, main: Callable[[], Any]):
        self._reaped = False
        self._from, to = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(to)
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background jobs
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(self._from)
        with open(to, "wb") as pipe:
            outcome = _outcome(main)
            gc.collect()
            pickle.dump(replace(outcome, mapped=arenas()), pipe)
        os._exit(0)

    def outcome(self, timeout_s: float = 240.0) -> Outcome | None:
        """None where the process ended without one. The process is then gone, but not yet reaped."""
        data = b""
        while True:
            if not select.select([self._from], [], [], timeout_s)[0]:
                raise TimeoutError(f"process {self.pid} hangs")
            if not (more := os.read(self._from, 1 << 16)):
                return pickle.loads(data) if data else None
            data += more

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def reap(self) -> None:
        if not self._reaped:
            os.waitpid(self.pid, 0)
            os.close(self._from)
        self._reaped = True


def in_a_child(work: Callable[[], object]) -> None:
    """Run `work` in a forked process, which then ends as a program does. Raise AssertionError with its error."""

    def main() -> None:
        work()
        gc.collect()
        weakref.finalize._exitfunc()  # type: ignore[attr-defined]

    fork = Fork(main)
    outcome = fork.outcome() or Outcome(error="the child was killed")
    fork.reap()
    assert not outcome.error, outcome.error


class Nursery:
    """Runs scenarios, functions of `comm.faults`."""

    def __init__(self, path: Path):
        keep = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from comm.forks import nursery; nursery()"],
            env=keep | {"PYTHONPATH": os.pathsep.join([str(path), str(Path(weft.__file__).parents[1])])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, scenario: Callable[[Path], Any], folder: Path) -> Any:
        """Return the result of the scenario, as JSON can hold it. Raise AssertionError with its traceback."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([scenario.__name__, str(folder)]) + "\n")
        self._process.stdin.flush()
        value, error = json.loads(self._process.stdout.readline())
        assert not error, error
        return value

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)


def nursery() -> None:
    """The nursery's main: imports, then a scenario a line."""
    import torch

    from weft.kernels.build import cpu_kernels

    torch.set_num_threads(1)
    cpu_kernels()
    scenarios = importlib.import_module("comm.faults")
    gc.freeze()  # so that a fork looks only through what is its own
    for line in sys.stdin:
        name, folder = json.loads(line)
        fork = Fork(partial(getattr(scenarios, name), Path(folder)))
        outcome = fork.outcome(timeout_s=800) or Outcome(error="the scenario was killed")
        fork.reap()
        print(json.dumps([outcome.value, outcome.error]), flush=True)
