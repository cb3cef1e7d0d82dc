"""What decode context parallelism gives in serving, and what it costs: tp against dcp under one budget for the cache.

A preset's shape with made-up weights. For each dcp size a fresh engine, whose ranks each have room for --kv-tokens:

- serving: so many clients, each with one request at a time of --prompt random tokens and --answer greedy ones without
  an end: tokens a second, median and 99th percentile of the time to first token, most sequences that ran at once;
- decode: milliseconds between tokens of a few sequences with long contexts: from where dcp pays.

Each context for decode is prefilled first, which is not timed. Beside what a step takes stands what the plan says: how
much longer one with dcp takes than without (`weft.planner.dcp`, by the cost table that the engine ran with), and, where
two contexts of as many sequences were measured, from which length dcp pays: measured, on the straight line between the
two, and predicted. Prints a line a measurement, and writes them all as JSON after each.

    python bench/scripts/gpu_dcp_serving.py --dcp 1 2 --concurrency 1 16 64 128 256 --decode 1x4096 1x32768 \
        --json OUT.json
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from gpu_decode import decode, layout
from weft.comm.transport import offer_of
from weft.engine.assets import preset_dir
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import dtype_of, enabled_transports
from weft.engine.controller.engine import Engine
from weft.engine.messages.request import SamplingParams
from weft.engine.output.request_output import RequestOutput
from weft.engine.worker.open_transports import cost_model
from weft.engine.worker.planning import plan_model, sharded_context
from weft.planner.dcp import ShardedContext
from weft.planner.prices import BlockPrices, Recipes
from weft.planner.recipes import Merge, Prompt
from weft.tune.host import describe_host


def serve(engine: Engine, clients: int, requests: int, prompt: int, answer: int, most_s: float) -> dict[str, Any]:
    """A closed loop: whenever an answer ends, its client asks again, until `requests` were asked."""
    generator = torch.Generator().manual_seed(clients)
    max_token = min(5000, engine.model_config.vocab_size)
    prompts = torch.randint(10, max_token, (requests, prompt), generator=generator).tolist()
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    first: list[float] = []
    limit = 0

    def ask() -> None:
        asked = time.perf_counter()
        waits = True

        def on_output(answer: RequestOutput) -> None:
            nonlocal waits
            output = answer.take()
            if waits and output.token_ids:
                waits = False
                first.append(time.perf_counter() - asked)
            if output.finish_reason:
                ended.put(output.finish_reason)

        engine.submit(prompts.pop(), params, on_output)

    began = time.perf_counter()
    for _ in range(min(clients, requests)):
        ask()
    done, preemptions = 0, engine.stats().preemptions
    while done < requests:
        try:
            reason = ended.get(timeout=0.1)
        except queue.Empty:
            limit = max(limit, engine.stats().running)
            if time.perf_counter() - began > most_s or not engine.healthy:
                return {"error": f"not done after {most_s:g} s: {done} of {requests}; {engine.error}"}
            continue
        assert reason == "length", reason
        done += 1
        if prompts:
            ask()
    seconds = time.perf_counter() - began
    return {
        "tokens_per_s": round(requests * answer / seconds, 1),
        "ttft_ms": round(statistics.median(first) * 1e3, 1),
        "ttft_p99_ms": round(sorted(first)[int(0.99 * len(first))] * 1e3, 1),
        "most_running": limit,
        "preemptions": engine.stats().preemptions - preemptions,
        "seconds": round(seconds, 2),
    }


def planned(config: EngineConfig) -> tuple[ShardedContext, BlockPrices] | None:
    """What the plan of a configuration that has run weighs; None without dcp."""
    mesh, model, dtype, table = config.mesh, config.read_model(), dtype_of(config), cost_model(config)
    if mesh.dcp == 1:
        return None
    offers = [offer_of(entry, mesh, table.of(entry.name, mesh.world)) for entry in enabled_transports(config)]
    recipes: Recipes = {Merge: config.dcp_exchange, Prompt: config.dcp_prefill}
    planner = plan_model(model, mesh, dtype, offers, recipes=recipes)
    context = sharded_context(model, mesh, dtype, planner.chain)
    return None if context is None else (context, planner.blocks)


def against_plan(config: EngineConfig, itl: dict[tuple[int, int, int], float]) -> list[dict[str, Any]]:
    """How much longer steps with dcp take than without, and from where they are quicker: measured, and as planned.

    itl: ms between tokens by (dcp, batch, context). of: predicted over measured crossover; the goal is 1/1.5 to 1.5.
    """
    rows: list[dict[str, Any]] = []
    if (found := planned(config)) is None:
        return rows
    (sharded, prices), dcp = found, config.dcp
    longer: dict[int, list[tuple[int, float]]] = {}
    for (n, batch, context), ms in sorted(itl.items()):
        if n != dcp or (1, batch, context) not in itl:
            continue
        without = itl[1, batch, context]
        predicted = sharded.exchange_us(batch, prices) - sharded.saved_us(prices) * batch * context
        longer.setdefault(batch, []).append((context, ms - without))
        of = {"dcp": dcp, "batch": batch, "context": context, "itl_ms": {"dcp 1": without, f"dcp {dcp}": ms}}
        share = {"longer_by": ms / without - 1, "predicted_longer_by": predicted / 1e3 / without}
        rows.append(of | {"longer_us": (ms - without) * 1e3, "predicted_longer_us": predicted} | share)
    for batch, lengths in longer.items():
        (near, more), (far, less) = lengths[0], lengths[-1]
        row: dict[str, Any] = {"dcp": dcp, "batch": batch, "between": [near, far]}
        row["predicted_pays_from"] = sharded.pays_from(batch, prices)
        if more > less:
            row["pays_from"] = near + (far - near) * more / (more - less)
            row["of"] = row["predicted_pays_from"] / row["pays_from"]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="deepseek-v2-lite")
    parser.add_argument("--num-layers", type=int, default=None)
    parser.add_argument("--layout", default="1x2,2x1")
    parser.add_argument("--dcp", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--exchange", default="auto", help="auto, ag_rs, a2a or fused")
    parser.add_argument("--query", default="gather", help="gather or replicate")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--kv-tokens", type=int, default=131072)
    parser.add_argument("--concurrency", nargs="*", type=int, default=[1, 16, 64, 128, 256])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument(
        "--decode", nargs="*", default=["1x4096", "1x32768", "8x4096", "8x12288"], help="batch x tokens"
    )
    parser.add_argument("--most-s", type=float, default=60.0, help="for one measurement")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = [tuple(map(int, text.split("x"))) for text in args.decode]
    longest = max([args.prompt + args.answer, *(context + 64 for _, context in cases)])
    rows: list[dict[str, Any]] = []
    itl: dict[tuple[int, int, int], float] = {}
    about = {"host": describe_host(), "arguments": vars(args) | {"json": None}}

    def found(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.json:
            args.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")

    for dcp in args.dcp:
        began = time.perf_counter()
        config = EngineConfig(
            model=preset_dir(args.preset),
            load_format="dummy",
            num_layers=args.num_layers,
            device=args.device,
            transport=args.transport,
            max_running=max([*args.concurrency, *(batch for batch, _ in cases)]),
            max_batch_tokens=8192,
            max_model_len=longest + 16,
            kv_tokens=args.kv_tokens,
            prefix_cache=False,
            dcp=dcp,
            dcp_exchange=args.exchange,
            dcp_query=args.query,
            **layout(args.layout),
        )
        with Engine(config, lambda what, part: None) as engine:
            found({"dcp": dcp, "start_s": round(time.perf_counter() - began, 1)})
            serve(engine, 4, 8, 64, 12, args.most_s)  # warm
            for batch, context in cases:
                row, _ = decode(engine, batch, context, 48)
                itl[dcp, batch, context] = row["itl_ms"]
                found({"dcp": dcp, "batch": batch, "context": context} | row)
            for clients in args.concurrency:
                requests = max(2, clients + clients // 2)
                row = serve(engine, clients, requests, args.prompt, args.answer, args.most_s)
                found({"dcp": dcp, "clients": clients, "requests": requests} | row)
        for row in against_plan(config, itl):
            found({"against_plan": row})


if __name__ == "__main__":
    main()
