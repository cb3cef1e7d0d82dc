"""Draft models: drafts as defined by transformers, and outputs without a change."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import small_model
from transformers import AutoModelForCausalLM

from e2e.here import weft_here
from engine.conftest import byte_tokenizer
from engine.test_engine import config
from speculation.test_draft_layers import WHOLE, DraftingRank, check_drafts, check_outputs, drafts_noted
from speculation.test_outputs import GREEDY, PROMPTS, results, same, without_drafts
from weft.engine.attention.caches import cached_layers
from weft.engine.controller.engine import Engine
from weft.engine.models.registry import load_config
from weft.engine.worker.memory import CacheNeed
from weft.planner.spec import LayoutError

pytestmark = pytest.mark.usefixtures("planned_once")


def make(folder: Path, family: str, seed: int, **more: Any) -> Path:
    folder.mkdir()
    small_model(family, 4, folder, seed=seed, vocab_size=257, max_position_embeddings=256, **more)
    byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("target") / "model", "qwen2_moe", 3)


@pytest.fixture(scope="session")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another family, of other widths."""
    return make(tmp_path_factory.mktemp("draft") / "model", "llama", 5)


@pytest.fixture(scope="session")
def near_dir(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    """The model with slightly other weights: its drafts are right now and then."""
    folder = make(tmp_path_factory.mktemp("near") / "model", "qwen2_moe", 3)
    tensors, generator = load_file(target_dir / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, value in tensors.items():
        tensors[name] = value * (1 + torch.randn(value.shape, generator=generator) / 200)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@torch.no_grad()
def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """Return the drafts that a model of transformers defines."""
    found = list(tokens)
    for _ in range(count):
        found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(tokens) :]


@pytest.mark.parametrize("graphs", [True, False])
def test_drafts_are_those_of_the_definition(target_dir: Path, draft_dir: Path, graphs: bool) -> None:
    target, drafter = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval() for each in (target_dir, draft_dir)
    )
    options = dict(cuda_graphs=graphs, speculative="draft", draft_model=draft_dir)
    check_drafts(DraftingRank(target_dir, **options), graphs, partial(greedy, drafter), target)


@pytest.mark.parametrize("graphs", [True, False])
def test_drafts_end_where_pages_do(target_dir: Path, draft_dir: Path, graphs: bool) -> None:
    drafter = AutoModelForCausalLM.from_pretrained(draft_dir, dtype=torch.float32).eval()
    rank = DraftingRank(target_dir, pages=4, cuda_graphs=graphs, speculative="draft", draft_model=draft_dir)
    counts = []
    while len(rank.tokens) <= 16:
        assert rank.drafts == greedy(drafter, rank.tokens, len(rank.drafts))
        counts.append(len(rank.drafts))
        rank.decode([])
    assert counts == [4, 4, 3, 2, 1] and not rank.drafts


@pytest.mark.usefixtures("never_pausing")
@pytest.mark.parametrize(
    "layout", ["1x1", "1x2", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("2x1", "dcp 2", "ep 2"))]
)
def test_outputs_are_those_without_drafts(target_dir: Path, near_dir: Path, layout: str) -> None:
    engine = check_outputs(target_dir, layout, speculative="draft", draft_model=near_dir)
    assert engine.speculation and engine.speculation.accepted[0] > 15


@pytest.mark.usefixtures("never_pausing")
def test_sequences_with_draft_models_are_preempted(target_dir: Path, near_dir: Path) -> None:
    plain = without_drafts(target_dir)
    options = dict(speculative="draft", draft_model=near_dir)
    rounds, engine = results(target_dir, **options, kv_tokens=96, max_batch_tokens=17)
    for found in rounds:
        same(found, plain)
    assert engine.stats().preemptions and engine.speculation and sum(engine.speculation.drafted)


@pytest.mark.usefixtures("never_pausing")
@pytest.mark.parametrize(
    "layouts", [("1x1", "2x1", "dcp 2"), pytest.param(("1x2", "ep 2"), marks=pytest.mark.nightly)], ids=str
)
def test_drafts_are_those_of_one_rank(
    target_dir: Path, near_dir: Path, monkeypatch: pytest.MonkeyPatch, layouts: tuple[str, ...]
) -> None:
    """Draft by draft, by groups without a sequence too, and after a reused prefix."""
    prompts = [PROMPTS[0], *([*PROMPTS[0], *tail] for tail in ([200, 201], [90], [91, 92, 93]))]

    def drafts(layout: str, prefix_cache: bool = True) -> list[Any]:
        options = dict(speculative="draft", draft_model=near_dir, prefix_cache=prefix_cache)
        options |= dict(page_size=4 if layout == "dcp 2" else 8)  # drafts end with the pages of a group
        with drafts_noted(monkeypatch) as noted, Engine(config(target_dir, **options, **WHOLE[layout])) as engine:
            cached = [engine.generate([prompt], GREEDY)[0].cached_tokens for prompt in prompts]
        assert any(cached) == prefix_cache
        return noted

    wanted = drafts("1x1", prefix_cache=False)
    assert len(wanted) >= 12
    for layout in layouts:
        assert drafts(layout) == wanted, layout


@pytest.mark.usefixtures("never_pausing")
def test_ranks_hold_their_drafts(target_dir: Path, near_dir: Path) -> None:
    """Accept equal drafts when ranks reply with them, as bad words ask, and when they hold them."""
    counts = []
    for layout, how in itertools.product(("1x1", "2x1", "1x2"), (GREEDY, replace(GREEDY, bad_words=((256, 256),)))):
        options = dict(speculative="draft", draft_model=near_dir, page_size=8)
        with Engine(config(target_dir, **options, **WHOLE[layout])) as engine:
            outputs = [engine.generate([prompt], how)[0].token_ids for prompt in PROMPTS[:4]]
            counts.append((outputs, engine.stats().drafted, engine.stats().accepted))
    assert counts == [counts[0]] * len(counts) and min(counts[0][2]) > 0


@pytest.mark.parametrize("executor", ["thread", pytest.param("process", marks=pytest.mark.nightly)])
def test_the_command_line(target_dir: Path, near_dir: Path, executor: str) -> None:
    arguments = ("generate", str(target_dir), "--executor", executor, "--prompt", "a b a b a b", "--max-tokens", "12")
    drafting = ("--speculative", "draft", "--draft-model", str(near_dir), "--stats")
    plain, drafted = (weft_here(*arguments, *more) for more in ((), drafting))
    assert plain[:2] == drafted[:2] and plain[0] == 0
    assert "drafts accepted" in drafted[2]


def test_a_draft_models_cache_is_counted(target_dir: Path, near_dir: Path) -> None:
    """It has the same pages as the model, which cost as much again."""
    worker = DraftingRank(target_dir, speculative="draft", draft_model=near_dir).worker
    specs = cached_layers(worker.runner.model)
    both, alone = (
        CacheNeed(worker.config, part, torch.float32).bytes()
        for part in (specs, {path: spec for path, spec in specs.items() if not path.startswith("draft.")})
    )
    assert worker.runner.caches.bytes == both == 2 * alone


def test_a_draft_model_that_cannot_run_is_refused_in_one_line(
    target_dir: Path, draft_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(says: str, draft: Path | None, kind: type[Exception] = LayoutError, **changes: Any) -> None:
        with pytest.raises(kind, match=says) as error:
            Engine(config(target_dir, **dict(speculative="draft", draft_model=draft) | changes))
        assert "\n" not in str(error.value)

    refused("lacks draft_model", None, ValueError)
    refused("lacks speculative draft", draft_dir, ValueError, speculative="mtp")
    refused("supports no split vocabulary so far", draft_dir, attn_tp=2, split_vocabulary="on")
    other = tmp_path / "other"
    other.mkdir()
    small_model("llama", 4, other, seed=1, vocab_size=259, max_position_embeddings=256)
    refused("has 259 tokens in its vocabulary, and the model 257", other)
    named = make(tmp_path / "named", "llama", 1)
    (named / "tokenizer.json").write_text((named / "tokenizer.json").read_text().replace('"<eos>"', '"<end>"'))
    (named / "tokenizer_config.json").unlink()
    refused("has other tokens than the model", named)
    refused("runs on one host only so far", draft_dir, nnodes=2, attn_dp=2, node_rank=0)
    assert load_config(draft_dir).draft_model is None
