"""Measure time between tokens, and prompt tokens read per second, of the engine on GPUs: a preset's shape with made-up
weights.

Every case, a layout with transports and a plan, is a fresh engine in a process of its own, which is ended after
`--case-timeout` seconds. Its sequences have `--context` tokens each and decode greedily without an end; the time
between one step's tokens and the next is measured at the callback, once all sequences decode. Prompts are read with
outputs of one token. Experts gather or dispatch (with carrier peer alone).

Carriers are transports, or a plan: auto (peer and NCCL, chosen edge by edge), peer, nccl, `nccl_window` (NCCL on
registered memory; its captured kernels have been seen to race), or `naive`: the plan of all-reduces that every other
plan is compared with, on auto's transports. With NCCL every DP group exchanges its graph's whole capacity
(`weft.stream.step_rows`).

equal_tokens compares outputs with each carrier that ran before in the same layout, and with earlier turns: the share of
tokens before the first that differs, in each output. All cases have the same weights and prompts, so a carrier that
gives wrong sums shows. Right ones differ late: they round sums otherwise, and a token may depend on that.

floor_ms is the minimum time of a step: the bytes of `decode_step_bytes` at the bandwidth of a kernel that only
reads.

Prints a line of JSON per measurement, and writes them all, with the cases that failed. `weft profile` shows the parts
of a step.

    python bench/scripts/gpu_decode.py --layouts 1x2,2x1 2x1,2x1 --batches 1 16 64 256 --carriers auto nccl naive
    python bench/scripts/gpu_decode.py --layouts 2x1,2x1 --carriers peer --moe-exchange gather dispatch
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from weft.engine.assets import preset_dir
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import dtype_of, kv_dtype_of
from weft.engine.controller.engine import Engine
from weft.engine.messages.request import SamplingParams
from weft.engine.output.request_output import OutputCallback, RequestOutput
from weft.engine.output.results import whole
from weft.engine.worker.footprint import decode_step_bytes
from weft.serve.cli.command import stop_on_sigterm
from weft.tune.host import describe_host
from weft_bench.breakdown import random_prompts

WAIT_S = 120.0
TRANSPORTS = ("auto", "peer", "nccl", "nccl_window", "naive")
Send = Callable[[Any], None]
Outputs = list[list[int]]


def layout(text: str) -> dict[str, int]:
    """Parse `1x2,2x1`: attn_dp × attn_tp, ep × moe_tp."""
    dp_tp, ep_tp = text.split(",")
    (dp, tp), (ep, moe_tp) = (map(int, half.split("x")) for half in (dp_tp, ep_tp))
    return {"attn_dp": dp, "attn_tp": tp, "ep": ep, "moe_tp": moe_tp}


def complete(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, limit_s: float = math.inf
) -> tuple[list[list[float]], Outputs]:
    """Complete all prompts at once; return the times of each one's increments in seconds, and its tokens."""
    times: list[list[float]] = [[] for _ in prompts]
    ended: dict[int, RequestOutput] = {}

    def callback(at: int) -> OutputCallback:
        def on_output(output: RequestOutput) -> None:
            times[at].append(time.perf_counter())
            if output.end is not None:
                ended[at] = output

        return on_output

    began = time.perf_counter()
    engine.submit_all([(prompt, params, callback(at)) for at, prompt in enumerate(prompts)])
    while len(ended) < len(prompts):
        if engine.wait(0.01):
            raise RuntimeError(f"the engine has ended: {engine.error}")
        if time.perf_counter() > began + limit_s:
            raise RuntimeError(f"{len(prompts)} outputs had not ended after {limit_s:.0f} s")
    return times, [list(whole(ended[at]).token_ids) for at in range(len(prompts))]


def reply(engine: Engine, batch: int, context: int, tokens: int) -> tuple[float, list[list[float]], Outputs]:
    """Complete prompts of random tokens; return the start, the times of each sequence's tokens in seconds, and the
    tokens."""
    prompts = random_prompts(engine, batch, context, seed=batch)
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return time.perf_counter(), *complete(engine, prompts, params, WAIT_S)


def read_bandwidth(device: str) -> float:
    """Return the bytes per second of reading 4 GiB of a GPU's memory; on CPUs, 256 MiB."""
    whole = torch.ones((1 << 28) if device == "cuda" else (1 << 24), 4, device=device)
    times = []
    for _ in range(8):
        began = time.perf_counter()
        whole.amax().item()
        times.append(time.perf_counter() - began)
    return whole.numel() * 4 / min(times)


def decode(engine: Engine, batch: int, context: int, tokens: int) -> tuple[dict[str, float], Outputs]:
    """Return times between tokens in ms and tokens per second, while all sequences decode, and the tokens."""
    _, times, answers = reply(engine, batch, context, tokens)
    last_start = max(t[0] for t in times)
    gaps = [b - a for t in times for a, b in itertools.pairwise(t) if a > last_start]
    gaps = gaps[len(gaps) // 10 :]
    itl = statistics.median(gaps)
    p99 = sorted(gaps)[int(len(gaps) * 0.99)]
    return {"itl_ms": itl * 1e3, "itl_p99_ms": p99 * 1e3, "tokens_s": batch / itl}, answers


def prefill(engine: Engine, prompts: int, context: int) -> dict[str, float]:
    """Return prompt tokens read per second, from the first prompt's arrival until the last one's first token."""
    began, times, _ = reply(engine, prompts, context, 1)
    seconds = max(t[0] for t in times) - began
    return {"prefill_tokens_s": prompts * context / seconds}


def measure(send: Send, args: argparse.Namespace, case: dict[str, Any]) -> None:
    """Run a case: send its row and the outputs for each measurement; outputs are None when prompts are read."""
    began, sizes, carrier = time.perf_counter(), layout(case["layout"]), case["carrier"]
    limit = max([*args.batches, args.prefill, 1])
    config = EngineConfig(
        model=preset_dir(case["preset"]),
        load_format="dummy",
        num_layers=args.num_layers,
        device=args.device,
        transport="auto" if carrier == "naive" else carrier,
        plugins=("weft_bench.nccl_window",) if carrier == "nccl_window" else (),
        plan="naive" if carrier == "naive" else "cheapest",
        moe_exchange=case["moe_exchange"],
        split_vocabulary=case["split_vocabulary"],
        kv_dtype=case["kv_dtype"],
        cuda_graphs=case["graphs"],
        overlap=not args.no_overlap,
        max_running=limit,
        max_choices=limit,
        max_batch_tokens=8192,
        max_model_len=max(args.context, 64) + args.tokens + 16,
        kv_tokens=(args.context + args.tokens + 32) * limit,
        prefix_cache=False,
        **sizes,
    )
    model, bandwidth = config.read_model(), args.bandwidth

    def floor_ms(batch: int) -> float:
        size = decode_step_bytes(model, config.mesh, dtype_of(config), batch, args.context, kv_dtype_of(config))
        return size / bandwidth * 1e3

    with Engine(config) as engine:
        case = case | {"start_s": round(time.perf_counter() - began, 1)}
        reply(engine, 2 * sizes["attn_dp"], 64, 12)  # warm
        for index in range(args.turns):
            for batch in args.batches:
                found, answers = decode(engine, batch, args.context, args.tokens)
                found["floor_ms"] = floor_ms(batch)
                send((case | {"what": "decode", "batch": batch, "turn": index} | found, answers))
            if args.prefill and carrier != "nccl_window":  # which copies every tensor of an eager step twice
                found = prefill(engine, args.prefill, args.context)
                send((case | {"what": "prefill", "batch": args.prefill, "turn": index} | found, None))


def apart(timeout_s: float, work: Callable[..., None], *given: Any) -> Iterator[Any]:
    """Yield what `work(send, *given)` sends from a process of its own, which is ended after timeout_s seconds.

    Raises RuntimeError with the reason if it failed, TimeoutError if it was ended.
    """
    context = multiprocessing.get_context("fork")  # with all that is imported; nothing runs yet, on no GPU either
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_apart, args=(there, work, given))
    process.start()
    there.close()
    deadline, late = time.monotonic() + timeout_s, False
    try:
        while here.poll(max(0.0, deadline - time.monotonic())):
            try:
                what, value = here.recv()
            except EOFError:
                process.join(10)
                if process.exitcode:
                    raise RuntimeError(f"its process ended with exit code {process.exitcode}") from None
                return
            if what == "failed":
                raise RuntimeError(value)
            yield value
        late = True
        raise TimeoutError(f"not done after {timeout_s:g} s")
    finally:
        process.join(0 if late else 10)
        if process.exitcode is None:
            process.kill()
            process.join()
            time.sleep(3)  # its ranks see within half a second that it is gone


def _apart(there: Connection, work: Callable[..., None], given: tuple[Any, ...]) -> None:
    try:
        work(lambda value: there.send(("value", value)), *given)
    except Exception as error:
        there.send(("failed", f"{type(error).__name__}: {error}"))
    there.close()


def same(one: Outputs, other: Outputs) -> float:
    """Return the share of all tokens that come before the first that differs, in each output."""
    before = 0
    for x, y in zip(one, other, strict=True):
        before += next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
    return before / sum(map(len, one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["qwen3-30b-a3b"])
    parser.add_argument("--num-layers", type=int, default=None)
    parser.add_argument("--layouts", nargs="+", default=["1x2,2x1"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16, 64])
    parser.add_argument("--carriers", nargs="+", default=["auto"], choices=TRANSPORTS)
    parser.add_argument("--moe-exchange", nargs="+", default=["auto"], choices=["auto", "gather", "dispatch"])
    parser.add_argument("--split-vocabulary", nargs="+", default=["off"], choices=["off", "on"])
    parser.add_argument(
        "--kv-dtypes", nargs="+", default=["auto"], choices=["auto", "fp8_e4m3"], help="dtypes of the cache"
    )
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--prefill", type=int, default=0, help="prompts of the context's length to read; 0: none")
    parser.add_argument("--turns", type=int, default=1, help="repetitions of each measurement")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--eager", action="store_true", help="use no CUDA graphs")
    parser.add_argument("--no-overlap", action="store_true", help="let each step wait for the previous step's tokens")
    parser.add_argument("--case-timeout", type=float, default=300.0, help="limit in seconds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    stop_on_sigterm()
    [(host, args.bandwidth)] = apart(60.0, lambda send: send((describe_host(), read_bandwidth(args.device))))
    rows: list[dict[str, Any]] = []
    drawn: dict[tuple[Any, ...], dict[str, Outputs]] = {}
    # Carriers in turn, so that one that hangs in every layout costs the others nothing.
    choices = args.moe_exchange, args.split_vocabulary, args.kv_dtypes
    cases = itertools.product(args.presets, args.carriers, args.layouts, *choices)
    for preset, carrier, shape, experts, split, kv in cases:
        case = {"preset": preset, "layout": shape, "carrier": carrier, "moe_exchange": experts}
        case |= {"split_vocabulary": split, "kv_dtype": kv}
        many = {each: len(given) > 1 for each, given in zip((experts, split, kv), choices, strict=True)}
        name = " ".join([carrier, *(what for what in many if many[what])])
        case |= {"graphs": not (args.eager or args.device == "cpu"), "context": args.context}
        try:
            for row, answers in apart(args.case_timeout, measure, args, case):
                if answers is not None:
                    others = drawn.setdefault((preset, shape, row["batch"]), {})
                    row["equal_tokens"] = {name: round(same(answers, other), 4) for name, other in others.items()}
                    others[name] = answers
                rows.append(row)
                print(json.dumps(row), flush=True)
        except (RuntimeError, TimeoutError) as error:  # one that fails must not take the others' figures along
            rows.append(case | {"what": "failed", "error": str(error)})
            print(f"{preset} {shape} {carrier}: {error}", file=sys.stderr, flush=True)
        if args.json:
            head = {"host": host, "arguments": {k: str(v) for k, v in vars(args).items()}}
            args.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
