"""Numbers of blocks and threads of a call: no GPU needed."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from weft.comm.peer_launch import MAX_THREADS, UNIT_BYTES, PeerTuning, Split, launch_of
from weft.planner.cost import read_tuning
from weft.planner.spec import LayoutError

ROW_BYTES = (0, 2, 16, 4096, 8192, 14336, 65536)
ROWS = (1, 2, 3, 4, 7, 8, 16, 33, 64, 256, 1024, 5000)


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_blocks_and_threads(cluster: int) -> None:
    t = PeerTuning(cluster=cluster)
    for row_bytes, rows, two_shot, norm in itertools.product(ROW_BYTES, ROWS, (False, True), (False, True)):
        size = rows * row_bytes
        found = launch_of(t, size, two_shot, rows if norm else 0, row_bytes)
        what = f"{rows} rows of {row_bytes} bytes, two shots {two_shot}, norm {norm}: {found}"
        push, add, write = found.blocks
        assert write > 0 and (add > 0) == (push > 0 and two_shot), what
        assert 32 <= found.threads <= MAX_THREADS and found.threads % 32 == 0, what
        assert found.cluster in (1, 2, 4, 8) and found.cluster <= cluster, what
        assert push % found.cluster == 0 and write % found.cluster == 0, what
        if size <= 128 << 10:
            assert push + add + write <= 24, f"leaves too little to others: {what}"
        if norm:
            units = -(-row_bytes // UNIT_BYTES)
            assert found.threads * found.cluster < units + 32 * found.cluster or found.threads == 32, f"idle: {what}"
            assert found.cluster == 1 or units >= 64 * found.cluster, f"blocks with next to nothing: {what}"


def test_tunings_are_what_they_were_after_json(tmp_path: Path) -> None:
    tuning, table = PeerTuning(threads=64, split_one_shot=Split(7, 1, 0, 3, 96)), tmp_path / "table.json"
    table.write_text(json.dumps({"peer_tuning": asdict(tuning)}))
    assert read_tuning(table, "peer_tuning", PeerTuning) == tuning
    for older in ({"split_one_shot": {"push": 1}}, {"one_hop_bytes": 1}):
        table.write_text(json.dumps({"peer_tuning": older}))
        with pytest.raises(LayoutError, match="weft tune writes a new one"):
            read_tuning(table, "peer_tuning", PeerTuning)
