"""Time between tokens, and prompts read a second, of the engine on GPUs: a preset's shape with made-up weights.

Every case, a layout with what carries its exchanges and the plan that they follow, is a fresh engine. Its sequences
have `--context` tokens each and answer greedily without an end; the time between one step's tokens and the next is
taken at the listener, once all of them answer. Prompts are read with answers of one token. Carriers are transports
(auto, peer, nccl) or `naive`: the plan of all-reduces that every other is compared with, carried as auto. NCCL takes no
row counts from device memory, so with several DP groups its steps cannot be captured: they run eagerly, and the row
says so. Experts gather or dispatch (with carrier peer alone). Prints a line of JSON a measurement, and writes them all.
What a step is made of, `weft profile` says.

    python benchmarks/gpu_decode.py --layouts 1x2,2x1 2x1,2x1 --batches 1 16 64 256 --carriers auto nccl naive
    python benchmarks/gpu_decode.py --layouts 2x1,2x1 --batches 1 16 64 256 --carriers peer --experts gather dispatch
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from weft.assets import preset_dir
from weft.bench.host import describe_host
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.request import Output, SamplingParams

WAIT_S = 120.0


def layout(text: str) -> dict[str, int]:
    """`1x2,2x1`: attn_dp × attn_tp, ep × moe_tp."""
    dp_tp, ep_tp = text.split(",")
    (dp, tp), (ep, moe_tp) = (map(int, half.split("x")) for half in (dp_tp, ep_tp))
    return {"attn_dp": dp, "attn_tp": tp, "ep": ep, "moe_tp": moe_tp}


def answer(engine: Engine, batch: int, context: int, tokens: int) -> tuple[float, list[list[float]]]:
    """Has prompts of random tokens answered: when that began, and when each sequence's tokens came, in seconds."""
    generator = torch.Generator().manual_seed(batch)
    most = min(5000, engine.model_config.vocab_size)
    prompts = torch.randint(10, most, (batch, context), generator=generator).tolist()
    times: list[list[float]] = [[] for _ in prompts]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)

    def listener(at: int) -> Any:
        def listen(output: Output) -> None:
            times[at].append(time.perf_counter())

        return listen

    began = time.perf_counter()
    for at, prompt in enumerate(prompts):
        engine.submit(prompt, params, listener(at))
    while any(len(t) < tokens for t in times) and time.perf_counter() < began + WAIT_S:
        if engine.wait(0.01):
            raise SystemExit(f"the engine has ended: {engine.error}")
    if any(len(t) < tokens for t in times):
        raise SystemExit(f"{batch} sequences were not answered in {WAIT_S:.0f} s")
    return began, times


def decode(engine: Engine, batch: int, context: int, tokens: int) -> dict[str, float]:
    """Milliseconds between the tokens of batch sequences, and tokens a second, once all of them answer."""
    _, times = answer(engine, batch, context, tokens)
    last_start = max(t[0] for t in times)
    gaps = [b - a for t in times for a, b in itertools.pairwise(t) if a > last_start]
    gaps = gaps[len(gaps) // 10 :]
    itl = statistics.median(gaps)
    return {"itl_ms": itl * 1e3, "itl_p99_ms": sorted(gaps)[int(len(gaps) * 0.99)] * 1e3, "tokens_s": batch / itl}


def prefill(engine: Engine, prompts: int, context: int) -> dict[str, float]:
    """Prompt tokens read a second, from the first prompt's coming until the last one's first token."""
    began, times = answer(engine, prompts, context, 1)
    took = max(t[0] for t in times) - began
    return {"prefill_tokens_s": prompts * context / took}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-30b-a3b")
    parser.add_argument("--num-layers", type=int, default=None)
    parser.add_argument("--layouts", nargs="+", default=["1x2,2x1"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16, 64])
    parser.add_argument("--carriers", nargs="+", default=["auto"], choices=["auto", "peer", "nccl", "naive"])
    parser.add_argument("--experts", nargs="+", default=["auto"], choices=["auto", "gather", "dispatch"])
    parser.add_argument("--split-vocabulary", nargs="+", default=["off"], choices=["off", "on"])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--prefill", type=int, default=0, help="prompts of the context's length to read; 0: none")
    parser.add_argument("--turns", type=int, default=1, help="how often each measurement is made")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--no-overlap", action="store_true", help="each step waits for the tokens of the one before")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    cases = itertools.product(args.layouts, args.carriers, args.experts, args.split_vocabulary)
    for shape, carrier, experts, split in cases:
        began, sizes = time.perf_counter(), layout(shape)
        graphs = not (args.eager or args.device == "cpu" or (carrier == "nccl" and sizes["attn_dp"] > 1))
        most = max([*args.batches, args.prefill, 1])
        config = EngineConfig(
            model=preset_dir(args.preset),
            load_format="dummy",
            num_layers=args.num_layers,
            device=args.device,
            transport="auto" if carrier == "naive" else carrier,
            plan="naive" if carrier == "naive" else "cheapest",
            experts=experts,
            split_vocabulary=split,
            cuda_graphs=graphs,
            overlap=not args.no_overlap,
            max_running=most,
            max_batch_tokens=8192,
            max_model_len=max(args.context, 64) + args.tokens + 16,
            kv_tokens=(args.context + args.tokens + 32) * most,
            prefix_cache=False,
            **sizes,
        )
        try:
            with Engine(config) as engine:
                case = {"layout": shape, "carrier": carrier, "experts": experts}
                case |= {"split_vocabulary": split}
                case |= {"graphs": graphs, "context": args.context}
                case |= {"start_s": round(time.perf_counter() - began, 1)}
                answer(engine, 2 * sizes["attn_dp"], 64, 12)  # warm
                for turn in range(args.turns):
                    for batch in args.batches:
                        found = decode(engine, batch, args.context, args.tokens)
                        rows.append(case | {"what": "decode", "batch": batch, "turn": turn} | found)
                        print(json.dumps(rows[-1]), flush=True)
                    if args.prefill:
                        found = prefill(engine, args.prefill, args.context)
                        rows.append(case | {"what": "prefill", "batch": args.prefill, "turn": turn} | found)
                        print(json.dumps(rows[-1]), flush=True)
        except Exception as error:  # one case that fails must not take the others' figures along
            print(f"{shape} {carrier}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if args.json:
            head = {"host": describe_host(), "arguments": {k: str(v) for k, v in vars(args).items()}}
            args.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
