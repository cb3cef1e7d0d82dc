"""Steps with prompts over dcp, eager and as CUDA graphs, on one GPU: attention of a rank, µs a layer.

    python benchmarks/dcp_prompts.py --out benchmarks/results/gpu_dcp_prompts.json
    python benchmarks/dcp_prompts.py --small         # a dry run

The other rank of the dcp group is made up: what it would send is copied from this rank's rows, as many bytes by kernels
on this GPU, and what comes out is not compared (`tests/gpu/triton_checks` does that). `wall` is an eager step as the
host runs it, `eager` the GPU's time of the same kernels, replayed; `graph` that of the captured step, which knows
neither rows nor tokens and has the capacity's shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention.oracle import Case, roomy
from weft.attention.backend import Absorbed
from weft.attention.context_parallel import ContextParallel
from weft.attention.paged_triton import PagedTriton
from weft.comm.transport import LiveSizes, offer_of
from weft.comm.transport_registry import PEER
from weft.dcp.group import ContextGroup
from weft.dcp.interleave import Interleave
from weft.engine.worker.build_batch import SeqRows, build_batch
from weft.kernels.triton.copy_rows import copy_rows
from weft.kv.cache import KVCache
from weft.kv.cache_spec import Latent, PagedKV
from weft.place.cost import costs
from weft.place.recipes import Gather, Prompt
from weft.place.settlements import Settlements
from weft.place.spec import Mesh

RANKS, PAGE, SEQUENCES = 2, 16, 64
STEPS: dict[str, tuple[list[tuple[int, int]], int]] = {
    "2,048 rows behind 30,720": ([(2048, 30720)], 2048),
    "one prompt of 2,048": ([(2048, 0)], 2048),
    "31 prompts of 60, 32 decode rows of 1,024": ([(1, 1023)] * 32 + [(60, 0)] * 31, 2048),
    "16 decode rows of 8,192, 496 rows behind 8,192": ([(1, 8191)] * 16 + [(496, 8192)], 512),
    "64 rows behind 30,720": ([(64, 30720)], 64),
}
SMALL = {"small": ([(1, 40)] * 2 + [(9, 20)], 16)}


class Loopback:
    """Settles with a rank that sends what this one does."""

    def __init__(self, max_bytes: int):
        self.mesh, self.rank = Mesh(1, RANKS, 1, RANKS, RANKS), 0
        offer = offer_of(PEER, self.mesh, costs("h200x4").of("peer", RANKS))
        self._settlements = Settlements(self.mesh, [replace(offer, max_bytes=max_bytes)], {Prompt: "auto"}, True)

    def recipe(self, what: Prompt, group: str, rows: int) -> str:
        return self._settlements.cheapest(what, group, rows).recipe.name

    def rows_of_call(self, what: Gather, group: str, rows: int) -> int:
        found = self._settlements.find(what, group, rows)
        return 0 if found is None else min(found.each, rows)

    def gather(self, what: Gather, group: str, x: Tensor, sizes: Any) -> Tensor:
        if not isinstance(sizes, LiveSizes):
            return torch.cat([x[:n] if n <= len(x) else x.expand(n, -1) for n in sizes])
        out = x.new_empty(sum(sizes.capacity), x.shape[1])
        places = torch.arange(len(out), dtype=torch.int32, device=x.device) % max(1, len(x))
        copy_rows(x, places, sizes.live.sum(0, keepdim=True).int(), out)
        return out

    def merge(self, group: str, out: Tensor, lse: Tensor, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return out.chunk(RANKS, 1)[0].contiguous(), lse.chunk(RANKS, 1)[0].contiguous()


def us(run: Any, times: int, graph: bool) -> float:
    """Median of the time of a call, or of a replay of its graph."""
    run()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        run = captured.replay
        run()
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--only", type=int)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    layers = args.layers if gpu else 1
    models = {
        "latents": (Latent(576, 512, (128, 128)), 8, 192),
        "latents, absorbed": (Latent(576, 512), 8, 192),
        "GQA 16/1": (PagedKV(1, 128), 8, 128),
    }
    if args.small:
        models = {"latents": (Latent(24, 16, (8, 8)), 2, 16), "GQA": (PagedKV(1, 16), 2, 16)}
    rows: list[dict[str, Any]] = []
    for number, (model, (spec, heads, dim)) in enumerate(models.items()):
        if args.only not in (None, number):
            continue
        interleave = Interleave(RANKS, PAGE, PAGE)
        group = ContextGroup(interleave, 0, Loopback(64 << 20))
        absorbed = None
        if isinstance(spec, Latent):
            n, value = dim - (spec.width - spec.value_width), dim - (spec.width - spec.value_width)
            up = torch.randn(RANKS * heads, n + value, spec.value_width, dtype=dtype, device=device) / 16
            absorbed = Absorbed(*up.split([n, value], dim=1), up)
        for name, (spans, capacity) in (SMALL if args.small else STEPS).items():
            width = 33024 // interleave.span if gpu else 8
            pages = sum(-(-(r + c) // interleave.span) for r, c in spans)
            cache = KVCache(spec, layers, pages, PAGE, dtype, device)
            cache.keys.normal_(), cache.values.normal_()
            free, seqs = iter(torch.randperm(pages).tolist()), []
            for r, c in spans:
                seqs.append(SeqRows(r, c, [[next(free) for _ in range(-(-(r + c) // interleave.span))]], True))
            total = sum(r for r, _ in spans)
            batch = build_batch([0] * total, seqs, interleave.span, device=device)
            q = torch.randn(total, heads, dim, dtype=dtype, device=device)
            case = Case(batch, cache, q, q, q, 0.1, [], [])
            wide = roomy(case, capacity, min(capacity, SEQUENCES))
            more = wide.batch.tables[0].pages
            more = more.new_zeros(len(more), width).index_copy_(1, torch.arange(more.shape[1], device=device), more)
            tables = (replace(wide.batch.tables[0], pages=more),)
            wide = replace(wide, batch=replace(wide.batch, tables=tables))
            backend = ContextParallel(PagedTriton(cache), group)

            def step(case: Case, backend: ContextParallel = backend, absorbed: Absorbed | None = absorbed) -> None:
                plan = backend.plan(case.batch, case.batch.tables[0])
                for layer in range(layers):
                    backend.attend(plan, layer, case.q, 0.1, False, absorbed, False)

            found: dict[str, Any] = {"model": model, "step": name, "rows": total, "capacity": capacity}
            if gpu:
                times = 5
                found["wall_us"] = round(us(lambda case=case: step(case), times, False) / layers, 1)
                found["graph_us"] = round(us(lambda case=wide: step(case), times, True) / layers, 1)
                plan = backend.plan(case.batch, case.batch.tables[0])
                backend.attend(plan, 0, case.q, 0.1, False, absorbed, False)

                def eager(
                    plan: Any = plan, case: Case = case, backend: Any = backend, absorbed: Any = absorbed
                ) -> None:
                    for layer in range(layers):
                        backend.attend(plan, layer, case.q, 0.1, False, absorbed, False)

                found["eager_us"] = round(us(eager, times, True) / layers, 1)
                form = plan.form[0]
                found["eager_form"] = type(form).__name__.replace("Plan", "Merged")
                captured = backend.plan(wide.batch, wide.batch.tables[0])
                backend.attend(captured, 0, wide.q, 0.1, False, absorbed, False)
                tokens = captured.form[0]._tokens
                found["graph_form"] = "Gathered" if tokens is not None and int(tokens.own) else "Merged"
                found["limit"] = 0 if tokens is None else len(tokens.slots)
            else:
                step(case)
                step(wide)
            print(json.dumps(found), flush=True)
            rows.append(found)
            if args.out:
                args.out.write_text(json.dumps({"layers": layers, "ranks": RANKS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
