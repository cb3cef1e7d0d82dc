"""Time transport shm of two source trees in turn, and show which calls are faster with one of them.

    git worktree add ../before COMMIT
    python bench/scripts/compare_trees.py --before ../before/src --after src --runs 10 --json compare.json

Runs alternate, so a disturbance of the machine affects both. A row is a call, a size and the place of the input; its
figures are the median and the minimum over the runs of `weft bench collectives`' figure, in microseconds. Rows of the
floor show how alike the trees' runs were: it is the same code in both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

from weft.tune.call_times import MIXED
from weft.tune.host import describe_host
from weft_bench.collectives import EDGES
from weft_bench.trees import alternate, run_python

RUN = """
import json, sys
from functools import partial

from weft.comm.shm import ShmTransport, ShmTuning
from weft.kernels.build import cpu_kernels
from weft.tune.ranks import run_ranks
from weft_bench import harness
from weft_bench.collectives import CpuCase, measure

# Here, as the ranks' processes import this too.
harness.ShmTransport = partial(ShmTransport, **json.loads(sys.argv[2]))
if __name__ == "__main__":
    cpu_kernels()
    cases = [CpuCase(*case) for case in json.loads(sys.argv[1])]
    print(json.dumps([t.row() for t in run_ranks(cases[0].ranks, measure, cases, [], ShmTuning())]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 10, 1 << 14, 1 << 16, 1 << 20, 1 << 24])
    parser.add_argument("--edges", nargs="+", default=[])
    parser.add_argument("--dtypes", nargs="+", default=["bf16"])
    parser.add_argument("--isa", default="auto", help="instruction set, such as avx2 if the CPU has more")
    parser.add_argument(
        "--spins", type=int, help="reads of a flag before a rank gives up its core: many where it is busy"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    edges = options.edges or [edge for edge in EDGES if options.ranks >= 4 or edge not in MIXED]
    cases = [
        (options.ranks, edge, dtype, size)
        for edge in edges
        for dtype in options.dtypes
        for size in (options.sizes if edge != "barrier" else options.sizes[:1])
    ]
    how = {"isa": options.isa, "spins": options.spins}
    script = Path(os.path.abspath("compare_trees_run.py"))
    script.write_text(RUN)  # a file, since the ranks' processes import it anew

    def run(tree: Path) -> dict[str, float]:
        rows = json.loads(run_python(tree, str(script), json.dumps(cases), json.dumps(how)))
        named = {f"{row['ranks']} ranks {row['edge']} {row['dtype']} {row['bytes']}": row["us"] for row in rows}
        return {f"{name} {transport}": us for name, of in named.items() for transport, us in of.items()}

    try:
        runs = alternate(options.runs, (options.before, options.after), run)
    finally:
        script.unlink()
    print(f"{'':52}{'before':>10}{'after':>10}{'ratio':>8}{'least':>10}{'least':>10}{'ratio':>8}")
    for row in runs["after"][0]:
        before, after = ([r[row] for r in of] for of in runs.values())
        pairs = [(f(before), f(after)) for f in (statistics.median, min)]
        print(f"{row:52}" + "".join(f"{b:10.2f}{a:10.2f}{a / b:8.2f}" for b, a in pairs), flush=True)
    if options.json:
        about = {"host": describe_host(), "ranks": options.ranks, **how}
        options.json.write_text(json.dumps(about | {"runs": runs}) + "\n")


if __name__ == "__main__":
    main()
