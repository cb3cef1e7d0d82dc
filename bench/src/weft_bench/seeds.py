"""The five pull requests that Weft grew from: their figures, and the same measurements for this host.

A `Seed` is a row of `SEEDS`: the pull request's figures, and its set-up as variants of an engine and loads, on any
number of ranks. `weft_bench.reproduce` runs any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from weft.engine.attention.backend_registry import BACKENDS, BackendEntry, Needs
from weft.engine.kv.cache_spec import Latent
from weft_bench.setups import Load, Metric, Profile, Seed, Setup, TableRow, Variant

EMBEDDED = "the embedded model (4 layers, 8 experts) in place of the pull request's; CPU ranks in place of GPUs"
DEEPSPEED = "DeepSpeed's all-reduce is no transport of the engine; weft bench collectives times it"
DEEPSPEED += "" if find_spec("deepspeed") else "; it is not installed here"
MADE_UP = "made-up weights"
SHM, GLOO, PEER, NCCL = ({"transport": name} for name in ("shm", "gloo", "peer", "nccl"))
NAIVE = {"plan": "naive"}
TWO_BY_TWO = dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2)
Quoted = Mapping[str, tuple[float, float]]
"""Figures of a pull request, by the variant that Weft's is compared with."""
UNCONVERTED = "lm_head embed_tokens conv1d in_proj_a in_proj_b gate shared_expert_gate g_proj"
FLOAT8 = {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": UNCONVERTED.split(),
    }
}
"""Storage of FP8 checkpoints as their publishers release them, for a preset of the same model in bfloat16."""
QWEN: dict[str, Any] = {"model": "qwen3.5-397b-a17b", "changed": FLOAT8}


def _four(ours: Variant, theirs: Variant, layout: Variant) -> dict[str, Variant]:
    """Return the naive plan and the cheapest, each with the usual transport and with Weft's own."""
    return {
        "all-reduce and slice, usual transport": {**NAIVE, **theirs, **layout},
        "all-reduce and slice, Weft's transport": {**NAIVE, **ours, **layout},
        "planned, usual transport": {**theirs, **layout},
        "planned, Weft's transport": {**ours, **layout},
    }


def _compared(metric: Metric, load: int, names: Sequence[str], quoted: Quoted | None = None) -> list[TableRow]:
    """Return rows that compare the last variant with each other one. quoted: figures of some of these."""
    *others, last = names
    return [TableRow(metric, load, name, last, (quoted or {}).get(name)) for name in others]


def _reduce_scatterv(four: dict[str, Variant], load: Load, profile: Profile, differs: Sequence[str]) -> Setup:
    first, naive, _, ours = four
    rows = [
        *_compared("tokens/s", 0, list(four), {first: (53_006, 57_115)}),
        *_compared("collectives of a decode step, ms", 0, list(four)),
        *_compared("collectives and waiting of a decode step, ms", 0, list(four), {first: (83.26, 71.93)}),
        TableRow("collectives a decode step", 0, naive, ours, (49, 49)),
        TableRow("collectives a step", 0, naive, ours),
        TableRow("MiB a step", 0, naive, ours),
    ]
    return Setup(four, [load], rows, differs, profile)


def _large_reduce_scatterv(gpus: int) -> Setup:
    four = _four(PEER, NCCL, dict(attn_dp=gpus, ep=gpus))
    at_once = 512 * gpus
    differs = [f"{gpus} GPUs in place of 4 of a GB200", MADE_UP, f"{at_once:,} at once in place of 4,096"]
    load, profile = Load(at_once, 1000, 1, at_once, times=3), Profile(100, at_once, 64)
    return replace(_reduce_scatterv(four, load, profile, differs), **QWEN)


def _mixed(
    variants: dict[str, Variant], quoted: Mapping[Metric, Quoted], load: Load, profile: Profile, differs: Sequence[str]
) -> Setup:
    rows = [row for metric in quoted for row in _compared(metric, 0, list(variants), quoted[metric])]
    return Setup(variants, [load], rows, differs, profile)


def _quoted_mixed(*rivals: str) -> dict[Metric, Quoted]:
    """Return its figures, by the variants for NCCL and, if there is one, for NCCL on registered memory."""
    figures: dict[Metric, tuple[tuple[float, float], float]] = {
        "next token, ms": ((14.889, 14.386), 12.002),
        "collectives of a decode step, ms": ((1.582, 1.323), 0.399),
        "collectives and waiting of a decode step, ms": ((3.817, 3.631), 2.145),
    }
    return {
        metric: {rival: (figure, after) for rival, figure in zip(rivals, before, strict=False)}
        for metric, (before, after) in figures.items()
    }


def _large_mixed(gpus: int) -> Setup:
    ep = max(2, gpus // 2)
    layout: Variant = dict(attn_dp=2, attn_tp=gpus // 2, ep=ep, moe_tp=gpus // ep, kv_dtype="fp8_e4m3")
    nccl, windows = "planned, NCCL", "planned, NCCL on registered memory"
    variants: dict[str, Variant] = {
        nccl: {**NCCL, **layout},
        windows: {"transport": "nccl_window", "plugins": ("weft_bench.nccl_window",), **layout},
        "naive plan": {**NAIVE, **layout},
        "planned": layout,
    }
    differs = [f"{gpus} GPUs in place of 8", MADE_UP]
    load, profile = Load(16, 8192, 24, 16, times=5), Profile(100, 16, 8192)
    return replace(_mixed(variants, _quoted_mixed(nccl, windows), load, profile, differs), **QWEN)


def _deferred(layout: Variant, load: Load, differs: Sequence[str]) -> Setup:
    before, after = "an all-reduce for each sum", "planned"
    variants: dict[str, Variant] = {before: {**NAIVE, **layout}, after: layout}
    rows = [
        TableRow("tokens/s", 0, before, after, (46_000, 56_000)),
        TableRow("collectives a step", 0, before, after),
        TableRow("MiB a step", 0, before, after),
    ]
    return Setup(variants, [load], rows, differs)


def _large_deferred(gpus: int) -> Setup:
    layout = dict(attn_tp=gpus, ep=max(1, gpus // 2), moe_tp=2 if gpus > 1 else 1)
    setup = _deferred(layout, Load(200, 8192, 1, 64, times=3), [f"{gpus} GPUs in place of 8", MADE_UP])
    return replace(setup, model="step-3.5-flash", changed=FLOAT8)


def _cpu_shm(load: Load, differs: Sequence[str], model: str | None = None) -> Setup:
    before, after = "torch.distributed (gloo)", "shm"
    layout = dict(attn_tp=2, moe_tp=2)
    variants: dict[str, Variant] = {before: GLOO | layout, after: SHM | layout}
    rows = [
        TableRow("first token, ms", 0, before, after, (1.0, 0.75)),
        TableRow("next token, ms", 0, before, after, (1.0, 0.63)),
    ]
    return Setup(variants, [load], rows, [*differs, DEEPSPEED], model=model)


RECIPES = ("ag_rs", "a2a", "fused")
QUOTED_TOKENS = {
    "flashinfer": {
        "": {1: 103.0, 8: 498.0, 32: 1060.0, 64: 1385.0, 128: 1374.0, 256: 1403.0, 512: 1400.0},
        "ag_rs": {1: 89.0, 8: 425.0, 32: 947.0, 64: 1336.0, 128: 1945.0, 256: 2568.0, 512: 3107.0},
        "a2a": {1: 86.0, 8: 413.0, 32: 929.0, 64: 1320.0, 128: 1919.0, 256: 2559.0, 512: 3126.0},
    },
    "fa3": {
        "": {1: 103.0, 8: 492.0, 32: 1058.0, 64: 1370.0, 128: 1358.0, 256: 1384.0, 512: 1382.0},
        "ag_rs": {1: 90.0, 8: 425.0, 32: 953.0, 64: 1358.0, 128: 1961.0, 256: 2572.0, 512: 2930.0},
        "a2a": {1: 87.0, 8: 413.0, 32: 936.0, 64: 1341.0, 128: 1933.0, 256: 2570.0, 512: 2951.0},
    },
}
"""Output tokens per second of seed 004, by attention backend, exchange ("": without dcp) and requests at once."""
QUOTED_FIRST = {
    32: (413.0, 420.0),
    64: (5744.0, 655.0),
    128: (39_672.0, 1095.0),
    256: (106_844.0, 1970.0),
    512: (239_577.0, 28_734.0),
}
"""Mean times to the first token of seed 004, ms, without dcp and with ag_rs, by FlashInfer."""


def _dcp(
    layout: Variant,
    ranks: int,
    loads: Sequence[Load],
    at_once: Sequence[int],
    backends: Mapping[str, Variant],
    differs: Sequence[str],
    changed: Mapping[str, Any] = {},
) -> Setup:
    """Return the setup of decode context parallelism.

    at_once: requests at once in the pull request, for each load. backends: attention backends with their options; one
    without a published figure is compared with FlashInfer's.
    """
    variants: dict[str, Variant] = {}
    rows: list[TableRow] = []
    for backend, options in backends.items():
        first = f"{backend}: attention tensor-parallel"
        names = {recipe: f"{backend}: dcp, {recipe}" for recipe in RECIPES}
        variants[first] = {**layout, **options}
        variants |= {
            name: {**layout, **options, "dcp": ranks, "dcp_exchange": recipe} for recipe, name in names.items()
        }
        quoted = QUOTED_TOKENS.get(backend, QUOTED_TOKENS["flashinfer"])
        rows += [
            TableRow(
                "tokens/s",
                at,
                first,
                name,
                (quoted[""][at_once[at]], quoted[recipe][at_once[at]]) if recipe in quoted else None,
            )
            for at in range(len(loads))
            for recipe, name in names.items()
        ]
        by = names["ag_rs"]
        rows += [TableRow("first token, ms", at, first, by, QUOTED_FIRST.get(at_once[at])) for at in range(len(loads))]
        rows += [TableRow("next token, ms", at, first, by) for at in range(len(loads))]
        rows += [TableRow("sequences at once", at, first, by) for at in range(len(loads)) if at_once[at] > 32]
    return Setup(variants, loads, rows, differs, model="deepseek-v2", changed=changed)


DEEPSEEK_V2_CACHE = Latent(576, 512)
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"dcp_prefill": "gather"},
    {"cuda_graphs": False},
    {"dcp_prefill": "gather", "cuda_graphs": False},
)
"""Options for attention backends; each backend gets the first that it supports."""


def _options_of(backend: BackendEntry, ranks: int) -> tuple[Variant | None, str]:
    """Return a backend's options for DeepSeek-V2 with dcp over `ranks` GPUs, and a line about them.

    The options are None if the backend supports none of ATTEMPTS; the line then says what it lacks.
    """
    capability = torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None
    needs = Needs(
        device="cuda",
        capability=capability,
        dtype="bfloat16",
        kv_dtype="auto",
        caches=lambda: [DEEPSEEK_V2_CACHE],
        page_size=16,
        dcp=ranks,
        dcp_prefill="auto",
        graphs=True,
    )
    refusal: str | None = None
    for options in ATTEMPTS:
        given = replace(
            needs,
            dcp_prefill=options.get("dcp_prefill", needs.dcp_prefill),
            graphs=options.get("cuda_graphs", needs.graphs),
        )
        if (refusal := backend.refusal(given)) is None:
            text = ", ".join(f"{name} {value}" for name, value in options.items())
            return options, f"attention backend {backend.option}" + (f" with {text}" if text else "")
    return None, f"without attention backend {backend.option}: it {refusal}"


def _large_dcp(gpus: int) -> Setup:
    at_once = [n for n in QUOTED_TOKENS["fa3"][""] if n <= 64 * gpus]  # beyond, all wait for a place in the cache
    loads = [Load(n if n < 64 else min(2 * n, 512), 4000, 1500, n) for n in at_once]
    layout = dict(attn_tp=gpus, ep=gpus, moe_tp=1, kv_tokens=48 * 5504, max_running=512)
    found = {backend.option: _options_of(backend, gpus) for backend in BACKENDS if backend.device != "cpu"}
    backends = {
        name: {**options, "attention_backend": name} for name, (options, _) in found.items() if options is not None
    }
    differs = [
        f"{gpus} GPUs in place of 8",
        MADE_UP,
        "the cache is made so small that it binds between 32 and 64 requests, as it did there",
        "the pull request counts tokens out alone; ratios compare, the figures do not",
        *[line for _, line in found.values()],
    ]
    return _dcp(layout, gpus, loads, at_once, backends, differs)


TINY_DEEPSEEK = dict(
    hidden_size=256,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=8,
    intermediate_size=512,
    moe_intermediate_size=64,
    n_routed_experts=8,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    vocab_size=2048,
    bos_token_id=0,
    eos_token_id=1,
)
LATENTS = "a DeepSeek-V2 of 3 layers and width 256 with made-up weights; 2 CPU ranks in place of 8 GPUs"

SEEDS = {
    "reduce-scatterv": Seed(
        "reduce_scatterv in place of an all-reduce and a slice, with data-parallel attention",
        "https://github.com/sgl-project/sglang/pull/22642",
        "Qwen3.5-397B-A17B-FP8, 4 GPUs of a GB200, attention dp 4, experts ep 4, 1,000 tokens in, 1 out, 4,096 at once",
        2,
        _reduce_scatterv(
            _four(SHM, GLOO, dict(attn_dp=2, ep=2)),
            Load(32, 400, 1, 16),
            Profile(10, 16, 16),
            [EMBEDDED, "400 tokens in, 16 at once; the profile is of 10 decode steps"],
        ),
        _large_reduce_scatterv,
    ),
    "mixed": Seed(
        "all-reduce with all-gather, and reduce-scatter with all-reduce, each in one call",
        "https://github.com/sgl-project/sglang/pull/23713",
        "Qwen3.5-397B-A17B-FP8, 8 H200, attention dp 2 × tp 4, ep 4, 8,192 tokens in, 24 out, 16 at once; compared "
        "with NCCL on registered memory",
        4,
        _mixed(
            {
                "planned, gloo": {**TWO_BY_TWO, **GLOO},
                "naive plan, shm": {**TWO_BY_TWO, **NAIVE, **SHM},
                "planned, shm": {**TWO_BY_TWO, **SHM},
            },
            _quoted_mixed("planned, gloo"),
            Load(8, 64, 24, 4),
            Profile(10, 4, 64),
            [EMBEDDED, "4 ranks, which share cores where there are fewer; 64 tokens in, 4 at once"],
        ),
        _large_mixed,
    ),
    "deferred": Seed(
        "one all-reduce a layer in place of three",
        "https://github.com/sgl-project/sglang/pull/22773",
        "Step-3.5-Flash-FP8, 8 H200, tp 8, ep 4, 8,192 tokens in, 1 out, 200 prompts",
        2,
        _deferred(dict(attn_tp=2, ep=2, moe_tp=1, **SHM), Load(16, 900, 1, 8), [EMBEDDED, "900 tokens in, 16 prompts"]),
        _large_deferred,
    ),
    "cpu-shm": Seed(
        "all-reduce through shared memory on CPUs",
        "https://github.com/mingfeima/sglang/pull/5",
        "DeepSeek-Coder-V2-Lite-Instruct, two sockets of a Granite Rapids, tp 2, 1,024 tokens in, 8 out; times "
        "relative to torch.distributed",
        2,
        _cpu_shm(Load(6, 900, 8, 1), [EMBEDDED, "900 tokens in"]),
        lambda ranks: _cpu_shm(Load(4, 1024, 8, 1), [MADE_UP], "deepseek-v2-lite"),
    ),
    "dcp": Seed(
        "decode context parallelism: cached tokens are sharded over the ranks of attention",
        "https://github.com/sgl-project/sglang/pull/21637",
        "DeepSeek-V2, 8 H100, tp 8, dcp 8, about 4,000 tokens in, 1,500 out, 1 to 512 at once",
        2,
        _dcp(
            dict(attn_tp=2, ep=2, moe_tp=1, kv_tokens=640, max_running=16, **SHM),
            2,
            [Load(1, 64, 32, 1), Load(16, 64, 32, 16)],
            (1, 512),
            {"torch": {}},
            [LATENTS, "64 tokens in, 32 out, 1 and 16 at once; the cache holds 6 such requests without dcp"],
            TINY_DEEPSEEK,
        ),
        _large_dcp,
    ),
}
