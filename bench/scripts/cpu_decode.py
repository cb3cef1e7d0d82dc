"""Decode steps of one CPU rank, recorded, with Weft's kernels, and with torch alone, in turns, on made-up weights.

Prints one JSON line per number of sequences: minimum and median ms of a step, and of a plain read of its weights by the
same threads, with its GB/s; of a recorded step also its calls from Python and the recorder's memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LlamaConfig

from weft.comm.reference import ReferenceTransport, ReferenceWorld
from weft.engine.attention.backend_registry import NATIVE, TORCH
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.messages.rank_messages import GroupRows, Join, Sampling
from weft.engine.models.layers.model_config import LanguageModel
from weft.engine.models.load import build_model
from weft.engine.models.registry import read_config
from weft.engine.worker.device_rows import DeviceRows
from weft.engine.worker.model_runner import ModelRunner
from weft.engine.worker.recorder import StepRecording
from weft.engine.worker.row_table import RowTable
from weft.kernels import cpu_rows
from weft.planner.spec import Mesh

PAGE = 16
SMOLLM2 = dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9)
SMOLLM2 |= dict(num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True)


@contextmanager
def torch_alone() -> Iterator[None]:
    """Run every op by torch."""
    missing = cpu_rows.missing
    cpu_rows.missing = lambda: "measured without"
    yield
    cpu_rows.missing = missing


def made_up_model(fields: dict[str, Any], dtype: str) -> LanguageModel:
    """Return a model with one rank's made-up weights. fields: of a config.json, or some of a Llama's."""
    torch.manual_seed(0)
    config = read_config(fields if "model_type" in fields else LlamaConfig(**fields).to_dict())
    model = build_model(config, Mesh(), 0, getattr(torch, dtype), torch.device("cpu"))
    for weight in model.parameters():
        weight.data.normal_(0, 0.05)
    return model


Step = Callable[[], object]


def recorded(runner: ModelRunner, sequences: int, context: int, pages: int) -> tuple[StepRecording, Step]:
    """Return a recorded step, and a function that runs it as a rank does."""
    table = RowTable(sequences, runner.rules, PAGE, torch.device("cpu"))
    state, rows = DeviceRows(table, pages), tuple(range(sequences))
    tables = [tuple(range(i * pages, (i + 1) * pages)) for i in rows]
    joins = tuple(Join(i, i, context - 1, (tables[i],), Sampling(temperature=0.0)) for i in rows)
    if refusal := runner.record(state):
        raise SystemExit(refusal)
    table.apply(GroupRows(rows, joins=joins))
    state.apply(GroupRows(rows, joins=joins))
    message, counts = GroupRows(rows), (sequences,)
    shape = runner.shape_of((message,), counts)
    assert shape is not None and runner._graphs is not None
    state.last_token.fill_(7)

    @torch.inference_mode()
    def step() -> object:
        state.length.fill_(context - 1)
        return runner.replay(shape, message, counts)

    return runner._graphs._graphs[shape][0], step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--context", type=int, default=200, help="tokens of each sequence")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="print torch's profile of the kernels' steps")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    model = made_up_model(dict(SMOLLM2), asked.dtype)
    size = sum(weight.nbytes for weight in model.parameters())
    memory = torch.zeros(size // 4)
    for sequences in asked.sequences:
        pages = -(-asked.context // PAGE)
        transport = ReferenceTransport(ReferenceWorld(1), 0)
        group = [CacheGroup(Rule(), sequences * pages)]
        runs: dict[str, Callable[[], object]] = {}
        runner_of = dict[str, ModelRunner]()
        for name, backend in (("kernels", NATIVE), ("torch", TORCH)):
            runner = ModelRunner(model, Mesh(), 0, [transport], group, PAGE, attention=backend)
            runner_of[name] = runner
            tables = [list(range(i * pages, (i + 1) * pages)) for i in range(sequences)]
            rows = [SeqRows(1, asked.context - 1, [table], True) for table in tables]

            def step(runner: ModelRunner = runner, rows: list[SeqRows] = rows) -> object:
                return runner.forward(build_batch([7] * len(rows), rows, PAGE), (len(rows),))

            runs[name] = step
        recording, runs["recorded"] = recorded(runner_of["kernels"], sequences, asked.context, pages)
        ms: dict[str, list[float]] = {name: [] for name in (*runs, "read")}
        for _ in range(asked.rounds):
            for name, step in runs.items():
                began = time.perf_counter()
                if name == "torch":
                    with torch_alone():
                        step()
                else:
                    step()
                ms[name].append((time.perf_counter() - began) * 1e3)
            began = time.perf_counter()
            cpu_rows.run("read", memory)
            ms["read"].append((time.perf_counter() - began) * 1e3)
        line: dict[str, object] = dict(sequences=sequences, dtype=asked.dtype, threads=asked.threads)
        for name, found in ms.items():
            line |= {f"{name}_ms": round(min(found), 2), f"{name}_median_ms": round(statistics.median(found), 2)}
        line["read_gbs"] = round(size / min(ms["read"]) / 1e6, 1)
        line["python_calls"], line["recorder_mb"] = len(recording.steps), recording.recorder.bytes >> 20
        print(json.dumps(line), flush=True)
        if asked.profile:
            with torch.profiler.profile() as profile:
                runs["kernels"]()
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=15))


if __name__ == "__main__":
    main()
