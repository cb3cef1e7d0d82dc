"""Compare attention backends on one GPU: decode rows and prompts, grouped queries and latents.

    python bench/scripts/attention_backends.py --out bench/results/gpu_attention_backends.json
    python bench/scripts/attention_backends.py --small                 # a dry run, on CPUs too

Every case is first compared with attention in float32 at some rows, then timed through the engine's backend: the median
of replays of a CUDA graph with several layers of attention, in microseconds per layer. A step's plan, which all layers
share, is timed apart (`plan_us`: host and device, to the end). Bytes count keys and values, operations both products.
Tokens lie in pages at random. A case that a backend does not support is omitted, with the backend's reason. Writes the
JSON after each case, so that a time limit loses little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.engine.attention.backend import Queries
from weft.engine.attention.backend_registry import Needs, backends
from weft.engine.attention.forward_batch import Batch, PageTables
from weft.engine.attention.paged import PagedAttention
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent, PagedKV
from weft.planner.spec import LayoutError
from weft.tune.gpu_times import events_us
from weft.tune.host import describe_host

PAGE = 16
POOL_BYTES = 4 << 30
"""Maximum bytes of a layer's pages; longer caches use pages several times."""
CACHED_BYTES = 200 << 20
"""Bytes that successive layers read in a case, so that little is found in the L2 cache."""
TOLERANCE = 1e-2
TORCH_BYTES = 2 << 30
"""Bytes of the largest case of plain torch, which copies what it reads."""


@dataclass(frozen=True)
class Shape:
    """Heads of a rank's attention: grouped queries, or latents of 512 + 64."""

    name: str
    heads: int
    spec: PagedKV | Latent

    @property
    def token_bytes(self) -> int:
        spec = self.spec
        return 2 * (spec.width if isinstance(spec, Latent) else 2 * spec.heads * spec.dim)

    @property
    def pair_operations(self) -> int:
        """Operations of a query, with all its heads, per token."""
        spec = self.spec
        each = spec.width + spec.value_width if isinstance(spec, Latent) else 2 * spec.dim
        return 2 * self.heads * each

    @property
    def scale(self) -> float:
        return (192 if isinstance(self.spec, Latent) else self.spec.dim) ** -0.5


@dataclass(frozen=True)
class Step:
    """Step of sequences with `rows` rows each; with its last row a sequence has `tokens` tokens."""

    sequences: int
    rows: int
    tokens: int

    @property
    def pairs(self) -> int:
        """Pairs of a query and a token that it sees."""
        context = self.tokens - self.rows
        return self.sequences * (self.rows * context + self.rows * (self.rows + 1) // 2)


SHAPES = (
    Shape("GQA 32/4", 32, PagedKV(4, 128)),
    Shape("GQA 8/1", 8, PagedKV(1, 128)),
    Shape("MLA 128", 128, Latent(576, 512)),
    Shape("MLA 16", 16, Latent(576, 512)),
)
DECODE = [Step(rows, 1, tokens) for tokens in (1024, 8192, 65536) for rows in (1, 16, 64, 256)]
PREFILL = [Step(1, n, n) for n in (1024, 4096, 16384)] + [Step(16, 256, 256), Step(1, 2048, 16384)]
SMALL = [Step(3, 1, 40), Step(1, 24, 24), Step(2, 8, 30)]


def make_batch(step: Step, pool_pages: int, device: torch.device) -> Batch:
    """Return the batch of a step: known to the host if it has prompts, otherwise as a CUDA graph sees it."""
    per_row = -(-step.tokens // PAGE)
    generator = torch.Generator().manual_seed(step.tokens + step.sequences)
    count = step.sequences * per_row
    order = torch.cat([torch.randperm(pool_pages, generator=generator) for _ in range(-(-count // pool_pages))])
    pages = order[:count].view(step.sequences, per_row).int().to(device)
    rows = step.sequences * step.rows
    lengths = torch.full((step.sequences,), step.tokens, dtype=torch.int32, device=device)
    positions = torch.arange(step.tokens - step.rows, step.tokens, device=device).repeat(step.sequences)
    tables = (PageTables(pages, torch.full((rows,), -1, device=device)),)
    tokens, prompts = torch.zeros(rows, dtype=torch.int64, device=device), step.rows > 1
    starts = torch.arange(0, rows + 1, step.rows, dtype=torch.int32, device=device) if prompts else None
    spans = ((step.rows, step.tokens - step.rows),) * step.sequences if prompts else None
    return Batch(tokens, positions, starts, lengths, tables, slice(0), spans)


def error_of(shape: Shape, step: Step, batch: Batch, cache: KVCache, q: Tensor, out: Tensor, lse: Tensor) -> float:
    """Return the larger of the output's relative and the log-sum-exp's absolute error, at some rows of layer 0."""
    table, worst, rows = batch.tables[0], 0.0, step.sequences * step.rows
    assert isinstance(table, PageTables)
    for row in sorted({0, rows // 3, rows - 1}):
        sequence, seen = row // step.rows, int(batch.positions[row]) + 1
        at = torch.arange(seen, device=q.device)
        slot = table.pages[sequence].long()[at // PAGE] * PAGE + at % PAGE
        keys, values = (x[0, slot].float() for x in (cache.keys, cache.values))
        group = shape.heads // keys.shape[1]
        score = torch.einsum("kgd,tkd->kgt", q[row].float().unflatten(0, (-1, group)), keys) * shape.scale
        expected = torch.einsum("kgt,tkd->kgd", score.softmax(-1), values).flatten(0, 1)
        worst = max(worst, float((out[row].float() - expected).norm() / expected.norm()))
        worst = max(worst, float((lse[row] - score.logsumexp(-1).flatten()).abs().max()))
    return worst if worst == worst else float("inf")


def elapsed_us(run: Callable[[], Any], calls: int, device: torch.device, replays: int) -> float:
    """Return the median microseconds of a call; `run` makes `calls` calls. On GPUs it runs in a CUDA graph."""

    def timed() -> float:
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6

    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            run()
        timed = partial(events_us, torch.cuda.current_stream(), graph.replay)
        timed(), timed()  # warm
    times: list[float] = []
    while len(times) < replays and sum(times) <= 4e5:  # 0.4 s
        times.append(timed())
    return statistics.median(times) / calls


def measure(backend: PagedAttention, shape: Shape, step: Step, batch: Batch, q: Tensor, replays: int) -> dict[str, Any]:
    """Return a backend's error in a case, and times if the error is small."""
    device, table, layers = q.device, batch.tables[0], backend.cache.keys.shape[0]
    assert isinstance(table, PageTables)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def attend(layer: int, lse: bool) -> tuple[Tensor, Tensor | None]:
        return backend.attend(plan, layer, Queries(q, shape.scale, lse))

    plan = backend.plan(batch, table)
    out, lse = attend(0, True)
    assert lse is not None
    found: dict[str, Any] = {"error": error_of(shape, step, batch, backend.cache, q, out, lse)}
    if not found["error"] < TOLERANCE:
        return found | {"us": None}
    plans = []
    for _ in range(3):
        wait()
        begin = time.perf_counter()
        plan = backend.plan(batch, table)
        wait()
        plans.append((time.perf_counter() - begin) * 1e6)
    attend(0, False)
    us = elapsed_us(lambda: [attend(layer, False) for layer in range(layers)], layers, device, replays)
    size, operations = step.sequences * step.tokens * shape.token_bytes, step.pairs * shape.pair_operations
    return found | {
        "us": us,
        "plan_us": statistics.median(plans),
        "gb_s": size / us / 1e3,
        "tflop_s": operations / us / 1e6,
    }


def host() -> dict[str, Any]:
    """Return the description of this host, with the versions of the kernels' libraries."""
    found = describe_host()
    for name in ("triton", "flashinfer"):
        try:
            found[name] = __import__(name).__version__
        except Exception:
            found[name] = None
    return found


class Bench:
    """Runs of all cases, with the least important cases last."""

    def __init__(self, names: Sequence[str], device: torch.device, out: Path | None, limit_s: float, replays: int):
        self.device, self._out, self._replays = device, out, replays
        self._until = time.monotonic() + limit_s
        known = backends()
        self.entries = [known[name] for name in names]
        self.rows: list[dict[str, Any]] = []
        self.left_out: dict[str, str] = {}

    def run(self, shapes: Sequence[Shape], steps: Sequence[Step]) -> None:
        for shape in shapes:
            for step in steps:
                if time.monotonic() > self._until:
                    self.left_out[f"{shape.name}, {step} and what follows"] = "the time was over"
                    return self.write()
                self._case(shape, step)

    def _case(self, shape: Shape, step: Step) -> None:
        size = step.sequences * step.tokens * shape.token_bytes
        pool = max(1, min(size, POOL_BYTES) // (PAGE * shape.token_bytes))
        layers = 1 if self.device.type != "cuda" else min(8, max(1, CACHED_BYTES // size))
        cache = KVCache(shape.spec, layers, pool, PAGE, torch.bfloat16, self.device)
        for kind in (cache.keys,) if isinstance(shape.spec, Latent) else (cache.keys, cache.values):
            kind.normal_()
        batch = make_batch(step, pool, self.device)
        width = shape.spec.width if isinstance(shape.spec, Latent) else shape.spec.dim
        q = torch.randn(step.sequences * step.rows, shape.heads, width, device=self.device, dtype=torch.bfloat16)
        before = len(self.rows)
        for entry in self.entries:
            name = f"{entry.option}, {shape.name}"
            try:
                entry.check(self._needs(shape))
                if entry.option == "torch" and max(size, step.pairs * shape.heads) > TORCH_BYTES:
                    continue
                found = measure(entry.make(cache), shape, step, batch, q, self._replays)
            except LayoutError as error:
                self.left_out[name] = str(error)
                continue
            except Exception as error:  # one that fails must not lose the others
                found = {"us": None, "failed": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
            self.rows.append(
                {"backend": entry.option, "shape": shape.name, "sequences": step.sequences, "rows": step.rows}
                | {"tokens": step.tokens, "layers": layers, "pool_pages": pool}
                | {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in found.items()}
            )
        self._ratios()
        for row in self.rows[before:]:
            print(json.dumps(row), flush=True)
        self.write()

    def _needs(self, shape: Shape) -> Needs:
        gpu = self.device.type == "cuda"
        capability = torch.cuda.get_device_capability(self.device) if gpu else None
        kind = "cuda" if gpu else "cpu"
        return Needs(kind, capability, "bfloat16", "auto", lambda: [shape.spec], PAGE, 1, "auto", graphs=False)

    def _ratios(self) -> None:
        """Divide each row's time by Triton's in the same case: above 1, Triton is faster."""
        case = ("shape", "sequences", "rows", "tokens")
        triton = {tuple(r[k] for k in case): r["us"] for r in self.rows if r["backend"] == "triton"}
        for row in self.rows:
            base = triton.get(tuple(row[k] for k in case))
            if base and row["us"]:
                row["by_triton"] = round(row["us"] / base, 3)

    def write(self) -> None:
        if self._out is not None:
            found = {"host": host(), "rows": self.rows, "left_out": self.left_out}
            self._out.write_text(json.dumps(found, indent=1) + "\n")

    def table(self) -> str:
        """Format microseconds per layer, with the multiple of Triton's, a case per line."""
        names = [entry.option for entry in self.entries]
        lines = ["| shape | rows | tokens | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
        cases: dict[tuple[Any, ...], dict[str, str]] = {}
        for r in self.rows:
            what = r["sequences"] if r["rows"] == 1 else f"{r['sequences']} × {r['rows']}"
            text = "failed" if r["us"] is None else f"{r['us']:.4g}"
            if (ratio := r.get("by_triton")) and r["backend"] != "triton":
                text += f" ({ratio:.2f})"
            cases.setdefault((r["shape"], what, r["tokens"]), {})[r["backend"]] = text
        lines += [
            f"| {shape} | {what} | {tokens:,} | " + " | ".join(found.get(n, "") for n in names) + " |"
            for (shape, what, tokens), found in cases.items()
        ]
        return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["triton", "fa3", "flashinfer", "torch"], help="to compare")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--limit-s", type=float, default=1e9, help="seconds after which no case begins")
    parser.add_argument("--replays", type=int, default=15, help="replays of a graph; figures are medians")
    parser.add_argument("--only", choices=["decode", "prefill"], help="measure these cases alone")
    shapes = [shape.name for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", default=shapes, metavar="NAME", help="measure these shapes alone")
    parser.add_argument("--small", action="store_true", help="dry run of small cases, on a CPU if there is no GPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.small:
        parser.error("there is no GPU here; --small is a dry run")
    bench = Bench(options.backends, device, options.out, options.limit_s, 3 if options.small else options.replays)
    with torch.inference_mode():
        if options.small:
            bench.run([SHAPES[1], Shape("MLA 4", 4, Latent(576, 512))], SMALL)
        else:
            shapes = [shape for shape in SHAPES if shape.name in options.shapes]
            if options.only != "prefill":
                bench.run(shapes, DECODE)
            if options.only != "decode":
                bench.run(shapes, PREFILL)
    bench.write()
    print(bench.table())
    for what, why in bench.left_out.items():
        print(f"omitted: {what}: {why}")
    wrong = [row for row in bench.rows if row["us"] is None]
    for row in wrong:
        print(f"wrong: {json.dumps(row)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
