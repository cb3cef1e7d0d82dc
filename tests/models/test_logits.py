"""Logits of every layout of up to 8 ranks against transformers', prefill and decode, all row patterns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import FAMILIES, run_world, small_model

from weft.comm.transport import Transport
from weft.engine.batch import SeqRows, build_batch
from weft.engine.runner import ModelRunner
from weft.kv.spec import CacheGroup, Rule
from weft.models.load import load_model
from weft.models.registry import load_config
from weft.place.spec import Mesh, layouts

PAGE = 4
# Lengths of the prompts in each DP group: group i takes row i modulo the pattern.
PATTERNS = {
    "equal": [[3, 4]],
    "ragged": [[9], [2, 5, 1], [1], [6, 3]],
    "empty group": [[4, 2], []],
    "one token": [[1], [], [], [], [], [], [], []],
}

Sequences = list[list[list[int]]]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[tuple[str, int], tuple[Path, Any]] = {}

    def get(family: str, parts: int) -> tuple[Path, Any]:
        if (family, parts) not in made:
            directory = tmp_path_factory.mktemp(f"{family}-{parts}")
            made[family, parts] = directory, small_model(family, parts, directory, seed=parts)
        return made[family, parts]

    return get


def sequences(mesh: Mesh, pattern: str, generator: torch.Generator) -> Sequences:
    rows = PATTERNS[pattern]
    return [
        [torch.randint(1, 61, (n,), generator=generator).tolist() for n in rows[g % len(rows)]]
        for g in range(mesh.attn_dp)
    ]


def drive(transport: Transport, directory: Path, mesh: Mesh, runs: list[Sequences], decodes: int) -> list[Any]:
    """Runs each set of sequences: a prefill of all but the last `decodes` tokens, in two chunks, then token by token.

    Gives, per run, {(sequence, position): logits} of this rank's group.
    """
    torch.set_num_threads(1)
    model = load_model(directory, load_config(directory), mesh, transport.rank)
    runner = ModelRunner(model, mesh, transport.rank, [transport], [CacheGroup(Rule(), 24)], PAGE)
    span = PAGE * mesh.dcp
    for _, backend in runner.caches.paged:  # a read of a slot that nothing wrote must show
        backend.cache.keys.fill_(float("nan"))
        backend.cache.values.fill_(float("nan"))
    mine = mesh.group_of(transport.rank)
    results = []
    for run in runs:
        seen: dict[tuple[int, int], torch.Tensor] = {}
        cached = [[0] * len(group) for group in run]

        def step(until: list[list[int]], run: Sequences = run, seen: Any = seen, cached: Any = cached) -> None:
            counts = tuple(
                sum(u - c for u, c in zip(us, cs, strict=True)) for us, cs in zip(until, cached, strict=True)
            )
            tokens, seqs, ends = [], [], []
            for i, text in enumerate(run[mine]):
                begin, end = cached[mine][i], until[mine][i]
                if end > begin:
                    tokens += text[begin:end]
                    pages = [(i * 5 + 3 * p) % 24 for p in range(-(-end // span))]
                    seqs.append(SeqRows(end - begin, begin, [pages], True))
                    ends.append((i, end - 1))
            logits = runner.forward(build_batch(tokens, seqs, span), counts)
            seen.update(dict(zip(ends, logits, strict=True)))
            for group, reached in enumerate(until):
                cached[group] = list(reached)

        lengths = [[len(t) for t in group] for group in run]
        prompts = [[max(1, n - decodes) for n in group] for group in lengths]
        step([[max(1, n // 2) for n in group] for group in prompts])
        step(prompts)
        while cached != lengths:
            step([[min(c + 1, n) for c, n in zip(cs, ns, strict=True)] for cs, ns in zip(cached, lengths, strict=True)])
        step(lengths)  # everyone idle: zero rows everywhere
        results.append(seen)
    return results


def compare(results: list[list[Any]], runs: list[Sequences], mesh: Mesh, model: Any) -> int:
    """Checks every logit that was sampled; gives their number."""
    checked = 0
    for index, run in enumerate(runs):
        for rank in range(mesh.world):
            seen = results[rank][index]
            for i, text in enumerate(run[mesh.group_of(rank)]):
                with torch.no_grad():
                    wanted = model(torch.tensor([text])).logits[0].float()
                at = [p for s, p in seen if s == i]
                assert len(text) - 1 in at
                for p in at:
                    error = (seen[i, p] - wanted[p]).norm() / wanted[p].norm()
                    assert error <= 1e-5, f"rank {rank}, sequence {i}, position {p}: {error:.2e}"
                    checked += 1
    return checked


# A model without experts is the same however they would be dealt out.
CASES = [(family, mesh) for family in FAMILIES for mesh in layouts(8) if family != "qwen3" or mesh.ep == 1]


@pytest.mark.parametrize("family, mesh", CASES, ids=str)
def test_every_layout_gives_transformers_logits(saved: Any, family: str, mesh: Mesh) -> None:
    # transformers' own float32 rounding is near 1e-7 here, so 1e-5 leaves a wrong sum no room.
    parts = {1: 2, 2: 2, 3: 6, 4: 4}.get(mesh.world, mesh.world)
    directory, model = saved(family, parts)
    generator = torch.Generator().manual_seed(hash(str(mesh)) % 1000)
    runs = [sequences(mesh, pattern, generator) for pattern in PATTERNS]
    results = run_world(mesh.world, lambda t: drive(t, directory, mesh, runs, decodes=2))
    assert compare(results, runs, mesh, model) >= mesh.world


LITE = dict(q_lora_rank=None, topk_method="greedy", n_group=1, rope_parameters=dict(rope_theta=1e4))


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(2, 2, 4, 1), Mesh(1, 4, 2, 2)], ids=str)
@pytest.mark.parametrize(
    "family, changes",
    [
        pytest.param("deepseek_v2", LITE, id="v2-lite"),  # queries of the hidden state, routing without groups, no YaRN
        pytest.param("deepseek_v3", {}, id="v3"),
        pytest.param("deepseek_v3", dict(norm_topk_prob=False, rope_interleave=False), id="v3 otherwise"),
    ],
)
def test_other_deepseeks(family: str, changes: dict, mesh: Mesh, tmp_path: Path) -> None:
    model = small_model(family, 4, tmp_path, **changes)
    runs = [sequences(mesh, pattern, torch.Generator().manual_seed(3)) for pattern in ("ragged", "empty group")]
    results = run_world(mesh.world, lambda t: drive(t, tmp_path, mesh, runs, decodes=2))
    assert compare(results, runs, mesh, model) >= mesh.world
