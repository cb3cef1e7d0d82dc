"""The Triton kernels of a decode step on one GPU: each against float64, then timed beside torch's operators.

    python bench/scripts/gpu_kernels.py --out bench/results/gpu_kernels.json

Shapes are those of Qwen3-30B-A3B on two ranks in bfloat16: 16 query and 2 key-value heads of 128, hidden 2048, 128
experts of inner size 768 of which 8 are chosen, 64 of them here (ep 2) or all at half the inner size (tp 2). Times are
of CUDA graphs that hold several calls on different inputs, so that little is found in the L2 cache: the median of the
replays, in microseconds a call. `floor_us` is the larger of what the bytes take at the bandwidth that a large copy
reaches and of one empty kernel for each kernel launched. Prints one JSON object last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from weft.engine.kernels.triton import (
    decode_attention,
    fused_experts,
    norm_rope_cache,
    prefill_attention,
    route,
    sample,
)
from weft.engine.kernels.triton import decode_step as step
from weft.engine.kernels.triton.experts_tiles import tile_rows_of
from weft.engine.models.routing import Routing
from weft.kernels.triton import rms_norm

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from gpu import definitions

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, PAGE = 16, 2, 128, 16
HIDDEN, EXPERTS, CHOSEN, VOCABULARY = 2048, 128, 8, 151936
RULE = Routing(CHOSEN, renormalise=True)
PAGES = 2048
"""Pages of a request's table: the longest sequence that a server would take, not the one at hand."""
SPLITS = {"ep2": (64, 768), "tp2": (128, 384)}
"""Experts that are here, and their inner size."""


@triton.jit
def _nothing():
    tl.debug_barrier()


def graph_us(calls: Sequence[Callable[[], Any]], replays: int = 15) -> float:
    """Microseconds a call in a graph that holds all of them, one after the other."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for index in range(replays + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if index >= 3:
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def write_json(found: dict[str, Any], out: Path | None) -> None:
    """Prints one JSON object, and writes it to out, where that is named."""
    text = json.dumps(found)
    if out:
        out.write_text(text + "\n")
    print(text)


def error(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖."""
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    """bfloat16, normally distributed."""
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).mul_(scale).to(BF16)


def ints(*values: int) -> Tensor:
    """int32."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Report:
    """Collects rows, and prints each when it is there."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.bandwidth = self._bandwidth()
        self.kernel_us = graph_us([lambda: _nothing[(1,)]()] * 200)
        print(f"copy {self.bandwidth / 1e12:.2f} TB/s, an empty kernel {self.kernel_us:.2f} µs", flush=True)

    def _bandwidth(self) -> float:
        a, b = (torch.rand(1 << 30, device=DEVICE) for _ in range(2))
        return 2 * a.nbytes / graph_us([lambda: torch.neg(a, out=b)], 5) * 1e6

    def add(
        self, name: str, what: str, us: float, torch_us: float | None, size: float, kernels: int, **more: Any
    ) -> None:
        """size: bytes that must be moved."""
        floor = max(size / self.bandwidth * 1e6, kernels * self.kernel_us)
        row = {"kernel": name, "case": what, "us": us, "torch_us": torch_us, "floor_us": floor, "bytes": size, **more}
        self.rows.append({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
        beside = "" if torch_us is None else f"  torch {torch_us:8.1f}"
        print(f"{name:18}{what:30}{us:9.2f} µs{beside}  floor {floor:7.2f}  {more or ''}", flush=True)

    def write(self, out: Path | None) -> None:
        """Prints all as JSON, into a file too, and ends the process where a row's error is 1e-2 or more."""
        host = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        measured = {"copy_bytes_per_s": self.bandwidth, "empty_kernel_us": self.kernel_us}
        write_json({"host": host, **measured, "rows": self.rows}, out)
        if wrong := [row for row in self.rows if not row.get("error", 0.0) < 1e-2]:
            raise SystemExit(f"too far from what it should be: {wrong}")


def time_attention(report: Report, rows: int, context: int) -> None:
    """Decode attention, the lengths of a batch spread by a quarter to both sides."""
    spread = torch.linspace(0.75, 1.25, rows) if rows > 1 else torch.ones(1)
    lengths = (spread * context).int().to(DEVICE)
    per_row = -(-int(lengths.max()) // PAGE)
    pages = torch.zeros(rows, max(per_row, PAGES), dtype=torch.int32, device=DEVICE)
    pages[:, :per_row] = torch.randperm(rows * per_row, device=DEVICE).view(rows, -1)
    layers = 4 if rows * context > 60000 else 16
    cache = normal(layers, 2, rows * per_row * PAGE, KV_HEADS, HEAD_DIM)
    q, scale = normal(rows, HEADS, HEAD_DIM), HEAD_DIM**-0.5
    lse = torch.empty(rows, HEADS, device=DEVICE)
    found = decode_attention.decode_attention(q, cache[0, 0], cache[0, 1], pages, lengths, PAGE, scale, lse=lse)
    wide = (x.double() for x in (q, cache[0, 0], cache[0, 1]))
    wanted, wanted_lse = definitions.decode_attention(*wide, pages, lengths, PAGE, scale)
    slots = (pages[:, :per_row].long()[:, :, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten(1)
    mask = (torch.arange(slots.shape[1], device=DEVICE) < lengths[:, None])[:, None, None]

    def today(k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.index_select(0, slots.flatten()).unflatten(0, slots.shape).transpose(1, 2) for x in (k, v))
        return F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, scale=scale, enable_gqa=True)

    def ours(k: Tensor, v: Tensor) -> Tensor:
        return decode_attention.decode_attention(q, k, v, pages, lengths, PAGE, scale)

    us = graph_us([lambda k=k, v=v: ours(k, v) for k, v in cache])
    torch_us = graph_us([lambda k=k, v=v: today(k, v) for k, v in cache])
    size = int(lengths.sum()) * KV_HEADS * HEAD_DIM * 4
    errors = {"error": error(found, wanted), "lse_error": error(lse, wanted_lse)}
    report.add("decode_attention", f"{rows} rows × {context}", us, torch_us, size, 2, **errors)


def time_prefill(report: Report, sequences: int, rows: int, context: int) -> None:
    """Prompts, or chunks of them behind a context; torch's column gathers the pages and masks, sequence by sequence."""
    length = rows + context
    pages = torch.randperm(sequences * length // PAGE, device=DEVICE).view(sequences, -1).int()
    keys, values = normal(2, sequences * length, KV_HEADS, HEAD_DIM)
    q, scale = normal(sequences * rows, HEADS, HEAD_DIM), HEAD_DIM**-0.5
    out = torch.empty_like(q)
    starts = torch.arange(0, q.shape[0] + 1, rows, dtype=torch.int32, device=DEVICE)
    limits = (torch.arange(rows, dtype=torch.int32, device=DEVICE) + context + 1).repeat(sequences)
    slots = (pages.long()[:, :, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten(1)
    mask = torch.arange(length, device=DEVICE)[None] < limits[:rows, None]

    def ours() -> None:
        prefill_attention.prefill_attention(q, keys, values, pages, starts, limits, PAGE, scale, out)

    def today() -> Tensor:
        for at in range(sequences):
            k, v = (x.index_select(0, slots[at]).transpose(0, 1)[None] for x in (keys, values))
            own = q[at * rows : (at + 1) * rows].transpose(0, 1)[None]
            found = F.scaled_dot_product_attention(own, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        return found[0].transpose(0, 1)

    ours()
    us, torch_us = graph_us([ours] * 4), graph_us([today], 5)
    flops = 4 * HEADS * HEAD_DIM * int(limits.sum())
    size = sequences * length * KV_HEADS * HEAD_DIM * 4 + 4 * q.numel()
    wrong = error(out[-rows:], today().double())
    what = f"{sequences} × {rows} rows behind {context}"
    report.add("prefill attention", what, us, torch_us, size, 1, tflops=flops / us / 1e6, error=wrong)


def time_latent_attention(report: Report, rows: int, context: int) -> None:
    """Decode attention over DeepSeek-V2-Lite's latents."""
    lengths = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
    pages = torch.zeros(rows, PAGES, dtype=torch.int32, device=DEVICE)
    pages[:, : context // PAGE] = torch.randperm(rows * context // PAGE, device=DEVICE).view(rows, -1)
    latents, q = normal(16, rows * context, 1, 576), normal(rows, 16, 576)

    def ours(x: Tensor) -> Tensor:
        return decode_attention.latent_decode_attention(q, x, 512, pages, lengths, PAGE, 0.07)

    wide = latents[0].double()
    wanted, _ = definitions.decode_attention(q.double(), wide, wide[..., :512], pages, lengths, PAGE, 0.07)
    wrong = error(ours(latents[0]), wanted)
    us = graph_us([lambda x=x: ours(x) for x in latents])
    report.add("latent attention", f"{rows} rows × {context}", us, None, rows * context * 1152, 2, error=wrong)


def torch_experts(x: Tensor, logits: Tensor, first: int, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same by torch's operators: two grouped products."""
    held = gate_up.shape[0]
    weight, expert = F.softmax(logits, dtype=torch.float32, dim=-1).topk(CHOSEN, dim=-1)
    weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
    expert = expert.flatten() - first
    here = (expert >= 0) & (expert < held)
    expert, order = torch.where(here, expert, held).sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(held, device=x.device), right=True).to(torch.int32)
    gate, up = F.grouped_mm(x[order // CHOSEN], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    rows = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends) * weight.flatten()[order, None]
    return torch.zeros_like(x).index_add_(0, order // CHOSEN, torch.where((expert < held)[:, None], rows, 0))


def skewed_logits(rows: int) -> Tensor:
    """Router logits by which some experts are chosen more often than others."""
    return normal(rows, EXPERTS) + normal(EXPERTS, scale=0.5)


def time_moe(report: Report, split: str, rows: int) -> None:
    """Routing and experts; the products' bytes are those of the experts that were hit."""
    held, inner = SPLITS[split]
    gate_up, down = normal(held, 2 * inner, HIDDEN, scale=0.02), normal(held, HIDDEN, inner, scale=0.03)
    live = ints(rows)
    sets = [(normal(rows, HIDDEN), skewed_logits(rows)) for _ in range(2 if rows == 4096 else 12)]
    out, tile_rows = torch.empty(rows, HIDDEN, device=DEVICE, dtype=BF16), tile_rows_of(rows, rows * CHOSEN, EXPERTS)

    def routed(logits: Tensor) -> route.Routing:
        return route.route(logits, RULE, live, tile_rows, 0, held)

    routings = [routed(logits) for _, logits in sets]
    x, logits = sets[0]
    weight, expert = definitions.route(logits, RULE, rows, 0, held)
    assert torch.equal(routings[0].expert.sort(-1)[0], expert.sort(-1)[0]), "other experts than torch's"
    fused_experts.experts(x, routings[0], gate_up, down, out.fill_(float("nan")))
    wanted = definitions.experts(x.double(), weight, expert, gate_up.double(), down.double())
    wrong = error(out, wanted)
    route_us = graph_us([lambda x=x: routed(x) for _, x in sets])
    each = list(zip(sets, routings, strict=True))
    us = graph_us([lambda x=s[0], r=r: fused_experts.experts(x, r, gate_up, down, out) for s, r in each])
    both = graph_us([lambda s=s: fused_experts.experts(s[0], routed(s[1]), gate_up, down, out) for s in sets])
    torch_us = graph_us([lambda s=s: torch_experts(*s, 0, gate_up, down) for s in sets], 5)
    hit = statistics.mean((r.expert.unique() >= 0).sum().item() for r in routings)
    size = hit * 3 * inner * HIDDEN * 2 + rows * HIDDEN * 4
    parts = {"route_us": route_us, "experts_us": us, "hit": hit, "error": wrong}
    report.add("route + experts", f"{split} {rows} rows", both, torch_us, size, 4, **parts)


def time_norm_rope_cache(report: Report, rows: int) -> None:
    """Norms of queries and keys, rotary, the cache's write."""
    weight, features = normal(HEAD_DIM), (HEADS + 2 * KV_HEADS) * HEAD_DIM
    layers = 4 if rows == 4096 else 16
    qkv, cache = normal(layers, rows, features), normal(layers, 2, rows + 7, KV_HEADS, HEAD_DIM)
    slots = torch.randperm(rows + 7, device=DEVICE)[:rows].int()
    kept = slots.long()
    angle = torch.rand(rows, HEAD_DIM // 2, device=DEVICE) * 6
    cos, sin = angle.cos().to(BF16), angle.sin().to(BF16)
    options = {"q_weight": weight, "k_weight": weight, "eps": 1e-6}

    def ours(x: Tensor, c: Tensor) -> Tensor:
        return norm_rope_cache.norm_rope_cache(x, HEADS, cos, sin, slots, c[0], c[1], **options)

    def today(x: Tensor, c: Tensor) -> Tensor:
        q, k, v = x.unflatten(1, (-1, HEAD_DIM)).split((HEADS, KV_HEADS, KV_HEADS), 1)
        rotated = []
        for part in (q, k):
            wide = part.float()
            y = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(BF16)
            left, right = y.chunk(2, -1)
            swapped = torch.cat((-right, left), -1)
            rotated.append(y * torch.cat((cos, cos), -1)[:, None] + swapped * torch.cat((sin, sin), -1)[:, None])
        c[0].index_copy_(0, kept, rotated[1])
        c[1].index_copy_(0, kept, v)
        return rotated[0]

    stored, wanted_stored = cache[0].clone(), cache[0].double()
    found = ours(qkv[0], stored)
    wanted = definitions.norm_rope_cache(qkv[0].double(), HEADS, cos, sin, slots, *wanted_stored, **options)
    wrong = max(error(found, wanted), error(stored, wanted_stored))
    each = list(zip(qkv, cache, strict=True))
    us = graph_us([lambda x=x, c=c: ours(x, c) for x, c in each])
    torch_us = graph_us([lambda x=x, c=c: today(x, c) for x, c in each])
    report.add("norm_rope_cache", f"{rows} rows", us, torch_us, rows * features * 4, 1, error=wrong)


def time_rms_norm(report: Report, rows: int) -> None:
    """The residual's addition and norm."""
    x, weight, residual = normal(16, rows, HIDDEN), normal(HIDDEN), normal(rows, HIDDEN)
    wanted = definitions.rms_norm(x[0].double(), weight, 1e-6, residual.double())
    wrong = error(rms_norm.rms_norm(x[0], weight, 1e-6, residual), wanted)
    us = graph_us([lambda y=y: rms_norm.rms_norm(y, weight, 1e-6, residual) for y in x])
    torch_us = graph_us([lambda y=y: F.rms_norm(residual.add_(y), (HIDDEN,), weight, 1e-6) for y in x])
    report.add("rms_norm + residual", f"{rows} rows", us, torch_us, rows * HIDDEN * 8, 1, error=wrong)


def time_sample(report: Report, rows: int, heat: float) -> None:
    """Draws from whole vocabularies; torch's column is argmax alone."""
    sets = [torch.randn(rows, VOCABULARY, device=DEVICE) * 3 for _ in range(6)]
    seed, position = torch.arange(rows, device=DEVICE) * 977, torch.arange(rows, device=DEVICE) + 5
    temperature, live = torch.full((rows,), heat, device=DEVICE), ints(rows)
    found = sample.sample(sets[0], temperature, seed, position, live)[1]
    wanted = definitions.sample(sets[0], temperature, seed, position, rows)[1]
    assert torch.equal(found, wanted), f"{found.tolist()} drawn, {wanted.tolist()} wanted"
    us = graph_us([lambda x=x: sample.sample(x, temperature, seed, position, live) for x in sets])
    torch_us = graph_us([lambda x=x: x.argmax(-1) for x in sets])
    report.add("sample", f"{rows} rows, {'drawn' if heat else 'greedy'}", us, torch_us, sets[0].nbytes, 2, error=0.0)


def few_ahead(rows: int) -> Tensor:
    """Logits as of a language model: a few tokens far ahead of the rest."""
    logits = torch.randn(rows, VOCABULARY, device=DEVICE) * 2
    logits[:, torch.randperm(VOCABULARY, device=DEVICE)[:200]] += torch.rand(rows, 200, device=DEVICE).square() * 20
    return logits


def time_cut(report: Report, rows: int, top_k: int, top_p: float, flat: bool = False) -> None:
    """Samples with top_k and top_p; torch's column is a sort of the vocabulary and what makes a mask of it, alone."""
    sets = [torch.randn(rows, VOCABULARY, device=DEVICE) * 3 if flat else few_ahead(rows) for _ in range(2)]
    seed, position = torch.arange(rows, device=DEVICE) * 977, torch.arange(rows, device=DEVICE) + 5
    heat, live = torch.full((rows,), 0.8, device=DEVICE), ints(rows)
    k, p = torch.full_like(live, top_k).expand(rows).contiguous(), torch.full_like(heat, top_p)

    def sorted_mask(x: Tensor) -> Tensor:
        ordered, order = (x / heat[:, None]).sort(dim=-1, descending=True, stable=True)
        behind = torch.arange(VOCABULARY, device=DEVICE) >= (top_k or VOCABULARY)
        probability = ordered.masked_fill(behind, float("-inf")).softmax(-1)
        gone = behind | ((probability.cumsum(-1) - probability >= top_p) & (top_p < 1))
        return x.masked_fill(torch.zeros_like(gone).scatter_(-1, order, gone), float("-inf"))

    def ours(x: Tensor) -> Tensor:
        return sample.sample(x, heat, seed, position, live, top_k=k, top_p=p)[1]

    kept, before = definitions.cut(sets[0], heat, k, p)
    masked = sets[0].masked_fill(~kept, float("-inf"))
    same = ours(sets[0]) == definitions.sample(masked, heat, seed, position, rows)[1]
    same |= ((before - p[:, None]).abs() < 1e-6).any(-1) & (p < 1)  # to the rounding of sums
    assert same.all(), f"rows {(~same).nonzero().tolist()} differ"
    us = graph_us([lambda x=x: ours(x) for x in sets])
    torch_us = graph_us([lambda x=x: sorted_mask(x) for x in sets], 5)
    what = f"{rows} rows, k {top_k}, p {top_p}{', flat' if flat else ''}"
    report.add("sample, cut", what, us, torch_us, sets[0].nbytes, 5, error=0.0)


def time_step(report: Report, rows: int) -> None:
    """The ends of a step."""
    state = torch.ones(256, dtype=torch.int32, device=DEVICE), torch.full((256,), 9, dtype=torch.int32, device=DEVICE)
    pages, tokens = (torch.zeros(*shape, dtype=torch.int32, device=DEVICE) for shape in ((256, 2560), (256,)))
    live, which = ints(rows), torch.arange(rows, dtype=torch.int32, device=DEVICE)
    parts, drawn = step.table_pieces([2560], [False], DEVICE), torch.zeros(1, rows, 16, 2, device=DEVICE)
    steps, told = ints(0), torch.zeros(8, rows, dtype=torch.int32, pin_memory=True)

    def ends() -> None:
        step.step_in(which, live, *state, pages, steps, parts, PAGE)
        step.step_out(which, live, live, drawn, which, *state, tokens, steps, told)

    report.add("step_in + step_out", f"{rows} rows", graph_us([ends] * 10), None, rows * 80, 2)


def time_all(report: Report) -> None:
    """Every kernel at every size."""
    for rows, context in ((1, 1024), (16, 1024), (64, 1024), (256, 1024), (1, 32768), (16, 8192)):
        time_attention(report, rows, context)
    for rows in (1, 16, 64):
        time_latent_attention(report, rows, 1024)
    for sequences, rows, context in ((1, 4096, 0), (16, 256, 0), (4, 512, 8192)):
        time_prefill(report, sequences, rows, context)
    for split in SPLITS:
        for rows in (1, 4, 16, 64, 256, 4096):
            time_moe(report, split, rows)
    for rows in (1, 16, 64, 256, 4096):
        time_norm_rope_cache(report, rows)
        time_rms_norm(report, rows)
    for rows in (1, 16, 64):
        time_sample(report, rows, 0.0)
        time_sample(report, rows, 0.8)
        time_step(report, rows)
    for rows in (1, 16, 64, 256):
        for top_k, top_p in ((50, 1.0), (0, 0.9), (50, 0.9)):
            time_cut(report, rows, top_k, top_p)
        time_cut(report, rows, 0, 0.9, flat=True)


def main() -> None:
    """Checks, times, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the JSON here, too")
    args = parser.parse_args()
    torch.manual_seed(0)
    report = Report()
    time_all(report)
    report.write(args.out)


if __name__ == "__main__":
    main()
