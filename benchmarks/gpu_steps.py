"""Decode steps of one rank on one GPU, kernel by kernel, beside the least time that their bytes take.

Each preset's shape, with made-up weights, is a rank without an engine in a process of its own: graphs are captured for
the sizes asked for alone, nothing is warmed up beyond them, and no prompt is read. Caches hold random numbers, and
sequences random last tokens. Steps are queued one ahead, as an engine's are.

step_us: of a step, the least of two turns. floor_us: the bytes of `weft.bench.step_bytes` at the bandwidth of a kernel
that only reads. hit: experts that the sequences chose, layer by layer. order: the kernels of a step in their order,
with the median µs of each and of the pause before it. Prints a line for each preset and number of sequences.

    python benchmarks/gpu_steps.py --presets qwen3-30b-a3b deepseek-v2-lite qwen3.5-35b-a3b gpt-oss-20b
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gpu_decode import Send, apart, read_bandwidth
from weft.assets import preset_dir
from weft.bench.host import describe_host
from weft.bench.step_bytes import decode_step_bytes
from weft.comm.reference import ReferenceWorld
from weft.engine.config import EngineConfig
from weft.engine.device import dtype_of, kv_dtype_of
from weft.engine.messages import GroupRows, Join, Sampling, StartProfile, Step
from weft.engine.worker import graph_inputs, model_runner
from weft.engine.worker.worker import Worker
from weft.kernels.triton import fused_experts
from weft.place.cost import costs
from weft.profiler.breakdown import read_rank, short, summarise

SPARE = 192
"""Tokens by which sequences may grow."""
STEPS, TRACED = 24, 10


@dataclass(frozen=True)
class Asked:
    """What is measured of each preset."""

    num_layers: int
    batches: Sequence[int]
    context: int
    backend: str


class Rank:
    """A rank with graphs for steps of `asked.batches` sequences. model: a directory."""

    def __init__(self, model: Path, asked: Asked):
        most, self.asked, self.gpu = max(asked.batches), asked, torch.cuda.is_available()
        graph_inputs.decode_capacities = lambda rows: sorted(asked.batches)  # type: ignore[assignment]
        model_runner.captures_prompts = lambda *_: False  # type: ignore[assignment]
        model_runner.exchange_times = lambda *_: {}  # type: ignore[assignment]
        Worker.warm_up = lambda *_: None  # type: ignore[method-assign]
        self.config = EngineConfig(
            model=model,
            load_format="dummy",
            num_layers=asked.num_layers,
            device="cuda" if self.gpu else "cpu",
            attention_backend=asked.backend,  # type: ignore[arg-type]
            split_vocabulary="off",
            max_running=most,
            max_choices=most,
            max_batch_tokens=max(512, most),
            max_model_len=asked.context + SPARE,
            kv_tokens=(asked.context + SPARE) * most,
            prefix_cache=False,
        )
        self.chosen: list[Tensor] = []  # the experts of each layer of each graph, the largest graph's first
        experts = fused_experts.experts

        def watched(x: Tensor, routing: Any, *more: Any, **named: Any) -> Tensor:
            if torch.cuda.is_current_stream_capturing():
                self.chosen.append(routing.expert)
            return experts(x, routing, *more, **named)

        fused_experts.experts = watched  # type: ignore[assignment]
        self.worker = Worker(self.config, ReferenceWorld(1).transports(), costs("cpu"), lambda message: None)
        fused_experts.experts = experts
        for _, backend in self.worker.runner.caches.paged:
            for kept in backend.cache.tensors:
                kept.normal_()
        self._number = itertools.count()
        if self.gpu:
            with profile(activities=[ProfilerActivity.CUDA]):  # the first one takes seconds
                torch.cuda.synchronize()

    def join(self, batch: int) -> None:
        """Sequences of `context` tokens, each with pages and a last token."""
        context, joins = self.asked.context, []
        pages = -(-(context + SPARE) // self.config.page_size)
        for row in range(batch):
            tables = []
            for group in self.worker.groups:
                first, seen = 0, pages
                if group.rule.window is not None:  # pages before the window are given up
                    first = max(0, context - group.rule.window) // self.config.page_size
                    seen = -(-group.rule.window // self.config.page_size) + 2
                own = [-1] * first + [(row * seen + i) % group.size for i in range(pages - first)]
                tables.append((row, row) if group.rule.state else tuple(own))
            joins.append(Join(row, row, context, tuple(tables), Sampling(0.0, 1.0, 0, 1)))
        rows, worker = GroupRows(joins=tuple(joins)), self.worker
        worker.table.apply(rows)
        if worker.device_rows:
            worker.device_rows.apply(rows)
        generator = torch.Generator().manual_seed(batch)
        limit = min(5000, worker.runner.model.config.vocab_size)
        tokens = torch.randint(10, limit, (batch,), generator=generator, dtype=torch.int32)
        worker.table.last_token[:batch] = tokens.to(worker.table.device)

    def run(self, batch: int, steps: int) -> float:
        """Seconds of a step."""
        rows, before = GroupRows(decode_rows=tuple(range(batch))), None
        began = time.perf_counter()
        for _ in range(steps):
            finish = self.worker.step(Step(next(self._number), (rows,)))
            if before:
                before()
            before = finish
        if before:
            before()
        return (time.perf_counter() - began) / steps

    def measure(self, batch: int) -> dict[str, Any]:
        """A row of figures."""
        self.join(batch)
        self.run(batch, 6)
        seconds = min(self.run(batch, STEPS) for _ in range(2))
        model, config = self.worker.runner.model.config, self.config
        of_weights = dtype_of(config), batch, self.asked.context, kv_dtype_of(config)
        row = {"step_us": seconds * 1e6, "bytes": decode_step_bytes(model, config.mesh, *of_weights)}
        layers = len(self.chosen) // len(self.asked.batches)
        at = sorted(self.asked.batches, reverse=True).index(batch) * layers
        row["hit"] = [int(e[e >= 0].unique().numel()) for e in self.chosen[at : at + layers]]
        self.worker.profiler.start(StartProfile(TRACED + 2, traced=True))
        self.run(batch, TRACED + 3)
        profiled = self.worker.profiler.stop()
        events = read_rank(json.loads(gzip.decompress(profiled.trace)), json.loads(profiled.about), config.mesh)
        steps = defaultdict(list)
        for event in sorted(events, key=lambda e: e.begin):
            steps[event.step].append(event)
        usual = Counter(map(len, steps.values())).most_common(1)[0][0]
        same = [step for step in steps.values() if len(step) == usual]
        order = []
        for at in range(usual):
            us = statistics.median(step[at].end - step[at].begin for step in same)
            pause = statistics.median(step[at].begin - step[at - 1].end for step in same) if at else 0.0
            order.append((short(same[0][at].what), round(us, 2), round(pause, 2)))
        return row | {"kernels": summarise([events])["kernels"], "order": order}


def of_preset(send: Send, model: Path, asked: Asked) -> None:
    """Sends a row for each number of sequences."""
    with torch.inference_mode():
        rank = Rank(model, asked)
        for batch in asked.batches:
            send({"batch": batch, "attention": rank.worker.runner.attention.option} | rank.measure(batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["qwen3-30b-a3b"])
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    asked = Asked(args.num_layers, args.batches, args.context, args.attention_backend)
    device = "cuda" if torch.cuda.device_count() else "cpu"
    [(host, bandwidth)] = apart(60.0, lambda send: send((describe_host(), read_bandwidth(device))))
    rows = []
    for preset in args.presets:
        model = Path(preset) if Path(preset).is_dir() else preset_dir(preset)
        for row in apart(300.0, of_preset, model, asked):
            row = {"preset": preset, "floor_us": row["bytes"] / bandwidth * 1e6} | row
            rows.append(row)
            ratio = row["step_us"] / row["floor_us"]
            print(f"{preset:24}{row['batch']:5}{row['step_us']:9.0f} µs, {ratio:.2f} of the floor", flush=True)
    if args.json:
        head = {"host": host, "bandwidth": bandwidth, "num_layers": args.num_layers, "context": args.context}
        lines = ",\n".join(map(json.dumps, rows))
        args.json.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
