"""Heads of EAGLE-3: drafts as defined, and outputs without a change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from e2e.here import weft_here
from engine.conftest import byte_tokenizer
from engine.test_engine import config
from engine.test_hybrids import FAMILIES as OTHERS
from speculation.eagle3 import DefinedHead, make_head
from speculation.test_draft_layers import WHOLE, DraftingRank, check_drafts, check_outputs, drafts_noted
from speculation.test_draft_models import make
from speculation.test_outputs import GREEDY, HOW, PROMPTS, results, same
from weft.engine.attention.caches import cached_layers
from weft.engine.controller.engine import Engine
from weft.engine.messages.rank_messages import GroupRows
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.families.eagle3 import Eagle3Config, read
from weft.engine.models.registry import load_config
from weft.planner.spec import LayoutError

pytestmark = pytest.mark.usefixtures("planned_once")


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("eagle-target") / "model", "qwen2_moe", 3)


@pytest.fixture(scope="session")
def head_dir(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    return make_head(tmp_path_factory.mktemp("eagle-head") / "head", target_dir)


def check_rank(target: Path, head: Path, graphs: bool, inputs: tuple[int, ...] = (0, 1, 2)) -> None:
    """Compare drafts with the definition."""
    defined = DefinedHead(target, head, inputs)
    rank = DraftingRank(target, cuda_graphs=graphs, speculative="eagle3", draft_model=head)
    check_drafts(rank, graphs, defined.drafts, defined.model)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "llama"])
def test_drafts_are_those_of_the_definition(family: str, graphs: bool, tmp_path: Path) -> None:
    target = make(tmp_path / "model", family, 3)
    check_rank(target, make_head(tmp_path / "head", target), graphs)


@pytest.mark.parametrize(
    "changes",
    [
        dict(hidden_size=24, embedding=1),
        dict(embedding=1, draft_vocab_size=257),
        dict(eagle_config={}, eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
    ],
)
def test_heads_have_an_embedding_a_vocabulary_and_layers_of_their_own(
    changes: dict[str, Any], target_dir: Path, tmp_path: Path
) -> None:
    check_rank(target_dir, make_head(tmp_path / "head", target_dir, **changes), graphs=True)


def test_drafts_after_steps_without_drafts_are_those_of_the_definition(target_dir: Path, head_dir: Path) -> None:
    """Rows that were delayed have the hidden states of their own step."""
    defined, rank = (
        DefinedHead(target_dir, head_dir),
        DraftingRank(target_dir, speculative="eagle3", draft_model=head_dir),
    )
    for drafts in (0, 0, 0, 2, 0, 3):
        result = rank.step(GroupRows((2,)), drafts)
        rank.tokens += result.tokens
        if drafts:
            assert list(result.drafts[0]) == defined.drafts(rank.tokens, drafts)


@pytest.mark.usefixtures("never_pausing")
@pytest.mark.parametrize(
    "layout",
    ["1x2", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("1x1", "2x1", "2x2", "ep 2", "dcp 2"))],
)
def test_outputs_are_those_without_drafts(target_dir: Path, head_dir: Path, layout: str) -> None:
    check_outputs(target_dir, layout, speculative="eagle3", draft_model=head_dir)


@pytest.mark.usefixtures("never_pausing")
@pytest.mark.parametrize(
    "layouts", [("1x2", "ep 2"), pytest.param(("2x1", "dcp 2"), marks=pytest.mark.nightly)], ids=str
)
def test_drafts_are_those_of_one_rank(
    target_dir: Path, head_dir: Path, monkeypatch: pytest.MonkeyPatch, layouts: tuple[str, ...]
) -> None:
    """Draft by draft, with equal accepted counts, by groups without a sequence too, and after a reused prefix."""
    prompts = [PROMPTS[0], [*PROMPTS[0], 200, 201], [*PROMPTS[0], 90]]

    def drafts(layout: str, prefix_cache: bool = True) -> tuple[list[Any], Any]:
        options = dict(speculative="eagle3", draft_model=head_dir, prefix_cache=prefix_cache)
        options |= dict(page_size=4 if layout == "dcp 2" else 8)  # drafts end with the pages of a group
        with drafts_noted(monkeypatch) as noted, Engine(config(target_dir, **options, **WHOLE[layout])) as engine:
            cached = [engine.generate([prompt], GREEDY)[0].cached_tokens for prompt in prompts]
            counts = engine.stats().drafted, engine.stats().accepted
        assert any(cached) == prefix_cache
        return noted, counts

    wanted = drafts("1x1", prefix_cache=False)
    assert len(wanted[0]) > 30
    for layout in layouts:
        assert drafts(layout) == wanted, layout


@pytest.mark.usefixtures("never_pausing")
@pytest.mark.parametrize("layout", ["1x2", pytest.param("2x1", marks=pytest.mark.nightly)])
def test_ranks_in_processes(target_dir: Path, head_dir: Path, layout: str) -> None:
    """The arena of a rank also holds the rows that a pass reads, in steps with prompts too."""
    how = HOW[:6]
    (plain, _), _ = results(target_dir, how, drafts=False)
    changes = dict(executor="process", transport="shm", speculative="eagle3", max_batch_tokens=17, kv_tokens=48)
    rounds, engine = results(target_dir, how, draft_model=head_dir, **changes | WHOLE[layout])
    for found in rounds:
        same(found, plain)
    stats = engine.stats()
    assert not stats.failures and stats.preemptions and engine.speculation and min(engine.speculation.drafted) > 50


def test_the_command_line(target_dir: Path, head_dir: Path) -> None:
    arguments = ("generate", str(target_dir), "--executor", "thread", "--prompt", "a b a b a b", "--max-tokens", "12")
    drafting = ("--speculative", "eagle3", "--draft-model", str(head_dir), "--stats")
    plain, drafted = (weft_here(*arguments, *more) for more in ((), drafting))
    assert plain[:2] == drafted[:2] and plain[0] == 0
    assert "drafts accepted" in drafted[2]


def test_layers_are_chosen_as_by_other_engines(target_dir: Path, tmp_path: Path) -> None:
    """Choose by the number of layers, by SGLang's field of outputs, and by vLLM's of inputs."""

    def found(**changes: Any) -> tuple[int, ...]:
        head = load_config(make_head(tmp_path / "head", target_dir, **changes), {"llama": read})
        assert isinstance(head, Eagle3Config)
        return head.inputs_in(replace(load_config(target_dir), num_layers=94))

    assert found(eagle_config=None) == (2, 47, 91)
    assert found(eagle_config=dict(eagle_aux_hidden_state_layer_ids=[1, 46, 90])) == (2, 47, 91)
    assert found(eagle_config=None, eagle_aux_hidden_state_layer_ids=[2, 47, 91]) == (2, 47, 91)
    with pytest.raises(ModelError, match=r"of layers .2, 47, 94."):
        found(eagle_config=None, eagle_aux_hidden_state_layer_ids=[2, 47, 94])


def test_its_cache_is_counted(target_dir: Path, head_dir: Path) -> None:
    worker = DraftingRank(target_dir, speculative="eagle3", draft_model=head_dir).worker
    assert "midlayer.self_attn" in cached_layers(worker.runner.model)


def test_a_head_that_cannot_run_is_refused_in_one_line(
    target_dir: Path, head_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(says: str, head: Path | None, model: Path = target_dir, **changes: Any) -> None:
        kinds = (LayoutError, ModelError, ValueError)
        with pytest.raises(kinds, match=says) as error:
            Engine(config(model, **dict(speculative="eagle3", draft_model=head) | changes))
        assert "\n" not in str(error.value)

    def changed(**changes: Any) -> Path:
        return make_head(tmp_path / "changed", target_dir, **changes)

    refused("lacks draft_model", None)
    refused("lacks speculative draft or eagle3", head_dir, speculative="mtp")
    refused("supports no split vocabulary so far", head_dir, attn_tp=2, split_vocabulary="on")
    refused("drop --num-layers", head_dir, num_layers=3)
    refused("runs on one host only so far", head_dir, nnodes=2, attn_dp=2, node_rank=0)
    refused("an EAGLE-3 head is no model: name it by --draft-model", head_dir, speculative="draft")
    refused("an EAGLE-3 head is no model", None, head_dir, speculative="off")
    refused("no EAGLE-3 head: none of its architectures", changed(architectures=["X"]))
    refused("norm_before_residual=True is not supported", changed(norm_before_residual=True))
    refused(
        "of layers .1, 2, 3. with 32 elements; the model has 3 layers",
        changed(eagle_config=None, eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
    )
    refused("with 999 elements; the model has 3 layers with ", changed(target_hidden_size=999, embedding=1))
    refused("has 259 tokens in its vocabulary, and the model 257", changed(vocab_size=259))
    head = changed()
    tensors = load_file(head / "model.safetensors")
    save_file({n: t + 257 if n == "d2t" else t for n, t in tensors.items()}, head / "model.safetensors")
    with pytest.raises(Exception, match=r"d2t of .* names a token beyond the model's 257"):
        DraftingRank(target_dir, speculative="eagle3", draft_model=head)
    other = tmp_path / "other"
    other.mkdir()
    OTHERS["qwen3_5_moe"](other)
    byte_tokenizer(other)
    values = json.loads((other / "config.json").read_text())
    width = values.get("text_config", values)["hidden_size"]
    refused("does not support models with recurrent states", changed(target_hidden_size=width, embedding=1), other)


@pytest.mark.parametrize("source", ["eagle3", "draft"])
def test_plans_show_what_drafts(source: str, target_dir: Path, head_dir: Path, tmp_path: Path) -> None:
    """They show its ops, and the price of its passes: a draft model runs one more than drafts."""
    drafting = head_dir if source == "eagle3" else make(tmp_path / "draft", "llama", 5)
    command = ("plan", str(target_dir), "--tokens", "64", "--speculative")
    asked = (*command, source, "--draft-model", str(drafting))
    (code, text, _), (_, plain, _) = weft_here(*asked, "--json"), weft_here(*command, "ngram", "--json")
    assert code == 0
    site = "midlayer.hidden_norm" if source == "eagle3" else "draft.model.layers.0.input_layernorm"
    assert f'"site": "{site}"' in text and ('"site": "model.layers.1.input"' in text) == (source == "eagle3")
    found, none = (json.loads(each)[0]["drafts"] for each in (text, plain))
    passes = [us - step for us, step in zip(found, none, strict=True)]
    if source == "draft":
        assert passes[0] == 0 and [round(us / passes[1], 1) for us in passes[2:]] == [1.5, 2.0, 2.5]
    else:
        assert [round((us - passes[0]) / (passes[1] - passes[0])) for us in passes] == [0, 1, 2, 3, 4]
    code, text, _ = weft_here(*asked)
    assert code == 0 and "\ndraft layer: layout attn_dp=2 attn_tp=2" in text
    assert ("read on GROUP" in text) == (source == "eagle3")


def test_plans_refuse_what_cannot_draft(target_dir: Path, head_dir: Path) -> None:
    for arguments, says in (
        (("--speculative", "eagle3"), "lacks draft_model"),
        (("--speculative", "mtp", "--draft-model", str(head_dir)), "lacks speculative draft or eagle3"),
        (("--speculative", "draft", "--draft-model", str(head_dir)), "an EAGLE-3 head is no model"),
        (("--speculative", "eagle3", "--draft-model", str(target_dir)), "no EAGLE-3 head"),
    ):
        code, _, said = weft_here("plan", str(target_dir), *arguments)
        assert code and says in said and "Traceback" not in said, arguments
