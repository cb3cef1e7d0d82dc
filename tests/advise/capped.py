"""Start every layout that the advisor names, in control groups with little memory.

    PYTHONPATH=tests python -m advise.capped --count 50 --seed 1 --limit-s 3000 --out capped.jsonl

Each random (model, memory, load) triple is a process of its own in a memory control group below this process's, of
version 1, as root: the advisor reads the group's limit as the host's memory, and the kernel kills who exceeds it. The
process starts the servers of each named layout with ranks as processes, and each server completes its requests.
Writes a line per triple: layouts that are named, and reasons of the ones that fail. Lines that are there are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.engine.advise.candidates import Candidate, ClientLoad, find_candidates
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.messages.request import SamplingParams

SHARED = dict(vocab_size=1024, max_position_embeddings=512, rms_norm_eps=1e-6, rope_theta=1e4, hidden_act="silu")
SHARED |= dict(num_attention_heads=8, head_dim=64, tie_word_embeddings=True, hidden_size=512, intermediate_size=2048)
LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"], num_key_value_heads=8)
MOE = dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_key_value_heads=4, num_experts=32)
MOE |= dict(moe_intermediate_size=256, num_experts_per_tok=2, norm_topk_prob=True)
LATENT = dict(model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"], num_key_value_heads=8, n_group=1)
LATENT |= dict(n_routed_experts=16, n_shared_experts=1, topk_group=1, kv_lora_rank=128, q_lora_rank=None)
LATENT |= dict(qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, moe_intermediate_size=256)
LATENT |= dict(first_k_dense_replace=1, topk_method="greedy", scoring_func="softmax", num_experts_per_tok=2)
SHAPES: dict[str, dict[str, Any]] = {"llama": LLAMA, "moe": MOE, "latent": LATENT}
RANKS, MAX_S = 2, 600


def own_group() -> Path:
    """Return the folder of this process's memory control group of version 1; one that is missing if there is none."""
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    path = next((path for _, names, path in lines if "memory" in names.split(",")), "/none")
    return Path("/sys/fs/cgroup/memory") / path.lstrip("/")


def triples(seed: int, count: int) -> list[dict[str, Any]]:
    """Return random models, MiB of memory and loads."""
    rng = random.Random(seed)
    return [
        {
            "seed": seed,
            "number": number,
            "model": rng.choice(sorted(SHAPES)),
            "layers": rng.randint(2, 10),
            "mib": int(2 ** rng.uniform(9.5, 11.3)),
            "load": [rng.randint(1, 200), rng.randint(1, 12), rng.randint(1, 16)],
        }
        for number in range(count)
    ]


def run_capped(triple: dict[str, Any]) -> dict[str, Any]:
    """Return what a process with little memory found: see `start_all`."""
    group = own_group() / f"weft-capped-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(triple["mib"] << 20))
        command = ["/bin/sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), sys.executable]
        command += ["-m", "advise.capped", "--triple", json.dumps(triple)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_S)
        except subprocess.TimeoutExpired:
            return {"failed": {"all": f"no end in {MAX_S} s"}}
        if done.returncode:
            return {"failed": {"all": f"exit status {done.returncode}: {done.stderr[-300:]}"}}
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    finally:
        for _ in range(50):  # ranks that were killed leave the group a moment later
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def start_all(triple: dict[str, Any]) -> dict[str, Any]:
    """Return the layouts that are named in this process's memory, and reasons why some of them do not serve."""
    load, failed, named = ClientLoad(*triple["load"]), dict[str, str](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        shape = SHARED | SHAPES[triple["model"]] | {"num_hidden_layers": triple["layers"]}
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        base = EngineConfig(model=Path(folder), load_format="dummy", device="cpu", dtype="float32")
        candidates, refused = find_candidates(base, RANKS, load)
        for each in candidates:
            named.append(str(each))
            try:
                serve(each, load.per_server(each.replicas))
            except Exception as error:
                failed[str(each)] = f"{type(error).__name__}: {error}"
    return {"named": named, "refused": len(refused), "failed": failed}


def serve(candidate: Candidate, load: ClientLoad) -> None:
    """Start a layout's servers, and let each complete a request per client."""
    params = SamplingParams(max_tokens=load.output_len, temperature=0.0, ignore_eos=True)
    prompts = [[1 + at % 1000] * load.input_len for at in range(load.concurrency)]
    with ExitStack() as stack:
        for cores in candidate.cores:
            bound = candidate.given.cpu_bind if cores == "auto" else cores
            engine = stack.enter_context(Engine(replace(candidate.given, cpu_bind=bound)))
            results = engine.generate(prompts, params)
            assert all(len(each.token_ids) == load.output_len for each in results)
            assert not engine.stats().failures, "ranks failed and were started anew"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="number of triples")
    parser.add_argument("--seed", type=int, default=1, help="seed of the triples")
    parser.add_argument("--limit-s", type=float, default=1e9, help="seconds after which no triple is begun")
    parser.add_argument("--out", type=Path, help="file of JSON lines")
    parser.add_argument("--triple", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.triple is not None:
        print(json.dumps(start_all(asked.triple)))
        return
    until = time.monotonic() + asked.limit_s
    old = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.is_file() else []
    for triple in triples(asked.seed, asked.count):
        if time.monotonic() > until or any(triple.items() <= each.items() for each in old):
            continue
        old.append(triple | run_capped(triple))
        with asked.out.open("a") as file:
            file.write(json.dumps(old[-1]) + "\n")
    named, failed = (sum(len(each.get(key, ())) for each in old) for key in ("named", "failed"))
    print(f"{len(old)} triples, {named} layouts named, {failed} failed")


if __name__ == "__main__":
    main()
