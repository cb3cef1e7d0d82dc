"""Time every edge of transport peer by two versions of Weft on the same GPUs, in turns: is any row slower than before?

    git worktree add ../before 528fa68
    python bench/scripts/gpu_before_after.py --before ../before/src --json before_after.json

Each version has a process per GPU, which holds its transport for the whole run and waits while the other one measures.
Every case is measured --turns times by each, in turns; a row's figure is the median of these, in µs a call (see
`weft.tune.gpu_times`). Ends with status 1 if a row is slower by more than --slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from weft_bench.trees import alternate, environment_of

HERE = Path(__file__).resolve()


class Version:
    """Processes of one version of Weft, one per rank."""

    def __init__(self, source: Path, world: int, directory: Path, max_bytes: int):
        directory.mkdir()
        command = [sys.executable, str(HERE), "--rank"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.ranks = [
            subprocess.Popen(
                [*command, str(rank), str(world), str(directory), str(max_bytes)], env=environment_of(source), **pipes
            )
            for rank in range(world)
        ]

    def us(self, case: dict[str, Any]) -> float:
        """Return µs per call, of the slowest rank."""
        for rank in self.ranks:
            assert rank.stdin is not None
            print(json.dumps(case), file=rank.stdin, flush=True)
        return max(self._answer(rank) for rank in self.ranks)

    def _answer(self, rank: subprocess.Popen[str]) -> float:
        assert rank.stdout is not None
        for line in rank.stdout:
            if line.startswith("us "):
                return float(line.split()[1])
        raise SystemExit(f"a rank ended with status {rank.wait()}")

    def close(self) -> None:
        """End the ranks: they have no more cases to wait for."""
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait(60)


def rank_main(rank: int, world: int, directory: Path, max_bytes: int) -> None:
    """Run a rank of one version: it measures the cases from its standard input."""
    from weft.tune.gpu_times import Case, World, peer_us

    here = World.open(rank, world, directory, max_bytes)
    print("us 0", flush=True)
    for line in sys.stdin:
        print("us", peer_us(Case(**json.loads(line)), here, [here.peer.tuning])[0], flush=True)
    here.close()


def main() -> int:
    """Print a line per case, then the slowest rows; return 1 if any is too slow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="folder `src` of the earlier version")
    parser.add_argument(
        "--after",
        type=Path,
        default=HERE.parents[2] / "src",
        help="folder `src` of the later version; defaults to this tree's",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--slower", type=float, default=0.03, help="share by which a row may be slower")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()

    import torch

    from weft_bench.cuda import EDGES, MIXED, RAGGED  # not in ranks, which import an earlier Weft

    world = torch.cuda.device_count()
    names = [edge for edge in (*EDGES, *RAGGED) if world >= 4 or not edge.startswith(MIXED)]
    max_bytes = (world + 1) * world * max(given.rows) * given.hidden * 2
    rows = []
    with tempfile.TemporaryDirectory(prefix="weft-before-after-") as directory:
        sources = (("before", given.before), ("after", given.after))
        versions = [Version(source, world, Path(directory) / name, max_bytes) for name, source in sources]
        for version in versions:
            for rank in version.ranks:
                version._answer(rank)
        for edge in names:
            for count in given.rows:
                case = {"ranks": world, "edge": edge, "dtype": "bf16", "hidden": given.hidden, "rows": count}
                turns = alternate(given.turns, versions, lambda version, case=case: round(version.us(case), 3))
                us = {name: statistics.median(found) for name, found in turns.items()}
                rows.append(case | {"us": us, "turns": turns})
                figures = f"{us['before']:8.2f} {us['after']:8.2f}  {ratio(rows[-1]):.3f}"
                print(f"{edge:32} × {count:<5} {figures}", flush=True)
        for version in versions:
            version.close()
    if given.json:
        head = {"what": "gpu_before_after", "gpus": world}
        head |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        given.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    slow = [row for row in rows if ratio(row) > 1 + given.slower]
    for row in slow:
        print(f"slower: {row['edge']} × {row['rows']}: {ratio(row):.3f} of before")
    return int(bool(slow))


def ratio(row: dict[str, Any]) -> float:
    """Return a row's time as a share of its earlier time."""
    return row["us"]["after"] / row["us"]["before"]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
    else:
        sys.exit(main())
