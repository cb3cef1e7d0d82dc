"""Results of the process of the Triton checks are reported as its tests' own, and so is its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("triton", reason="needs triton, which the extra gpu brings")

from gpu.triton_checks.worker import Worker

CHECKS = """
import os, pytest

@pytest.fixture
def broken():
    raise ValueError("no fixture")

def test_passes(): pass
def test_fails(): assert [1, 2] == [1, 3]
def test_needs_what_is_broken(broken): pass
def test_does_not_apply(): pytest.skip("not here")
def test_ends_the_process(): os._exit(3)
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """The process imports for seconds. It is ended by the last of these tests."""
    folder = tmp_path_factory.mktemp("checks")
    files = [folder / f"test_{name}.py" for name in ("some", "others", "them")]
    for file in files:
        file.write_text(CHECKS if file.stem == "test_them" else "def test_one(): pass\ndef test_two(): pass\n")
    worker = Worker(files, folder)
    yield worker
    worker.close()


def test_what_was_to_follow_may_be_skipped(worker: Worker) -> None:
    """A mark, for example, skips it: the process is never asked for it, but for the next of another file."""
    worker.run("test_some.py::test_one", "test_some.py::test_two")
    worker.run("test_others.py::test_one", None)


def test_each_outcome_is_reported(worker: Worker) -> None:
    def run(name: str, following: str | None = None) -> None:
        worker.run(f"test_them.py::{name}", following and f"test_them.py::{following}")

    run("test_passes", "test_fails")
    with pytest.raises(pytest.fail.Exception, match=r"assert \[1, 2\] == \[1, 3\]"):
        run("test_fails")
    with pytest.raises(pytest.fail.Exception, match="no fixture"):
        run("test_needs_what_is_broken")
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run("test_does_not_apply")
    assert not worker.ended
    with pytest.raises(pytest.fail.Exception, match="ended with 3"):
        run("test_ends_the_process")
    assert worker.ended
