"""`weft reproduce`: every set-up can be, and tables and lines of JSON follow from the figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.here import weft_here
from weft.bench.reproduce import Measured, better, config_of, measure
from weft.bench.seeds import SEEDS, Load, Row, Seed, Setup
from weft.cli import cmd_reproduce

SETUPS = {f"{name} small": seed.small for name, seed in SEEDS.items()}
SETUPS |= {f"{name} {n}": seed.large(n) for name, seed in SEEDS.items() for n in (2, 4, 8) if n >= seed.min_ranks}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_every_setup_can_be(setup: Setup, tmp_path: Path) -> None:
    for row in setup.rows:
        assert row.before != row.after and {row.before, row.after} <= setup.variants.keys()
        assert row.load < len(setup.loads)
    worlds = set()
    for options in setup.variants.values():
        config = config_of(setup, options, tmp_path / "model", None, "auto")
        model = config.read_model()
        longest = max(load.input + load.output for load in setup.loads)
        assert longest < min(model.max_position, config.max_model_len or longest + 1) <= config.cached_tokens
        worlds.add(config.mesh.world)
    assert len(worlds) == 1, "all variants take as many ranks"


def test_what_is_better() -> None:
    assert better("tokens/s", 100.0, 120.0) == 1.2 and better("next token, ms", 30.0, 20.0) == 1.5


TINY = Setup(
    None,
    {},
    {name: dict(executor="thread", attn_dp=2, plan=plan) for name, plan in (("naive", "naive"), ("ours", "cheapest"))},
    [Load(3, 9, 3, 2), Load(2, 5, 1, 2)],
    [Row("tokens/s", 0, "naive", "ours", (100.0, 120.0)), Row("MiB a step", 1, "naive", "ours")],
    ["two threads in place of GPUs"],
)


def test_a_run(tmp_path: Path) -> None:
    done: list[None] = []
    measured, layers = measure(TINY, tmp_path, 2, 1, "cpu", lambda: done.append(None))
    assert len(done) == 4 and layers == 1
    for figures in measured.figures.values():
        assert [load["tokens/s"] > 0 for load in figures] == [True, True]
        assert figures[0]["next token, ms"] > 0 == figures[1]["next token, ms"]
        assert all(load["collectives a step"] >= 1 and load["MiB a step"] > 0 for load in figures)
    assert measured.ratio(TINY.rows[1]) > 1, "a reduce-scatter brings less than an all-reduce"


def test_the_table_and_the_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {
        name: [{"tokens/s": rate, "MiB a step": 3.0}, {"tokens/s": 1.0, "MiB a step": 2.0}]
        for name, rate in (("naive", 50.0), ("ours", 75.0))
    }
    seed = Seed("a title", "a source", "much larger", 2, TINY, lambda gpus: TINY)
    monkeypatch.setitem(cmd_reproduce.SEEDS, "mixed", seed)
    monkeypatch.setattr(cmd_reproduce, "measure", lambda *_: (Measured(figures), 5))  # type: ignore[arg-type]
    assert cmd_reproduce.Command("mixed", small=True, rounds=1).run() == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    assert "here: two threads in place of GPUs" in "\n".join(table) and "here: 5 layers" in "\n".join(table)
    [row] = [line for line in table if line.startswith("tokens/s")]
    assert row.split("ours")[1].split() == ["100", "→", "120", "(1.20)", "50.00", "75.00", "1.50"]
    assert [each["times_better"] for each in json.loads(last)["rows"]] == [1.5, 1.0]


def test_too_few_gpus_are_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    code, _, error = weft_here("reproduce", "mixed")
    assert code == 2 and error == "weft: mixed takes 4 GPUs or more, and CUDA sees 1 here; --small runs on CPUs\n"
    monkeypatch.setitem(cmd_reproduce.SEEDS, "mixed", replace(SEEDS["mixed"], min_ranks=9))
    assert weft_here("reproduce", "all", "--rounds", "0")[2] == "weft: rounds is 0; it must be 1 or more\n"
