"""Pauses of ranks' drafts: steps without drafts run no pass of the draft layer, and drafts after them are the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.conftest import byte_model, byte_tokenizer, generate_together
from engine.test_engine import config
from engine.test_hybrids import FAMILIES as OTHERS
from speculation.draft_layers import add_draft_layer
from speculation.test_draft_layers import WHOLE, Defined, DraftingRank, drafts_noted
from speculation.test_outputs import GREEDY, PROMPTS, SEEDED, results, same, without_drafts
from speculation.toy import FixedPrices
from weft.engine.controller.engine import Engine
from weft.engine.kv.cache_spec import Rule
from weft.engine.messages.rank_messages import Entries, GroupRows, Join, Sampling, Step
from weft.engine.speculation import drafting
from weft.engine.speculation.draft_prices import Price
from weft.engine.speculation.drafting import Speculation
from weft.engine.worker import delayed_rows
from weft.engine.worker.row_table import RowTable
from weft.engine.worker.run_stats import RunStats
from weft.engine.worker.worker import Finish, Repeatable, Worker

pytestmark = pytest.mark.usefixtures("planned_once")
Passes = list[tuple[int, ...]]


@pytest.fixture(scope="session")
def drafting_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_draft_layer(byte_model(tmp_path_factory.mktemp("pausing")))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """Rows of each DP group in each pass of a draft layer, in order."""
    noted, ran = Passes(), RunStats.ran_draft

    def noting(stats: RunStats, counts: tuple[int, ...]) -> None:
        noted.append(counts)
        ran(stats, counts)

    monkeypatch.setattr(RunStats, "ran_draft", noting)
    return noted


@pytest.fixture
def pausing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let sequences draft in two steps of each six."""
    for name, value in dict(MIN_PAUSE=6, MAX_PAUSE=6, PROBES=2).items():
        monkeypatch.setattr(drafting, name, value)
    monkeypatch.setattr(FixedPrices, "value", Price(50.0, 50.0))
    yield


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_without_drafts_run_no_pass(
    drafting_dir: Path, graphs: bool, passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows run in one pass before the next drafts, or when they are many."""
    defined, rank = Defined(drafting_dir), DraftingRank(drafting_dir, cuda_graphs=graphs)

    def decode(drafts: int, **changes: Any) -> None:
        result = rank.step(GroupRows((2,), **changes), drafts)
        rank.tokens += result.tokens
        if drafts:
            assert list(result.drafts[0]) == defined.drafts(rank.tokens, drafts)

    def found() -> Passes:
        rank.worker.held.run()
        taken, passes[:] = passes[:], []
        return taken

    assert found() == [(5,), (6,), (1,), (1,), (1,)]
    for _ in range(5):
        decode(0)
    assert not found()
    decode(2)
    assert found() == [(5,), (1,), (1,)]
    decode(0)
    decode(0, entries=(Entries(2, 0, 40, (41,)),))
    assert not found()
    decode(1)
    assert found() == [(2,), (1,)]
    monkeypatch.setattr(rank.worker.runner.draft.delayed, "limit", 3)  # type: ignore[union-attr]
    for _ in range(4):
        decode(0)
    assert found() == [(3,)]
    decode(3)
    assert found() == [(1,), (1,), (1,), (1,)]


@pytest.mark.parametrize("graphs", [True, False])
def test_delayed_rows_leave_the_keys_of_a_pass_in_each_step(drafting_dir: Path, graphs: bool) -> None:
    found = []
    for drafts in ((0, 0, 0, 0, 1), (1, 1, 1, 1, 1)):
        rank = DraftingRank(drafting_dir, cuda_graphs=graphs)
        tokens = [rank.step(GroupRows((2,)), count).tokens for count in drafts]
        rank.worker.held.run()
        caches = rank.worker.runner.caches
        kind, layer = caches.places["mtp.layers.0.self_attn"]
        keys = caches.paged[kind][1].cache.keys[layer, : rank.worker.table.rows[2].length]  # pages are in order
        found.append((tokens, keys.clone()))
    assert found[0][0] == found[1][0] and found[0][1].abs().sum(-1).min() > 0
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("pausing")
def test_drafts_after_pauses_are_those_of_one_rank(drafting_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft by draft, by groups without a sequence too."""
    prompts = [PROMPTS[0], [*PROMPTS[0], 200, 201]]

    def drafts(layout: str, **changes: Any) -> list[Any]:
        changes |= dict(page_size=4 if layout == "dcp 2" else 8)  # drafts end with the pages of a group
        with (
            drafts_noted(monkeypatch) as noted,
            Engine(config(drafting_dir, speculative="mtp", **WHOLE[layout], **changes)) as engine,
        ):
            cached = [engine.generate([prompt], replace(GREEDY, max_tokens=80))[0].cached_tokens for prompt in prompts]
        assert any(cached) == changes.get("prefix_cache", True)
        return noted

    wanted = drafts("1x1", prefix_cache=False)
    assert 8 < len(wanted) < 80
    for layout in ("2x1", "dcp 2"):
        assert drafts(layout, prefix_cache=False) == wanted, layout
    assert drafts("1x1")


@pytest.mark.usefixtures("pausing")
@pytest.mark.parametrize(
    "layout", ["2x1", *(pytest.param(each, marks=pytest.mark.nightly) for each in WHOLE if each != "2x1")]
)
def test_outputs_with_pauses_are_those_without_drafts(drafting_dir: Path, layout: str, passes: Passes) -> None:
    """Every parameter, in two rounds, with preemption."""
    plain = without_drafts(drafting_dir)
    rounds, engine = results(drafting_dir, speculative="mtp", kv_tokens=160, max_batch_tokens=17, **WHOLE[layout])
    for found in rounds:
        same(found, plain)
    assert engine.stats().preemptions and engine.speculation and engine.speculation.drafted[0]
    assert passes and max(map(max, passes)) <= 17


@pytest.mark.parametrize("options", [dict(), dict(attn_dp=2, ep=2)])
def test_a_paused_step_is_the_last_one_again(
    drafting_dir: Path, options: dict[str, Any], passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks repeat it, and the controller sends it ahead, as without a draft layer."""
    repeated, repeat = list[int](), Worker._repeat

    def noting(worker: Worker, step: Step, last: Repeatable) -> Finish:
        repeated.append(step.number)
        return repeat(worker, step, last)

    monkeypatch.setattr(Worker, "_repeat", noting)
    monkeypatch.setattr(Speculation, "pause", 1024)
    monkeypatch.setattr(FixedPrices, "value", Price(50.0, 50.0))
    found = []
    for source in ("off", "mtp"):
        with Engine(config(drafting_dir, speculative=source, **options)) as engine:
            tokens = engine.generate(PROMPTS[:1], replace(GREEDY, max_tokens=40))[0].token_ids
            found.append((tokens, len(repeated), engine.stats().steps))
        repeated.clear()
    (tokens, plain, steps), (*same, paused, paused_steps) = found
    ranks, chunks, caught_up = options.get("attn_dp", 1), 2, 2  # a pass holds 16 rows
    assert [tokens] == same and steps == paused_steps and plain == ranks * (steps - 3)
    assert paused == plain - ranks * caught_up and len(passes) == ranks * (chunks + caught_up)


@pytest.mark.parametrize("graphs", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_groups_pass_their_limits(
    drafting_dir: Path, graphs: bool, passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of more rows than may be delayed run their pass. Of two groups, one has rows beyond the recorded step, so
    only the other one repeats steps, also behind a pass of delayed rows."""
    monkeypatch.setitem(delayed_rows.MAX_ROWS, "cpu", 3)
    monkeypatch.setattr(FixedPrices, "value", Price(50.0, 50.0))
    monkeypatch.setattr(Speculation, "pause", 1024)
    values = dict(speculative="mtp", max_running=4, max_batch_tokens=64, max_restarts=0, attn_dp=2, ep=2)
    with Engine(config(drafting_dir, cuda_graphs=graphs, **values)) as engine:
        for count in (2, 8):
            how = [replace(SEEDED, top_k=9), GREEDY] * (count // 2)
            generate_together(engine, PROMPTS[:count], how)
    assert (3, 3) in passes and any(4 in counts for counts in passes)


@pytest.mark.usefixtures("pausing")
@pytest.mark.parametrize("layout", ["1x1", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("2x1", "1x2"))])
def test_windows_of_draft_models(
    drafting_dir: Path, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delayed rows run before a page that they read is given away: a draft is the same whenever the rows before it
    ran."""
    OTHERS["gpt_oss"](tmp_path)
    byte_tokenizer(tmp_path)
    options = dict(speculative="draft", draft_model=tmp_path, page_size=4, **WHOLE[layout])
    found = []
    for delays in (False, True):
        with drafts_noted(monkeypatch) as noted, monkeypatch.context() as patched:
            if not delays:
                patched.setattr(delayed_rows.DelayedRows, "delays", lambda *step: False)
            with Engine(config(drafting_dir, **options)) as engine:
                engine.generate(PROMPTS[:1], replace(GREEDY, max_tokens=60))
        found.append(noted)
    assert found[0] == found[1] and len(found[0]) > 6


def test_a_delayed_row_is_not_stored_on_a_page_of_another_row() -> None:
    """An ended sequence's page may be given away before its rows run."""
    table, like = RowTable(4, [Rule()], 4, torch.device("cpu")), torch.zeros(1)
    joins = tuple(Join(row, row, 6, (tuple(pages),), Sampling()) for row, pages in ((1, (5, 6)), (2, (7, 8))))
    table.apply(GroupRows(joins=joins))
    delayed, both = delayed_rows.DelayedRows(8, 3, like), GroupRows((1, 2))
    for step in range(2):
        table.advance(both)
        delayed.add((2,), both.decode_rows, table, torch.tensor([3, 4]), torch.full((2, 3), float(step)))
    change = GroupRows((2,), entries=(Entries(2, 0, 2, (6,)),))
    delayed.give_away(change, table)
    table.apply(change)
    assert not delayed.due(Step(1, (change,))) and delayed.due(Step(1, (change,), drafts=1)) == (4,)
    batch, hidden = delayed.taken(table)
    assert batch.tables[0].slots.tolist() == [-1, 34, -1, 35] and batch.positions.tolist() == [6, 6, 7, 7]  # type: ignore[union-attr]
    assert batch.tokens.tolist() == [3, 4] * 2 and hidden[:, 0].tolist() == [0, 0, 1, 1]
    assert delayed.due(Step(1, (change,), drafts=1)) == ()


def test_delayed_rows_are_limited_by_the_rows_of_a_step() -> None:
    limits = [delayed_rows.DelayedRows(rows, 1, torch.zeros(1)).limit for rows in (17, 4096)]
    assert limits == [17, delayed_rows.MAX_ROWS["cpu"]]
