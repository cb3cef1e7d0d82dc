"""First-token and next-token latency of one model, with each transport in turn.

One process per rank, one copy of the weights, and a runner per transport. Runners take turns round by round, so a
disturbance of the machine affects all.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2MoeConfig

from weft.comm.shm import ShmTuning
from weft.comm.transport import Transport
from weft.engine.attention.backend_registry import NATIVE, TORCH
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.models.load import build_model, load_model
from weft.engine.models.registry import load_config, read_config
from weft.engine.worker.model_runner import ModelRunner
from weft.kernels.cpu_rows import missing
from weft.planner.cost import ETHERNET, Costs, costs, over_network
from weft.planner.spec import Mesh
from weft.tune.ranks import HostContext, Report, all_cores, slowest
from weft_bench.collectives_hosts import transports_over_hosts
from weft_bench.harness import CpuRank

PAGE = 16
OVER_HOSTS = ("gloo", "shm+gloo")
LARGEST = 64 << 20
"""Bytes of a step's largest tensor, over hosts."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

RANDOM = Qwen2MoeConfig(
    # DeepSeek-V2-Lite's depth and routing (27 layers, 6 of 64 experts, a shared one) at a quarter of its width.
    vocab_size=32000,
    hidden_size=512,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_key_value_heads=16,
    intermediate_size=2736,
    moe_intermediate_size=80,
    shared_expert_intermediate_size=160,
    num_experts=64,
    num_experts_per_tok=6,
    max_position_embeddings=8192,
)


@dataclass(frozen=True)
class LatencyRun:
    """Sequence of `prompt` tokens, then `output` tokens. model: a directory; None: RANDOM, with random weights."""

    model: Path | None
    mesh: Mesh
    dtype: str
    prompt: int
    output: int
    rounds: int
    transports: tuple[str, ...]
    tuning: ShmTuning
    cost: str


@dataclass(frozen=True)
class Latency:
    """Round of one transport: ms to the first token, and the median ms of the next tokens."""

    transport: str
    first_ms: float
    next_ms: float


def parameters() -> int:
    """Return the number of the random model's parameters."""
    with torch.device("meta"):
        model = build_model(read_config(RANDOM.to_dict()), Mesh(), 0, torch.bfloat16, torch.device("meta"))
    return sum(p.numel() for p in model.parameters())


def measure(rank: int, directory: Path, report: Report, request: LatencyRun) -> None:
    """Run a rank's part; rank 0 reports a Latency for each transport and round, after one round unreported."""
    ranks = CpuRank(request.mesh, rank, directory, gloo="gloo" in request.transports, tuning=request.tuning, spins=None)
    opened: dict[str, Transport | None] = {"shm": ranks.shm, "gloo": ranks.gloo}
    # The shm runner prices by the host's table; gloo's is the same plan that it would get alone.
    sets = {name: [transport] for name in request.transports if (transport := opened[name]) is not None}
    _measure(rank, report, request, sets, ranks.shm, ranks.patient, ranks.shm, costs(request.cost))
    ranks.close()


def measure_over_hosts(rank: int, directory: Path, report: Report, here: HostContext, said: dict[str, Any]) -> None:
    """Run a rank's part on several hosts: by gloo alone, and by plans of shm inside hosts and gloo across.

    said: fields of a LatencyRun except model and mesh; random: whether the model is RANDOM, or the host's; values of
    `cost_described`.
    """
    fields = {name: said[name] for name in ("dtype", "prompt", "output", "rounds", "cost")}
    model, tuning = None if said["random"] else here.model, ShmTuning(**said["tuning"])
    request = LatencyRun(**fields, model=model, mesh=here.mesh, transports=OVER_HOSTS, tuning=tuning)
    with transports_over_hosts(rank, directory, here, said, LARGEST) as (cost, shm, gloo):
        sets = dict(zip(OVER_HOSTS, ([gloo], [shm, gloo]), strict=True))
        _measure(rank, report, request, sets, shm, gloo, gloo, over_network(costs(cost), ETHERNET))


def _measure(
    rank: int,
    report: Report,
    request: LatencyRun,
    sets: dict[str, list[Transport]],
    home: Transport,
    meeting: Transport,
    gathering: Transport,
    model_costs: Costs,
) -> None:
    """Run the runners in turn. sets: transports of each runner. home: transport of the activations' memory."""
    mesh, dtype, cpu = request.mesh, DTYPES[request.dtype], torch.device("cpu")
    if request.model is None:
        model = build_model(read_config(RANDOM.to_dict()), mesh, rank, dtype, cpu, home.empty)
        torch.manual_seed(0)
        for name, weight in model.named_parameters():
            weight.data.fill_(1.0) if "norm" in name else weight.data.normal_(0, 0.05)
    else:
        model = load_model(request.model, load_config(request.model), mesh, rank, dtype, cpu, workspace=home.empty)
    total = request.prompt + request.output
    pages = -(-total // PAGE)
    group = tuple(range(mesh.world))
    attention = NATIVE if missing() is None else TORCH
    runners = {
        name: ModelRunner(
            model, mesh, rank, transports, [CacheGroup(Rule(), pages)], PAGE, model_costs, attention=attention
        )
        for name, transports in sets.items()
    }
    prompt = torch.randint(1, model.config.vocab_size, (request.prompt,)).tolist()
    for number in range(1 + request.rounds):
        for name, runner in runners.items():
            steps = []
            tokens, at = prompt, 0
            for _ in range(1 + request.output - 1):
                batch = build_batch(tokens, [SeqRows(len(tokens), at, [list(range(pages))], True)], PAGE)
                with nullcontext() if name == "shm" else all_cores():
                    meeting.barrier(group)
                    began = time.perf_counter()
                    logits = runner.forward(batch, (len(tokens),))
                    steps.append((time.perf_counter() - began) * 1e3)
                at += len(tokens)
                tokens = [int(logits[-1].argmax())]
            first_and_next = slowest([steps[0], statistics.median(steps[1:])], gathering, group)
            if rank == 0 and number:
                report(Latency(name, *first_and_next))
