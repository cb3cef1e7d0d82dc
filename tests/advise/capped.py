"""Start every layout that the advisor names on a host with little memory, and sample the memory of its processes.

    PYTHONPATH=tests python -m advise.capped --count 50 --seed 1 --limit-s 3000 --out capped.jsonl

Each random (model, memory, load) triple is a process of its own: its advisor is told that the host has this memory, by
`host_memory_gib`, and so are the servers of each named layout that it starts, with ranks as processes. Each server
completes its requests. The memory of the process and its descendants, in which a page that they share counts once, must
stay below the triple's. Writes a line per triple: layouts that are named, peaks of MiB, and reasons of the ones that
fail. Lines that are there are skipped.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
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
RANKS, MAX_S, SAMPLE_S = 2, 600, 0.1


def tree_bytes(root: int) -> int:
    """Return the memory of a process and its descendants: pages that processes share count in parts."""
    parents = dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    tree, total = {root}, 0
    while more := {process for process, parent in parents.items() if parent in tree} - tree:
        tree |= more
    for process in tree:
        with suppress(OSError):
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += sum(int(kib) << 10 for kib in re.findall(r"^Pss: +(\d+) kB", rollup, re.MULTILINE))
    return total


def triples(seed: int, count: int) -> list[dict[str, Any]]:
    """Return random models, MiB of memory and loads."""
    rng = random.Random(seed)
    return [
        {
            "seed": seed,
            "number": number,
            "model": rng.choice(sorted(SHAPES)),
            "layers": rng.randint(2, 10),
            "mib": int(2 ** rng.uniform(9.8, 11.8)),
            "load": [rng.randint(1, 200), rng.randint(1, 12), rng.randint(1, 16)],
        }
        for number in range(count)
    ]


def run_capped(triple: dict[str, Any]) -> dict[str, Any]:
    """Return what a process with little memory found, as `start_all` prints it, and peaks of MiB by layout."""
    command = [sys.executable, "-m", "advise.capped", "--triple", json.dumps(triple)]
    peaks, until = {"none": 0}, time.monotonic() + MAX_S
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        with open(out, "w") as said, open(err, "w") as errors:
            process = subprocess.Popen(command, stdout=said, stderr=errors)
        while process.poll() is None and time.monotonic() < until:
            layout = ([json.loads(line)["starts"] for line in out.read_text().splitlines()[-1:]] or ["none"])[0]
            peaks[layout] = max(peaks.get(layout, 0), tree_bytes(process.pid) >> 20)
            time.sleep(SAMPLE_S)
        if process.poll() is None:
            process.terminate()  # ranks end with it
            process.wait()
            return {"failed": {"all": f"no end in {MAX_S} s"}, "peaks": peaks}
        if process.returncode:
            why = f"exit status {process.returncode}: {err.read_text()[-300:]}"
            return {"failed": {"all": why}, "peaks": peaks}
        found: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
        del found["starts"]
    over = {each: f"{mib} MiB, more than {triple['mib']}" for each, mib in peaks.items() if mib > triple["mib"]}
    return found | {"peaks": peaks, "failed": over | found["failed"]}


def start_all(triple: dict[str, Any]) -> dict[str, Any]:
    """Return the layouts that are named for the memory, and reasons why some of them do not serve.

    Prints the name of each one before its start.
    """
    load, failed, named = ClientLoad(*triple["load"]), dict[str, str](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        shape = SHARED | SHAPES[triple["model"]] | {"num_hidden_layers": triple["layers"]}
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        base = EngineConfig(model=Path(folder), load_format="dummy", device="cpu", dtype="float32")
        base = replace(base, host_memory_gib=triple["mib"] / 1024)
        candidates, refused = find_candidates(base, RANKS, load)
        for each in candidates:
            named.append(str(each))
            print(json.dumps({"starts": str(each)}), flush=True)
            try:
                serve(each, load.per_server(each.replicas))
            except Exception as error:
                failed[str(each)] = f"{type(error).__name__}: {error}"
    return {"starts": "none", "named": named, "refused": len(refused), "failed": failed}


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
