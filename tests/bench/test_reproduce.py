"""`weft reproduce`: every set-up can be, and tables and lines of JSON follow from the figures."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from e2e.here import weft_here
from weft.engine.assets import preset_dir
from weft.engine.attention import backend_registry
from weft.engine.attention.backend_registry import BACKENDS, Needs, backends
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.controller.startup import declared_caches
from weft.engine.kv.cache_spec import Latent
from weft.engine.worker.memory import weight_bytes
from weft.serve.cli.command import UserError
from weft_bench import reproduce
from weft_bench.commands import cmd_reproduce
from weft_bench.reproduce import Figures, Measured, better, config_of, measure
from weft_bench.seeds import DEEPSEEK_V2_CACHE, SEEDS
from weft_bench.setups import Load, Profile, Seed, Setup, TableRow

SETUPS = {f"{name} small": seed.small for name, seed in SEEDS.items()}
SETUPS |= {f"{name} {n}": seed.large(n) for name, seed in SEEDS.items() for n in (2, 4, 8) if n >= seed.min_ranks}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_every_setup_can_be(setup: Setup, tmp_path: Path) -> None:
    for row in setup.rows:
        assert row.before != row.after and {row.before, row.after} <= setup.variants.keys()
        assert row.load < len(setup.loads)
    assert setup.profile is None or setup.profile.batch == setup.loads[0].concurrency, "as rows of its figures say"
    worlds = set()
    for options in setup.variants.values():
        config = config_of(setup, options, tmp_path / "model", None, "auto")
        model = config.read_model()
        longest = max(load.input + load.output for load in setup.loads)
        assert longest < min(model.max_position, config.max_model_len or longest + 1) <= config.cached_tokens
        worlds.add(config.mesh.world)
    assert len(worlds) == 1, "all variants take as many ranks"


def test_dcp_runs_with_every_backend_that_lacks_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU with all libraries, each with the options that it takes; without them, what is missing is named."""
    monkeypatch.setattr(backend_registry, "fa3_library", lambda: ("somewhere", tmp_path))
    monkeypatch.setattr(backend_registry, "find_spec", lambda name: object())
    setup = SEEDS["dcp"].large(8)
    exchanges = {(options["attention_backend"], options.get("dcp_exchange")) for options in setup.variants.values()}
    recipes = (None, "ag_rs", "a2a", "fused")
    assert exchanges == {(entry.option, recipe) for entry in BACKENDS if entry.device != "cpu" for recipe in recipes}
    for options in setup.variants.values():
        config = config_of(setup, options, tmp_path / "model", None, "auto")
        assert config.kv_dtype == "auto" and config.mesh.world == 8
        needs = Needs(
            "cuda",
            (9, 0),
            "bfloat16",
            config.kv_dtype,
            lambda: [Latent(576, 512)],
            config.page_size,
            config.dcp,
            config.dcp_prefill,
            config.cuda_graphs,
        )
        assert backends()[config.attention_backend].refusal(needs) is None
    assert "attention backend flashinfer with dcp_prefill gather, cuda_graphs False" in setup.differs
    quoted = {row.after: row.quoted for row in setup.rows if (row.metric, row.load) == ("tokens/s", 6)}
    assert quoted["flashinfer: dcp, a2a"] == (1400, 3126) and quoted["fa3: dcp, ag_rs"] == (1382, 2930)
    assert quoted["fa3: dcp, fused"] is None

    monkeypatch.setattr(backend_registry, "fa3_library", lambda: None)
    setup = SEEDS["dcp"].large(8)
    assert not any(name.startswith("fa3") for name in setup.variants)
    assert [line for line in setup.differs if line.startswith("without attention backend fa3: it requires vLLM")]


def test_the_model_of_dcp_has_the_cache_that_backends_are_asked_for() -> None:
    config = EngineConfig(preset_dir("deepseek-v2"), load_format="dummy", num_layers=1, device="cpu")
    [cache] = declared_caches(config, config.read_model())
    assert isinstance(cache, Latent)
    assert (cache.width, cache.value_width) == (DEEPSEEK_V2_CACHE.width, DEEPSEEK_V2_CACHE.value_width)


def test_mixed_has_the_cache_of_the_pull_request() -> None:
    assert {options["kv_dtype"] for options in SEEDS["mixed"].large(8).variants.values()} == {"fp8_e4m3"}


def test_what_is_better() -> None:
    assert better("tokens/s", 100.0, 120.0) == 1.2 and better("next token, ms", 30.0, 20.0) == 1.5
    assert better("MiB a step", 0.0, 1.0) is None and better("next token, ms", 1.0, 0.0) is None


@pytest.mark.parametrize("kinds", [[], [{"kind": "collectives", "calls": 3.0, "us": 0.0}]])
def test_a_profile_without_times_of_collectives_measures_nothing(
    kinds: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "run", lambda *_: SimpleNamespace(figures={"kinds": kinds}))
    assert reproduce.run_profile(None, Profile(2, 1, 4)) == {}  # type: ignore[arg-type]


TINY = Setup(
    {name: dict(executor="thread", attn_dp=2, plan=plan) for name, plan in (("naive", "naive"), ("ours", "cheapest"))},
    [Load(3, 9, 3, 2), Load(2, 5, 1, 2, times=3)],
    [
        TableRow("tokens/s", 0, "naive", "ours", (100.0, 120.0)),
        TableRow("MiB a step", 1, "naive", "ours"),
        TableRow("collectives of a decode step, ms", 0, "naive", "ours"),
    ],
    ["two threads in place of GPUs"],
    Profile(2, 2, 4),
)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at_once: bool) -> None:
    ran, run_load = list[Load](), reproduce.run_load
    monkeypatch.setattr(reproduce, "run_load", lambda engine, load: ran.append(load) or run_load(engine, load))
    started, closed, close = list[Engine](), list[Engine](), Engine.close
    monkeypatch.setattr(reproduce, "Engine", lambda config: started.append(Engine(config)) or started[-1])
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine) or close(engine))
    *before, measured = measure(TINY, tmp_path, 2, 1, "cpu", at_once)
    assert len(started) == (2 if at_once else 4) and set(map(id, closed)) == set(map(id, started))
    assert len(before) == 3 and list(before[0].figures) == ["naive"], "each variant's figures are there once it has run"
    assert measured.layers == 1 and not measured.failed
    assert [ran.count(load) for load in TINY.loads] == [4, 12], (
        "each as often as it says, of two variants in two rounds"
    )
    for figures in measured.figures.values():
        assert [load["tokens/s"] > 0 for load in figures] == [True, True]
        assert figures[0]["next token, ms"] > 0 == figures[1]["next token, ms"]
        assert all(load["collectives a step"] >= 1 and load["MiB a step"] > 0 for load in figures)
    assert (measured.ratio(TINY.rows[1]) or 0) > 1, "a reduce-scatter brings less than an all-reduce"
    assert measured.ratio(TINY.rows[2]) is None, "ranks that are threads have no profile"


def test_tokens_do_not_wait_for_sequences_to_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted for each token, they took longer than the step."""
    counts, stats = list[int](), Engine.stats
    monkeypatch.setattr(Engine, "stats", lambda engine: counts.append(1) or stats(engine))
    monkeypatch.setattr(reproduce, "COUNTED_S", 1e9)
    with Engine(EngineConfig(executor="thread", kv_tokens=512)) as engine:
        found = reproduce.run_load(engine, Load(4, 9, 20, 4))
    assert len(counts) == 3 and 1 <= found["sequences at once"] <= 4, "before, once, and after"


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_as_many_layers_run_as_fit(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's weights count, in the dtype that GPUs keep them in; one layer always runs."""
    config = EngineConfig(preset_dir("llama-3.2-1b"), load_format="dummy", device="cpu")
    monkeypatch.setattr(reproduce, "resolve_defaults", lambda config: replace(config, float8="on"))

    def bytes_of(count: int) -> int:
        return weight_bytes(replace(config, num_layers=count).read_model(), config.mesh, 0, torch.bfloat16)

    for free, fits in ((bytes_of(layers), layers), (bytes_of(layers + 1) - 1, layers), (bytes_of(16) * 9, 16), (0, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (math.ceil(free / reproduce.WEIGHTS_SHARE), 0))  # noqa: B023
        assert reproduce._fitting_layers(config) == fits


@pytest.mark.parametrize("at_once", [False, True])
def test_a_variant_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at_once: bool) -> None:
    ran, run_load = list[str](), reproduce.run_load

    def load(engine: Engine, load: Load) -> Figures:
        ran.append(engine.config.plan)
        if engine.config.plan == "naive":
            raise RuntimeError("rank 1: no more\nmemory")
        return run_load(engine, load)

    monkeypatch.setattr(reproduce, "run_load", load)
    *_, measured = measure(TINY, tmp_path, 2, 1, "cpu", at_once)
    assert measured.failed == {"naive": "rank 1: no more"} and ran.count("naive") == 1
    assert list(measured.figures) == ["ours"] and measured.value(TINY.rows[0], "ours")
    assert measured.ratio(TINY.rows[0]) is None
    seed = Seed("a title", "a source", "much larger", 2, TINY, lambda gpus: TINY)
    assert "  failed: naive: rank 1: no more\n" in cmd_reproduce.text("mixed", seed, TINY, [], measured)
    monkeypatch.setitem(cmd_reproduce.SEEDS, "mixed", seed)
    monkeypatch.setattr(cmd_reproduce, "measure", lambda *_: iter([measured]))
    assert cmd_reproduce.Command("mixed", small=True).run() == 1


def test_engines_end_if_another_start_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also if the error ends the command."""
    closed, close = list[str](), Engine.close

    def start(config: EngineConfig) -> Engine:
        if config.plan == "naive":
            raise KeyError("a fault of this program")
        return Engine(config)

    monkeypatch.setattr(reproduce, "Engine", start)
    monkeypatch.setattr(Engine, "close", lambda engine: closed.append(engine.config.plan) or close(engine))
    with pytest.raises(KeyError):
        next(measure(TINY, tmp_path, 1, 1, "cpu", at_once=True))
    assert closed == ["cheapest"]


def test_some_variants(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = list[Setup]()
    monkeypatch.setattr(cmd_reproduce, "measure", lambda setup, *_: asked.append(setup) or iter([Measured({})]))
    assert cmd_reproduce.Command("mixed", small=True, variants=("naive", "gloo")).run() == 0
    assert list(asked[0].variants) == ["planned, gloo", "naive plan, shm"] and not asked[0].rows
    assert cmd_reproduce.Command("dcp", small=True, variants=("tensor-parallel", "a2a")).run() == 0
    assert {row.after for row in asked[1].rows} == {"torch: dcp, a2a"}
    with pytest.raises(UserError, match=r"^no variant has nccl in its name: planned, gloo, naive plan, shm, planned, "):
        cmd_reproduce.Command("mixed", small=True, variants=("nccl",)).run()


def test_the_table_and_the_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {
        name: [{"tokens/s": rate, "MiB a step": 3.0}, {"tokens/s": 1.0, "MiB a step": 2.0}]
        for name, rate in (("naive", 50.0), ("ours", 75.0))
    }
    seed = Seed("a title", "a source", "much larger", 2, TINY, lambda gpus: TINY)
    monkeypatch.setitem(cmd_reproduce.SEEDS, "mixed", seed)
    monkeypatch.setattr(cmd_reproduce, "measure", lambda *_: iter([Measured(figures, {}, 5)]))  # type: ignore[arg-type]
    assert cmd_reproduce.Command("mixed", small=True, rounds=1).run() == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    assert "here: two threads in place of GPUs" in "\n".join(table) and "here: 5 layers" in "\n".join(table)
    [row] = [line for line in table if line.startswith("tokens/s")]
    assert row.split("ours")[1].split() == ["100", "→", "120", "(1.20)", "50.00", "75.00", "1.50"]
    assert [each["times_better"] for each in json.loads(last)["rows"]] == [1.5, 1.0, None]
    [row] = [line for line in table if line.startswith("collectives of a decode step")]
    assert row.endswith("not measured  not measured  not measured")


def check_all(names: list[str], directory: Path, *options: str) -> None:
    """Run seeds on CPU ranks by the command, and check every table's columns and every line of JSON."""
    code, out, error = weft_here("reproduce", *options, "--small", "--json", str(directory / "all.json"))
    assert code == 0, error
    lines = [json.loads(line) for line in (directory / "all.json").read_text().splitlines()]
    assert [line["seed"] for line in lines] == names
    tables = [block for block in out.split("\n\n") if block.lstrip().startswith("pull request")]
    assert len(tables) == len(names)
    for line, table in zip(lines, tables, strict=True):
        seed = SEEDS[line["seed"]]
        head, *rows = table.splitlines()
        assert re.split(r"\s{2,}", head.strip()) == ["pull request", "compared with", "Weft", "times better"]
        assert len(rows) == len(line["rows"]) == len(seed.small.rows)
        for row, of_table, wanted in zip(line["rows"], rows, seed.small.rows, strict=True):
            before, after = (line["figures"][row[which]][row["load"]][row["metric"]] for which in ("before", "after"))
            assert before > 0 and after > 0 and row["times_better"] > 0, row
            assert of_table.startswith(f"{row['metric']}, ") and f"{wanted.before} → {wanted.after}" in of_table
            times = better(wanted.metric, before, after) or 0.0
            assert of_table.split()[-3:] == [f"{before:,.2f}", f"{after:,.2f}", f"{times:.2f}"]
        assert line["figures"].keys() == line["variants"].keys() and line["rounds"] == 1
        assert all(f"  here: {each}" in out for each in line["differs"])


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A seed as it is but for its load, of which `test_all_of_them` runs the whole."""
    seed = SEEDS["cpu-shm"]
    monkeypatch.setitem(SEEDS, "cpu-shm", replace(seed, small=replace(seed.small, loads=[Load(1, 40, 3, 1)])))
    check_all(["cpu-shm"], tmp_path, "cpu-shm")


@pytest.mark.nightly
def test_all_of_them(tmp_path: Path) -> None:
    """Figures that do not depend on the machine's load follow from the plans and the size of the cache."""
    check_all(list(SEEDS), tmp_path, "all")
    ratios = {
        (line["seed"], row["metric"]): row["times_better"]
        for line in map(json.loads, (tmp_path / "all.json").read_text().splitlines())
        for row in line["rows"]
    }
    assert ratios["reduce-scatterv", "MiB a step"] > 1
    assert ratios["dcp", "sequences at once"] > 1


def test_too_few_gpus_are_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    code, _, error = weft_here("reproduce", "mixed")
    assert code == 2 and error == "weft: mixed requires 4 GPUs or more, but CUDA sees 1 here; --small runs on CPUs\n"
    monkeypatch.setitem(cmd_reproduce.SEEDS, "mixed", replace(SEEDS["mixed"], min_ranks=9))
    assert weft_here("reproduce", "all", "--rounds", "0")[2] == "weft: rounds is 0; it must be 1 or more\n"
