"""Flat collectives beside those of plans over hosts: two hosts of two ranks, joined by a link of limited bandwidth.

The hosts are namespaces of this machine (`weft_bench.hosts_rig`, which takes root), and `tc tbf` limits the link, each
direction alone. For each bandwidth the exchanges are first priced, at fewer sizes than `weft tune --nnodes 2` takes;
then both kinds run in turns, as in `weft bench collectives --nnodes 2`, planned and predicted by that table. Prints a
line for each exchange and size: medians over rounds, predictions, and the median of the rounds' ratios.

    python bench/scripts/hosts_collectives.py --gbit 1 10 --json results.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from weft.comm.shm import ShmTuning
from weft.comm.transport_registry import GLOO, SHM
from weft.engine.config.config import EngineConfig
from weft.engine.hosts.measurement import over_hosts
from weft.serve.cli.command import stop_on_sigterm
from weft.tune import cpu_costs as tune
from weft.tune import host_costs
from weft.tune.host import describe_host
from weft.tune.ranks import run_ranks
from weft_bench import collectives_hosts
from weft_bench.hosts_rig import Host, arguments, joined_hosts

TUNED = [1 << 13, 1 << 17, 1 << 21]
BURST = "256kb"
"""What may pass at once: less than the exchanges of the larger sizes."""


def main(asked: argparse.Namespace) -> None:
    """Runs all bandwidths, each on hosts of its own."""
    stop_on_sigterm()  # so that the hosts are removed
    found: dict[str, Any] = {"what": "bench/scripts/hosts_collectives.py", "host": describe_host()}
    found |= {"hosts": 2, "ranks": 4, "tuned_bytes": TUNED, "burst": BURST, "runs": []}
    for gbit in asked.gbit:
        print(f"{gbit:g} Gbit/s")
        with tempfile.TemporaryDirectory() as folder, joined_hosts(2) as hosts:
            first, second = hosts
            limit(first, f"port{second.number}", gbit)
            limit(second, second.link, gbit)
            (key := Path(folder) / "cluster.key").write_text(os.urandom(32).hex())
            results = Path(folder) / "results.json"
            options = ["--bytes", *map(str, asked.bytes), "--rounds", str(asked.rounds), "--json", str(results)]
            started = [host.start(sys.executable, __file__, *options, *arguments(host, key)) for host in hosts]
            if any([process.wait() for process in started]):
                raise SystemExit("a host failed")
            found["runs"].append({"gbit": gbit} | json.loads(results.read_text()))
        if asked.json:
            asked.json.write_text(json.dumps(found, indent=1) + "\n")


def limit(host: Host, device: str, gbit: float) -> None:
    """Limits what leaves a host by a device."""
    rate = f"{1000 * gbit:g}mbit"
    host.run("tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", BURST, "latency", "50ms")


def on_host(asked: argparse.Namespace) -> None:
    """A host's part: a table, and both kinds of collectives planned by it. Node 0 writes the results."""
    meeting: dict[str, Any] = dict(master_addr=asked.master_addr, cluster_key=asked.cluster_key, nnodes=asked.nnodes)
    config = EngineConfig(attn_dp=2, attn_tp=2, device="cpu", node_rank=asked.node_rank, **meeting)
    tuning, said = asdict(ShmTuning()), partial(print, file=sys.stderr, flush=True)
    asked_for = {"options": [SHM.option, GLOO.option], "sizes": TUNED, "tuning": tuning}
    prices: dict[str, list[Any]] = {}
    for row in over_hosts(config, host_costs.price, lambda: asked_for, said):
        prices.setdefault(row.pop("transport"), []).append(row)
    table: dict[str, Any] = {"transports": prices, "shm_tuning": tuning}
    cases = [(exchange, size) for exchange in collectives_hosts.EXCHANGES for size in asked.bytes]

    def by_table() -> dict[str, Any]:
        [points] = list(run_ranks(1, tune.price_locals, TUNED))
        table.update(points)
        described = {"cost": "cpu", "table": json.dumps(table), "tuning": tuning}
        return described | {"cases": cases, "rounds": asked.rounds}

    timings = list(over_hosts(config, collectives_hosts.measure, by_table, said))
    for flat, planned in zip(timings[::2], timings[1::2], strict=True):
        print(collectives_hosts.line(flat, planned), flush=True)
    if not asked.node_rank:
        asked.json.write_text(json.dumps({"table": table, "rows": [timing.row() for timing in timings]}))


def parse() -> argparse.Namespace:
    """The options; those of a host are given by this script itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 10.0], help="bandwidths of the link")
    parser.add_argument("--bytes", type=int, nargs="+", default=[1 << 13, 1 << 19, 1 << 22], help="of all ranks' rows")
    parser.add_argument("--rounds", type=int, default=5, help="in each of which both kinds run")
    parser.add_argument("--json", type=Path, help="file for the raw figures")
    for name, kind in (("nnodes", int), ("node-rank", int), ("master-addr", str), ("cluster-key", Path)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    main(options) if options.nnodes is None else on_host(options)
