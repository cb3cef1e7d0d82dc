"""Kernels on CPUs against their definitions in torch: fresh inputs, poisoned outputs, odd widths, all dtypes; the same
bits for any number of threads and rows, by each instruction set.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from attention.oracle import NAN
from pairs import in_pairs
from weft.comm.reference import ReferenceTransport, ReferenceWorld
from weft.engine.attention.backend_registry import NATIVE
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.kernels import cpu_ops, model_reference, ops
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.models.layers.routing import Routing
from weft.engine.models.load import build_model
from weft.engine.models.registry import read_config
from weft.engine.models.weights.float8_weights import Float8Weight
from weft.engine.worker.model_runner import ModelRunner
from weft.kernels import cpu_rows, float8, stream_ops, torch_reference
from weft.kernels.build import KernelError, model_kernels
from weft.planner.spec import Mesh

NEEDS = {
    "x86_64": {
        "scalar": set[str](),
        "avx2": {"avx2", "fma", "f16c"},
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"},
        "avx512_bf16": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c", "avx512_bf16"},
        "amx": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c", "amx_tile", "amx_bf16"},
    },
}.get(platform.machine(), {"scalar": set[str]()})
FLAGS = set(Path("/proc/cpuinfo").read_text().split())
ISAS = [isa for isa, needs in NEEDS.items() if needs <= FLAGS]
OWN_BITS = {"avx512_bf16", "amx"}
"""Instruction sets that round sums of products of bfloat16 numbers in their own order."""
DTYPES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Tolerance of each dtype, relative to the greatest value: two units in the last place."""
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    cpu_rows.missing()  # remembers its answer: no test may ask first while the scalar kernels run
    yield
    model_kernels().use("auto")
    torch.set_num_threads(threads)


@pytest.fixture
def normal() -> Callable[..., Tensor]:
    seed = int(torch.randint(2**31, ()).item())
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return make


def everywhere(run: Callable[[], Any], threads: tuple[int, ...] = (1, 2, 3, 8), isas: list[str] = ISAS) -> Any:
    """Return run()'s result, after a comparison of its bits by these instruction sets and numbers of threads."""
    first = None
    for isa, count in product(isas, threads):
        assert model_kernels().use(isa) == isa
        torch.set_num_threads(count)
        found = run()
        assert found is not None, "not covered"
        parts = found if isinstance(found, tuple) else (found,)
        first = parts if first is None else first
        for part, other in zip(parts, first, strict=True):
            assert torch.equal(part.nan_to_num(9e9), other.nan_to_num(9e9)), f"{isa}, {count} threads: other bits"
    return first if first is None or len(first) > 1 else first[0]


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype, slack: float = 1.0) -> None:
    """AssertionError unless found is near wanted, which may be of a wider dtype."""
    assert found.dtype == dtype and found.shape == wanted.shape and bool(found.isfinite().all())
    bound = slack * DTYPES[dtype] * max(1.0, float(wanted.abs().max()))
    assert float((found.double() - wanted.double()).abs().max()) <= bound


def of_sums(terms: int) -> float:
    """Return the slack of sums in float32 that may cancel: in 4,000 draws 1,601 terms were off by 7 bounds, not 13."""
    return max(1.0, terms**0.5 / 3)


def test_the_widest_instruction_set_runs() -> None:
    assert model_kernels().use("auto") == ISAS[-1]
    with pytest.raises(KernelError, match="this CPU has no sse9"):
        model_kernels().use("sse9")


def of_equal_bits(dtype: torch.dtype) -> list[list[str]]:
    """Return the instruction sets in groups that give the same bits of a product."""
    own = [[isa] for isa in ISAS if isa in OWN_BITS]
    return [[isa for isa in ISAS if isa not in OWN_BITS], *own] if dtype == torch.bfloat16 else [ISAS]


@in_pairs("rows, inputs, dtype", [1, 2, 3, 4, 5, 16, 29], [1, 31, 64, 100, 577, 1700], DTYPES)
def test_products(rows: int, inputs: int, dtype: torch.dtype, normal: Callable[..., Tensor]) -> None:
    slack = of_sums(inputs) if dtype == torch.float32 else 1.0
    for outputs in (1, 5, 24, 77):
        x, weight, bias = (normal(*s, dtype=dtype) for s in ((rows, inputs), (outputs, inputs), (outputs,)))
        wanted = x.double() @ weight.double().t()
        for isas in of_equal_bits(dtype):
            found = everywhere(lambda x=x, w=weight: ops.linear(x, w), isas=isas)
            near(found, wanted, dtype, slack)
            added = everywhere(lambda x=x, w=weight, b=bias: ops.linear(x, w, None, b), isas=isas)
            near(added, wanted + bias.double(), dtype, slack)
            alone = torch.cat([ops.linear(row[None], weight) for row in x])
            assert torch.equal(alone, found), "a row's bits depend on others"


@each_dtype
def test_products_into_parts_of_other_tensors(dtype: torch.dtype, normal: Callable[..., Tensor]) -> None:
    """Rows, weights and outputs that are columns of wider tensors; what lies next to them stays."""
    wide, weights = normal(5, 300, dtype=dtype), normal(70, 200, dtype=dtype)
    x, weight = wide[:, 10:110], weights[:, 50:150]

    def run() -> Tensor:
        out = torch.full((5, 90), NAN, dtype=dtype)
        assert ops.linear(x, weight, out[:, 7:77]).data_ptr() == out[:, 7:].data_ptr()
        return out

    for isas in of_equal_bits(dtype):
        found = everywhere(run, isas=isas)
        near(found[:, 7:77].contiguous(), x.double() @ weight.double().t(), dtype)
        assert bool(found[:, :7].isnan().all()) and bool(found[:, 77:].isnan().all())


@pytest.mark.parametrize("inputs", [1, 31, 577, 2100])
@pytest.mark.parametrize("rows", [33, 64, 101, 330])
def test_products_of_many_rows(rows: int, inputs: int, normal: Callable[..., Tensor]) -> None:
    """AMX has them for bfloat16, with the bits of few rows. By other instruction sets torch computes them."""
    for outputs in (1, 77, 300):
        weight, bias = (normal(outputs, n).bfloat16() for n in (inputs + 5, 1))
        weight, bias, x = weight[:, 2:-3], bias[:, 0], normal(rows, inputs + 3).bfloat16()[:, 1:-2]
        for isa in ISAS:
            model_kernels().use(isa)
            assert (cpu_ops.linear(x, weight) is None) == (isa != "amx")
        if "amx" not in ISAS:
            continue

        def run(weight: Tensor = weight, bias: Tensor = bias, x: Tensor = x, outputs: int = outputs) -> Tensor:
            out = torch.full((len(x), outputs + 2), NAN, dtype=torch.bfloat16)
            ops.linear(x, weight, out[:, 1:-1], bias)
            return out

        found = everywhere(run, isas=["amx"])
        assert bool(found[:, [0, -1]].isnan().all())
        near(found[:, 1:-1], x.double() @ weight.double().t() + bias.double(), torch.bfloat16)
        few = torch.cat([run(x=part) for part in x.split(16)])
        assert torch.equal(few[:, 1:-1], found[:, 1:-1]), "a row's bits depend on others"


def test_products_that_torch_computes(normal: Callable[..., Tensor]) -> None:
    """The rule: more than 32 rows, no row, other dtypes, mixed dtypes, columns that are not dense."""
    weight = normal(8, 32)
    for x in (normal(33, 32), normal(0, 32), normal(32, 4).t()):
        assert cpu_ops.linear(x, weight) is None
        assert torch.equal(ops.linear(x, weight), torch.nn.functional.linear(x, weight))
    assert cpu_ops.linear(normal(2, 32).double(), weight.double()) is None
    assert cpu_ops.linear(normal(2, 32).bfloat16(), weight) is None
    assert cpu_ops.linear_or_partials(normal(2, 32).bfloat16(), weight.bfloat16(), None, torch.float32) is None
    assert cpu_ops.linear(normal(32, 32), weight) is not None
    x = normal(3, 32)
    found = ops.linear_or_partials(x, weight)
    assert not isinstance(found, SplitKPartials) and torch.equal(found, ops.logits(x, weight))


def test_a_host_without_kernels_uses_torch(monkeypatch: pytest.MonkeyPatch, normal: Callable[..., Tensor]) -> None:
    monkeypatch.setattr(cpu_rows, "missing", lambda: "model.cc does not compile")
    x, weight = normal(2, 32), normal(8, 32)
    assert cpu_ops.linear(x, weight) is None and cpu_rows.rms_norm(x, weight[0], 1e-6) is None
    assert torch.equal(ops.linear(x, weight), torch.nn.functional.linear(x, weight))


LATENTS = (9, 1, 96, 64)
"""Heads, key-value heads, and elements of a key and of a value, which is part of it."""


def attention(
    q: Tensor, keys: Tensor, values: Tensor, pages: Tensor, length: int, window: int | None, scale: float, page: int
) -> tuple[Tensor, Tensor]:
    """Attention of one row `[heads, dim]` in float64, and its log-sum-exps."""
    at = torch.arange(0 if window is None else max(0, length - window), length)
    slots = pages.long()[at // page] * page + at % page
    k, v = (x[slots].double().repeat_interleave(len(q) // x.shape[1], dim=1) for x in (keys, values))
    scores = torch.einsum("hd,thd->ht", q.double(), k) * scale
    return torch.einsum("ht,thd->hd", scores.softmax(-1), v), scores.logsumexp(-1)


@in_pairs(
    "shape, window, dtype",
    [(9, 3, 64, 64), (4, 4, 40, 24), (7, 1, 33, 31), (2, 2, 128, 128), LATENTS],
    [None, 1, 70, 300],
    DTYPES,
)
def test_attention_over_pages(
    shape: tuple[int, int, int, int], window: int | None, dtype: torch.dtype, normal: Callable[..., Tensor]
) -> None:
    """Ragged and empty sequences of several parts, with NaN in all slots that no row sees."""
    heads, kv_heads, dim, value_dim = shape
    page, lengths = 16, [1, 0, 130, 64, 517, 128, 0, 129]
    width = -(-max(lengths) // page)
    order = torch.randperm(sum(-(-n // page) for n in lengths)).tolist()
    pages = torch.full((len(lengths), width), 10**6, dtype=torch.int32)
    keys = torch.full((len(order) * page, kv_heads, dim), NAN, dtype=dtype)
    values = torch.full((len(order) * page, kv_heads, value_dim), NAN, dtype=dtype)
    for row, length in enumerate(lengths):
        for i in range(-(-length // page)):
            pages[row, i] = number = order.pop()
            begin = number * page
            count = min(page, length - i * page)
            skipped = 0 if window is None else min(count, max(0, length - window - i * page))
            keys[begin + skipped : begin + count] = normal(count - skipped, kv_heads, dim, dtype=dtype)
            values[begin + skipped : begin + count] = normal(count - skipped, kv_heads, value_dim, dtype=dtype)
    values = keys[..., :value_dim] if shape == LATENTS else values
    q, tokens = normal(len(lengths), heads, dim, dtype=dtype), torch.tensor(lengths, dtype=torch.int32)

    def run(at: slice = slice(None)) -> tuple[Tensor, Tensor]:
        out = torch.full((len(q[at]), heads, value_dim), NAN, dtype=dtype)
        lse = torch.full((len(q[at]), heads), NAN)
        cpu_ops.attend(q[at], keys, values, pages[at], tokens[at], out, lse, 0.3, window, page)
        return out, lse

    outs, lses = everywhere(run)
    for row, length in enumerate(lengths):
        alone, lone_lse = run(slice(row, row + 1))
        assert torch.equal(alone[0], outs[row]) and torch.equal(lone_lse[0], lses[row])
        if not length:
            assert not outs[row].any() and bool((lses[row] == -torch.inf).all())
            continue
        wanted, lse = attention(q[row], keys, values, pages[row], length, window, 0.3, page)
        near(outs[row], wanted, dtype)
        near(lses[row], lse, torch.float32, slack=4)


@in_pairs(
    "shape, step, window",
    [(9, 3, 64, 64), (4, 4, 40, 24), (7, 1, 33, 31), (2, 2, 192, 128), LATENTS],
    [(1, 0), (5, 0), (45, 0), (2, 30), (33, 299), (150, 131)],
    [None, 1, 70, 300],
)
def test_attention_of_prompts(
    shape: tuple[int, int, int, int], step: tuple[int, int], window: int | None, normal: Callable[..., Tensor]
) -> None:
    """AMX has it for bfloat16: NaN in all slots that no row sees, and the same bits for a prompt in parts."""
    (heads, kv_heads, dim, value_dim), (rows, context) = shape, step
    tokens, unseen = context + rows, 0 if window is None else max(0, context - window + 1)
    slots = torch.randperm(tokens + 20)[:tokens].int()
    keys, values = (torch.full((tokens + 20, kv_heads, n), NAN).bfloat16() for n in (dim, value_dim))
    for cached in (keys, values):
        cached[slots[unseen:].long()] = normal(tokens - unseen, *cached.shape[1:]).bfloat16()
    values = keys[..., :value_dim] if shape == LATENTS else values
    q = normal(rows, heads, dim).bfloat16()

    def attend(first: int, last: int) -> tuple[Tensor, Tensor] | None:
        begin = 0 if window is None else max(0, context + first - window + 1)
        limits = torch.arange(context + first + 1, context + last + 1, dtype=torch.int32) - begin
        out = torch.full((last - first, heads, value_dim + 1), NAN).bfloat16()[..., :-1]
        lse = torch.full((last - first, heads), NAN)
        at = slots[begin : context + last]
        ran = cpu_ops.attend_prompt(q[first:last], keys, values, at, limits, out, lse, 0.3, window, begin)
        return (out, lse) if ran else None

    for isa in ISAS:
        model_kernels().use(isa)
        assert (attend(0, rows) is None) == (isa != "amx")
    if "amx" not in ISAS:
        return
    out, lse = everywhere(lambda: attend(0, rows), isas=["amx"])
    for i in range(rows):
        begin = 0 if window is None else max(0, context + i - window + 1)
        k, v = (x[slots[begin : context + i + 1].long()].double() for x in (keys, values))
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("hd,thd->ht", q[i].double(), k) * 0.3
        near(lse[i], scores.logsumexp(-1), torch.float32, slack=of_sums(dim))
        near(out[i], torch.einsum("ht,thd->hd", scores.softmax(-1), v), torch.bfloat16)
    cut = rows // 3
    parts = [part for part in (attend(0, cut) if cut else None, attend(cut, rows)) if part is not None]
    assert all(
        torch.equal(torch.cat(each), whole) for each, whole in zip(zip(*parts, strict=True), (out, lse), strict=True)
    )


def test_rows_of_prompts_that_see_nothing(normal: Callable[..., Tensor]) -> None:
    """Rows with no token of theirs on this rank, and tokens that are not in slots."""
    q, keys, values = (normal(40, n, 64).bfloat16() for n in (4, 2, 2))
    limits = torch.tensor([0] * 3 + [1] * 37, dtype=torch.int32)
    out, lse = torch.full((40, 4, 64), NAN).bfloat16(), torch.full((40, 4), NAN)
    if not cpu_ops.attend_prompt(q, keys, values, None, limits, out, lse, 1.0, None, 0):
        assert "amx" not in ISAS
        return
    assert bool((out[:3] == 0).all()) and bool((lse[:3] == -torch.inf).all())
    assert torch.equal(out[3:], values[:1].repeat_interleave(2, dim=1).expand(37, -1, -1))


@each_dtype
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), [(4, 2, 40, 40), (9, 1, 96, 64), (3, 3, 33, 33)])
def test_attention_over_pages_in_float8(
    heads: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype, normal: Callable[..., Tensor]
) -> None:
    """Vectors of magnitudes from 1e-6 to 1e6, also with values that are part of keys, as latents have them."""
    page, lengths, window = 16, [1, 0, 130, 64, 300], 200
    pages = torch.randperm(5 * 20).view(5, 20).int()
    magnitudes = 10.0 ** torch.randint(-6, 7, (100 * page, kv_heads, 1))
    keys = float8.to_vectors(normal(100 * page, kv_heads, dim))
    values = float8.Fp8Vectors(keys.values[..., :value_dim], keys.exponents)
    if value_dim == dim:
        values = float8.to_vectors(magnitudes * normal(100 * page, kv_heads, dim))
    q, tokens = normal(len(lengths), heads, dim, dtype=dtype), torch.tensor(lengths, dtype=torch.int32)

    def run(at: slice = slice(None)) -> tuple[Tensor, Tensor]:
        out = torch.full((len(q[at]), heads, value_dim), NAN, dtype=dtype)
        lse = torch.full((len(q[at]), heads), NAN)
        cpu_ops.attend(q[at], keys, values, pages[at], tokens[at], out, lse, 0.3, window, page)
        return out, lse

    outs, lses = everywhere(run)
    wide = [torch.ldexp(x.values.double(), x.exponents[..., None]) for x in (keys, values)]
    for row, length in enumerate(lengths):
        alone, lone_lse = run(slice(row, row + 1))
        assert torch.equal(alone[0], outs[row]) and torch.equal(lone_lse[0], lses[row])
        if length and dtype != torch.float16:  # magnitudes overflow it
            wanted, lse = attention(q[row], *wide, pages[row], length, window, 0.3, page)
            near(outs[row], wanted, dtype, slack=2)
            near(lses[row], lse, torch.float32, slack=4)


@in_pairs("shape, transposed, dtype", [(1, 1), (33, 7), (128, 130), (100, 256)], [False, True], DTYPES)
def test_products_by_heads(
    shape: tuple[int, int], transposed: bool, dtype: torch.dtype, normal: Callable[..., Tensor]
) -> None:
    """Weights that are dense in either dimension; rows and outputs that are parts of wider tensors."""
    depth, columns = shape
    for rows in (1, 3, 4, 16, 29):
        x = normal(rows, 3, depth + 5, dtype=dtype)[..., 2:-3]
        weight = normal(3, columns, depth, dtype=dtype).mT if transposed else normal(3, depth, columns, dtype=dtype)
        wanted = torch.einsum("thd,hdc->thc", x.double(), weight.double())

        def run(x: Tensor = x, weight: Tensor = weight) -> Tensor:
            out = torch.full((len(x), 3, columns + 2), NAN, dtype=dtype)
            assert cpu_ops.multiply_heads(x, weight, out[..., 1:-1]) is not None
            assert bool(out[..., [0, -1]].isnan().all())
            return out[..., 1:-1].contiguous()

        for isas in of_equal_bits(dtype) if transposed else [ISAS]:
            found = everywhere(run, isas=isas)
            near(found, wanted, dtype, slack=4)
            assert torch.equal(torch.cat([run(row[None]) for row in x]), found), "a row's bits depend on others"
    assert cpu_ops.multiply_heads(normal(33, 3, depth).to(dtype), weight, normal(33, 3, columns).to(dtype)) is None


@each_dtype
@pytest.mark.parametrize("width", [1, 31, 64, 100, 576])
def test_norms(width: int, dtype: torch.dtype, normal: Callable[..., Tensor]) -> None:
    for rows, wide_weight in product((1, 5, 70), (False, True)):
        x, delta = normal(rows, width, dtype=dtype), normal(rows, 2 * width, dtype=dtype)[:, :width]
        weight = normal(width, dtype=torch.float32 if wide_weight else dtype)
        found = everywhere(lambda x=x, w=weight: cpu_rows.rms_norm(x, w, 1e-5), (1, 3))
        near(found, torch_reference.rms_norm(x.double(), weight.double(), 1e-5), dtype, slack=2)
        by_heads = cpu_rows.rms_norm(x.view(rows, 1, width), weight, 1e-5)
        assert by_heads is not None and torch.equal(by_heads[:, 0], found)
        total, normed = everywhere(lambda x=x, d=delta, w=weight: cpu_rows.add_rms_norm(x, d, w, 1e-5), (1, 3))
        assert torch.equal(total, x + delta)
        assert torch.equal(normed, cpu_rows.rms_norm(total, weight, 1e-5))


@each_dtype
@pytest.mark.parametrize("inner", [1, 33, 64, 1536])
def test_gated(inner: int, dtype: torch.dtype, normal: Callable[..., Tensor]) -> None:
    score = (normal(3, 8, dtype=dtype), normal(1, 8, dtype=dtype))
    for options in ({}, {"limit": 0.7}, {"limit": 0.7, "alpha": 1.7}, {"score": score}):
        x = 3 * normal(3, 2 * inner, dtype=dtype)
        x[0, 0], x[1, 0] = 60.0, -200.0
        wide = options | ({"score": tuple(s.double() for s in score)} if "score" in options else {})
        found = everywhere(lambda x=x, o=options: cpu_ops.gated(x, **o), (1, 2))
        near(found, model_reference.gated(x.double(), **wide), dtype, slack=1 + 2 * ("score" in options))


@each_dtype
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("groups", "top", "best"), [(1, 1, 1), (4, 2, 1), (4, 3, 2)])
def test_choices_of_experts(
    groups: int, top: int, best: int, score: Literal["softmax", "sigmoid"], dtype: torch.dtype, normal: Any
) -> None:
    """Rows with bias and without, of another rank's experts, and with equal logits, whose first ones are chosen."""
    for bias, renormalise, first in ((None, False, 0), (normal(16), True, 3)):
        rule = Routing(3, score, groups, top, best, renormalise=renormalise, scale=1.5)
        logits = 2 * normal(40, 20, dtype=dtype)[:, :16]
        args = rule, None, range(first, 16), False, bias
        weight, expert = everywhere(lambda given=(logits, *args): cpu_ops.route(*given), (1, 2))
        wide, wanted = model_reference.route(logits.double(), *args)
        order = (at.argsort(-1) for at in (expert, wanted))
        (ours, theirs) = (
            (w.gather(-1, o), e.gather(-1, o)) for o, w, e in zip(order, (weight, wide), (expert, wanted), strict=True)
        )
        apart = (ours[1] != theirs[1]).any(-1)  # near ties
        assert int(apart.sum()) <= 1 + 8 * (dtype != torch.float32)
        near(ours[0][~apart], theirs[0][~apart], torch.float32, slack=4)
        alone = cpu_ops.route(logits[7:8], *args)
        assert alone is not None and torch.equal(alone[0], weight[7:8]) and torch.equal(alone[1], expert[7:8])
        found = cpu_ops.choose(logits, rule, bias=bias)
        assert found is not None and torch.equal(found[1], expert + first)
    even = cpu_ops.choose(torch.ones(1, 16), Routing(3, score))
    assert even is not None and even[1].tolist() == [[0, 1, 2]]


@each_dtype
def test_embeddings_rotary_tables_and_joined_rows(dtype: torch.dtype, normal: Callable[..., Tensor]) -> None:
    weight, tokens = normal(11, 33, dtype=dtype), torch.tensor([0, 10, 3, 3])
    assert torch.equal(everywhere(lambda: cpu_ops.embed(tokens, weight)), weight[tokens])
    part = weight[2:7]
    assert torch.equal(cpu_ops.embed(tokens, part, 2), model_reference.embed(tokens, part, 2))  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="tokens of the vocabulary"):
        cpu_ops.embed(tokens + 1, weight)
    positions, inverse = torch.tensor([0, 1, 77, 131_071]), 10_000.0 ** -torch.arange(0, 1, 0.2)
    for interleaved in (False, True):
        found = everywhere(lambda i=interleaved: cpu_ops.cos_sin(positions, inverse, 0.7, dtype, i), (1, 2))
        for table, wanted in zip(
            found, model_reference.cos_sin(positions, inverse, 0.7, dtype, interleaved), strict=True
        ):
            near(table, wanted, dtype)
    left, right = normal(4, 7, dtype=dtype)[:, :5], normal(4, 3, dtype=dtype)
    assert torch.equal(everywhere(lambda: cpu_ops.join(left, right)), model_reference.join(left, right))


@in_pairs("tokens, shape, dtype", [1, 2, 5, 16, 29, 200], [(64, 48), (33, 7), (130, 100)], DTYPES)
def test_grouped_experts(
    tokens: int, shape: tuple[int, int], dtype: torch.dtype, normal: Callable[..., Tensor]
) -> None:
    """Experts of other ranks, of no token and of all tokens; sums that replace NaN, or are added to an output."""
    (width, inner), held, k = shape, 6, 3
    gate_up, down = 0.3 * normal(held, 2 * inner, width), 0.3 * normal(held, width, inner)
    biases = normal(held, 2 * inner), normal(held, width)
    gate_up, down, *biases = (x.to(dtype) for x in (gate_up, down, *biases))
    x, weight = normal(tokens, width + 3, dtype=dtype)[:, :-3], normal(tokens, k).abs()
    expert = torch.stack([torch.randperm(held + 2)[:k] - 1 for _ in range(tokens)])  # -1 and `held` are elsewhere
    expert[:, 0] = torch.where((expert[:, 1:] == 4).any(1), expert[:, 0], 4)
    plain = model_reference.experts
    for ints, options in (
        (torch.int64, {}),
        (torch.int32, dict(limit=0.7, alpha=1.7, gate_up_bias=biases[0], down_bias=biases[1])),
        (torch.int64, dict(limit=0.7, add=True, down_bias=biases[1])),
    ):
        before = (
            normal(tokens, width, dtype=dtype) if options.get("add") else torch.full((tokens, width), NAN).to(dtype)
        )
        wide = {name: each.double() if isinstance(each, Tensor) else each for name, each in options.items()}
        parts = (t.double() for t in (x, gate_up, down, before.clone()))
        rows, up, last, out = parts
        wanted = plain(rows, (weight.to(dtype).double(), expert), up, last, out, **wide)

        def run(at: slice = slice(None), ints: torch.dtype = ints, before: Tensor = before, o: Any = options) -> Tensor:
            chosen = weight[at], expert[at].to(ints)
            found = cpu_ops.experts(x[at], chosen, gate_up, down, before[at].clone(), **o)
            assert found is not None
            return found

        for isas in of_equal_bits(dtype):
            if tokens > cpu_rows.MAX_ROWS and isas != ["amx"]:
                continue
            found = everywhere(run, isas=isas)
            near(found, wanted, dtype, slack=4)
            alone = torch.cat([run(slice(i, i + 1)) for i in range(tokens)])
            assert torch.equal(alone, found), "a row's bits depend on others"


def test_experts_of_more_rows_of_one_expert_than_a_product_has(normal: Callable[..., Tensor]) -> None:
    x, gate_up, down = normal(9, 32), normal(2, 16, 32), normal(2, 32, 8)
    expert, out = torch.zeros(9, 3, dtype=torch.int64), torch.full((9, 32), NAN)
    chosen = normal(9, 3), expert
    found = cpu_ops.experts(x, chosen, gate_up, down, out)
    assert found is out
    near(out, model_reference.experts(x, chosen, gate_up, down, torch.empty(9, 32)), torch.float32, slack=8)


def test_experts_that_torch_computes(normal: Callable[..., Tensor]) -> None:
    gate_up, down = normal(2, 16, 32), normal(2, 32, 8)
    for x in (normal(33, 32), normal(0, 32), normal(2, 32).double()):
        chosen = normal(len(x), 1), torch.zeros(len(x), 1, dtype=torch.int64)
        assert cpu_ops.experts(x, chosen, gate_up, down, torch.empty_like(x)) is None


@each_dtype
@pytest.mark.parametrize(("width", "group"), [(1, 128), (33, 32), (300, 128), (64, 48)])
def test_rows_in_float8(width: int, group: int, dtype: torch.dtype, normal: Callable[..., Tensor]) -> None:
    """Zeros, subnormal values, ties, NaN and infinity, with the bits of the definition."""
    x = normal(7, width + 1, dtype=dtype)[:, :-1] * torch.tensor([1.0, 1e-3, 0, 100, 1, 1, 1]).to(dtype)[:, None]
    x[3] = torch.randint(-448, 448, (width,)).to(dtype)
    x[4, 0], x[5, width // 2] = NAN, torch.inf
    x[6] = torch.arange(width) % 31 * 2.0**-12
    x[6, 0] = 448.0
    wanted = float8.quantise(x, group)

    def run() -> tuple[Tensor, Tensor]:
        found = stream_ops.quantise(x, group)
        assert found.group_size == group
        return found.values.view(torch.uint8) & (0x7F if width == 1 else 0xFF), found.scales

    values, scales = everywhere(run, (1, 3))
    assert cpu_rows.quantise(x, group) is not None and cpu_rows.quantise(x.double(), group) is None
    assert torch.equal(values, wanted.values.view(torch.uint8) & (0x7F if width == 1 else 0xFF))
    assert torch.equal(scales.nan_to_num(9e9, 8e9), wanted.scales.nan_to_num(9e9, 8e9))
    by_norm = float8.unfilled(x, group)
    normed = cpu_rows.rms_norm(x, x[0], 1e-5, quantised=by_norm)
    assert normed is not None and torch.equal(by_norm.scales[:3], float8.quantise(normed, group).scales[:3])


def float8_weight(weight: Tensor, unit: tuple[int, int]) -> Float8Weight:
    """Return a weight in FP8 with scales that are no powers of two."""
    *before, rows, columns = weight.shape
    scales = torch.rand(*before, -(-rows // unit[0]), -(-columns // unit[1])) / 100 + 1e-3
    made = Float8Weight((100 * weight).to(float8.FLOAT8), scales, unit)
    made.check()
    return made


@in_pairs("rows, inputs, dtype", [1, 3, 4, 16, 29], [1, 31, 64, 100, 1601], DTYPES)
def test_products_with_weights_in_float8(
    rows: int, inputs: int, dtype: torch.dtype, normal: Callable[..., Tensor]
) -> None:
    for outputs, unit in product((1, 5, 77), ((128, 128), (3, 32), (1, 64))):
        weight, x = float8_weight(normal(outputs, inputs), unit), normal(rows, inputs + 1, dtype=dtype)[:, :-1]
        wide = float8.dequantise(float8.quantise(x, unit[1])).double()
        wanted = wide @ float8.dequantise(weight).double().t()

        def run(rows: Any = x, weight: Float8Weight = weight, outputs: int = outputs) -> Tensor:
            out = torch.full((len(rows.values if isinstance(rows, float8.Fp8Rows) else rows), outputs + 2), NAN)
            found = ops.linear_float8(rows, weight, out.to(dtype)[:, 1:-1])
            assert cpu_ops.linear_quantised(rows, weight, torch.empty_like(found)) is not None
            return found.contiguous()

        found = everywhere(run)
        near(found, wanted, dtype, slack=of_sums(inputs))
        assert torch.equal(run(float8.quantise(x, unit[1])), found)
        assert torch.equal(torch.cat([run(row[None]) for row in x]), found), "a row's bits depend on others"


@each_dtype
@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize(("up", "last", "add"), [((32, 128), (128, 32), False), ((16, 32), (32, 64), True)])
def test_grouped_experts_in_float8(
    up: tuple[int, int],
    last: tuple[int, int],
    add: bool,
    tokens: int,
    dtype: torch.dtype,
    normal: Callable[..., Tensor],
) -> None:
    width, inner, held, k = 160, 96, 4, 2
    gate_up = float8_weight(0.3 * normal(held, 2 * inner, width), up)
    down = float8_weight(0.3 * normal(held, width, inner), last)
    x, weight, before = normal(tokens, width, dtype=dtype), normal(tokens, k).abs(), normal(tokens, width, dtype=dtype)
    expert = torch.stack([torch.randperm(held + 1)[:k] for _ in range(tokens)])
    wanted = model_reference.experts(x, (weight, expert), gate_up, down, before.clone(), limit=0.7, add=add)

    def run(rows: Any = x, at: slice = slice(None)) -> Tensor:
        out = before[at].clone() if add else torch.full_like(before[at], NAN)
        found = cpu_ops.experts(rows, (weight[at], expert[at]), gate_up, down, out, limit=0.7, add=add)
        assert found is out
        return found

    found = everywhere(run)
    # A value between the products may be rounded to a neighbour in FP8, if their sums' last bits differ.
    errors = (found.float() - wanted.float()).abs().amax(1) / wanted.float().abs().max().clamp(min=1.0)
    assert float(errors.max()) <= 0.02 and int((errors > 4 * DTYPES[dtype]).sum()) <= 1
    assert torch.equal(run(float8.quantise(x, up[1])), found)
    assert torch.equal(torch.cat([run(x[i : i + 1], slice(i, i + 1)) for i in range(tokens)]), found)


@pytest.mark.parametrize("interleaved", [False, True])
@in_pairs("norms, shape, dtype", [None, "own", "float32"], [(64, 64), (40, 24), (33, 2)], DTYPES)
def test_rotary_and_the_caches_write(
    norms: str | None, shape: tuple[int, int], interleaved: bool, dtype: torch.dtype, normal: Callable[..., Tensor]
) -> None:
    dim, rotated = shape
    rows, heads, kv_heads, slots = 5, 3, 2, torch.tensor([7, 0, -1, 3, 4])
    qkv = normal(rows, (heads + 2 * kv_heads) * dim + 3, dtype=dtype)[:, :-3]
    angles = normal(rows, rotated // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = [None if norms is None else normal(dim, dtype=dtype if norms == "own" else torch.float32) for _ in "qk"]

    def rotate(keys: float8.Stored, values: float8.Stored) -> Tensor:
        q = cpu_ops.norm_rope_cache(
            qkv,
            heads,
            cos,
            sin,
            slots,
            keys,
            values,
            q_weight=weights[0],
            k_weight=weights[1],
            eps=1e-5,
            interleaved=interleaved,
            unused=9,
        )
        assert q is not None
        return q

    def run() -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.full((2, 10, kv_heads, dim), NAN, dtype=dtype)
        return rotate(keys, values), keys, values

    q, keys, values = everywhere(run, (1, 2))
    of_q, of_k, of_v = (x.unflatten(1, (-1, dim)) for x in qkv.double().split([heads * dim, *[kv_heads * dim] * 2], 1))
    turned = []
    for x, weight in zip((of_q, of_k), weights, strict=True):
        normed = x if weight is None else torch_reference.rms_norm(x, weight.double(), 1e-5)
        first = normed[..., :rotated].unflatten(-1, (-1, 2) if interleaved else (2, -1))
        left, right = first.unbind(-1 if interleaved else -2)
        c, s = cos.double()[:, None], sin.double()[:, None]
        pairs = torch.stack((left * c - right * s, right * c + left * s), -1 if interleaved else -2)
        turned.append(torch.cat((pairs.flatten(-2), normed[..., rotated:]), -1))
    near(q, turned[0], dtype, slack=2)
    stored = slots[slots >= 0]
    near(keys[stored], turned[1][slots >= 0], dtype, slack=2)
    assert torch.equal(values[stored].double(), of_v[slots >= 0])
    assert bool(keys[[1, 2, 5, 6, 8]].isnan().all()) and bool(values[[1, 2, 5, 6, 8]].isnan().all())

    def run_in_float8() -> tuple[Tensor, ...]:
        caches = [float8.to_vectors(torch.full((10, kv_heads, dim), NAN)) for _ in "kv"]
        again = rotate(*caches)
        return (again, *(x.values.view(torch.uint8) for x in caches), *(x.exponents for x in caches))

    again, *stored8 = everywhere(run_in_float8, (1, 2))
    assert torch.equal(again, q)
    for cache, values8, exponents in zip((keys, values), stored8[:2], stored8[2:], strict=True):
        made = float8.to_vectors(cache[stored])
        assert torch.equal(values8[stored], made.values.view(torch.uint8))
        assert torch.equal(exponents[stored], made.exponents)


def test_ranks_that_are_threads_have_pools_of_their_own(normal: Callable[..., Tensor]) -> None:
    torch.set_num_threads(3)
    x, weight = normal(4, 256), normal(3000, 256)
    wanted, found = ops.linear(x, weight), list[bool]()

    def work() -> None:
        found.append(all(torch.equal(ops.linear(x, weight), wanted) for _ in range(50)))

    ranks = [threading.Thread(target=work) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert found == [True] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_steps_bits_depend_on_no_other_sequence(dtype: torch.dtype) -> None:
    """Check whole decode steps of one to sixteen sequences, with one thread and with three."""
    fields = dict(vocab_size=300, hidden_size=96, intermediate_size=200, num_hidden_layers=2, num_attention_heads=6)
    config = read_config(LlamaConfig(**fields, num_key_value_heads=2, max_position_embeddings=512).to_dict())
    model, page, sequences = build_model(config, Mesh(), 0, dtype, torch.device("cpu")), 16, 16
    for weight in model.parameters():
        weight.data.normal_(0, 0.1)
    transport = ReferenceTransport(ReferenceWorld(1), 0)
    runner = ModelRunner(model, Mesh(), 0, [transport], [CacheGroup(Rule(), 10 * sequences)], page, attention=NATIVE)

    def step(tokens: list[int], rows: list[SeqRows]) -> Tensor:
        return runner.forward(build_batch(tokens, rows, page), (len(tokens),))

    contexts = torch.randint(1, 150, (sequences,)).tolist()
    tables = [[list(range(10 * i, 10 * i + 10))] for i in range(sequences)]
    for context, table in zip(contexts, tables, strict=True):
        step(torch.randint(300, (context,)).tolist(), [SeqRows(context, 0, table, 1)])
    rows = [SeqRows(1, context, table, 1) for context, table in zip(contexts, tables, strict=True)]
    alone = torch.cat([step([i], [row]) for i, row in enumerate(rows)])
    for count, threads in ((16, 1), (16, 3), (5, 3), (2, 1)):
        torch.set_num_threads(threads)
        assert torch.equal(step(list(range(count)), rows[:count]), alone[:count])
    assert not torch.equal(alone[0], alone[1])


def test_a_prompts_bits_depend_on_no_other_row() -> None:
    """Check whole prompts in bfloat16 by AMX: alone, in parts, and after others."""
    if "amx" not in ISAS:
        return
    fields = dict(vocab_size=300, hidden_size=96, intermediate_size=200, num_hidden_layers=2, num_attention_heads=6)
    config = read_config(LlamaConfig(**fields, num_key_value_heads=2, max_position_embeddings=512).to_dict())
    model, page = build_model(config, Mesh(), 0, torch.bfloat16, torch.device("cpu")), 16
    for weight in model.parameters():
        weight.data.normal_(0, 0.1)
    transport = ReferenceTransport(ReferenceWorld(1), 0)
    runner = ModelRunner(model, Mesh(), 0, [transport], [CacheGroup(Rule(), 40)], page, attention=NATIVE)
    tokens, tables = torch.randint(300, (200,)).tolist(), [[list(range(20))], [list(range(20, 40))]]

    def step(*seqs: tuple[int, int, int]) -> Tensor:
        """Run (table, begin, end) of the tokens, and return the logits of the last row of the last sequence."""
        rows = [SeqRows(end - begin, begin, tables[table], 1) for table, begin, end in seqs]
        fed = [token for _, begin, end in seqs for token in tokens[begin:end]]
        return runner.forward(build_batch(fed, rows, page), (len(fed),))[-1]

    whole = step((0, 0, 200))
    for threads in (1, 3):
        torch.set_num_threads(threads)
        step((0, 0, 70))
        assert torch.equal(step((0, 70, 200)), whole)
        assert torch.equal(step((1, 0, 77), (0, 0, 200)), whole)
