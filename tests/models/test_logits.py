"""Logits of every layout of up to 8 ranks against transformers', prefill and decode, all row patterns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import FAMILIES, run_world, small_model

from planner.meshes import layouts
from weft.comm.transport import Transport
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.models.layers.moe import SparseMoE
from weft.engine.models.load import load_model
from weft.engine.models.registry import load_config
from weft.engine.worker.model_runner import ModelRunner
from weft.planner.exchange import Exchange
from weft.planner.experts import Forms
from weft.planner.spec import Mesh
from weft.stream.hidden import Hidden

PAGE, PAGES = 4, 24
config_of = lru_cache(load_config)
Steps = dict[str, Callable[[int], tuple[int, int]]]
"""Rows that each of two sequences has in a step, by DP group: a chunk of its prompt, or a token to decode."""
STEPS: Steps = {
    "equal": lambda group: (3, 1),
    "ragged": lambda group: (1 + 3 * group % 5, group % 2),
    "empty groups": lambda group: (0, 0) if group % 2 else (2, 2),
    "decode": lambda group: (1, 1),
    "one token": lambda group: (int(group == 0), 0),
    "nothing": lambda group: (0, 0),
}
Texts = list[list[list[int]]]
"""Two sequences of each DP group."""


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[tuple[str, int], tuple[Path, Any]] = {}

    def get(family: str, parts: int) -> tuple[Path, Any]:
        if (family, parts) not in made:
            directory = tmp_path_factory.mktemp(f"{family}-{parts}")
            made[family, parts] = directory, small_model(family, parts, directory, seed=parts)
        return made[family, parts]

    return get


def texts_of(mesh: Mesh, steps: Steps = STEPS) -> Texts:
    """Return the texts of each group, the same on every mesh for a group of the same number."""
    generator = torch.Generator().manual_seed(5)
    lengths = [[sum(rows) for rows in zip(*(s(g) for s in steps.values()), strict=True)] for g in range(mesh.attn_dp)]
    return [[torch.randint(1, 61, (n,), generator=generator).tolist() for n in group] for group in lengths]


def drive(
    transport: Transport,
    directory: Path,
    mesh: Mesh,
    texts: Texts,
    steps: Steps = STEPS,
    experts: Forms = "gather",
    replicate: bool = False,
    **options: Any,
) -> dict[tuple[int, int], torch.Tensor]:
    """Run the steps. Return {(sequence, position): logits} of the last row of each sequence in each step.

    replicate: each rank of a dcp group makes the queries of all. options: of `ModelRunner`.
    """
    torch.set_num_threads(1)
    config = replace(config_of(directory), experts=experts, replicate_queries=replicate)
    model = load_model(directory, config, mesh, transport.rank)
    runner = ModelRunner(model, mesh, transport.rank, [transport], [CacheGroup(Rule(), PAGES)], PAGE, **options)
    for _, backend in runner.caches.paged:  # a read of a slot that nothing wrote must show
        backend.cache.keys.fill_(float("nan"))
        backend.cache.values.fill_(float("nan"))
    group, seen, cached, span = mesh.group_of(transport.rank), {}, [0, 0], PAGE * mesh.dcp
    for rows_of in steps.values():
        tokens, seqs, ends = [], [], []
        for i, rows in enumerate(rows_of(group)):
            if rows:
                begin, end = cached[i], cached[i] + rows
                tokens += texts[group][i][begin:end]
                pages = [(i * 5 + 3 * p) % PAGES for p in range(-(-end // span))]
                seqs.append(SeqRows(rows, begin, [pages], True))
                ends.append((i, end - 1))
                cached[i] = end
        counts = tuple(sum(rows_of(g)) for g in range(mesh.attn_dp))
        logits = runner.forward(build_batch(tokens, seqs, span), counts)
        seen.update(dict(zip(ends, logits, strict=True)))
    return seen


@lru_cache(maxsize=256)
def truth(model: Any, text: tuple[int, ...]) -> torch.Tensor:
    """transformers' logits of a whole sequence."""
    with torch.no_grad():
        return model(torch.tensor([text])).logits[0].float()


def compare(results: list[dict[tuple[int, int], torch.Tensor]], texts: Texts, mesh: Mesh, model: Any) -> None:
    """Check every logit that was sampled, on every rank."""
    for rank, seen in enumerate(results):
        group = mesh.group_of(rank)
        assert {(i, len(text) - 1) for i, text in enumerate(texts[group])} <= seen.keys()
        for (i, position), logits in seen.items():
            wanted = truth(model, tuple(texts[group][i]))[position]
            error = (logits - wanted).norm() / wanted.norm()
            # transformers' own float32 rounding is near 1e-7 here, so 1e-5 leaves a wrong sum no room.
            assert error <= 1e-5, f"rank {rank}, sequence {i}, position {position}: {error:.2e}"


def splits(max_world: int) -> list[Mesh]:
    """Every split of attention and every split of the experts, each in one layout."""
    every = layouts(max_world)
    return [mesh for mesh in every if mesh.attn_dp == mesh.moe_tp]


# Of layouts that differ in how the two splits are combined, collectives differ, which know nothing of families: one
# family, of shared experts behind a gate, has every combination. By day combinations, and families, take turns.
CASES = [("qwen2_moe", mesh, mesh.attn_tp.bit_length() + mesh.moe_tp.bit_length()) for mesh in layouts(8)]
CASES += [(family, mesh, i + j) for i, family in enumerate(FAMILIES[1:]) for j, mesh in enumerate(splits(8))]


@pytest.mark.parametrize(
    "family, mesh",
    [pytest.param(*case, marks=[pytest.mark.nightly] * (at % 3 > 0), id=f"{case[0]}-{case[1]}") for *case, at in CASES],
)
def test_every_layout_gives_transformers_logits(saved: Any, family: str, mesh: Mesh) -> None:
    parts = {1: 2, 2: 2, 3: 6, 4: 4}.get(mesh.world, mesh.world)
    directory, model = saved(family, parts)
    texts = texts_of(mesh)
    compare(run_world(mesh.world, lambda t: drive(t, directory, mesh, texts)), texts, mesh, model)


def test_the_last_layer_of_one_rank_ends_with_the_sampled_rows(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, model = saved("qwen3_moe", 2)
    mesh, seen, forward = Mesh(), [], SparseMoE.forward

    def counted(self: SparseMoE, x: Hidden) -> Hidden:
        seen.append(len(x.value))
        return forward(self, x)

    monkeypatch.setattr(SparseMoE, "forward", counted)
    texts = texts_of(mesh)
    compare(run_world(1, lambda t: drive(t, directory, mesh, texts)), texts, mesh, model)
    steps = [(sum(rows), sum(map(bool, rows))) for rows in (s(0) for s in STEPS.values())]
    assert list(filter(None, seen)) == [n for step in steps for n in step if n]  # of three layers two have experts


DISPATCHED = [Mesh(4, 1, 4, 1), Mesh(2, 2, 2, 2), Mesh(1, 4, 4, 1), Mesh(4, 1, 1, 4)]
"""Rows of a rank's own group or a share of them; experts whole, in parts, or both."""


@pytest.mark.parametrize("mesh", DISPATCHED, ids=str)
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "deepseek_v2"])
def test_rows_that_are_sent_to_their_experts(saved: Any, family: str, mesh: Mesh) -> None:
    """A shared expert behind a gate, none, and one without a gate next to experts in groups; layers without experts."""
    directory, model = saved(family, 4)
    texts = texts_of(mesh)
    compare(run_world(mesh.world, lambda t: drive(t, directory, mesh, texts, experts="dispatch")), texts, mesh, model)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(2, 2, 4, 1)], ids=str)
def test_weights_for_both_forms_serve_either(saved: Any, mesh: Mesh) -> None:
    """Rows are gathered, as the transport is without all_to_allv; a single rank has nothing to send."""
    directory, model = saved("qwen2_moe", 4)
    texts = texts_of(mesh)
    compare(
        run_world(mesh.world, lambda t: drive(Gathers(t), directory, mesh, texts, experts="auto")), texts, mesh, model
    )


class Gathers:
    """A reference transport without all_to_allv."""

    def __init__(self, transport: Transport):
        self._transport, self.entry = transport, replace(transport.entry, offers=self.offers)

    def offers(self, exchange: Exchange, epilogue: bool = False) -> bool:
        return exchange.kind != "all_to_allv" and self._transport.entry.offers(exchange, epilogue)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


STRETCHED = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
KIMI = dict(
    n_group=1, topk_group=1, rope_parameters=STRETCHED | dict.fromkeys(("beta_fast", "beta_slow", "mscale"), 1.0)
)
LITE = dict(q_lora_rank=None, topk_method="greedy", n_group=1, rope_parameters=dict(rope_theta=1e4))


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(2, 2, 4, 1), Mesh(1, 4, 2, 2)], ids=str)
@pytest.mark.parametrize(
    "family, changes",
    [
        pytest.param("deepseek_v2", LITE, id="v2-lite"),  # queries of the hidden state, routing without groups, no YaRN
        pytest.param("deepseek_v3", {}, id="v3"),
        pytest.param("deepseek_v3", KIMI, id="kimi-k2"),  # saved under its own type
        pytest.param("deepseek_v3", dict(norm_topk_prob=False, rope_interleave=False), id="v3 otherwise"),
    ],
)
def test_other_deepseeks(family: str, changes: dict, mesh: Mesh, tmp_path: Path) -> None:
    model, texts = small_model(family, 4, tmp_path, **changes), texts_of(mesh)
    if changes is KIMI:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2"}))
        assert config_of(tmp_path).family == "kimi_k2"
    compare(run_world(mesh.world, lambda t: drive(t, tmp_path, mesh, texts)), texts, mesh, model)
