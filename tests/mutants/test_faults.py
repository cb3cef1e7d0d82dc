"""Every planted fault has its place in the sources; that tests catch them, `make test-mutants` shows."""

from __future__ import annotations

from pathlib import Path

from mutants.faults import FAULTS

ROOT = Path(__file__).parents[2]
SOURCES = {"weft": ROOT / "src", "weft_bench": ROOT / "bench" / "src"}


def test_each_fault_has_one_place() -> None:
    texts = {fault.path: (SOURCES[fault.path.split("/")[0]] / fault.path).read_text() for fault in FAULTS}
    stale = [fault.name for fault in FAULTS if texts[fault.path].count(fault.old) != 1]
    assert not stale
