"""Every planted fault has its place in the sources; that tests catch them, `make test-mutants` shows."""

from __future__ import annotations

from pathlib import Path

from mutants.faults import FAULTS

SOURCES = Path(__file__).parents[2] / "src" / "weft"


def test_each_fault_has_one_place() -> None:
    stale = [fault.name for fault in FAULTS if (SOURCES / fault.file).read_text().count(fault.old) != 1]
    assert not stale
