"""Measure steps of one rank on one GPU, kernel by kernel: decode steps, with the minimum time of their bytes, and
prompts.

Each preset's shape, with made-up weights, is a rank without an engine in a process of its own: graphs are captured for
the requested sizes alone, and nothing else is warmed up. Caches hold random numbers, and sequences random last tokens.
Steps are queued one ahead, as an engine's are.

step_us: time of a step, the smaller of two turns. floor_us: the bytes of `decode_step_bytes` at the bandwidth of a
kernel that only reads; null for steps with prompts. hit: number of experts that the sequences chose, layer by layer.
order: the kernels of a step in their order, with the median µs of each and of the pause before it. Prints a line for
each preset and step.

    python bench/scripts/gpu_steps.py --presets qwen3-30b-a3b deepseek-v2-lite qwen3.5-35b-a3b gpt-oss-20b
    python bench/scripts/gpu_steps.py --batches 248 --prompts 8x1024 1x8192 8x993+248 --num-layers 16
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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gpu_decode import Send, apart, read_bandwidth
from weft.comm.reference import ReferenceWorld
from weft.engine.assets import preset_dir
from weft.engine.config.config import EngineConfig
from weft.engine.config.device import dtype_of, kv_dtype_of
from weft.engine.kernels.triton import fused_experts
from weft.engine.messages.rank_messages import Chunk, GroupRows, Join, Sampling, StartProfile, Step
from weft.engine.worker import graph_inputs, model_runner
from weft.engine.worker.footprint import decode_step_bytes
from weft.engine.worker.worker import Worker
from weft.planner.cost import costs
from weft.tune.host import describe_host
from weft_bench.breakdown import read_rank, short, summarise

SPARE = 192
"""Tokens by which sequences may grow."""
STEPS, TRACED = 24, 10


class Prompts(NamedTuple):
    """Step of prompts without cached tokens, and decode rows."""

    sequences: int
    tokens: int
    decoding: int = 0

    @property
    def rows(self) -> int:
        return self.sequences * self.tokens + self.decoding

    @classmethod
    def read(cls, text: str) -> Prompts:
        """Parse `8x1024`, prompts × tokens of each, or `8x993+248`, with 248 decode rows."""
        prompts, _, decoding = text.partition("+")
        sequences, tokens = map(int, prompts.split("x"))
        return cls(sequences, tokens, int(decoding or 0))


@dataclass(frozen=True)
class Asked:
    """Measurements of each preset."""

    num_layers: int
    batches: Sequence[int]
    prompts: Sequence[Prompts]
    context: int
    backend: str


class Rank:
    """Rank with graphs for steps of `asked.batches` sequences. model: a directory."""

    def __init__(self, model: Path, asked: Asked):
        self.asked, self.gpu = asked, torch.cuda.is_available()
        most = max([*asked.batches, *(p.sequences + p.decoding for p in asked.prompts)])
        longest = max([asked.context, *(p.tokens for p in asked.prompts)])
        graph_inputs.decode_capacities = lambda rows: sorted(asked.batches)  # type: ignore[assignment]
        graph_inputs.prompt_capacities = lambda rows: sorted({p.rows for p in asked.prompts})  # type: ignore[assignment]
        if not asked.prompts:
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
            float8="on" if self.gpu else "off",  # as engines on GPUs
            max_running=most,
            max_choices=most,
            max_batch_tokens=max([512, most, *(p.rows for p in asked.prompts)]),
            max_model_len=longest + SPARE,
            kv_tokens=(asked.context + SPARE) * most + longest,
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

    def joins(self, rows: range, context: int, more: int) -> tuple[Join, ...]:
        """Return sequences of `context` tokens, each with pages for these and `more`."""
        joins = []
        pages = -(-(context + more) // self.config.page_size)
        for row in rows:
            tables = []
            for group in self.worker.groups:
                first, seen = 0, pages
                if group.rule.window is not None:  # pages before the window are given up
                    first = max(0, context - group.rule.window) // self.config.page_size
                    seen = -(-group.rule.window // self.config.page_size) + 2
                own = [-1] * first + [(row * seen + i) % group.size for i in range(pages - first)]
                tables.append((row, row) if group.rule.state else tuple(own))
            joins.append(Join(row, row, context, tuple(tables), Sampling(temperature=0.0, seed=1)))
        return tuple(joins)

    def join(self, batch: int) -> None:
        """Let `batch` sequences of `context` tokens join, each with pages and a last token."""
        rows, worker = GroupRows(joins=self.joins(range(batch), self.asked.context, SPARE)), self.worker
        worker.table.apply(rows)
        if worker.device_rows:
            worker.device_rows.apply(rows)
        worker.table.last_token[:batch] = self.tokens(batch).to(worker.table.device)

    def tokens(self, count: int) -> Tensor:
        """Return random tokens, int32."""
        generator = torch.Generator().manual_seed(count)
        limit = min(5000, self.worker.runner.model.config.vocab_size)
        return torch.randint(10, limit, (count,), generator=generator, dtype=torch.int32)

    def rows(self, asked: int | Prompts) -> GroupRows:
        """Return the rows of a step: decode rows, or prompts. A prompt's row begins anew in each step."""
        if isinstance(asked, int):
            return GroupRows(tuple(range(asked)))
        tokens = self.tokens(asked.sequences * asked.tokens).view(asked.sequences, -1)
        prompts = range(asked.decoding, asked.decoding + asked.sequences)
        chunks = [Chunk(row, each.numpy().tobytes(), True) for row, each in zip(prompts, tokens, strict=True)]
        return GroupRows(tuple(range(asked.decoding)), tuple(chunks), self.joins(prompts, 0, asked.tokens))

    def run(self, rows: GroupRows, steps: int) -> float:
        """Return the seconds of a step."""
        before = None
        began = time.perf_counter()
        for _ in range(steps):
            finish = self.worker.step(Step(next(self._number), (rows,)))
            if before:
                before()
            before = finish
        if before:
            before()
        return (time.perf_counter() - began) / steps

    def measure(self, asked: int | Prompts) -> dict[str, Any]:
        """Return a row of figures of a decode step, or of one with prompts."""
        self.join(asked if isinstance(asked, int) else asked.decoding)
        rows, config, row = self.rows(asked), self.config, dict[str, Any]()
        self.run(rows, 6)
        row["step_us"] = min(self.run(rows, STEPS) for _ in range(2)) * 1e6
        if isinstance(asked, int):
            model = self.worker.runner.model.config
            of_weights = dtype_of(config), asked, self.asked.context, kv_dtype_of(config)
            row["bytes"] = decode_step_bytes(model, config.mesh, *of_weights)
        shapes = self.worker.runner._graphs.shapes[::-1] if self.worker.runner._graphs else []
        if shapes:  # in the order of the captures
            shape = self.worker.runner.shape_of((rows,), (rows.count,))
            layers, at = len(self.chosen) // len(shapes), shapes.index(shape)
            chosen = self.chosen[at * layers : (at + 1) * layers]
            row["hit"] = [int(e[e >= 0].unique().numel()) for e in chosen]
        self.worker.profiler.start(StartProfile(TRACED + 2, traced=True))
        self.run(rows, TRACED + 3)
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
    """Send a row for each number of sequences."""
    with torch.inference_mode():
        rank = Rank(model, asked)
        attention = rank.worker.runner.attention.option
        for batch in asked.batches:
            send({"batch": batch, "attention": attention} | rank.measure(batch))
        for prompts in asked.prompts:
            send({"prompts": prompts._asdict(), "batch": prompts.rows, "attention": attention} | rank.measure(prompts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["qwen3-30b-a3b"])
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64, 256])
    shape = "8x1024, or 8x993+248: prompts × tokens of each, with 248 decode rows"
    parser.add_argument("--prompts", nargs="+", type=Prompts.read, default=[], help=shape)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    asked = Asked(args.num_layers, args.batches, args.prompts, args.context, args.attention_backend)
    device = "cuda" if torch.cuda.device_count() else "cpu"
    [(host, bandwidth)] = apart(60.0, lambda send: send((describe_host(), read_bandwidth(device))))
    head = {"host": host, "bandwidth": bandwidth, "num_layers": args.num_layers, "context": args.context}
    rows: list[dict[str, Any]] = []
    for preset in args.presets:
        model = Path(preset) if Path(preset).is_dir() else preset_dir(preset)
        for row in apart(300.0, of_preset, model, asked):
            floor = row["bytes"] / bandwidth * 1e6 if "bytes" in row else None
            rows.append({"preset": preset, "floor_us": floor} | row)
            compared = "of prompts" if floor is None else f"{row['step_us'] / floor:.2f} of the floor"
            print(f"{preset:24}{row['batch']:5}{row['step_us']:9.0f} µs, {compared}", flush=True)
            if args.json:  # after each row: a run that is ended early loses nothing else
                lines = ",\n".join(map(json.dumps, rows))
                args.json.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
