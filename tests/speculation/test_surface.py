"""Surface of drafts for users: metrics, reports, the command line, and hints at other engines' options."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.here import weft_here
from engine.test_engine import config
from weft.engine.controller.engine import Engine
from weft.engine.messages.request import SamplingParams
from weft.serve.cli.other_engines import hint
from weft.serve.http.metrics import Metrics
from weft.serve.http.options import Options
from weft.serve.http.shared import Shared

REPEATS = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logit_bias=((40, 50.0),))


@pytest.mark.parametrize("speculative", ["ngram", "off"])
def test_drafts_are_counted_by_position(model_dir: Path, speculative: str) -> None:
    with Engine(config(model_dir, speculative=speculative, speculative_tokens=2)) as engine:
        engine.generate([[5, 6, 7]], REPEATS)
        stats = engine.stats()
        metrics = Metrics(engine)
        lines = metrics.text("name").decode().splitlines()
        values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
        reported = Shared(engine, metrics, Options(), "name").slow["report"]()["speculative"]
    model, counted = 'model_name="name"', (stats.drafted, stats.accepted)
    assert values["weft_draft_tokens_total"] == values[f"vllm:spec_decode_num_draft_tokens_total{{{model}}}"]
    assert values["weft_accepted_draft_tokens_total"] == sum(stats.accepted)
    if speculative == "off":
        assert reported is None and counted == ((), ()) and not values["weft_draft_rows_total"]
        return
    assert stats.drafted == (13, 13) or min(stats.drafted) > 5
    counts = dict(drafted=stats.drafted, accepted=stats.accepted)
    assert reported is not None and reported.pop("k") == 2
    assert reported.pop("why").startswith("k drafts cost 0.05 + 0.10 k steps, and the first is right in ")
    assert reported == dict(source="ngram", tokens=2, overlap="while all sequences pause", **counts)
    assert (
        values["weft_draft_rows_total"] == values[f"vllm:spec_decode_num_drafts_total{{{model}}}"] == stats.drafted[0]
    )
    for position in range(2):
        label = f'position="{position}"'
        assert values[f"weft_accepted_draft_tokens_per_position_total{{{label}}}"] == stats.accepted[position] > 5
        assert values[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{{model},{label}}}"] > 5
    assert stats.steps < 30 and stats.generated_tokens == 40


def test_a_completion_that_ends_with_drafts_is_counted_once(model_dir: Path) -> None:
    """Each token of a step has a call of the callback, and all of the last step see the end."""
    prompts, ended = [[5, 6, 7], [8, 9, 10], [11, 12, 13]], list[int]()
    with Engine(config(model_dir, speculative="ngram", speculative_tokens=2)) as engine:
        results = engine.generate(prompts, REPEATS, lambda: ended.append(1))
        assert sum(engine.stats().accepted) > 10
    assert [len(result.token_ids) for result in results] == [40] * 3 and len(ended) == 3


def test_the_command_line(model_dir: Path) -> None:
    arguments = ("generate", str(model_dir), "--executor", "thread", "--prompt", "a b a b a b", "--max-tokens", "12")
    plain, drafted = (weft_here(*arguments, *more) for more in ((), ("--speculative", "ngram", "--stats")))
    assert plain[:2] == drafted[:2] and plain[0] == 0
    [line] = [line for line in drafted[2].splitlines() if "drafts accepted" in line]
    assert " tokens in " in line
    code, _, said = weft_here("serve", "--speculative-config", "{}")
    assert code == 2 and "in Weft it is --speculative ngram" in said
    assert "--speculative ngram" in (hint(["--speculative-algorithm=NGRAM"]) or "")
    assert "--draft-model, with --speculative draft" in (hint(["--speculative-draft-model-path", "x"]) or "")
    config = '--speculative-config={"model": "x", "num_speculative_tokens": 3}'
    assert "draft [--draft-model DIR]" in (hint([config]) or "")
