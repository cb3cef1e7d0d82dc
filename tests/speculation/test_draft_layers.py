"""Draft layers of checkpoints: drafts as defined by transformers' layers, and outputs without a change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import run_world, small_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from e2e.here import weft_here
from engine.conftest import byte_model, byte_tokenizer
from engine.test_engine import config
from engine.test_hybrids import FAMILIES as OTHERS
from speculation.draft_layers import add_draft_layer
from speculation.test_outputs import GREEDY, LAYOUTS, PROMPTS, results, same, without_drafts
from weft.comm.reference import ReferenceTransport, ReferenceWorld
from weft.engine.assets import embedded_model_dir
from weft.engine.attention.forward_batch import Batch
from weft.engine.controller.engine import Engine
from weft.engine.controller.startup import resolve_defaults
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.kv.manager import CacheManager
from weft.engine.kv.tokens import HELD, token_bytes
from weft.engine.messages.rank_messages import Chunk, GroupRows, Join, Result, Sampling, Step
from weft.engine.models.registry import load_config
from weft.engine.scheduler.scheduler import drafts_asked
from weft.engine.worker.draft_chain import DraftChain
from weft.engine.worker.run_stats import RunStats
from weft.engine.worker.worker import Worker
from weft.planner.chain import Counts
from weft.planner.cost import costs
from weft.planner.spec import LayoutError

pytestmark = pytest.mark.usefixtures("planned_once")
WHOLE = {name: {k: v for k, v in layout.items() if k != "split_vocabulary"} for name, layout in LAYOUTS.items()}
"""Layouts with a whole vocabulary."""


@pytest.fixture(scope="session")
def drafting_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_draft_layer(byte_model(tmp_path_factory.mktemp("drafting")))


class Defined:
    """Draft layer made of transformers' parts."""

    def __init__(self, directory: Path):
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        names, tensors = load_config(directory).draft_names, load_file(directory / "model.safetensors")  # type: ignore[attr-defined]
        self.weights = {name: tensors[f"{name}.weight"] for name in vars(names).values() if name != names.layer}
        self.names, self.eps = names, self.model.config.rms_norm_eps
        last = self.model.model.layers[-1]
        self.layer = type(last)(self.model.config, len(self.model.model.layers) - 1).eval()
        own = {n.removeprefix(f"{names.layer}."): t for n, t in tensors.items() if n.startswith(names.layer)}
        missing = self.layer.load_state_dict(fused(own), strict=False).missing_keys
        assert not missing, missing

    def norm(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weights[name], self.eps)

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the drafts after a sequence, whose last token has not run."""
        model, names = self.model.model, self.names
        hidden, follow = model(torch.tensor([tokens[:-1]])).last_hidden_state, torch.tensor([tokens[1:]])
        cache, first, found = DynamicCache(config=self.model.config), 0, list[int]()
        for _ in range(count):
            both = [self.norm(model.embed_tokens(follow), names.embedding_norm), self.norm(hidden, names.hidden_norm)]
            x = torch.cat(both, -1) @ self.weights[names.join].t()
            places = torch.arange(first, first + x.shape[1])[None]
            seen = torch.arange(first + x.shape[1])[None] <= places[0][:, None]
            mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]
            rotary = model.rotary_emb(x, places)
            out = self.layer(
                x, attention_mask=mask, position_ids=places, past_key_values=cache, position_embeddings=rotary
            )
            hidden = self.norm(out, names.norm)[:, -1:]
            follow, first = self.model.lm_head(hidden).argmax(-1), first + x.shape[1]
            found.append(int(follow))
        return found


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a layer's tensors as transformers 5 has them, with the experts of a layer in one tensor."""
    experts = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("mlp.experts."))

    def of(kind: str) -> Tensor:
        return torch.stack([tensors[f"mlp.experts.{i}.{kind}.weight"] for i in range(experts)])

    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("mlp.experts.")}
    gate_up = torch.cat([of("gate_proj"), of("up_proj")], 1)
    return rest | {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": of("down_proj")}


STEP = Step(1, (GroupRows(),), 1)
"""A step that asks for a draft, before which delayed rows run."""


class DraftingRank:
    """A rank with one sequence, whose prompt runs in two chunks."""

    def __init__(self, directory: Path, pages: int = 40, **options: Any):
        values = dict(executor="thread", max_running=4, kv_tokens=1024, page_size=4, speculative="mtp") | options
        worker = Worker(
            resolve_defaults(config(directory, **values)),
            [ReferenceWorld(1).transports()[0]],
            costs("cpu"),
            lambda message: None,
        )
        self.worker, self.number, prompt = worker, 0, PROMPTS[0][:11]
        join = Join(2, 1, 0, (tuple(range(pages)),), Sampling(temperature=0.0))
        first, rest = prompt[:5], prompt[5:]
        self.step(GroupRows(joins=(join,), chunks=(Chunk(2, token_bytes(first), False, None, rest[0]),)), 0)
        self.tokens = list(prompt)
        self.note(self.step(GroupRows(chunks=(Chunk(2, token_bytes(rest), True),))))

    @torch.inference_mode()
    def step(self, rows: GroupRows, drafts: int = 4, hold: bool = False) -> Result:
        self.number += 1
        return self.worker.step(Step(self.number, (rows,), drafts, hold))()

    def note(self, result: Result) -> None:
        self.tokens += result.tokens
        self.drafts = list(result.drafts[0])

    def decode(self, drafts: Sequence[int]) -> None:
        count = (len(drafts) + 1,) if drafts else ()
        self.note(self.step(GroupRows((2,), decode_tokens=count, drafts=token_bytes(drafts))))


@torch.no_grad()
def check_drafts(rank: DraftingRank, graphs: bool, drafts: Callable[[list[int], int], list[int]], model: Any) -> None:
    """Compare drafts after prompts in chunks, and after accepted and rejected drafts, which leave nothing that is seen.

    drafts: called with tokens and a number of drafts to expect after them. model: transformers' target.
    """
    accepted = 0
    assert (rank.worker.eager_because is None) == graphs
    for step in range(9):
        assert rank.drafts == drafts(rank.tokens, 4), step
        before, right = len(rank.tokens), int(model(torch.tensor([rank.tokens])).logits[0, -1].argmax())
        rank.decode([[], [7, 8, 9], [right], [right, 5]][step % 4])
        accepted += len(rank.tokens) - before - 1
    assert accepted == 4


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_drafts_are_those_of_the_definition(family: str, graphs: bool, tmp_path: Path) -> None:
    small_model(family, 4, tmp_path, seed=3, vocab_size=257, max_position_embeddings=256)
    byte_tokenizer(tmp_path)
    defined = Defined(add_draft_layer(tmp_path))
    check_drafts(DraftingRank(tmp_path, cuda_graphs=graphs), graphs, defined.drafts, defined.model)


@pytest.mark.parametrize("graphs", [True, False])
def test_drafts_end_where_pages_do(drafting_dir: Path, graphs: bool) -> None:
    """A row behind the pages is neither stored nor valid."""
    defined, rank = Defined(drafting_dir), DraftingRank(drafting_dir, pages=4, cuda_graphs=graphs)
    counts = []
    while len(rank.tokens) <= 16:
        assert rank.drafts == defined.drafts(rank.tokens, len(rank.drafts))
        counts.append(len(rank.drafts))
        rank.decode([])
    assert counts == [4, 4, 4, 3, 2] and len(rank.drafts) == 1


@pytest.mark.parametrize("graphs", [True, False])
def test_a_rank_holds_drafts_for_its_next_step(drafting_dir: Path, graphs: bool) -> None:
    """A result tells their number, and a step that runs them names none."""
    known, holding = (DraftingRank(drafting_dir, cuda_graphs=graphs) for _ in range(2))
    for drafts in (3, 4, 2, 1):
        known.note(known.step(GroupRows((2,)), drafts))
        result = holding.step(GroupRows((2,)), drafts, hold=True)
        assert result.drafts == ((HELD,) * drafts,) and result.tokens == (known.tokens[-1],)
        sent, held = dict(decode_tokens=(drafts + 1,)), holding.worker.held
        with torch.inference_mode():
            held.run()
        filled = held.filled(GroupRows((2,), **sent, drafts=token_bytes(result.drafts[0])))
        assert filled.drafts == token_bytes(known.drafts)
        after = [
            rank.step(GroupRows((2,), **sent, drafts=token_bytes(each)), 0)
            for rank, each in ((known, known.drafts), (holding, result.drafts[0]))
        ]
        assert after[0].tokens == after[1].tokens and after[0].accepted == after[1].accepted
        assert after[0].ran.tokens != after[1].ran.tokens, "the held drafts are in the checksum"


def test_warm_up_runs_delayed_rows_of_every_size(drafting_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long pause they are more than a step has sequences, so that Triton would compile kernels for them."""
    rank, passes, run = DraftingRank(drafting_dir, max_batch_tokens=256), list[tuple[Counts, int]](), DraftChain._pass

    def noting(chain: DraftChain, counts: Counts, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        passes.append((counts, len(batch.lengths)))
        return run(chain, counts, batch, hidden)

    monkeypatch.setattr(DraftChain, "_pass", noting)
    rank.worker.warm_up(16, lambda done, total: None)
    assert rank.worker.runner.draft and not rank.worker.runner.draft.delayed.due(STEP)
    assert {((n,), n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256)} <= set(passes)


def test_warm_up_leaves_no_pass(drafting_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass of its last step would read tensors of a captured one."""
    rank, passes, ran = DraftingRank(drafting_dir), list[Counts](), RunStats.ran_draft

    def noting(stats: RunStats, counts: Counts) -> None:
        passes.append(counts)
        ran(stats, counts)

    monkeypatch.setattr(RunStats, "ran_draft", noting)
    rank.worker.warm_up(16, lambda done, total: None)
    count = len(passes)
    assert count > 3 and not rank.worker.table.rows
    rank.worker.held.run()
    assert len(passes) == count


@pytest.mark.parametrize("layout", ["2x2", "dcp 2", "dispatch"])
def test_warm_up_is_the_same_on_all_ranks(drafting_dir: Path, layout: str) -> None:
    """Passes of delayed rows have exchanges."""
    options = dict(executor="thread", max_running=4, kv_tokens=1024, page_size=4, speculative="mtp") | WHOLE[layout]
    made = resolve_defaults(config(drafting_dir, **options))

    def warm_up(transport: ReferenceTransport) -> int:
        worker = Worker(made, [transport], costs("cpu"), lambda message: None)
        ran, worker.runner.stats.ran_draft = list[Counts](), lambda counts: ran.append(counts)  # type: ignore[method-assign]
        worker.warm_up(16, lambda done, total: None)
        assert not worker.table.rows and worker.runner.draft and not worker.runner.draft.delayed.due(STEP)
        return len(ran)

    assert len(set(run_world(made.mesh.world, warm_up))) == 1


@contextmanager
def drafts_noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[tuple[int, ...], ...]]]:
    """Note the drafts of each result, which ranks do not hold."""
    noted, result = list[tuple[tuple[int, ...], ...]](), Worker._result

    def noting(worker: Worker, *arguments: Any) -> Result:
        found = result(worker, *arguments)
        if found.drafts:
            noted.append(found.drafts)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Worker, "_result", noting)
        patched.setattr("weft.engine.controller.engine.drafts_asked", lambda each: (drafts_asked(each)[0], False))
        yield noted


def check_outputs(directory: Path, layout: str, **options: Any) -> Engine:
    """Compare outputs with those without drafts: every parameter, in two rounds, the second one from the prefix cache.
    Return the engine, which has ended."""
    plain = without_drafts(directory)
    rounds, engine = results(directory, **options, **WHOLE[layout])
    for found in rounds:
        same(found, plain)
    assert any(result.cached_tokens for result in rounds[1])
    assert engine.speculation and min(engine.speculation.drafted) > 100
    return engine


@pytest.mark.usefixtures("never_pausing")
@pytest.mark.parametrize(
    "layout",
    [
        "1x1",
        "2x1",
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ("dcp 2", "1x2", "2x2", "ep 2", "dispatch")),
    ],
)
def test_outputs_are_those_without_drafts(drafting_dir: Path, layout: str) -> None:
    check_outputs(drafting_dir, layout, speculative="mtp")


@pytest.mark.usefixtures("never_pausing")
def test_sequences_with_draft_layers_are_preempted(drafting_dir: Path) -> None:
    plain = without_drafts(drafting_dir)
    rounds, engine = results(drafting_dir, speculative="mtp", kv_tokens=96, max_batch_tokens=17)
    for found in rounds:
        same(found, plain)
    assert engine.stats().preemptions and engine.speculation and sum(engine.speculation.drafted)


@pytest.mark.usefixtures("never_pausing")
@pytest.mark.parametrize(
    "layouts", [("2x1", "dcp 2"), pytest.param(("1x1", "1x2", "ep 2"), marks=pytest.mark.nightly)], ids=str
)
def test_drafts_are_those_of_one_rank(
    drafting_dir: Path, monkeypatch: pytest.MonkeyPatch, layouts: tuple[str, ...]
) -> None:
    """Draft by draft, by groups without a sequence too, and whatever is cached."""
    tails = [[200, 201], [90], [91, 92, 93]]
    prompts = [PROMPTS[0], *([*PROMPTS[0], *tail] for tail in tails)]

    def drafts(layout: str, **changes: Any) -> list[Any]:
        changes |= dict(page_size=4 if layout == "dcp 2" else 8)  # drafts end with the pages of a group
        with (
            drafts_noted(monkeypatch) as noted,
            Engine(config(drafting_dir, speculative="mtp", **WHOLE[layout], **changes)) as engine,
        ):
            cached = [engine.generate([prompt], GREEDY)[0].cached_tokens for prompt in prompts]
        assert any(cached) == changes.get("prefix_cache", True)
        return noted

    wanted = drafts("1x1", prefix_cache=False)
    assert len(wanted) > 40
    for layout in layouts:
        assert drafts(layout, prefix_cache=False) == wanted, layout
    assert drafts("1x1") == wanted


def test_the_last_token_of_a_common_prefix_runs_again() -> None:
    """Its entry in a draft layer's cache follows from the token after it."""
    groups = [CacheGroup(Rule(), 40)]
    found = []
    for lookahead in (False, True):
        caches = CacheManager(groups, 4, lookahead=lookahead)
        admitted = caches.admit(list(range(12)), 12)
        assert admitted is not None
        caches.cache_prefix(admitted[0], list(range(12)), ended=True)
        caches.release(admitted[0])
        for tokens in ([*range(8), 99, 98], [*range(12), 99], [0, 99], [99, 98]):
            again = caches.admit(tokens, 4)
            assert again is not None and again[1] == caches.longest(tokens)
            found.append(again[1])
            caches.release(again[0])
    assert found == [8, 12, 1, 0, 7, 11, 0, 0]


@pytest.mark.usefixtures("never_pausing")
def test_the_embedded_models_drafts_are_accepted() -> None:
    """Its own draft layer is right for most tokens."""
    tokens = []
    for speculative in ("off", "mtp"):
        with Engine(config(embedded_model_dir(), speculative=speculative)) as engine:
            prompt = engine.tokenizer.apply_chat_template(
                [{"role": "user", "content": "Mia has 3 boxes with 12 kites in each. How many kites does Mia have?"}],
                add_generation_prompt=True,
                return_dict=False,
            )
            tokens.append(engine.generate([prompt], replace(GREEDY, ignore_eos=False, max_tokens=64))[0].token_ids)
            steps = engine.stats().steps
    assert tokens[0] == tokens[1] and len(tokens[0]) > 15
    assert engine.speculation is not None
    assert steps < 0.6 * len(tokens[0]) and engine.speculation.accepted[0] > 0.6 * engine.speculation.drafted[0]


def test_a_draft_layer_that_cannot_run_is_refused_in_one_line(
    model_dir: Path, drafting_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(says: str, model: Path = drafting_dir, **changes: Any) -> None:
        with pytest.raises(LayoutError, match=says) as error:
            Engine(config(model, **dict(speculative="mtp") | changes))
        assert "\n" not in str(error.value)

    refused("runs the checkpoint's draft layer, and config.json names none", model_dir)
    refused("needs all layers of the model: drop --num-layers", num_layers=2)
    refused("supports no split vocabulary so far", attn_tp=2, split_vocabulary="on")
    OTHERS["qwen3_5_moe"](tmp_path)
    byte_tokenizer(tmp_path)
    refused("config.json names none", tmp_path)


def test_plans_show_the_draft_layer(drafting_dir: Path) -> None:
    command = ("plan", str(drafting_dir), "--tokens", "2", "--speculative", "mtp")
    code, text, _ = weft_here(*command)
    assert code == 0 and "\ndraft layer: layout attn_dp=2 attn_tp=2" in text
    assert "  layers.*.post_attention_layernorm" in text.partition("draft layer")[2]
    code, text, _ = weft_here(*command, "--json")
    assert code == 0 and '"site": "mtp.layers.0.input_layernorm"' in text


def test_plans_show_the_price_of_drafts(drafting_dir: Path) -> None:
    """More rows cost more, and a draft layer costs its passes, too; without drafts nothing is shown."""
    command = ("plan", str(drafting_dir), "--tokens", "0,1,64", "--json")
    found = []
    for source in ("ngram", "mtp"):
        code, text, _ = weft_here(*command, "--speculative", source)
        assert code == 0
        none, one, many = (each.get("drafts") for each in json.loads(text))
        assert none is None and len(one) == len(many) == 5 and many[4] > 1.1 * many[0]
        found.append(many)
    assert found[0][0] == found[1][0] and found[0][1] < found[1][1]
    code, text, _ = weft_here("plan", str(drafting_dir), "--tokens", "64", "--speculative", "ngram")
    assert code == 0 and f"× {found[0][4] / found[0][0]:.2f}" in text.partition("drafts: predicted time")[2]
    assert "drafts" not in weft_here(*command)[1]


@pytest.mark.usefixtures("never_pausing")
@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["1x2", "2x2", "dcp 2"])
def test_ranks_in_processes(drafting_dir: Path, layout: str) -> None:
    """The arena of a rank also holds the rows that a pass reads, in steps with prompts too."""
    plain = without_drafts(drafting_dir)
    changes = dict(executor="process", transport="shm", speculative="mtp", max_batch_tokens=17)
    changes |= dict(kv_tokens=48 if layout == "dcp 2" else 96)  # of a rank
    rounds, engine = results(drafting_dir, **changes | WHOLE[layout])
    for found in rounds:
        same(found, plain)
    stats = engine.stats()
    assert not stats.failures and stats.preemptions and engine.speculation and min(engine.speculation.drafted) > 50
