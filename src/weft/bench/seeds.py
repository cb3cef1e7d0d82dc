"""The five pull requests that Weft grew from: what each measured, and the same for this host.

A `Seed` is a row of `SEEDS`: the pull request's figures, and how its set-up becomes variants of an engine and loads on
as many ranks as there are. `weft.bench.reproduce` runs any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

Metric = Literal[
    "tokens/s", "first token, ms", "next token, ms", "sequences at once", "collectives a step", "MiB a step"
]
"""sequences at once: the most that had their tokens in the cache. MiB: that the busiest rank receives
(`weft.comm.stats.StepStat`)."""
Options = Mapping[str, Any]
"""Of `weft.engine.config.EngineConfig`."""


@dataclass(frozen=True)
class Load:
    """requests of input random tokens and output tokens each, `concurrency` at once."""

    requests: int
    input: int
    output: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.input} in, {self.output} out, {self.concurrency} at once"


@dataclass(frozen=True)
class Row:
    """A line of the table: a metric of a load, by two variants. quoted: the pull request's figures for the two."""

    metric: Metric
    load: int
    before: str
    after: str
    quoted: tuple[float, float] | None = None


@dataclass(frozen=True)
class Setup:
    """What is run here. model: a preset, with the fields of its config.json that are changed; None: the embedded model.

    differs: what is not as in the pull request, a line each.
    """

    model: str | None
    changed: Options
    variants: Mapping[str, Options]
    loads: Sequence[Load]
    rows: Sequence[Row]
    differs: Sequence[str]


@dataclass(frozen=True)
class Seed:
    """A pull request. original: what it measured on. min_ranks: that its layout takes.

    small: for CPUs, within a minute or two; large: for so many GPUs.
    """

    title: str
    source: str
    original: str
    min_ranks: int
    small: Setup
    large: Callable[[int], Setup]


EMBEDDED = "the embedded model (4 layers, 8 experts) in place of the pull request's; CPU ranks in place of GPUs"
DEEPSPEED = "DeepSpeed's all-reduce is no transport of the engine; weft bench collectives times it"
DEEPSPEED += "" if find_spec("deepspeed") else "; it is not installed here"
SHM, GLOO, PEER, NCCL = ({"transport": name} for name in ("shm", "gloo", "peer", "nccl"))
NAIVE = {"plan": "naive"}


def _four(ours: Options, theirs: Options, layout: Options) -> dict[str, Options]:
    """The naive plan and the cheapest, each by the transport that is usual and by Weft's own."""
    return {
        "all-reduce and slice, usual transport": {**NAIVE, **theirs, **layout},
        "all-reduce and slice, Weft's transport": {**NAIVE, **ours, **layout},
        "planned, usual transport": {**theirs, **layout},
        "planned, Weft's transport": {**ours, **layout},
    }


def _compared(metric: Metric, load: int, names: Sequence[str], quoted: tuple[float, float] | None = None) -> list[Row]:
    """The last variant beside each other; the pull request's figures beside the first."""
    *others, last = names
    return [Row(metric, load, name, last, quoted if name == others[0] else None) for name in others]


def _reduce_scatterv(model: str | None, four: dict[str, Options], load: Load, differs: Sequence[str]) -> Setup:
    rows = [
        *_compared("tokens/s", 0, list(four), (53_006, 57_115)),
        Row("collectives a step", 0, "all-reduce and slice, Weft's transport", "planned, Weft's transport"),
        Row("MiB a step", 0, "all-reduce and slice, Weft's transport", "planned, Weft's transport"),
    ]
    return Setup(model, {}, four, [load], rows, differs)


def _large_reduce_scatterv(gpus: int) -> Setup:
    four = _four(PEER, NCCL, dict(attn_dp=gpus, ep=gpus))
    differs = [f"{gpus} GPUs in place of 4 of a GB200", "made-up weights; as many layers as fit"]
    return _reduce_scatterv("qwen3.5-397b-a17b", four, Load(1024, 1000, 1, 512), differs)


def _mixed(model: str | None, variants: dict[str, Options], load: Load, differs: Sequence[str]) -> Setup:
    rows = _compared("next token, ms", 0, list(variants), (14.386, 12.002))
    return Setup(model, {}, variants, [load], rows, differs)


def _large_mixed(gpus: int) -> Setup:
    layout = dict(attn_dp=2, attn_tp=gpus // 2, ep=max(2, gpus // 2), moe_tp=gpus // max(2, gpus // 2))
    variants: dict[str, Options] = {
        "planned, NCCL": {**NCCL, **layout},
        "naive plan": {**NAIVE, **layout},
        "planned": layout,
    }
    differs = [f"{gpus} GPUs in place of 8", "made-up weights; as many layers as fit", "cache in bfloat16, not FP8"]
    return _mixed("qwen3.5-397b-a17b", variants, Load(32, 8192, 24, 16), differs)


def _deferred(model: str | None, layout: Options, load: Load, differs: Sequence[str]) -> Setup:
    before, after = "an all-reduce for each sum", "planned"
    variants: dict[str, Options] = {before: {**NAIVE, **layout}, after: layout}
    rows = [
        Row("tokens/s", 0, before, after, (46_000, 56_000)),
        Row("collectives a step", 0, before, after),
        Row("MiB a step", 0, before, after),
    ]
    return Setup(model, {}, variants, [load], rows, differs)


def _large_deferred(gpus: int) -> Setup:
    layout = dict(attn_tp=gpus, ep=max(1, gpus // 2), moe_tp=2 if gpus > 1 else 1)
    differs = [f"{gpus} GPUs in place of 8", "made-up weights; as many layers as fit"]
    return _deferred("step-3.5-flash", layout, Load(64, 8192, 1, 64), differs)


def _cpu_shm(model: str | None, changed: Options, load: Load, differs: Sequence[str]) -> Setup:
    before, after = "torch.distributed (gloo)", "shm"
    layout = dict(attn_tp=2, moe_tp=2)
    variants: dict[str, Options] = {before: GLOO | layout, after: SHM | layout}
    rows = [
        Row("first token, ms", 0, before, after, (1.0, 0.75)),
        Row("next token, ms", 0, before, after, (1.0, 0.63)),
    ]
    return Setup(model, changed, variants, [load], rows, [*differs, DEEPSPEED])


def _dcp(changed: Options, layout: Options, ranks: int, cache: Options, loads: list[Load], differs: list[str]) -> Setup:
    variants: dict[str, Options] = {"attention tensor-parallel": {**layout, **cache}}
    for recipe in ("ag_rs", "a2a", "fused"):
        variants[f"dcp, {recipe}"] = {**layout, **cache, "dcp": ranks, "dcp_exchange": recipe}
    quoted = {0: (103.0, 86.0), len(loads) - 1: (1400.0, 3126.0)}
    first, *others = variants
    rows = [
        Row("tokens/s", at, first, name, quoted.get(at) if name == "dcp, a2a" else None)
        for at in range(len(loads))
        for name in others
    ]
    last, by = len(loads) - 1, "dcp, ag_rs"
    rows += [Row("first token, ms", at, first, by, (239_577, 28_734) if at == last else None) for at in (0, last)]
    rows += [Row("next token, ms", at, first, by) for at in (0, last)]
    rows.append(Row("sequences at once", last, first, by))
    return Setup("deepseek-v2", changed, variants, loads, rows, differs)


def _large_dcp(gpus: int) -> Setup:
    loads = [Load(4 * n, 4000, 150, n) for n in (1, 8, 32, 64, 128)]
    differs = [
        f"{gpus} GPUs in place of 8",
        "made-up weights; as many layers as fit; 150 tokens out in place of 1,500",
        "the cache is made so small that it binds between 32 and 64 requests, as it did there",
        "attention by Triton's kernels alone: FA3 and FlashInfer are not among Weft's backends",
    ]
    return _dcp(
        {}, dict(attn_tp=gpus, ep=gpus, moe_tp=1), gpus, dict(kv_tokens=48 * 4150, max_running=128), loads, differs
    )


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
)
LATENTS = "a DeepSeek-V2 of 3 layers and width 256 with made-up weights; 2 CPU ranks in place of 8 GPUs"

SEEDS = {
    "reduce-scatterv": Seed(
        "reduce_scatterv in place of an all-reduce and a slice, with data-parallel attention",
        "https://github.com/sgl-project/sglang/pull/22642",
        "Qwen3.5-397B-A17B-FP8, 4 GPUs of a GB200, attention dp 4, experts ep 4, 1,000 tokens in, 1 out, 4,096 at once",
        2,
        _reduce_scatterv(
            None, _four(SHM, GLOO, dict(attn_dp=2, ep=2)), Load(32, 400, 1, 16), [EMBEDDED, "400 tokens in, 16 at once"]
        ),
        _large_reduce_scatterv,
    ),
    "mixed": Seed(
        "all-reduce with all-gather, and reduce-scatter with all-reduce, each in one call",
        "https://github.com/sgl-project/sglang/pull/23713",
        "Qwen3.5-397B-A17B-FP8, 8 H200, attention dp 2 × tp 4, ep 4, 8,192 tokens in, 24 out, 16 at once; beside NCCL "
        "on registered memory",
        4,
        _mixed(
            None,
            {
                "planned, gloo": dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2, **GLOO),
                "naive plan, shm": dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2, **NAIVE, **SHM),
                "planned, shm": dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2, **SHM),
            },
            Load(8, 64, 24, 4),
            [EMBEDDED, "4 ranks, which share cores where there are fewer; 64 tokens in, 4 at once"],
        ),
        _large_mixed,
    ),
    "deferred": Seed(
        "one all-reduce a layer in place of three",
        "https://github.com/sgl-project/sglang/pull/22773",
        "Step-3.5-Flash-FP8, 8 H200, tp 8, ep 4, 8,192 tokens in, 1 out, 200 prompts",
        2,
        _deferred(
            None, dict(attn_tp=2, ep=2, moe_tp=1, **SHM), Load(16, 900, 1, 8), [EMBEDDED, "900 tokens in, 16 prompts"]
        ),
        _large_deferred,
    ),
    "cpu-shm": Seed(
        "all-reduce through shared memory on CPUs",
        "https://github.com/mingfeima/sglang/pull/5",
        "DeepSeek-Coder-V2-Lite-Instruct, two sockets of a Granite Rapids, tp 2, 1,024 tokens in, 8 out; times "
        "relative to torch.distributed",
        2,
        _cpu_shm(None, {}, Load(6, 900, 8, 1), [EMBEDDED, "900 tokens in"]),
        lambda ranks: _cpu_shm("deepseek-v2-lite", {}, Load(4, 1024, 8, 1), ["made-up weights"]),
    ),
    "dcp": Seed(
        "decode context parallelism: cached tokens are sharded over the ranks of attention",
        "https://github.com/sgl-project/sglang/pull/21637",
        "DeepSeek-V2, 8 H100, tp 8, dcp 8, about 4,000 tokens in, 1,500 out, 1 to 512 at once",
        2,
        _dcp(
            TINY_DEEPSEEK,
            dict(attn_tp=2, ep=2, moe_tp=1, **SHM),
            2,
            dict(kv_tokens=640, max_running=16),
            [Load(1, 64, 32, 1), Load(16, 64, 32, 16)],
            [LATENTS, "64 tokens in, 32 out, 1 and 16 at once; the cache holds 6 such requests without dcp"],
        ),
        _large_dcp,
    ),
}
