"""A vocabulary that is split over ranks: the model's logits, each rank's best token, and the engine's outputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import run_world, small_model

from engine.conftest import byte_tokenizer
from engine.test_engine import GREEDY, config, prompts
from models.layouts import check
from models.stepfun import small_step
from weft.comm.transport import Transport, offer_of
from weft.engine.controller.engine import Engine
from weft.engine.messages.request import SamplingParams
from weft.engine.models.layers.basic import vocabulary_share
from weft.engine.worker.split_vocabulary import SplitVocabulary
from weft.planner.cost import costs
from weft.planner.prices import BlockPrices
from weft.planner.spec import LayoutError, Mesh
from weft.stream.block_exchanges import BlockExchanges

pytestmark = pytest.mark.usefixtures("planned_once")


def split(transport: Transport, mesh: Mesh, vocabulary: int) -> SplitVocabulary:
    name = transport.entry.name
    offer = offer_of(transport.entry, mesh, costs("cpu").of(name, mesh.world))
    exchanges = BlockExchanges(mesh, transport.rank, {name: transport}, BlockPrices(mesh, [offer]))
    return SplitVocabulary(vocabulary, mesh, transport.rank, exchanges)


@pytest.mark.parametrize("mesh", [Mesh(1, 4, 4, 1), Mesh(2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("vocabulary", [64, 61, 5])
def test_rows_and_best_tokens_are_the_whole_vocabularys(mesh: Mesh, vocabulary: int) -> None:
    """Each group has rows of its own, one of them none; equal scores are the lower token's, −inf is a score."""
    rows = [3, 0] if mesh.attn_dp == 2 else [5]
    generator = torch.Generator().manual_seed(vocabulary)
    logits = [torch.randint(0, 4, (n, vocabulary), generator=generator).float() for n in rows]
    for whole in logits:
        whole[:1] = float("-inf")

    def main(transport: Transport) -> tuple[torch.Tensor, torch.Tensor]:
        whole = logits[mesh.group_of(transport.rank)]
        share = vocabulary_share(mesh, transport.rank, vocabulary)
        own = whole[:, share].contiguous()
        held = split(transport, mesh, vocabulary)
        assert held.share == share and held.size == vocabulary
        score, at = own.max(-1).values, own.argmax(-1)
        return held.gather_logits(own), held.best(score, at + share.start)

    for rank, (found, best) in enumerate(run_world(mesh.world, main)):
        wanted = logits[mesh.group_of(rank)]
        assert torch.equal(found, wanted) and torch.equal(best, wanted.argmax(-1).int())


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(LayoutError, match="a vocabulary of 3 tokens is not split over attn_tp=4"):
        run_world(4, lambda t: split(t, Mesh(1, 4, 4, 1), 3))


@pytest.mark.parametrize("mesh", [Mesh(1, 4, 4, 1), Mesh(2, 2, 2, 2), Mesh(2, 1, 2, 1)], ids=str)
def test_logits_are_those_of_a_whole_vocabulary(mesh: Mesh, tmp_path: Path) -> None:
    """61 tokens: some ranks have one more than others."""
    check(tmp_path, mesh, small_step(tmp_path), 61, split=True)


def test_a_weight_that_embedding_and_head_share(tmp_path: Path) -> None:
    model = small_model("qwen3", 4, tmp_path)
    check(tmp_path, Mesh(1, 4, 1, 4), lambda tokens: model(tokens[None]).logits[0], 61, split=True)


MIXED = [
    SamplingParams(max_tokens=10, temperature=1.5, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=10, temperature=2.0, seed=6, top_k=20, ignore_eos=True),
    SamplingParams(max_tokens=10, temperature=2.0, seed=7, min_p=0.05, ignore_eos=True),
    SamplingParams(max_tokens=10, temperature=0.0, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=10, temperature=0.5, seed=8, repetition_penalty=1.5, ignore_eos=True),
]


LAYOUTS = {
    "1x4": dict(attn_tp=4, moe_tp=4),
    "2x2": dict(attn_dp=2, attn_tp=2, ep=4),
    "1x2, processes": dict(attn_tp=2, moe_tp=2, executor="process"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_are_those_of_a_whole_vocabulary(layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Greedy, sampled by temperature, and those that need whole rows. No others gather any in eager steps;
    recorded ones gather rows with a temperature too."""
    small_model("qwen2_moe", 4, tmp_path, seed=3, vocab_size=257, max_position_embeddings=256)
    byte_tokenizer(tmp_path)
    asked = prompts(2 if "processes" in layout else len(MIXED))
    with Engine(config(tmp_path)) as engine:
        greedy = [r.token_ids for r in engine.generate(asked, GREEDY)]
        mixed = [engine.generate([prompt], params)[0] for prompt, params in zip(asked, MIXED, strict=False)]
    split = config(tmp_path, split_vocabulary="on", **LAYOUTS[layout])
    with Engine(replace(split, cuda_graphs=False)) as engine, monkeypatch.context() as patched:
        patched.delattr(SplitVocabulary, "gather_logits")
        assert [r.token_ids for r in engine.generate(asked, GREEDY)] == greedy
        assert engine.generate(asked[:1], MIXED[0])[0].token_ids == mixed[0].token_ids
    with Engine(split) as engine:
        with monkeypatch.context() as patched:
            patched.delattr(SplitVocabulary, "gather_logits")
            assert [r.token_ids for r in engine.generate(asked, GREEDY)] == greedy
        for prompt, params, wanted in zip(asked, MIXED, mixed, strict=False):
            found = engine.generate([prompt], params)[0]
            assert found.token_ids == wanted.token_ids, params
            for ours, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
                assert abs(ours.logprob - theirs.logprob) < 1e-4
        engine.check_idle()
