"""Drives models with caches of any kind over layouts of emulated ranks, and compares their logits with an oracle's."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from support import EVERY, converted, run_world
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear

from planner.meshes import layouts
from weft.comm.transport import Transport
from weft.engine.assets import preset_dir
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.attention.caches import cached_layers
from weft.engine.kernels import cpu_ops, model_reference
from weft.engine.kv.cache_spec import CacheGroup, rule
from weft.engine.models.layers.basic import Builder, Layer
from weft.engine.models.load import load_model
from weft.engine.models.registry import load_config
from weft.engine.worker.model_runner import ModelRunner
from weft.engine.worker.planning import plan_model
from weft.planner.cost import PRESETS, Costs, Offer
from weft.planner.show import fold
from weft.planner.spec import Mesh

PAGE, PAGES = 4, 24
PATTERN = [[9, 4, 1], [2], [12], [5, 1], [], [6, 3]]
"""Lengths of the sequences in each DP group: group i has item i modulo their number. Groups have other numbers of rows
than each other in most steps, and none in some: the second in every other step, the fifth in all.
"""
MESHES = tuple(m for m in layouts(8) if m.world in (1, 2, 4, 8) and m.attn_dp == m.moe_tp)
"""Layouts of powers of two: every split of attention and every split of experts, each once. `test_every_layout.py` has
the others.
"""

config_of = lru_cache(load_config)
Run = list[list[list[int]]]
"""Sequences of each DP group."""
Lengths = list[list[int]]
"""Number of tokens read of each sequence, per DP group."""
Steps = Callable[[Lengths], list[Lengths]]
"""Lengths after each step, from the sequences' final lengths."""
Oracle = Callable[[Tensor], Tensor]
"""Logits float32 `[tokens, vocabulary]` of one whole sequence, int64 `[tokens]`."""


def sequences(mesh: Mesh, vocabulary: int, seed: int = 0) -> Run:
    """Random tokens; of a group of the same number they are the same on every mesh."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randint(1, vocabulary, (n,), generator=generator).tolist() for n in PATTERN[group % len(PATTERN)]]
        for group in range(mesh.attn_dp)
    ]


@lru_cache(maxsize=256)
def truth(oracle: Oracle, text: tuple[int, ...]) -> Tensor:
    """Return the oracle's logits of a sequence, cached as many layouts have it. Products are rounded once: with float32
    sums by torch some oracles are further from the truth than the tests allow."""

    def once_rounded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "linear", once_rounded)
        return oracle(torch.tensor(text))


def step_by_step(lengths: Lengths) -> list[Lengths]:
    """A prompt of all but the last two tokens, in two chunks, then token by token, then a step without rows."""
    prompts = [[max(1, n - 2) for n in group] for group in lengths]
    until = [[[max(1, n // 2) for n in group] for group in prompts], prompts]
    while until[-1] != lengths:
        until.append(
            [[min(u + 1, n) for u, n in zip(us, ns, strict=True)] for us, ns in zip(until[-1], lengths, strict=True)]
        )
    return [*until, lengths]


def in_two_steps(lengths: Lengths) -> list[Lengths]:
    """Half of a prompt and the rest, or all but a token and that one; the second group begins in the second step."""
    first = [[0 if g == 1 else n - 1 if i % 2 else n // 2 for i, n in enumerate(ns)] for g, ns in enumerate(lengths)]
    return [first, lengths]


def drive(
    transport: Transport,
    directory: Path,
    mesh: Mesh,
    run: Run,
    dtype: torch.dtype = torch.float32,
    split: bool = False,
    float8: bool = False,
    steps: Steps | None = None,
    costs: Costs | None = None,
) -> dict[tuple[int, int], Tensor]:
    """Run the sequences, step by step if not otherwise. Return {(sequence, position): logits} of this rank's group."""
    torch.set_num_threads(1)
    config = replace(config_of(directory), split_vocabulary=split, float8=float8)
    model = load_model(directory, config, mesh, transport.rank, dtype)
    rules = list(dict.fromkeys(map(rule, cached_layers(model).values())))
    runner = ModelRunner(model, mesh, transport.rank, [transport], [CacheGroup(r, PAGES) for r in rules], PAGE, costs)
    for _, backend in runner.caches.paged:  # a read of a slot that nothing wrote must show
        backend.cache.keys.fill_(float("nan"))
        backend.cache.values.fill_(float("nan"))
    for _, states in runner.caches.states:
        for state in states.states:
            state[:, :PAGES].fill_(float("nan"))
    mine = mesh.group_of(transport.rank)
    seen: dict[tuple[int, int], Tensor] = {}
    lengths = [[len(text) for text in group] for group in run]
    cached = [[0] * len(group) for group in run]
    slots = [-1] * len(run[mine])  # which of its two slots holds a sequence's state
    for reached in (steps or step_by_step)(lengths):
        counts = tuple(sum(u) - sum(c) for u, c in zip(reached, cached, strict=True))
        tokens, seqs, ends = [], [], []
        for i, text in enumerate(run[mine]):
            begin, end = cached[mine][i], reached[mine][i]
            if end > begin:
                tokens += text[begin:end]
                # Each group has other pages, and states move from slot to slot.
                tables = [
                    [2 * i + slots[i] if begin else -1, 2 * i + (slots[i] + 1) % 2]
                    if r.state
                    else [(i * 5 + 3 * p + g) % PAGES for p in range(-(-end // PAGE))]
                    for g, r in enumerate(rules)
                ]
                slots[i] = (slots[i] + 1) % 2
                seqs.append(SeqRows(end - begin, begin, tables, 1))
                ends.append((i, end - 1))
        logits = runner.forward(build_batch(tokens, seqs, PAGE, rules), counts)
        seen.update(dict(zip(ends, logits, strict=True)))
        cached = reached
    return seen


def check(
    directory: Path,
    mesh: Mesh,
    oracle: Oracle,
    vocabulary: int,
    split: bool = False,
    steps: Steps | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Check every logit that was sampled, on every rank, to a relative error. split: the vocabulary over
    attn_tp. steps: as `drive`.
    """
    run = sequences(mesh, vocabulary)
    results = run_world(mesh.world, lambda t: drive(t, directory, mesh, run, split=split, steps=steps))
    for rank, seen in enumerate(results):
        texts = run[mesh.group_of(rank)]
        assert {(i, len(text) - 1) for i, text in enumerate(texts)} <= seen.keys()
        for (i, position), logits in seen.items():
            wanted = truth(oracle, tuple(texts[i]))[position]
            error = (logits - wanted).norm() / wanted.norm()
            assert error <= tolerance, f"rank {rank}, sequence {i}, position {position}: {error:.2e}"


def over(values: dict[str, Any], parts: int) -> dict[str, Any]:
    """A small config with two layers, a dense and a sparse one where both are, that divides over `parts` ranks."""
    text = values.get("text_config", values)
    keys = 1 if parts == 6 else parts if parts % 2 else 2  # fewer than ranks too: replicated
    sizes = dict(num_attention_heads=2 * parts, num_hidden_layers=2)
    sizes |= dict.fromkeys(("num_key_value_heads", "num_attention_groups"), keys)
    sizes |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 2 * parts)
    sizes |= dict.fromkeys(("linear_num_value_heads",), 2 * parts)
    sizes |= dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "share_expert_dim", "shared_expert_intermediate_size"), 4 * parts
    )
    text = text | {name: size for name, size in sizes.items() if name in text}
    if text.get("n_group", 1) > 1:  # a token's experts are all of the groups that it may go to
        limit = text["n_routed_experts"] // text["n_group"] * text["topk_group"]
        text |= dict(num_experts_per_tok=min(text["num_experts_per_tok"], limit))
    if "linear_num_key_heads" in text:
        text |= dict(linear_num_key_heads=parts, layer_types=["linear_attention", "full_attention"])
    elif "attention_other_setting" in text:
        other = dict(num_attention_heads=4 * parts, num_attention_groups=keys)
        text = {
            name: value[:4] if isinstance(value, list) else value for name, value in text.items()
        }  # two draft tokens
        text |= dict(attention_other_setting=text["attention_other_setting"] | other, moe_layers_enum="1")
        text |= dict(swiglu_limits=[0.0, 0.5, 0.0, 0.0])
    elif "layer_types" in text:
        text |= dict(layer_types=text["layer_types"][:2])
    return values | {"text_config": text} if "text_config" in values else text


class Published(Protocol):
    """A model of transformers' that knows the names of the published index."""

    def published(self) -> dict[str, Tensor]: ...
    def __call__(self, tokens: Tensor) -> Tensor: ...


def nearness(model: Published, config: dict[str, Any], directory: Path) -> tuple[float, float]:
    """Return the median relative errors of bfloat16 against float32 on four ranks: (our logits', transformers').

    Tokens of 32 prompts count if both chose the experts that float32 chooses: others are far off, on either side,
    wherever rounding decided.
    """
    small = converted(model, torch.bfloat16)
    save_file({name: tensor.clone() for name, tensor in small.published().items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    texts = torch.randint(1, 61, (32, 6), generator=torch.Generator().manual_seed(1))
    ours, our_choice = logits_of(directory, texts)
    with torch.no_grad():
        theirs, their_choice = watched(small, texts)
        truth, right = watched(converted(small, torch.float32), texts)
    alike = ((our_choice == right) & (their_choice == right)).all(-1).all(0)  # in every layer
    same = alike.int().cummin(-1).values.bool()
    assert same.sum() >= 24, f"only {same.sum()} of {same.numel()} tokens have the same experts: too few to compare"
    wanted = truth[same]
    off = [((logits[same] - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median().item() for logits in (ours, theirs)]
    return off[0], off[1]


def logits_of(directory: Path, texts: Tensor) -> tuple[Tensor, Tensor]:
    """(our logits of equally long prompts `[prompts, tokens, vocabulary]` in bfloat16 on four ranks, the experts that
    were chosen `[layers, prompts, tokens, k]`, ascending).
    """
    mesh, (many, length) = Mesh(1, 4, 2, 2), texts.shape
    config, choose, chosen = load_config(directory), model_reference.choose, dict[int, list[Tensor]]()
    kernel = cpu_ops._choose

    def note(expert: Tensor) -> None:
        if len(expert):  # a trace has no rows
            chosen.setdefault(threading.get_ident(), []).append(expert.long().sort(-1).values)

    def watch(*args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        weight, expert = choose(*args, **more)
        note(expert)
        return weight, expert

    def watch_kernel(logits: Any, how: Any, first: int, bias: Any) -> tuple[Tensor, Tensor] | None:
        found = kernel(logits, how, first, bias)
        if found is not None:
            note(found[1] + first)
        return found

    def main(transport: Transport) -> Tensor:
        torch.set_num_threads(1)
        model = load_model(directory, config, mesh, transport.rank, torch.bfloat16)
        rules = list(dict.fromkeys(map(rule, cached_layers(model).values())))
        pages = -(-length // PAGE)
        groups = [CacheGroup(r, many * pages) for r in rules]
        runner = ModelRunner(model, mesh, transport.rank, [transport], groups, PAGE)
        seqs = [
            SeqRows(length, 0, [[-1, i] if r.state else range(i * pages, (i + 1) * pages) for r in rules], length)
            for i in range(many)
        ]
        return runner.forward(build_batch(texts.flatten().tolist(), seqs, PAGE, rules), (texts.numel(),))

    patch = mock.patch.object
    with patch(model_reference, "choose", watch), patch(cpu_ops, "_choose", watch_kernel):
        logits = run_world(mesh.world, main)[0]
    first, *others = (torch.stack(found) for found in chosen.values())
    assert len(others) == 3 and all(torch.equal(first, found) for found in others), "ranks choose alike"
    return logits.double().view(many, length, -1), first.unflatten(1, (many, length))


def watched(model: Any, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Return transformers' logits and experts, like `logits_of`, a prompt at a time."""
    chosen: list[Tensor] = []

    def watch(router: Any, given: Any, result: Sequence[Tensor]) -> None:
        [expert] = (r for r in result if not r.is_floating_point())
        chosen.append(expert.reshape(texts.shape[1], -1).sort(-1).values)

    hooks = [m.register_forward_hook(watch) for m in model.modules() if type(m).__name__.endswith("Router")]
    logits = torch.stack([model(text) for text in texts]).double()
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(chosen).unflatten(0, (len(texts), -1)).transpose(0, 1)


def stored_shapes(directory: Path, num_layers: int | None = None) -> dict[str, tuple[int, ...]]:
    """The tensors that a model, or its first `num_layers` layers, reads, and their shapes as they are stored."""
    config = load_config(directory, num_layers=num_layers)
    model = config.build(Builder(Mesh(), 0, torch.bfloat16, torch.device("meta")))
    layers = [layer for layer in model.modules() if isinstance(layer, Layer)]
    every = [source for layer in layers for found in layer.sources.values() for source in found]
    return {source.name: source.stored()[0] for source in every}


def check_float8(plain: dict[str, Tensor], names: Sequence[str], config: dict[str, Any], directory: Path) -> None:
    """Store the named tensors in FP8: every rank's weights are what they stand for. plain: split as in the release."""
    stored, wanted = dict(plain), dict(plain)
    for name in names:
        values, scales, wanted[name] = float8(plain[name], 8)
        stored |= {name: values, f"{name}_scale_inv": scales}
    method = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[8, 8])
    loaded = []
    mesh = Mesh(1, 4, 2, 2)
    for tensors in (stored, wanted):
        save_file(tensors, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
        found = load_config(directory)
        loaded.append([dict(load_model(directory, found, mesh, rank).named_parameters()) for rank in (1, 2)])
    for ours, theirs in zip(*loaded, strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def float8(weight: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """(stored, scales, what they stand for) of `[…, rows, columns]`, element by element."""
    rows, columns = (-(-n // block) for n in weight.shape[-2:])
    scales = torch.rand(*weight.shape[:-2], rows, columns) + 0.01
    spread = torch.empty_like(weight)
    for r, c in itertools.product(range(weight.shape[-2]), range(weight.shape[-1])):
        spread[..., r, c] = scales[..., r // block, c // block]
    stored = (weight / spread).to(torch.float8_e4m3fn)
    return stored, scales, stored.float() * spread


def planned(preset: str, mesh: Mesh) -> Counter[str]:
    """The collectives of a published shape by read, kind, group and operation, for eight tokens in each DP group."""
    config = load_config(preset_dir(preset))
    planner = plan_model(config, mesh, torch.bfloat16, [Offer("any", EVERY, EVERY, PRESETS["h200-nvlink"])])
    moves = planner.plan((8,) * mesh.attn_dp).moves()
    return Counter(f"{fold(read.site)} {edge.kind} {edge.group} {step.op}" for read, step, edge in moves)
