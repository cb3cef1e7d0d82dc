"""`weft diff`: layouts that are equal are found equal, and each planted fault is found at its site."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small_model
from torch import Tensor

from e2e.here import weft_here
from engine.test_hybrids import FAMILIES
from models.test_float8 import saved
from models.test_formats import SLOW_BYTES
from weft.comm.reference import ReferenceTransport
from weft.engine.config.config import EngineConfig
from weft.engine.controller import layout_diff
from weft.engine.controller.layout_diff import (
    LOGITS,
    RecordedRun,
    RowCopies,
    compare,
    record,
    record_transformers,
    tolerance_of,
)
from weft.engine.models.config_json.fields import ModelError
from weft.kernels import torch_reference
from weft.planner.cost import Costs

pytestmark = pytest.mark.usefixtures("planned_once")
PROMPTS = [list(range(3, 23)), list(range(30, 50)), list(range(5, 60, 7)), [9]]
"""Two for each DP group of two, with equal numbers of rows for each: groups may take each other's sums."""
EVEN = [PROMPTS[0], PROMPTS[1]]
STEPS = 3
QUARTER: dict[str, Any] = dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2)
SHARDED: dict[str, Any] = dict(attn_tp=8, moe_tp=8, dcp=2, dcp_interleave=1)
Exchange = Callable[..., Tensor]


def config(**options: Any) -> EngineConfig:
    """Return a config, of the embedded model unless options name another."""
    return EngineConfig(executor="thread", **options)


def run(options: dict[str, Any], given: list[list[int]] | None, prompts: list[list[int]] = PROMPTS) -> RecordedRun:
    return record(config(**options), prompts, STEPS, given, lambda what, part: None)


@pytest.fixture(scope="module")
def alone() -> RecordedRun:
    return run({}, None)


def differences(alone: RecordedRun, options: dict[str, Any]) -> dict[str, Any]:
    return compare(alone, run(options, alone.outputs(PROMPTS)), PROMPTS, tolerance_of(config(**options)))


@pytest.mark.parametrize(
    "options",
    [
        QUARTER,
        QUARTER | dict(plan="naive"),
        dict(attn_tp=4, ep=4),
        dict(attn_dp=8, ep=8, moe_exchange="dispatch"),  # half of the DP groups have no prompt
        dict(attn_tp=2, split_vocabulary="on"),
        SHARDED | dict(dcp_exchange="a2a", dcp_prefill="merge"),
        SHARDED | dict(dcp_query="replicate"),
    ],
    ids=str,
)
def test_equal_layouts_are_equal(alone: RecordedRun, options: dict[str, Any]) -> None:
    """Logits are equal in float32 to 10⁻⁵: only the order of sums differs."""
    found = differences(alone, options)
    assert found["departure"] is None and not found["partings"]
    assert found["largest"] < 1e-5
    sites = [f"model.layers.{i}.{norm}_layernorm" for i in range(4) for norm in ("input", "post_attention")]
    expected = [(step, site) for step in range(STEPS) for site in (*sites, "model.norm", LOGITS)]
    assert [(read["step"], read["site"]) for read in found["reads"]] == expected


def test_sizes_of_steps_follow_from_the_prompts(alone: RecordedRun) -> None:
    """Limits for serving do not matter, whether they are too small or too large for these prompts."""
    for limits in (dict(max_batch_tokens=1), dict(mixed_batch_tokens=1), dict(mixed_batch_tokens=2000)):
        assert not differences(alone, limits)["partings"]


def test_in_bfloat16_rounding_is_within_its_tolerance(tmp_path: Path) -> None:
    """A dense model is compared: a router would choose other experts where rounding decides."""
    small_model("qwen3", 4, tmp_path, seed=3, vocab_size=257)
    options = dict(model=tmp_path, dtype="bfloat16")
    first = run(options, None)
    found = compare(first, run(options | QUARTER, first.outputs(PROMPTS)), PROMPTS, tolerance_of(config(**options)))
    assert found["departure"] is None
    assert found["largest"] > 1e-4, "the tolerance of float32 would find rounding"


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v2"])
def test_windows_states_and_latents(family: str, tmp_path: Path) -> None:
    if family in FAMILIES:
        FAMILIES[family](tmp_path)
    else:
        small_model(family, 4, tmp_path, seed=3, vocab_size=257, max_position_embeddings=256)
    first = run(dict(model=tmp_path), None)
    other = run(dict(model=tmp_path, attn_dp=2, attn_tp=2), first.outputs(PROMPTS))
    found = compare(first, other, PROMPTS, 1e-4)
    # Recurrent states amplify the last bits of sums of two halves: 3e-6 by torch, 4e-5 by the kernels.
    assert found["departure"] is None and found["largest"] < (1e-5 if family != "qwen3_5_moe" else 6e-5)


def test_rows_that_travel_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no elements in the dtype of activations: the recorded ones are what products read."""
    monkeypatch.setattr(layout_diff, "cost_model", lambda config: Costs("slow", {"*": {0: SLOW_BYTES}}))
    options = dict(model=saved("qwen3", tmp_path), float8="on")
    prompts = [[token % 61 for token in prompt] for prompt in PROMPTS]
    first = run(options, None, prompts)
    other = run(options | QUARTER, first.outputs(prompts), prompts)
    assert any("in fp8" in text for sites in other.exchanges for texts in sites.values() for text in texts)
    found = compare(first, other, prompts, tolerance_of(config(**options)))
    assert found["departure"] is None and found["largest"] > 0


def planted(monkeypatch: pytest.MonkeyPatch, number: int, fault: Callable[..., Tensor], step: int = 0) -> None:
    """Exchange `number` of a step of QUARTER by the naive plan, three in each layer, is `fault` instead."""
    done, exchange = Counter[int](), ReferenceTransport.exchange

    def counted(transport: Any, x: Tensor, *args: Any, **named: Any) -> Tensor:
        done[transport.rank] += 1
        if done[transport.rank] - 1 == 12 * step + number:
            return fault(exchange, transport, x, *args, **named)
        return exchange(transport, x, *args, **named)

    monkeypatch.setattr(ReferenceTransport, "exchange", counted)


def over_the_wrong_group(exchange: Exchange, transport: Any, x: Tensor, kind: Any, group: Any, *args: Any) -> Tensor:
    assert group in ((0, 1), (2, 3)), "attn_tp"
    return exchange(transport, x, kind, (transport.rank % 2, transport.rank % 2 + 2), *args)


def dropped(exchange: Exchange, transport: Any, x: Tensor, *args: Any) -> Tensor:
    return x.clone()


def dropped_on_rank_3(exchange: Exchange, transport: Any, x: Tensor, *args: Any) -> Tensor:
    right = exchange(transport, x, *args)
    return x.clone() if transport.rank == 3 else right


@pytest.mark.parametrize(
    ("number", "fault", "step", "site", "by"),
    [
        (6, over_the_wrong_group, 0, "model.layers.2.post_attention_layernorm", "all_reduce attn_tp"),
        (5, dropped, 0, "model.layers.2.input_layernorm", "all_reduce world"),
        (11, dropped, 1, "model.norm", "all_reduce world"),
        (0, dropped_on_rank_3, 2, "model.layers.0.post_attention_layernorm", "all_reduce attn_tp"),
    ],
)
def test_a_sum_that_is_wrong(
    alone: RecordedRun,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    fault: Callable[..., Tensor],
    step: int,
    site: str,
    by: str,
) -> None:
    planted(monkeypatch, number, fault, step)
    first = alone if fault is not over_the_wrong_group else run({}, None, EVEN)
    prompts = PROMPTS if fault is not over_the_wrong_group else EVEN
    other = run(QUARTER | dict(plan="naive"), first.outputs(prompts), prompts)
    found = compare(first, other, prompts, 1e-4)
    departure = found["departure"]
    assert (departure["step"], departure["site"]) == (step, site)
    assert departure["exchanges"][0].startswith(by)
    assert departure["relative"] > 0.05 and departure["largest_before"] < 1e-5
    reads = [(read["step"], read["site"]) for read in found["reads"]]
    assert reads[reads.index((step, site)) - 1][1] == departure["before"]
    if fault is dropped_on_rank_3:
        assert departure["rank"] in (1, 3), "rank 1 gathers rows from rank 3"
        own = compare(other, other, prompts, 1e-4)["departure"]
        assert (own["step"], own["site"]) == (step, site) and own["rank"] in (1, 3), "copies of one layout differ, too"


def test_a_softmax_merge_with_a_wrong_base(alone: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts gather their tokens, so that only decode rows are merged."""
    merge = torch_reference.merge_weights

    def base_two(lses: Tensor) -> tuple[Tensor, Tensor]:
        weights, lse = merge(lses * math.log(2))
        return weights, lse / math.log(2)

    monkeypatch.setattr(torch_reference, "merge_weights", base_two)
    departure = differences(alone, SHARDED | dict(dcp_prefill="gather"))["departure"]
    assert (departure["step"], departure["site"]) == (1, "model.layers.0.post_attention_layernorm")
    assert any(text.startswith("outputs:") and " dcp " in text for text in departure["exchanges"])
    assert departure["largest_before"] < 1e-5


def test_transformers_is_compared_at_all_norms(alone: RecordedRun) -> None:
    outputs = alone.outputs(PROMPTS)
    theirs = record_transformers(config(), PROMPTS, outputs, list(alone.steps[0]))
    found = compare(alone, theirs, PROMPTS, 1e-4)
    assert found["departure"] is None and len(found["reads"]) == 10 * STEPS
    with pytest.raises(ModelError, match="transformers does not run /nowhere: "):
        record_transformers(EngineConfig(model=Path("/nowhere")), PROMPTS, outputs, [])


def recorded(values: dict[str, list[list[float]]]) -> RecordedRun:
    """Return a recording of one step on one rank, with a prompt of two tokens."""
    made, numbers = RecordedRun(1), torch.arange(2).numpy()
    for site, rows in values.items():
        made.steps[0][site] = [RowCopies(0 * numbers, numbers, torch.tensor(rows).numpy())]
    return made


def test_what_is_reported_of_a_row() -> None:
    first = recorded({"norm": [[3.0, 4.0], [0.0, 1.0]], LOGITS: [[1.0, 2.0, 0.0], [0.0, 2.0, 1.5]]})
    other = recorded({"norm": [[3.0, 4.5], [0.0, 1.2]], LOGITS: [[1.0, 2.0, 0.0], [0.0, 1.0, math.nan]]})
    found = compare(first, other, [[7, 8]], 0.15)
    departure = found["departure"]
    assert (departure.pop("relative"), departure.pop("max_abs")) == pytest.approx((0.2, 0.2))
    where = dict(step=0, site="norm", before="", exchanges=[], prompt=0, position=1, rank=0, rows=[1, 2])
    assert departure == where | dict(largest_before=0.0)
    assert found["reads"][1] == {"step": 0, "site": LOGITS, "relative": None} and found["largest"] is None
    assert found["partings"] == [{"prompt": 0, "token": 0, "first": 1, "other": 2, "margin": 0.5}]


def test_the_command_prints_both_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("diff", "--executor", "thread", "--max-tokens", "2", "--prompt", "One two three four five")
    code, out, _ = weft_here(*arguments, "--layouts", "1x1", "1x2 --dtype float32", "--against", "transformers")
    assert code == 0 and len(out.splitlines()) == 3
    assert out.startswith("1x2 --dtype float32 equals 1x1 at 20 reads: by ") and "\ntransformers equals 1x1" in out

    planted(monkeypatch, 5, dropped)
    layouts = "1x1", "2x2 --plan naive"
    code, out, _ = weft_here(*arguments, "--layouts", *layouts)
    lines = out.splitlines()
    assert code == 1
    assert lines[0] == "2x2 --plan naive departs from 1x1 at model.layers.2.input_layernorm, in the step of the prompts"
    assert lines[3] == "  equal before  model.layers.1.post_attention_layernorm"
    assert lines[4] == "  since then    all_reduce world → WORLD · reference"
    assert lines[5].startswith("  outputs part  at token 0 of prompt 0: ")
    assert " in 2x2 --plan naive (logits " in lines[5]
    planted(monkeypatch, 5, dropped)
    code, out, _ = weft_here(*arguments, "--json", "--layouts", *layouts)
    report = json.loads(out)
    assert code == 1 and not report["equal"] and report["first"] == "1x1"
    assert report["compared"][0]["departure"]["site"] == "model.layers.2.input_layernorm"


@pytest.mark.nightly
def test_ranks_in_processes_on_a_real_transport() -> None:
    code, out, err = weft_here("diff", "--layouts", "1x1", "1x2 --transport shm", "--max-tokens", "2")
    assert (code, "1x2 --transport shm equals 1x1" in out) == (0, True), err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--layouts", "1x1"), "give two layouts or more"),
        (("--layouts", "1x1", "1x2,x"), "layout '1x2,x' is not ATTN_DPxATTN_TP"),
        (("--layouts", "1x1", "1x1 --dcp 2"), "dcp=2 does not divide attn_tp=1"),
        (("--layouts", "1x1", "1x1 '"), "an unclosed quotation mark"),
        (("--attn-tp", "2"), "give layouts by --layouts"),
        (("--max-tokens", "0"), "--max-tokens must be 1 or more"),
        (("--max-tokens", "5000"), "at most the model's 1024"),
        (("--against", "transformers", "--num-layers", "1"), "transformers reads whole checkpoints"),
    ],
)
def test_bad_input_ends_in_one_line(arguments: tuple[str, ...], says: str) -> None:
    code, out, err = weft_here("diff", *arguments)
    assert code == 2 and not out and says in err and len(err.splitlines()) == 1
