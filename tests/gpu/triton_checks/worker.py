"""Runs checks by name in a process of its own, since Triton decides when it is imported whether it interprets."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()
"""Flag of checks in Triton's interpreter; else they run on a GPU."""


class Worker:
    """The process. files: where the checks are that it will be asked for. root: what their names begin at."""

    def __init__(self, files: Iterable[Path], root: Path):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # none is used, and they import for seconds
        if INTERPRETED:
            environment["TRITON_INTERPRET"] = "1"
        self._pipe, theirs = Pipe()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpu.triton_checks.worker", str(theirs.fileno()), *map(str, files)],
                env=environment,
                cwd=root,
                pass_fds=[theirs.fileno()],
                stdout=self._printed,
                stderr=subprocess.STDOUT,
            )

    def run(self, name: str, following: str | None) -> None:
        """Raise a failure or a skip of pytest. following: the next that it will be asked for, if any."""
        failures, skipped = [], None
        try:
            for report in self._reports(name, following):
                if report.failed:
                    failures.append("\n".join([report.longreprtext, *(text for _, text in report.sections)]))
                elif report.skipped:
                    skipped = report.longrepr[2]
        except BaseException:  # the process ended, or it took too long
            self.close()
            raise
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)
        if skipped is not None:
            pytest.skip(skipped)

    def _reports(self, name: str, following: str | None) -> Iterator[pytest.TestReport]:
        with suppress(EOFError, OSError):
            self._pipe.send((name, following))
            while (report := self._pipe.recv()) is not None:
                yield report
            return
        status = self._process.wait()
        self._printed.seek(0)
        printed = self._printed.read().decode(errors="replace")[-6000:]
        pytest.fail(f"the process of the checks ended with {status}\n{printed}", pytrace=False)

    @property
    def ended(self) -> bool:
        return self._pipe.closed

    def close(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()
        self._printed.close()


class Serving:
    """The plugin of pytest in that process: runs what it is asked for, and sends the reports, then None."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:
            return None  # pytest says which files it could not collect
        gc.freeze()  # what is imported stays: the garbage collector need not look through it again and again
        items: dict[str | None, pytest.Item] = {item.nodeid: item for item in session.items}
        while True:
            try:
                name, following = self._pipe.recv()
            except EOFError:
                return True
            session._setupstate.teardown_exact(items[name])  # what was to follow may have been skipped
            session.config.hook.pytest_runtest_protocol(item=items[name], nextitem=items.get(following))
            self._pipe.send(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not isinstance(report.longrepr, tuple):
            report.longrepr = report.longreprtext or None
        self._pipe.send(report)


if __name__ == "__main__":
    if INTERPRETED:
        from gpu.triton_checks import interpreting  # noqa: F401
    own = ["-p", "no:cacheprovider", "-p", "no:warnings", "--runxfail", "--confcutdir", str(Path(__file__).parent)]
    pytest.main([*own, *sys.argv[2:]], plugins=[Serving(Connection(int(sys.argv[1])))])
