"""Time between tokens of the engine on GPUs: a preset's shape with made-up weights, by layout, batch and transport.

Every case is a fresh engine; its sequences have `--context` tokens each, answer greedily without an end, and the time
between one step's tokens and the next is taken at the listener, from the tenth on. Prints a table and writes JSON.

    python benchmarks/gpu_decode.py --layouts 1x2,2x1 --batches 1 16 64 --transports peer nccl --json OUT.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import torch

from weft.assets import preset_dir
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.request import Output, SamplingParams


def layout(text: str) -> dict[str, int]:
    dp_tp, ep_tp = text.split(",")
    (dp, tp), (ep, moe_tp) = (map(int, half.split("x")) for half in (dp_tp, ep_tp))
    return {"attn_dp": dp, "attn_tp": tp, "ep": ep, "moe_tp": moe_tp}


def measure(engine: Engine, batch: int, context: int, tokens: int) -> dict[str, float]:
    """Milliseconds between steps, of batch sequences."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(10, 5000, (batch, context), generator=generator).tolist()
    times: dict[int, list[float]] = {i: [] for i in range(batch)}
    first: list[float] = []
    began = time.perf_counter()

    def listen(i: int) -> object:
        def on_output(output: Output) -> None:
            times[i].append(time.perf_counter())
            if len(times[i]) == 1:
                first.append(times[i][0] - began)

        return on_output

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.submit(prompt, params, listen(i))
    deadline = time.time() + 120
    while any(len(t) < tokens for t in times.values()) and engine.healthy and time.time() < deadline:
        time.sleep(0.01)
    last_start = max(t[0] for t in times.values())
    gaps = [b - a for t in times.values() for a, b in itertools.pairwise(t) if a > last_start]
    gaps = gaps[len(gaps) // 10 :]
    return {
        "itl_ms": statistics.median(gaps) * 1e3,
        "itl_p99_ms": sorted(gaps)[int(len(gaps) * 0.99)] * 1e3,
        "ttft_last_ms": max(first) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-30b-a3b")
    parser.add_argument("--num-layers", type=int, default=None)
    parser.add_argument("--layouts", nargs="+", default=["1x2,2x1"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--transports", nargs="+", default=["peer"])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for shape in args.layouts:
        for transport in args.transports:
            began = time.perf_counter()
            config = EngineConfig(
                model=preset_dir(args.preset),
                load_format="dummy",
                num_layers=args.num_layers,
                device="cuda",
                transport=transport,
                cuda_graphs=not args.eager,
                max_running=max(args.batches),
                max_batch_tokens=8192,
                max_model_len=args.context + args.tokens + 16,
                kv_tokens=(args.context + args.tokens + 32) * max(args.batches),
                prefix_cache=False,
                **layout(shape),
            )
            with Engine(config, lambda what, part: None) as engine:
                start_s = time.perf_counter() - began
                for batch in args.batches:
                    measure(engine, batch, 64, 12)  # warm
                    row = {"layout": shape, "transport": transport, "batch": batch, "context": args.context}
                    row |= {"start_s": round(start_s, 1)} | measure(engine, batch, args.context, args.tokens)
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                if transport == args.transports[0]:
                    for stat in engine.comm_report()[0]:
                        print(f"  {stat.site:40} {stat.step:70} {stat.count}", flush=True)
    if args.json:
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        host = {"gpus": gpus, "torch": torch.__version__, "cuda": torch.version.cuda}
        found = {"host": host, "arguments": vars(args) | {"json": None}, "rows": rows}
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
