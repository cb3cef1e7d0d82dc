"""What a step with a prompt takes on one GPU: the host's CPU time beside the time that the GPU is busy.

    python benchmarks/gpu_prompt_steps.py --num-layers 16 --out prompt_steps.json

Each step reads one prompt of so many tokens, or its rest beside `--answers` sequences that draw their next token; it is
run as the engine's ranks run it, without exchanges: first eagerly, then, with the same weights, by CUDA graphs. CPU
time is of the thread that runs steps, until all is queued, the median over steps; wall is until the GPU has done it;
busy is the union of all kernels' and copies' times in torch's profiler, in the mean. Where the first is longer, the GPU
waits for its host. Prints a line of JSON a case, with all also a layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from weft.assets import preset_dir
from weft.bench.host import describe_host
from weft.engine.config import EngineConfig
from weft.engine.messages import Chunk, GroupRows, Join, Sampling, Step
from weft.engine.transports import cost_model, open_transports
from weft.engine.worker import Worker

GREEDY, GIB = Sampling(0.0, 1.0, 0, 1), 1 << 30


def steps_of(config: EngineConfig, tokens: int, answers: int, context: int = 256) -> tuple[Step, Step]:
    """The step after which sequences with some context have a token to go on from; and the one to be measured, with a
    prompt's rows behind their answers. It may run a hundred times: the answers' sequences grow.
    """
    pages, first = config.num_pages, 0

    def join(row: int, have: int, room: int) -> Join:
        nonlocal first
        need, begin = -(-room // config.page_size), first
        first += need
        return Join(row, row, have, (tuple((begin + i) % pages for i in range(need)),), GREEDY)

    joins = tuple(join(row, context, context + 128) for row in range(answers))
    before = GroupRows(chunks=tuple(Chunk(row, (7,), True) for row in range(answers)), joins=joins)
    prompt = join(answers, 0, tokens - answers)
    chunk = Chunk(answers, (7,) * (tokens - answers), True)
    return Step(1, (before,)), Step(2, (GroupRows(tuple(range(answers)), (chunk,), (prompt,)),))


def busy_ms(events: Any) -> float:
    """The union of the GPU's times in a trace."""
    total = end = 0.0
    for begin, stop in sorted((e.time_range.start, e.time_range.end) for e in events):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total / 1e3


def measure(worker: Worker, before: Step, step: Step, steps: int) -> dict[str, float]:
    """Milliseconds a step."""
    on_gpu, cpu, wall = worker.on_gpu, [], []
    if before.groups[0].count:
        worker.step(before)()

    def run() -> None:
        worker.step(step)()
        if on_gpu:
            torch.cuda.synchronize()

    for _ in range(3):
        run()
    for _ in range(steps):
        began, at = time.thread_time(), time.perf_counter()
        finish = worker.step(step)
        cpu.append(time.thread_time() - began)
        if on_gpu:
            torch.cuda.synchronize()
        wall.append(time.perf_counter() - at)
        finish()
    found = {"cpu_ms": 1e3 * statistics.median(cpu), "wall_ms": 1e3 * statistics.median(wall)}
    if on_gpu:
        with profile(activities=[ProfilerActivity.CUDA]) as watched:
            for _ in range(4):
                run()
        on_device = [e for e in watched.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        found["busy_ms"] = busy_ms(on_device) / 4
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-30b-a3b")
    parser.add_argument("--num-layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--answers", type=int, nargs="+", default=[0, 16])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    config = EngineConfig(
        model=preset_dir(asked.preset),
        load_format="dummy",
        num_layers=asked.num_layers,
        device=asked.device,
        max_running=max(asked.answers) + 1,
        max_batch_tokens=max(asked.tokens),
        max_model_len=max(*asked.tokens, 1024),
        kv_tokens=max(asked.tokens) + 512 * (max(asked.answers) + 1),
        cuda_graphs=False,
    )
    rows: list[dict[str, Any]] = []

    def cases(how: str) -> None:
        for tokens in asked.tokens:
            for answers in asked.answers:
                found = measure(worker, *steps_of(config, tokens, answers), asked.steps)
                a_layer = {
                    f"{name.removesuffix('_ms')}_us_a_layer": 1e3 * x / asked.num_layers for name, x in found.items()
                }
                figures = {name: round(x, 3) for name, x in (found | a_layer).items()}
                rows.append({"how": how, "tokens": tokens, "answers": answers} | figures)
                print(json.dumps(rows[-1]), flush=True)

    with tempfile.TemporaryDirectory() as directory:
        transports = open_transports(config, 0, Path(directory))
        worker = Worker(config, transports, cost_model(config), lambda message: None)
        cases("eager")
        if worker.on_gpu:
            began, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
            worker.capture(config.max_model_len or config.cached_tokens)
            torch.cuda.synchronize()
            took = {
                "capture_s": time.perf_counter() - began,
                "capture_gib": (free - torch.cuda.mem_get_info()[0]) / GIB,
            }
            print(json.dumps({name: round(x, 2) for name, x in took.items()}), flush=True)
            cases("graph")
        for transport in transports:
            transport.close()
    if asked.out:
        head = {"host": describe_host(), "arguments": {k: str(v) for k, v in vars(asked).items()}}
        asked.out.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
