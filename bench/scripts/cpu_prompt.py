"""Prompt steps of one CPU rank with Weft's kernels, and with torch alone, in turns, on made-up weights.

Prints one JSON line per step: minimum and median ms of wall time and of all threads' CPU time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from cpu_decode import PAGE, SMOLLM2, made_up_model, torch_alone
from weft.comm.reference import ReferenceTransport, ReferenceWorld
from weft.engine.attention.backend_registry import NATIVE, TORCH
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.worker.model_runner import ModelRunner
from weft.planner.spec import Mesh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", default=["1x1024", "1x200", "10x200"], help="prompts x tokens of steps")
    parser.add_argument("--context", type=int, default=0, help="tokens of each prompt that ran before")
    parser.add_argument("--config", type=Path, help="a config.json instead of SmolLM2-135M's shape")
    parser.add_argument("--layers", type=int, help="number of layers instead of the config's")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="print torch's profile of the kernels' steps")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    fields = json.loads(asked.config.read_text()) if asked.config else dict(SMOLLM2)
    model = made_up_model(fields | ({"num_hidden_layers": asked.layers} if asked.layers else {}), asked.dtype)
    for prompt in asked.prompts:
        count, tokens = map(int, prompt.split("x"))
        pages = -(-(tokens + asked.context) // PAGE)
        rows = [SeqRows(tokens, asked.context, [range(i * pages, (i + 1) * pages)], 1) for i in range(count)]
        batch = build_batch(torch.randint(1000, (count * tokens,)).tolist(), rows, PAGE)
        runners = {
            name: ModelRunner(
                model,
                Mesh(),
                0,
                [ReferenceTransport(ReferenceWorld(1), 0)],
                [CacheGroup(Rule(), count * pages)],
                PAGE,
                attention=backend,
            )
            for name, backend in (("kernels", NATIVE), ("torch", TORCH))
        }
        found: dict[str, list[float]] = {f"{name}{kind}_ms": [] for name in runners for kind in ("", "_cpu")}
        for _ in range(asked.rounds):
            for name, runner in runners.items():
                with torch_alone() if name == "torch" else nullcontext():
                    wall, cpu = time.perf_counter(), time.process_time()
                    runner.forward(batch, (len(batch.tokens),))
                found[f"{name}_ms"].append((time.perf_counter() - wall) * 1e3)
                found[f"{name}_cpu_ms"].append((time.process_time() - cpu) * 1e3)
        line = {name: [round(min(ms), 1), round(statistics.median(ms), 1)] for name, ms in found.items()}
        named = dict(prompts=prompt, context=asked.context, dtype=asked.dtype, threads=asked.threads)
        print(json.dumps(named | line), flush=True)
        if asked.profile:
            with torch.profiler.profile() as profile:
                runners["kernels"].forward(batch, (len(batch.tokens),))
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=15))


if __name__ == "__main__":
    main()
