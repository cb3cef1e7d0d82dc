"""Fixtures for all tests."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from weft.engine.processes.fork_client import ForkServer, RankProcess
from weft.engine.worker import model_runner as runner
from weft.kernels.build import model_kernels

torch.set_num_threads(1)
settings.register_profile("weft", deadline=None)  # no test depends on how fast a busy machine is
settings.load_profile("weft")

LONGEST = (
    "gpu/test_emulated.py",
    "e2e/test_commands.py",
    "gpu/test_triton_compile.py",
    "gpu/triton_checks",
    "models/test_logits.py",
    "models/test_every_layout.py",
    "comm/test_shm_protocol.py",
    "comm/test_shm.py",
    "e2e/test_layouts.py",
    "e2e/test_serve.py",
    "chaos/test_chaos.py",
    "e2e/test_measuring.py",
    "engine/test_faults.py",
    "library/test_planned.py",
    "library/test_communicator.py",
    "server/test_tools.py",
    "dcp/test_product.py",
    "gpu/test_merge_emulated.py",
    "gpu/test_compile.py",
)
"""Files that begin first, so that no worker is left alone with one of them at the end."""
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of ranks too, which are then not bound: many engines run at a time
ENVIRONMENT, TEMPORARY = dict(os.environ), tempfile.gettempdir()
"""Environment and temporary folder before any test changes them."""
CHECKS = "tests/gpu/triton_checks/"
"""Folders that run in one worker, as each process that imports them needs seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: at for at, name in enumerate(LONGEST)}

    def at(item: pytest.Item) -> int:
        parts = item.path.parts
        return place.get("/".join(parts[-2:]), place.get("/".join(parts[-3:-1]), len(place)))

    items.sort(key=at)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze all imports so far: repeated garbage collection of them took an eighth of the time of all tests."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling  # only where it is used

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return CHECKS if nodeid.startswith(CHECKS) else super()._split_scope(nodeid)

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Undo the log of a command that runs in a test's process: its filter would change lines of later tests."""
    loggers = logging.getLogger("weft"), logging.getLogger()
    before = [(each.level, each.handlers[:], each.propagate) for each in loggers]
    yield
    for each, (level, handlers, propagate) in zip(loggers, before, strict=True):
        each.setLevel(level)
        each.handlers[:], each.propagate = handlers, propagate


class ForkServerOfThreads(ForkServer):
    """Fork server that engines and agents of several threads may use."""

    def __init__(self, directory: Path):
        self._lock = threading.RLock()
        super().__init__(directory)

    def request(self, directory: Path, rank: int) -> None:
        with self._lock:
            super().request(directory, rank)

    def _read(self, timeout_s: float) -> None:
        with self._lock:
            super()._read(timeout_s)


class SharedForkServer:
    """Replacement for ForkServer: one process that has imported torch forks the ranks of every engine of these tests.

    Commands that tests run as processes have their own, as users' have. Ranks inherit its environment, which must not
    be the environment of the first test that needs it.
    """

    shared: ForkServer | None = None

    def __init__(self, directory: Path):
        if self.shared is None or not self.shared.alive:
            folder = Path(tempfile.mkdtemp(prefix="weft-tests-", dir=TEMPORARY))
            with pytest.MonkeyPatch.context() as patched:
                for name in os.environ.keys() - ENVIRONMENT.keys():
                    patched.delenv(name)
                for name, value in ENVIRONMENT.items():
                    patched.setenv(name, value)
                type(self).shared = ForkServerOfThreads(folder)
        self._asked: set[int] = set()

    @property
    def alive(self) -> bool:
        return self.shared is not None and self.shared.alive

    def request(self, directory: Path, rank: int) -> None:
        assert self.shared is not None
        self._asked.add(rank)
        self.shared.request(directory, rank)

    def forked(self, rank: int, timeout_s: float) -> RankProcess | None:
        assert self.shared is not None
        if (process := self.shared.forked(rank, timeout_s)) is not None:
            self._asked.discard(rank)
        return process

    def close(self) -> None:
        """Mark an engine's ranks as ended. Ranks that it requested and never saw must not be taken for another
        engine's."""
        if self._asked and self.shared is not None:
            self.shared.close()


@pytest.fixture
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share one planner among ranks that are threads: making it would be most of a small model's time."""
    lock, made = threading.Lock(), list[tuple[Any, Any]]()

    planned = runner.plan_model

    def plan_once(*args: Any, **named: Any) -> Any:
        with lock:
            planner = next((planner for given, planner in made if given == (args, named)), None)
            if planner is None:
                planner = planned(*args, **named)
                made.append(((args, named), planner))
            return planner

    monkeypatch.setattr(runner, "plan_model", plan_once)


@pytest.fixture(scope="session", autouse=True)
def instruction_set() -> None:
    """Select the kernels of models that the processor would use which `processors.py` emulates."""
    if isa := os.environ.get("WEFT_TESTS_ISA"):
        model_kernels().use(isa)


@pytest.fixture(scope="session", autouse=True)
def one_fork_server() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("weft.engine.processes.rank_processes.ForkServer", SharedForkServer)
        yield
    if SharedForkServer.shared is not None:
        SharedForkServer.shared.close()


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep no tables of this host in the cache folder; compiled kernels stay."""
    from weft.planner.cost import cache_folder  # only where it is used

    kernels = cache_folder() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "weft").mkdir()
    (tmp_path / "weft" / "kernels").symlink_to(kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
