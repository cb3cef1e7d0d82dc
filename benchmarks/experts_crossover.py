"""From how many tokens experts by dispatch take less time than by gather, measured beside what the planner predicts.

    python benchmarks/experts_crossover.py --layout 4x1 --preset qwen3-30b-a3b --num-layers 2 --out results.json

A process a rank, with the model's shape and made-up weights, once in each form. A step has so many sequences of one
token in each DP group; both forms take turns, round by round, and the slowest rank's time counts. Absolute times on a
machine that does other work mean little: read the ratios. Ranks run on CPUs, over `shm` or `gloo`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from weft.assets import embedded_model_dir, preset_dir
from weft.bench.ranks import Report, every_core, run_ranks
from weft.cli.cmd_plan import parse_layout, parse_tokens
from weft.comm.shm import ShmTransport
from weft.comm.torchdist import TorchDistTransport
from weft.comm.transport import Transport
from weft.engine.batch import SeqRows, build_batch
from weft.engine.runner import ModelRunner
from weft.kv.cache_spec import CacheGroup, Rule
from weft.models.load import dummy_model
from weft.models.registry import load_config
from weft.place.cost import costs
from weft.place.spec import Mesh

FORMS = ("gather", "dispatch")


@dataclass(frozen=True)
class Case:
    """What is measured. model: a directory with a config.json; tokens: in each DP group."""

    model: Path
    num_layers: int
    mesh: Mesh
    transport: str
    tokens: tuple[int, ...]
    rounds: int
    cost: str


@dataclass(frozen=True)
class Found:
    """Of one number of tokens: ms of a step in each form, by round, and what the planner predicts of its exchanges."""

    tokens: int
    gather_ms: list[float]
    dispatch_ms: list[float]
    ratio: float
    predicted_gather_us: float
    predicted_dispatch_us: float


def measure(rank: int, directory: Path, report: Report, case: Case) -> None:
    """A rank's part; rank 0 reports a Found for each number of tokens."""
    mesh, most = case.mesh, max(case.tokens)
    shm = ShmTransport(mesh, rank, directory / "shm", spins=None if case.transport == "shm" else 0)
    transport: Transport = shm
    if case.transport == "gloo":
        with every_core():
            transport = TorchDistTransport(mesh, rank, f"file://{directory}/gloo")
    config = load_config(case.model, num_layers=case.num_layers)
    runners = []
    for form in FORMS:
        chosen = replace(config, experts=form)
        model = dummy_model(chosen, mesh, rank, torch.float32, workspace=transport.empty)
        group = [CacheGroup(Rule(), most)]
        runners.append(ModelRunner(model, mesh, rank, [transport], group, 1, costs(case.cost)))
    world = tuple(range(mesh.world))
    for tokens in case.tokens:
        counts = (tokens,) * mesh.attn_dp
        draw = torch.Generator().manual_seed(mesh.group_of(rank))
        text = torch.randint(1, config.vocab_size, (tokens,), generator=draw).tolist()
        batch = build_batch(text, [SeqRows(1, 0, [[i]], i == 0) for i in range(tokens)], 1)
        times: list[list[float]] = [[], []]
        for turn in range(case.rounds + 1):
            for which in (0, 1) if turn % 2 else (1, 0):  # neither is always first
                shm.barrier(world)
                began = time.perf_counter()
                with every_core() if transport is not shm else nullcontext():
                    runners[which].forward(batch, counts)
                took = torch.tensor([[time.perf_counter() - began]], dtype=torch.float64)
                slowest = float(shm.all_gatherv(took, world, (1,) * mesh.world).max())
                if turn:  # the first warms up
                    times[which].append(slowest * 1e3)
        if rank == 0:
            ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
            predicted = [runner.plan(tokens).us for runner in runners]
            report(Found(tokens, *times, ratio, *predicted))
    if transport is not shm:
        transport.close()
    shm.close()


def main() -> None:
    """Parses the command line, runs the ranks, prints and writes what they find."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="4x1", help="ATTN_DPxATTN_TP,EPxMOE_TP")
    parser.add_argument("--preset", help="a published config; left out, the embedded model's")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--transport", choices=("shm", "gloo"), default="shm")
    parser.add_argument("--tokens", default="1,4,16,64,256", help="in each DP group")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cost", default="cpu", help="what the planner predicts by: cpu, or a table of weft tune")
    parser.add_argument("--out", type=Path, help="write every round and the host's description here")
    args = parser.parse_args()
    model = preset_dir(args.preset) if args.preset else embedded_model_dir()
    mesh, tokens = parse_layout(args.layout), tuple(parse_tokens(args.tokens))
    case = Case(model, args.num_layers, mesh, args.transport, tokens, args.rounds, args.cost)
    found: list[Found] = []
    print(f"{mesh}, {args.transport}, {args.preset or 'embedded'}, {args.num_layers} layers: ms a step, medians")
    for one in run_ranks(mesh.world, measure, case):
        found.append(one)
        gather, dispatch = (statistics.median(times) for times in (one.gather_ms, one.dispatch_ms))
        print(f"{one.tokens:6} tokens a group  gather {gather:9.2f}  dispatch {dispatch:9.2f}  ratio {one.ratio:5.2f}")
    if args.out:
        host = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
        about = {"layout": str(mesh), "transport": args.transport, "model": args.preset or "embedded"}
        about |= {"layers": args.num_layers, "cost": args.cost}
        args.out.write_text(json.dumps({"host": host} | about | {"found": [asdict(f) for f in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
