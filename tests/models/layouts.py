"""Drives models with caches of any kind over layouts of emulated ranks, and compares their logits with an oracle's."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from support import EVERY, run_world
from torch import Tensor

from weft.assets import preset_dir
from weft.attention.caches import cached_layers
from weft.comm.transport import Transport
from weft.engine.batch import SeqRows, build_batch
from weft.engine.runner import ModelRunner, plan_model
from weft.kv.spec import CacheGroup, rule
from weft.models.layers import Builder, Layer
from weft.models.load import load_model
from weft.models.registry import load_config
from weft.place.cost import PRESETS, Offer
from weft.place.show import fold
from weft.place.spec import Mesh

PAGE, PAGES = 4, 24
PATTERNS = {
    "equal": [[9, 4]],
    "ragged": [[12], [2, 5, 1], [1], [6, 3]],
    "empty group": [[7, 2], []],
}
"""Lengths of the sequences in each DP group: group i takes row i modulo the pattern."""
MESHES = (Mesh(), Mesh(2, 2, 2, 2), Mesh(4, 1, 1, 4), Mesh(1, 8, 4, 2), Mesh(2, 4, 8, 1))
"""A few layouts of up to eight ranks, in which every group has one rank somewhere and several elsewhere."""

Sequences = list[list[list[int]]]
Oracle = Callable[[Tensor], Tensor]
"""Logits float32 `[tokens, vocabulary]` of one whole sequence, int64 `[tokens]`."""


def sequences(mesh: Mesh, pattern: str, vocabulary: int, seed: int = 0) -> Sequences:
    """Random tokens of a pattern's lengths."""
    generator, rows = torch.Generator().manual_seed(seed), PATTERNS[pattern]
    return [
        [torch.randint(1, vocabulary, (n,), generator=generator).tolist() for n in rows[group % len(rows)]]
        for group in range(mesh.attn_dp)
    ]


def drive(
    transport: Transport,
    directory: Path,
    mesh: Mesh,
    runs: Sequence[Sequences],
    dtype: torch.dtype = torch.float32,
    split: bool = False,
) -> list[Any]:
    """Runs each set of sequences: a prompt of all but the last two tokens, in two chunks, then token by token, then a
    step without rows. Gives, for each set, {(sequence, position): logits} of this rank's group.
    """
    torch.set_num_threads(1)
    config = replace(load_config(directory), split_vocabulary=split)
    model = load_model(directory, config, mesh, transport.rank, dtype)
    rules = list(dict.fromkeys(map(rule, cached_layers(model).values())))
    runner = ModelRunner(model, mesh, transport.rank, [transport], [CacheGroup(r, PAGES) for r in rules], PAGE)
    for _, backend in runner.caches.paged:  # a read of a slot that nothing wrote must show
        backend.cache.keys.fill_(float("nan"))
        backend.cache.values.fill_(float("nan"))
    for _, states in runner.caches.states:
        for state in states.states:
            state[:, :PAGES].fill_(float("nan"))
    mine = mesh.group_of(transport.rank)
    results = []
    for run in runs:
        seen: dict[tuple[int, int], Tensor] = {}
        lengths = [[len(text) for text in group] for group in run]
        prompts = [[max(1, n - 2) for n in group] for group in lengths]
        until = [[[max(1, n // 2) for n in group] for group in prompts], prompts]
        while until[-1] != lengths:
            until.append(
                [
                    [min(u + 1, n) for u, n in zip(us, ns, strict=True)]
                    for us, ns in zip(until[-1], lengths, strict=True)
                ]
            )
        cached = [[0] * len(group) for group in run]
        states = [-1] * len(run[mine])  # which of its two slots holds a sequence's state
        for reached in [*until, lengths]:
            counts = tuple(sum(u) - sum(c) for u, c in zip(reached, cached, strict=True))
            tokens, seqs, ends = [], [], []
            for i, text in enumerate(run[mine]):
                begin, end = cached[mine][i], reached[mine][i]
                if end > begin:
                    tokens += text[begin:end]
                    # Each group has other pages, and states move from slot to slot.
                    tables = [
                        [2 * i + states[i] if begin else -1, 2 * i + (states[i] + 1) % 2]
                        if r.state
                        else [(i * 5 + 3 * p + g) % PAGES for p in range(-(-end // PAGE))]
                        for g, r in enumerate(rules)
                    ]
                    states[i] = (states[i] + 1) % 2
                    seqs.append(SeqRows(end - begin, begin, tables, 1))
                    ends.append((i, end - 1))
            logits = runner.forward(build_batch(tokens, seqs, PAGE, rules), counts)
            seen.update(dict(zip(ends, logits, strict=True)))
            cached = reached
        results.append(seen)
    return results


def check(directory: Path, mesh: Mesh, oracle: Oracle, vocabulary: int, split: bool = False) -> None:
    """Checks every logit that was sampled, of every pattern, on every rank, to a relative error of 10⁻⁵.

    split: the vocabulary over attn_tp.
    """
    runs = [sequences(mesh, pattern, vocabulary, seed) for seed, pattern in enumerate(PATTERNS)]
    results = run_world(mesh.world, lambda t: drive(t, directory, mesh, runs, split=split))
    for index, run in enumerate(runs):
        for group, texts in enumerate(run):
            for i, text in enumerate(texts):
                with torch.no_grad():
                    wanted = oracle(torch.tensor(text))
                for rank in (r for r in range(mesh.world) if mesh.group_of(r) == group):
                    seen = results[rank][index]
                    at = [p for s, p in seen if s == i]
                    assert len(text) - 1 in at
                    for p in at:
                        error = (seen[i, p] - wanted[p]).norm() / wanted[p].norm()
                        assert error <= 1e-5, f"rank {rank}, sequence {i}, position {p}: {error:.2e}"


class Published(Protocol):
    """A model of transformers' that knows the names of the published index."""

    def bfloat16(self) -> Any: ...
    def float(self) -> Any: ...
    def published(self) -> dict[str, Tensor]: ...
    def __call__(self, tokens: Tensor) -> Tensor: ...


def nearness(model: Published, config: dict[str, Any], directory: Path) -> tuple[float, float]:
    """How far bfloat16 is from float32 on four ranks, relatively: (our logits, transformers'), quartiles of 24 prompts.

    The lower ones: where rounding makes a router choose another expert, on either side, a prompt is far off.
    """
    small = model.bfloat16()
    save_file({name: tensor.clone() for name, tensor in small.published().items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    mesh = Mesh(2, 2, 2, 2)
    runs = [sequences(mesh, "equal", 61, seed) for seed in range(6)]
    ran = run_world(mesh.world, lambda t: drive(t, directory, mesh, runs, torch.bfloat16))
    every = [
        (at, group, i) for at, run in enumerate(runs) for group, texts in enumerate(run) for i in range(len(texts))
    ]
    texts = [torch.tensor(runs[at][group][i]) for at, group, i in every]
    with torch.no_grad():
        theirs = torch.stack([small(text)[-1] for text in texts]).double()
        truth = torch.stack([small.float()(text)[-1] for text in texts]).double()
    last = [ran[mesh.leader(group)][at][i, len(runs[at][group][i]) - 1] for at, group, i in every]
    ours = torch.stack(last).double()
    far = [((x - truth).norm(dim=-1) / truth.norm(dim=-1)).quantile(0.25).item() for x in (ours, theirs)]
    return far[0], far[1]


def stored_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The tensors that a model reads, and their shapes as they are stored."""
    model = load_config(directory).build(Builder(Mesh(), 0, torch.bfloat16, torch.device("meta")))
    layers = [layer for layer in model.modules() if isinstance(layer, Layer)]
    every = [source for layer in layers for found in layer.sources.values() for source in found]
    return {source.name: source.stored()[0] for source in every}


def check_float8(plain: dict[str, Tensor], names: Sequence[str], config: dict[str, Any], directory: Path) -> None:
    """Stores the named tensors in FP8: every rank's weights are what they stand for. plain: split as in the release."""
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
