"""First-token and next-token latency of one model, with each transport in turn.

One process a rank, one copy of the weights; a runner for each transport, which takes turns round by round, so that a
machine that changes its mind changes it for all.
"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2MoeConfig

from weft.bench.ranks import Report, all_cores
from weft.comm.shm import ShmTransport, ShmTuning
from weft.comm.torchdist import TorchDistTransport
from weft.comm.transport import Transport
from weft.engine.worker.build_batch import SeqRows, build_batch
from weft.engine.worker.model_runner import ModelRunner
from weft.kv.cache_spec import CacheGroup, Rule
from weft.models.load import build_model, load_model
from weft.models.registry import load_config, read_config
from weft.place.cost import costs
from weft.place.spec import Mesh

PAGE = 16
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
class Request:
    """One sequence of `prompt` tokens, then `output` tokens. model: a directory; None: RANDOM, with random weights."""

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
    """A round of one transport: ms to the first token, and each next token's ms (median of the round)."""

    transport: str
    first_ms: float
    next_ms: float


def parameters() -> int:
    """Of the random model."""
    with torch.device("meta"):
        model = build_model(read_config(RANDOM.to_dict()), Mesh(), 0, torch.bfloat16, torch.device("meta"))
    return sum(p.numel() for p in model.parameters())


def measure(rank: int, directory: Path, report: Report, request: Request) -> None:
    """A rank's part; rank 0 reports a Latency for each transport and round, after one round unreported."""
    mesh = request.mesh
    shm = ShmTransport(mesh, rank, directory / "shm", tuning=request.tuning, spins=None)
    patient = ShmTransport(mesh, rank, directory / "patient", spins=0)  # see bench/collectives.py
    opened: dict[str, Transport] = {"shm": shm}
    if "gloo" in request.transports:
        with all_cores():
            opened["gloo"] = TorchDistTransport(mesh, rank, f"file://{directory}/gloo")
    dtype, cpu = DTYPES[request.dtype], torch.device("cpu")
    if request.model is None:
        model = build_model(read_config(RANDOM.to_dict()), mesh, rank, dtype, cpu, shm.empty)
        torch.manual_seed(0)
        for name, weight in model.named_parameters():
            weight.data.fill_(1.0) if "norm" in name else weight.data.normal_(0, 0.05)
    else:
        model = load_model(request.model, load_config(request.model), mesh, rank, dtype, cpu, workspace=shm.empty)
    total = request.prompt + request.output
    pages = -(-total // PAGE)
    group = tuple(range(mesh.world))
    # The shm runner prices by the host's table; gloo's is the same plan that it would get alone.
    runners = {
        name: ModelRunner(model, mesh, rank, [opened[name]], [CacheGroup(Rule(), pages)], PAGE, costs(request.cost))
        for name in request.transports
    }
    prompt = torch.randint(1, model.config.vocab_size, (request.prompt,)).tolist()
    for number in range(1 + request.rounds):
        for name, runner in runners.items():
            steps = []
            tokens, at = prompt, 0
            for _ in range(1 + request.output - 1):
                batch = build_batch(tokens, [SeqRows(len(tokens), at, [list(range(pages))], True)], PAGE)
                with all_cores() if name == "gloo" else nullcontext():
                    patient.barrier(group)
                    began = time.perf_counter()
                    logits = runner.forward(batch, (len(tokens),))
                    steps.append((time.perf_counter() - began) * 1e3)
                at += len(tokens)
                tokens = [int(logits[-1].argmax())]
            latencies = torch.tensor([[steps[0], statistics.median(steps[1:])]]).double()
            slowest = shm.all_gatherv(latencies, group, (1,) * mesh.world).amax(0).tolist()
            if rank == 0 and number:
                report(Latency(name, *slowest))
    for transport in (*opened.values(), patient):
        transport.close()
