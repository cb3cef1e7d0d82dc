"""One plan for all that a step exchanges: every op is in it, in order, and ranks that differ in one are found."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import EVERY, SUMS, run_world, small_model
from torch import Tensor

from engine.conftest import byte_tokenizer
from engine.test_engine import GREEDY, config
from weft.comm.reference import ReferenceTransport
from weft.engine.config.config import EngineError
from weft.engine.controller.engine import Engine
from weft.engine.messages.rank_messages import GroupRows
from weft.engine.models.registry import load_config, registry
from weft.engine.worker.graph_inputs import Shape
from weft.engine.worker.planning import plan_model
from weft.engine.worker.step_output import sampled_logits
from weft.engine.worker.worker import Worker
from weft.planner.cost import PRESETS, AlphaBeta, Offer
from weft.planner.experts import Dispatch, Permute
from weft.planner.op import BlockOp
from weft.planner.plan import Plan, Planner
from weft.planner.prices import BlockPrices
from weft.planner.recipes import RECIPES, Merge, Recipe
from weft.planner.show import plan_dict
from weft.planner.spec import Mesh, PlacementError
from weft.stream import block_exchanges
from weft.stream.block_exchanges import BlockExchanges
from weft.stream.dispatch import Exchanging, all_to_allv
from weft.stream.step_rows import StepRows

ASKED = [[5, 17, 40], [9, 2, 33, 21, 8]]
KINDS = EVERY | {"all_to_allv", "merge_scatterv"}
OFFER = Offer("reference", KINDS, SUMS, PRESETS["h200-nvlink"])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    small_model("deepseek_v2", 4, tmp_path)
    byte_tokenizer(tmp_path)
    return tmp_path


def plan_of(directory: Path, mesh: Mesh, experts: str = "dispatch") -> Plan:
    read = replace(load_config(directory, registry(())), experts=experts, split_vocabulary=True)
    return plan_model(read, mesh, read.dtype, [OFFER]).plan((4,) * mesh.attn_dp)


def test_one_list_has_every_op_in_the_order_of_a_step(model: Path) -> None:
    mesh = Mesh(2, 4, 8, 1, dcp=2)
    ops = [(site, str(op)) for site, op in plan_of(model, mesh).ops()]
    first = next(site for site, _ in ops if site.endswith("input_layernorm"))
    inside = [op.partition(" ")[0] for site, op in ops if site == first]
    assert inside[-2:] == ["queries:", "outputs:"], "after what brings the stream's rows"
    moe = next(site for site, op in ops if op.startswith("dispatch"))
    assert [op.partition(":")[0] for site, op in ops if site == moe][-3:] == ["counts", "dispatch", "combine"]
    assert [op.partition(":")[0] for _, op in ops[-2:]] == ["best tokens", "logits"]
    assert sum(op.startswith("queries") for _, op in ops) == 3, "of every layer"


def test_a_plan_costs_what_its_ops_cost(model: Path) -> None:
    plan = plan_of(model, Mesh(2, 4, 8, 1, dcp=2))
    inside = [op.us for read in plan.reads for op in read.inside if not op.optional]
    steps = [step.us for read in plan.reads for step in read.steps]
    assert plan.us == pytest.approx(sum(steps) + sum(inside)) and min(inside) > 0
    assert plan.us == pytest.approx(sum(read.us for read in plan.reads))


def altered(plan: Plan, at: int) -> Plan:
    """Return the plan with op number `at` carried out by another transport."""
    changed, reads = list(plan.ops())[at][1], []
    numbers = itertools.count()

    def other(op: Any) -> Any:
        if isinstance(op, BlockOp) and op.parts:
            return replace(op, parts=tuple(map(other, op.parts)))
        return replace(op, transport="another") if op.kinds and next(numbers) == at else op

    for read in plan.reads:
        reads.append(replace(read, steps=tuple(map(other, read.steps)), inside=tuple(map(other, read.inside))))
    assert at < next(numbers) and changed.transport != "another"
    return replace(plan, reads=tuple(reads))


def test_every_op_counts_in_the_checksum(model: Path) -> None:
    plan = plan_of(model, Mesh(2, 2, 4, 1, dcp=2))
    ops = list(plan.ops())
    found = {altered(plan, at).checksum() for at in range(len(ops))}
    assert len(found) == len(ops) and plan.checksum() not in found
    ag_rs = RECIPES[Merge][0]
    merged = [
        replace(
            read,
            inside=tuple(replace(s, recipe=ag_rs) if isinstance(s.value, Merge) else s for s in read.inside),
        )
        for read in plan.reads
    ]
    assert replace(plan, reads=tuple(merged)).checksum() != plan.checksum(), "the recipe of a merge too"


class Replayed:
    """Graphs as a CPU has them: of steps of up to 16 rows, each replay of which runs the step eagerly."""

    shapes, greedy = (Shape(16, 16, True),), False

    def __init__(self, worker: Worker):
        self._worker, self.token_ring = worker, self
        runner = worker.runner
        runner._graphs, runner.stats.graph_seconds = self, defaultdict(dict)  # type: ignore[assignment]
        runner.stats.graph_planner = Planner(runner.mesh, runner.planner.chain, runner.planner.offers)

    def shape_of(self, groups: Any, counts: tuple[int, ...]) -> Shape:
        return self.shapes[0]

    def replay(self, shape: Shape, group_rows: GroupRows, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        table, runner = self._worker.table, self._worker.runner
        logits = sampled_logits(group_rows, runner.forward(table.batch(group_rows), counts))
        self._tokens = self._worker.sampler.sample(group_rows, logits)
        return logits, self._tokens

    def wait(self, sampled: int) -> Callable[[], np.ndarray]:
        return lambda: self._tokens.numpy()


class Ranks:
    """The workers of an engine's threads, by rank. captured: their steps are replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, captured: bool, begin: Callable[[Worker], None] | None = None):
        self.workers: dict[int, Worker] = {}
        true = Worker.__init__

        def init(worker: Worker, *args: Any) -> None:
            true(worker, *args)
            if captured:
                Replayed(worker)
            if begin:
                begin(worker)
            self.workers[worker.rank] = worker

        monkeypatch.setattr(Worker, "__init__", init)


def differ(worker: Worker, what: str, captured: bool) -> None:
    """Have the rank plan, and run, one op otherwise: by another transport, which does the same."""
    runner = worker.runner
    planner = runner.stats.graph_planner if captured else runner.planner
    true = planner.plan

    def plan(counts: tuple[int, ...]) -> Plan:
        found = true(counts)
        of_stream = what == "stream"
        return altered(
            found,
            next(
                at
                for at, (_, op) in enumerate(found.ops())
                if (not isinstance(op, BlockOp) if of_stream else str(op).startswith(what))
            ),
        )

    planner.plan = plan  # type: ignore[method-assign]
    runner.transports["another"] = next(iter(runner.transports.values()))
    runner._checksums.clear()


LAYOUT = dict(attn_dp=2, attn_tp=2, ep=4, moe_tp=1, dcp=2, split_vocabulary="on", moe_exchange="dispatch")
LAYOUT |= dict(cuda_graphs=False)  # no recorded steps
OPS = pytest.mark.parametrize("what", ["stream", "queries", "outputs", "best tokens", "logits", "dispatch"])
CAPTURED = pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])


@OPS
@CAPTURED
def test_a_rank_that_differs_in_one_op_is_found_before_a_token_goes_out(
    model: Path, what: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, captured)
    with Engine(config(model, max_restarts=0, **LAYOUT)) as engine:
        differ(ranks.workers[1], what, captured)
        came: list[Any] = []
        with pytest.raises(EngineError, match=r"ranks diverge: rank 1 ran .* by plan [0-9a-f]{8} .*, where .* by plan"):
            came += engine.generate(ASKED, GREEDY)
        assert not came


@OPS
@CAPTURED
def test_a_rank_that_plans_one_op_otherwise_is_found_before_any_step(
    model: Path, what: str, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ranks(monkeypatch, captured, lambda worker: differ(worker, what, captured) if worker.rank == 1 else None)
    plan = rf"plans {'captured ' * captured}steps of 16 rows by plan [0-9a-f]{{8}}"
    with pytest.raises(EngineError, match=rf"ranks diverge: rank 1 {plan}, where rank 0 {plan}; give all") as error:
        Engine(config(model, **LAYOUT))
    assert "\n" not in str(error.value)


def test_replayed_steps_give_the_same_tokens(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found where ranks agree."""
    found = []
    for captured in (False, True):
        with monkeypatch.context() as m:
            ranks = Ranks(m, captured)
            with Engine(config(model, **LAYOUT)) as engine:
                found.append([result.token_ids for result in engine.generate(ASKED, GREEDY)])
            assert all(
                any(rows for _, rows in worker.runner.stats.steps) == captured for worker in ranks.workers.values()
            )
    assert found[0] == found[1] and all(found[0])


def test_ranks_with_calls_of_other_rows_differ(model: Path) -> None:
    """One runs more collectives than the other, of the same op by the same transport; so does one with other rows."""
    plan = plan_of(model, Mesh(1, 2, 2, 1, dcp=2))
    [first, *others] = plan.reads
    split = replace(first, inside=tuple(replace(op, max_call_rows=1) for op in first.inside))
    assert replace(plan, reads=(split, *others)).checksum() != plan.checksum()
    assert replace(plan, counts=(8,)).checksum() != plan.checksum()


def test_a_recipe_is_added_by_one_registration(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the planner's table, and what carries it out: plans take it, reports name it, tokens are the same."""
    toy = Recipe("toy", lambda value, ranks, rows: [("merge_scatterv", 0.0)], lambda value, ranks, rows: [])
    monkeypatch.setitem(RECIPES, Merge, (*RECIPES[Merge], toy))
    monkeypatch.setitem(block_exchanges.MERGES, "toy", block_exchanges.fused)
    mesh = Mesh(1, 2, 2, 1, dcp=2)
    prices = BlockPrices(mesh, [OFFER], {Merge: "auto"})
    assert prices.plan(Merge(4, 16, 4), "dcp", 8).recipe.name == "toy", "it moves nothing, so it costs least"

    def rank_main(transport: ReferenceTransport) -> dict[Any, Any]:
        exchanges = BlockExchanges(mesh, transport.rank, {"reference": transport}, prices)
        exchanges.site = "layers.0.norm"
        exchanges.merge("dcp", torch.ones(3, 4, 16), torch.zeros(3, 4))
        return exchanges.ran

    for ran in run_world(2, rank_main):
        [((site, op), (calls, *_))] = ran.items()
        assert (site, str(op), calls) == ("layers.0.norm", "outputs: toy: merge_scatterv dcp · reference", 1)
    found = []
    for exchange in ("auto", "fused"):
        with Engine(config(model, attn_tp=2, ep=2, dcp=2, dcp_exchange=exchange)) as engine:
            found.append([result.token_ids for result in engine.generate(ASKED, GREEDY)])
            steps = [stat.step for stat in engine.comm_report()[0] if stat.step.startswith("outputs")]
            assert all(("toy" in step) == (exchange == "auto") for step in steps) and steps
    assert found[0] == found[1]


def test_a_recipe_of_a_dispatch_is_added_by_one_registration(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans take it where it costs less, reports name its ops and no others, tokens are the same."""

    def parts(value: Dispatch, ranks: int, tokens: int) -> Any:
        ops = [(part, rows) for part, rows in value.parts(ranks, tokens) if isinstance(part, Permute)]
        return tuple((replace(op, what=f"toy {op.what}"), rows) for op, rows in ops)  # without the kernels' time

    def run(by: Exchanging, *given: Any) -> Any:
        toy = replace(
            by,
            carry=lambda name, x, sizes: by.carry(f"toy {name}", x, sizes),
            empty=lambda name, *shape, like: by.empty(f"toy {name}", *shape, like=like),
        )
        return all_to_allv(toy, *given)

    found = []
    for toy in (False, True):
        if toy:
            monkeypatch.setitem(RECIPES, Dispatch, (*RECIPES[Dispatch], Recipe("toy", parts=parts)))
            monkeypatch.setitem(block_exchanges.DISPATCHES, "toy", run)
        with Engine(config(model, attn_tp=2, ep=2, moe_exchange="dispatch")) as engine:
            tokens = [result.token_ids for result in engine.generate(ASKED, GREEDY)]
            found.append((tokens, {s.step: s.bytes for s in engine.comm_report()[0] if "all_to_allv" in s.step}))
    (tokens, ops), (same, toys) = found
    assert tokens == same and len(ops) == 3 and toys == {f"toy {op}": size for op, size in ops.items()}


def test_a_block_that_dispatches_otherwise_than_it_was_traced_is_found(model: Path) -> None:
    """Before it communicates, by name: a rank whose peers dispatch otherwise would wait for ever."""
    mesh = Mesh(2, 1, 2, 1)
    planned = plan_model(replace(load_config(model, registry(())), experts="dispatch"), mesh, torch.float32, [OFFER])

    def rank_main(transport: ReferenceTransport) -> str:
        exchanges = BlockExchanges(mesh, transport.rank, {"reference": transport}, planned.blocks)
        plan, x = planned.plan((2, 1)), torch.ones(2, 64)
        exchanges.begin(plan.counts, StepRows(mesh, transport.rank, (2, 1)), None)
        [read, *_] = [read for read in plan.reads if read.inside]
        exchanges.serve(read)
        with pytest.raises(PlacementError) as found:
            exchanges.dispatch(x, torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.int64), 4, lambda x, *_: x)
        return str(found.value)

    said = run_world(2, rank_main)
    assert said[0] == said[1] and "post_attention_layernorm" in said[0] and "which is not in the plan here" in said[0]


def test_the_naive_plan_merges_by_ag_rs(model: Path) -> None:
    """Beside another plan it is what would have been moved; where it is followed, that is what runs."""
    found, tokens = {}, []
    for plan in ("cheapest", "naive"):
        with Engine(config(model, attn_tp=2, ep=2, dcp=2, plan=plan)) as engine:
            tokens.append([result.token_ids for result in engine.generate(ASKED, GREEDY)])
            for report, stats in zip(("ran", "compared"), engine.comm_report(), strict=True):
                outputs = [stat for stat in stats if stat.step.startswith("outputs")]
                found[plan, report] = [(s.step.split(" dcp ")[0], s.count, s.bytes) for s in outputs]
    by = {key: {step for step, _, _ in steps} for key, steps in found.items()}
    assert by["cheapest", "ran"] == {"outputs: fused: merge_scatterv"}
    ag_rs = "outputs: ag_rs: all_gatherv + reduce_scatterv"
    assert by["cheapest", "compared"] == by["naive", "ran"] == by["naive", "compared"] == {ag_rs}
    for (_, count, moved), (_, naive_count, naive) in zip(
        found["cheapest", "ran"], found["cheapest", "compared"], strict=True
    ):
        output, lse = 5 * 4, 4  # bytes of a head of which half are other ranks', or all
        assert naive_count == count and naive == pytest.approx(moved * (output / 2 + lse) / ((output + lse) / 2))
    assert found["naive", "ran"] == found["naive", "compared"] and tokens[0] == tokens[1]


def test_plan_json_has_the_ops_of_blocks_in_their_places(model: Path) -> None:
    read = replace(load_config(model, registry(())), split_vocabulary=True)
    planner = plan_model(read, Mesh(1, 2, 2, 1, dcp=2), read.dtype, [OFFER])
    reads = plan_dict(planner, (4,))["plan"]["reads"]
    assert [step["value"] for step in reads[0]["steps"] if step["op"] == "settle"] == ["queries", "outputs"]
    assert [step["value"] for step in reads[-1]["steps"] if step["op"] == "settle"] == ["best tokens", "logits"]
    assert [step["asked"] for step in reads[-1]["steps"][-2:]] == [False, True]


def test_groups_with_fewer_rows_exchange_as_the_plan_does(model: Path) -> None:
    """A plan is made for the fullest DP group: its recipes run in all of them, not the cheapest for each one's rows."""
    mesh = Mesh(2, 2, 4, 1, dcp=2)
    few = AlphaBeta("few", alpha_us=1.0, hop_us=0.0, gb_s=0.1, launch_us=1.0, mem_gb_s=1e6)
    many = replace(few, name="many", alpha_us=100.0, gb_s=1e6)
    offers = [Offer("reference", KINDS - {"merge_scatterv"}, SUMS, few), Offer("other", KINDS, SUMS, many)]
    read = replace(load_config(model, registry(())), split_vocabulary=True)
    planner = plan_model(read, mesh, read.dtype, offers)
    tokens = 1 << 14
    plan = planner.plan((tokens, 1))
    attention = next(r for r in plan.reads if any(isinstance(s.value, Merge) for s in r.inside))
    [merge] = [s for s in attention.inside if isinstance(s.value, Merge)]
    alone = planner.blocks.plan(merge.value, "dcp", 1)
    assert (alone.transport, alone.recipe.name) != (merge.transport, merge.recipe.name), "otherwise nothing is tested"

    def rank_main(transport: ReferenceTransport) -> dict[Any, Any]:
        exchanges = BlockExchanges(mesh, transport.rank, {"reference": transport, "other": transport}, planner.blocks)
        exchanges.begin(plan.counts, StepRows(mesh, transport.rank, (3, 1)), None)
        exchanges.serve(attention)
        rows = (3, 1)[mesh.group_of(transport.rank)]
        value = merge.value
        assert isinstance(value, Merge)
        exchanges.merge(
            "dcp", torch.ones(rows, value.heads, value.dim, dtype=read.dtype), torch.zeros(rows, value.heads)
        )
        return exchanges.ran

    for ran in run_world(4, rank_main):
        assert [op for _, op in ran] == [merge]


def test_plan_json_has_a_dispatch_in_its_place(model: Path) -> None:
    read = replace(load_config(model, registry(())), experts="dispatch")
    plans = plan_dict(plan_model(read, Mesh(2, 1, 2, 1), read.dtype, [OFFER]), (4, 4))
    found = [[step for step in each["steps"] if step["op"] == "settle"] for each in plans["plan"]["reads"]]
    dispatches = [steps for steps in found if steps]
    assert len(dispatches) == read.num_layers - 1, "the first layer has no experts"
    for counts, pack, send, back, add in dispatches:
        assert [step["value"] for step in (counts, send, back)] == ["counts", "dispatch", "combine"]
        for step in (counts, send, back):
            assert (step["recipe"], step["transport"], step["group"]) == ("all_to_allv", "reference", "world")
            assert step["bytes"] > 0 and step["us"] > 0
        assert [(step["recipe"], step["bytes"], step["us"] > 0) for step in (pack, add)] == [("local", 0, True)] * 2
    moved = sum(step.get("bytes", 0) for each in plans["plan"]["reads"] for step in each["steps"])
    assert moved == plans["plan"]["bytes"]
