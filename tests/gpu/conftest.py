"""Triton checks are tests here, and run in a process of their own, which does not load this file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from gpu.triton_checks.worker import Worker

CHECKS = Path(__file__).parent / "triton_checks"
WORKER = pytest.StashKey[Worker]()

if importlib.util.find_spec("triton") is None:  # the extra gpu brings it
    collect_ignore = [str(CHECKS)]


class Check(pytest.Item):
    """Stands in for a check. One process runs all that follow each other."""

    test: pytest.Item
    following: pytest.Item | None = None

    def setup(self) -> None:
        folder = self.getparent(pytest.Package)
        assert folder is not None
        worker = folder.stash.get(WORKER, None)
        if worker is None or worker.ended:
            files = dict.fromkeys(item.path for item in self.session.items if isinstance(item, Check))
            folder.stash[WORKER] = worker = Worker(files, self.config.rootpath)
            folder.addfinalizer(worker.close)
        self._worker = worker

    def runtest(self) -> None:
        self._worker.run(self.nodeid, self.following.nodeid if isinstance(self.following, Check) else None)

    def reportinfo(self) -> tuple[Path | str, int | None, str]:
        return self.test.reportinfo()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for at, test in enumerate(items):
        if CHECKS in test.path.parents:
            items[at] = check = Check.from_parent(test.parent, name=test.name, nodeid=test.nodeid)
            check.test = test
            check.own_markers.extend(test.own_markers)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if isinstance(item, Check):
        item.following = nextitem
