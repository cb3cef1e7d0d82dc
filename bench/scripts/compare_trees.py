"""Times transport shm of two source trees in turn, and says which calls one of them makes faster.

    git worktree add ../before COMMIT
    python bench/scripts/compare_trees.py --before ../before/src --after src --runs 10 --json compare.json

Runs alternate, so that a machine that changes its mind does so for both. A row is a call, a size and where the input
lies; its figures are the median and the least over the runs of `weft bench collectives`' figure, in microseconds.
Rows of the floor say how alike the trees' runs were: it is the same code in both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from weft.tune.host import describe_host

EDGES = ("all_reduce", "reduce_scatterv", "all_gatherv", "all_to_allv", "broadcast", "barrier", "all_reduce+norm")
MIXED = ("all_reduce+all_gatherv", "reduce_scatterv+all_reduce")
RUN = """
import json, sys
from functools import partial

from weft_bench import collectives
from weft_bench.collectives import Case, measure
try:
    from weft.tune.ranks import run_ranks
except ImportError:  # a tree from before 2026-11-28
    from weft_bench.ranks import run_ranks
from weft.comm.shm import ShmTransport, ShmTuning
from weft.kernels.build import cpu_kernels

# Here, as the ranks' processes import this too.
collectives.ShmTransport = partial(ShmTransport, **json.loads(sys.argv[2]))
if __name__ == "__main__":
    cpu_kernels()
    cases = [Case(*case) for case in json.loads(sys.argv[1])]
    print(json.dumps([t.row() for t in run_ranks(cases[0].ranks, measure, cases, [], ShmTuning())]))
"""


def run(tree: Path, cases: list[tuple[int, str, str, int]], how: dict[str, object], script: Path) -> dict[str, float]:
    """One run of a tree: µs by row."""
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(cases), json.dumps(how)],
        env=os.environ | {"PYTHONPATH": str(tree.resolve())},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = {}
    for row in json.loads(done.stdout):
        for transport, us in row["us"].items():
            found[f"{row['ranks']} ranks {row['edge']} {row['dtype']} {row['bytes']} {transport}"] = us
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 10, 1 << 14, 1 << 16, 1 << 20, 1 << 24])
    parser.add_argument("--edges", nargs="+", default=[])
    parser.add_argument("--dtypes", nargs="+", default=["bf16"])
    parser.add_argument("--isa", default="auto", help="avx2, say, where the CPU has more")
    parser.add_argument(
        "--spins", type=int, help="reads of a flag before a rank gives up its core: many where it is busy"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    edges = options.edges or (*EDGES, *(MIXED if options.ranks >= 4 else ()))
    cases = [
        (options.ranks, edge, dtype, size)
        for edge in edges
        for dtype in options.dtypes
        for size in (options.sizes if edge != "barrier" else options.sizes[:1])
    ]
    how = {"isa": options.isa, "spins": options.spins}
    trees = {"before": options.before, "after": options.after}
    script = Path(os.path.abspath("compare_trees_run.py"))
    script.write_text(RUN)  # a file, since the ranks' processes import it anew
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    try:
        for index in range(options.runs):
            for name in sorted(trees, reverse=bool(index % 2)):
                runs[name].append(run(trees[name], cases, how, script))
            print(f"run {index + 1} of {options.runs}", file=sys.stderr)
    finally:
        script.unlink()
    print(f"{'':52}{'before':>10}{'after':>10}{'ratio':>8}{'least':>10}{'least':>10}{'ratio':>8}")
    for row in runs["after"][0]:
        before, after = ([r[row] for r in runs[name]] for name in trees)
        pairs = [(f(before), f(after)) for f in (statistics.median, min)]
        print(f"{row:52}" + "".join(f"{b:10.2f}{a:10.2f}{a / b:8.2f}" for b, a in pairs), flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"host": describe_host(), "ranks": options.ranks, **how, "runs": runs}) + "\n"
        )


if __name__ == "__main__":
    main()
