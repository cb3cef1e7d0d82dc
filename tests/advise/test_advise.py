"""`weft advise`: order, reasons, commands and errors, on times that are given, and once on measured ones."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from e2e.here import weft_here
from weft.engine.advise import advice as advice_module
from weft.engine.advise.advice import SHORTEST, Limits, advise, predict, step_us
from weft.engine.advise.candidates import Arrival, Candidate, ClientLoad, find_candidates
from weft.engine.advise.measure import (
    MAX_ROUNDS,
    ROUNDS,
    configs,
    described,
    grids,
    kept_loads,
    kept_path,
    kept_times,
    measure,
    step_times,
)
from weft.engine.advise.measured_load import correct, run_load, started_servers
from weft.engine.advise.simulate import NO_API, ApiTimes
from weft.engine.advise.step_prices import GPUS, PricedSteps
from weft.engine.assets import embedded_model_dir, preset_dir
from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.controller.step_runner import StepRunner
from weft.engine.hosts.digests import source_version
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.messages.rank_messages import Step
from weft.engine.models.config_json.fields import ModelError
from weft.kernels.cpu_rows import MAX_ROWS
from weft.planner.cost import cache_folder
from weft.planner.spec import Mesh
from weft.serve.cli import main
from weft.serve.cli.api_times import api_times
from weft.serve.cli.cmd_serve import Command as Serve
from weft.serve.cli.command import parse
from weft.serve.cli.other_engines import command_of
from weft.tune.step_table import NotMeasured, StepShape, StepTable

ROOT = Path(__file__).parents[2]
LOAD = ClientLoad(32, 16, 4)
SIZES = ["--device=cpu", "--ranks=2", "--input-len=32", "--output-len=16", "--concurrency=4"]
Times = Callable[[Candidate, StepShape], float]


def given(monkeypatch: pytest.MonkeyPatch, us: Times, error: float = 0.05) -> None:
    """Let layouts have these times on their grids."""

    def table_of(candidate: Candidate, load: ClientLoad, *more: Any) -> StepTable:
        decode, mixed = grids(candidate, load)
        decode_us = {place: us(candidate, StepShape(int(place[0]), place[1])) for place in decode}
        mixed_us = {p: us(candidate, StepShape(int(p[0]), load.input_len, int(p[1]), p[2])) for p in mixed}
        return StepTable(decode_us, mixed_us, [error])

    monkeypatch.setattr(advice_module, "step_times", table_of)
    for name in ("measure_api", "measure_controller"):
        monkeypatch.setattr(f"weft.serve.cli.api_times.{name}", lambda: NO_API)
    monkeypatch.setattr("weft.engine.advise.candidates.own_cores", lambda: {0: [0, 1]})


def by_layout(candidate: Candidate, shape: StepShape) -> float:
    """Tensor parallelism decodes fastest, and prompts are slow there."""
    rows = shape.decode + shape.prompt * (20 if candidate.config.attn_tp == 2 else 1)
    base = 1000 if candidate.config.attn_tp == 2 else 1500 * candidate.replicas
    return base + 10 * rows + shape.context


def found(*options: str) -> dict[str, Any]:
    code, out, err = weft_here("advise", *SIZES, "--json", *options)
    assert code == 0 and not err, err
    return json.loads(out)  # type: ignore[no-any-return]


def test_the_best_is_first_and_limits_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, by_layout)
    free = found()["layouts"]
    assert [each["tokens_s"]["value"] for each in free] == sorted((e["tokens_s"]["value"] for e in free), reverse=True)
    assert all(each["meets_limits"] for each in free)
    itl = min(each["itl_ms"]["median"]["value"] for each in free)
    tight = found("--itl-ms", str(itl * 1.01))["layouts"]
    assert tight[0]["itl_ms"]["median"]["value"] == itl and not all(each["meets_limits"] for each in tight)
    _, out, _ = weft_here("advise", *SIZES, "--itl-ms", str(itl * 1.01))
    assert "more tokens/s, beyond the limits" in out or tight[0]["tokens_s"] == free[0]["tokens_s"]
    impossible = found("--itl-ms", str(itl / 2))["layouts"]
    assert impossible[0]["itl_ms"]["median"]["value"] == itl and not impossible[0]["meets_limits"]


def test_steps_are_shorter_where_others_exceed_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 768 tokens interrupt others' outputs; a step takes a µs a row, and 100 more."""
    given(monkeypatch, lambda candidate, shape: 100 + shape.decode + shape.prompt)
    load = ["--ranks=1", "--input-len=768", "--output-len=32", "--concurrency=4", "--no-http"]
    [free], [kept], [cut] = (
        found(*load, *limit)["layouts"] for limit in ([], ["--itl-p99-ms=2.1"], ["--itl-p99-ms=0.7"])
    )
    assert free == kept and free["mixed_batch_tokens"] == 2048 and free["itl_ms"]["p99"]["value"] > 1
    assert (
        cut["mixed_batch_tokens"] == 512
        and cut["meets_limits"]
        and cut["tokens_s"]["value"] < free["tokens_s"]["value"]
    )
    assert cut["ttft_ms"]["p99"]["value"] > free["ttft_ms"]["p99"]["value"]
    assert all("--mixed-batch-tokens" not in line for line in free["commands"])
    assert all("--mixed-batch-tokens 512" in line for line in cut["commands"])
    [none] = found(*load, "--itl-p99-ms=0.01")["layouts"]
    assert none["mixed_batch_tokens"] == SHORTEST and not none["meets_limits"]
    [both] = found(*load, "--itl-p99-ms=0.7", f"--ttft-p99-ms={free['ttft_ms']['p99']['value']}")["layouts"]
    assert not both["meets_limits"], "shorter steps read prompts later"
    _, out, _ = weft_here("advise", *SIZES, *load, "--itl-p99-ms=0.7", "--for=vllm")
    assert "mixed_batch_tokens=512" in out and "--max-num-batched-tokens 512" in out


def test_shorter_steps_of_an_h200_are_predicted() -> None:
    """Published figures predict 16 layers of Qwen3-30B-A3B that ran with three limits (docs/log/serving.md)."""
    recorded = json.loads((ROOT / "bench/results/gpu_mixed_batch_tokens_h200_2026-11-29.json").read_text())["rows"]
    config = EngineConfig(preset_dir("qwen3-30b-a3b"), load_format="dummy", num_layers=16, max_running=256)
    load, gpu = ClientLoad(1024, 128, 64), GPUS["h200"]
    [layout] = find_candidates(config, 1, load, gpu=gpu)[0]
    table = PricedSteps(gpu, layout.footprint, layout.planner)
    for rows, name in ((8192, "weft"), (4096, "weft-3"), (2048, "weft-2")):
        limited = replace(layout, config=replace(layout.config, mixed_batch_tokens=rows))
        ours = predict(limited, table, load, Limits()).figures
        [theirs] = [each for each in recorded if (each["engine"], each["clients"]) == (name, 64)]
        assert ours.itl_ms[1] == pytest.approx(theirs["p99_itl_ms"], rel=0.2)
        assert ours.tokens_s == pytest.approx(theirs["output_throughput"], rel=0.12)
    [shorter] = advise(config, 1, load, Limits(itl_p99_ms=9.0), gpu=gpu).predictions
    assert shorter.candidate.given.mixed_batch_tokens == 512 and shorter.excess <= 1
    free = replace(config, max_running=None)
    [same] = advise(free, 1, load, Limits(itl_p99_ms=9.0), gpu=gpu).predictions
    assert same.candidate.given.mixed_batch_tokens == 512 and same.candidate.config.batch_sequences == 512
    assert layout.config.batch_sequences == 256 and same.candidate.given.max_running is None


def test_the_text_has_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, by_layout)
    code, out, err = weft_here("advise", *SIZES, "--itl-ms", "0.001")
    lines = out.splitlines()
    assert code == 0 and not err and [line[:2] for line in lines if line[0] != " "][:3] == ["1.", "2.", "3."]
    assert out.count("each ± 5%") == 3 and out.count("a decode step takes") == 3 and out.count("   loses: ") == 2
    assert out.count("nearest possible: exceeds the limits") == 1 and out.count("exceeds the limits") == 3
    assert "collectives" in out and lines[-1].endswith("other layouts do not start; --json says why")


def test_json_has_intervals_commands_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, by_layout, error=0.25)
    report = found()
    assert (
        report.keys() == {*["what_if", "load", "ranks", "device", "api", "layouts", "not_known", "refused", "omitted"]}
        and report["ranks"] == 2
    )
    assert report["load"] == {"input_len": 32, "output_len": 16, "concurrency": 4, "shared_prefix": 0.0, "arrivals": []}
    for each in report["layouts"]:
        assert each["tokens_s"]["low"] == pytest.approx(0.75 * each["tokens_s"]["value"], rel=1e-3)
        assert each["itl_ms"]["p99"]["high"] == pytest.approx(1.25 * each["itl_ms"]["p99"]["value"], abs=1e-2)
        assert each["decode_step"]["exchanges_us"] <= each["decode_step"]["us"] and each["error"] == 0.25
        assert (each["decode_step"]["collectives"] > 0) == ("attn_dp=1 attn_tp=1" not in each["layout"])
        assert len(each["commands"]) == each["replicas"]
    assert report["refused"] and all("dcp" in why for why in report["refused"].values())


def test_commands_start_the_layouts_that_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, by_layout)
    for each in found("--dtype", "bfloat16")["layouts"]:
        for number, line in enumerate(each["commands"]):
            weft, serve, *arguments = shlex.split(line)
            command = parse(Serve, "serve", arguments)
            assert (weft, serve, str(command.engine.mesh)) == ("weft", "serve", each["layout"])
            assert command.engine.dtype == "bfloat16" and command.engine.device == "cpu"
            if each["replicas"] > 1:
                assert (command.port, command.engine.cpu_bind) == (8000 + number, str(number))


def test_servers_get_the_limit_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges of two ranks exceed it, and two servers of a rank do not."""
    given(monkeypatch, by_layout)
    monkeypatch.setattr("weft.engine.advise.candidates._own_bytes", lambda: 0)
    monkeypatch.setattr("weft.engine.advise.candidates.available_bytes", lambda limit_gib: int(limit_gib * 2**30))
    report = found("--host-memory-gib", "0.07")
    [servers] = report["layouts"]
    assert servers["replicas"] == 2 and all("--host-memory-gib 0.07" in line for line in servers["commands"])
    assert any("71 MiB are free" in why for why in report["refused"].values())


def test_a_preset_is_served_with_dummy_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, by_layout)
    code, out, _ = weft_here("advise", *SIZES, "--ranks", "1", "--preset", "llama-3.2-1b", "--json")
    assert code == 0 and "--preset llama-3.2-1b --load-format dummy" in json.loads(out)["layouts"][0]["commands"][0]


@pytest.mark.parametrize(
    "engine, mesh, text",
    [
        ("vllm", Mesh(1, 2, 1, 2), "vllm serve DIR --tensor-parallel-size 2"),
        ("vllm", Mesh(2, 1, 2, 1), "--tensor-parallel-size 1 --data-parallel-size 2 --enable-expert-parallel"),
        ("vllm", Mesh(1, 4, 1, 4, 2), "--tensor-parallel-size 4 --decode-context-parallel-size 2"),
        ("vllm", Mesh(1, 4, 2, 2), "vllm has no layout with ep=2 of 4 ranks"),
        ("sglang", Mesh(2, 2, 2, 2), "--tp-size 4 --dp-size 2 --enable-dp-attention --ep-size 2"),
        ("sglang", Mesh(1, 4, 1, 4, 2), "sglang has no layout with dcp=2"),
    ],
)
def test_flags_of_other_engines(engine: str, mesh: Mesh, text: str) -> None:
    assert text in command_of(engine, "DIR", mesh)
    full, known = command_of(engine, "DIR", mesh, "fp8_e4m3", 512), "has no" not in text
    chunk = f" --chunked-prefill-size {512 * mesh.attn_dp} --enable-mixed-chunk"
    rows = {"vllm": " --max-num-batched-tokens 512", "sglang": chunk}[engine]
    assert full.endswith(f" --kv-cache-dtype fp8_e4m3{rows}") == known


def test_other_engines_are_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, by_layout)
    for engine, start in (("vllm", "vllm serve "), ("sglang", "python -m sglang.launch_server ")):
        assert all(each["commands"][0].startswith(start) for each in found("--for", engine)["layouts"])


@pytest.mark.parametrize(
    "arguments, text",
    [
        ("nonesuch", "nonesuch has no config.json"),
        ("--preset nonesuch", "there is no preset 'nonesuch'"),
        ("--ranks 4096", "4096 ranks require a core each"),
        ("--ranks 0", "0 ranks require"),
        ("--gpus 4096", "4096 ranks require a GPU each"),
        ("--gpus 2 --ranks 2", "give one of them"),
        ("--ranks 1 --input-len 1000 --output-len 100", "beyond the 1024 tokens of the model's context"),
        ("--concurrency 0", "concurrency is 0; it must be 1 or more"),
        ("--what-if h9000x8", "no published host; known: h200, such as h200x8"),
        ("--what-if h200x8 --measure-load 1", "drop --what-if and --trace"),
        ("--measure-load nan", "S of 0 or more"),
        ("--ttft-ms nan", "ttft_ms is nan; a limit must be more than 0"),
        ("--itl-ms -1", "itl_ms is -1.0; a limit must be more than 0"),
        ("--kv-dtypes", "needs one or more of auto and fp8_e4m3"),
        ("--what-if h200", "no published host"),
        ("--what-if h200x8 --ranks 2", "drop --ranks, --gpus and --device"),
        ("--host-memory-gib 0", "host_memory_gib is 0.0; it must be above 0"),
        ("--ranks 1 --host-memory-gib 0.1", "0.0 GiB for each: use more ranks"),
        ("--shared-prefix 1", "shared_prefix is 1.0; it must be from 0 to below 1"),
    ],
)
def test_bad_input_ends_in_one_line(arguments: str, text: str) -> None:
    code, out, err = weft_here("advise", *arguments.split())
    assert code == 2 and not out and text in err and err.startswith("weft: ") and err.count("\n") == 1


def test_a_folder_that_keeps_no_times_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It does so before anything is measured."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("weft.serve.cli.api_times.measure_api", lambda: pytest.fail("the server was measured"))
    code, out, err = weft_here("advise", *SIZES)
    assert code == 2 and not out and "cannot keep times" in err and "--no-measure" in err and err.count("\n") == 1


def test_a_directory_without_weights_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It does so before the server is measured. Made-up weights are what the line proposes."""
    given(monkeypatch, by_layout)
    monkeypatch.setattr("weft.serve.cli.api_times.measure_api", lambda: pytest.fail("the server was measured"))
    (tmp_path / "config.json").write_bytes((embedded_model_dir() / "config.json").read_bytes())
    code, out, err = weft_here("advise", str(tmp_path), *SIZES, "--again")
    lack = "has no model.safetensors: add weights, or --load-format dummy to make some up"
    assert (code, out, err) == (2, "", f"weft: {tmp_path} {lack}\n")
    code, out, _ = weft_here("advise", str(tmp_path), *SIZES, "--load-format", "dummy", "--no-http")
    assert code == 0 and f"weft serve {tmp_path} --load-format dummy" in out


@pytest.mark.usefixtures("empty_cache")
def test_what_is_not_measured_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.advise.candidates.own_cores", lambda: {0: [0, 1]})
    code, out, err = weft_here("advise", *SIZES, "--no-measure")
    assert code == 1 and not err and all(line.startswith("not known: ") for line in out.splitlines()[:-1])
    code, out, _ = weft_here("advise", *SIZES, "--no-measure", "--json")
    report = json.loads(out)
    assert code == 1 and not report["layouts"] and len(report["not_known"]) == 5


@pytest.mark.usefixtures("empty_cache")
def test_kept_times_serve_smaller_loads_only(monkeypatch: pytest.MonkeyPatch) -> None:
    base, measured = EngineConfig(device="cpu"), list[ClientLoad]()

    def fake(candidate: Candidate, load: ClientLoad, progress: Any) -> StepTable:
        measured.append(load)
        decode, mixed = grids(candidate, load)
        return StepTable(dict.fromkeys(decode, 5.0), dict.fromkeys(mixed, 9.0), [0.1])

    monkeypatch.setattr("weft.engine.advise.measure.measure", fake)

    def times(load: ClientLoad, again: bool = False, measures: bool = True) -> None:
        [candidate], _ = find_candidates(base, 1, load)
        step_times(candidate, load, (lambda what, part: None) if measures else None, again)

    small, large = ClientLoad(32, 16, 2), ClientLoad(32, 32, 4)
    times(LOAD)
    times(small)
    assert measured == [LOAD]
    with pytest.raises(NotMeasured, match="no times of attn_dp=1"):
        times(large, measures=False)
    times(large)
    times(large, measures=False)
    times(large, again=True)
    assert measured == [LOAD, large, large]


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weft.engine.advise.measure.source_version": lambda omit: "1 (later)"}, "weft was .*, and is 1 .later."),
        ({"torch.__version__": "9.9"}, "torch was .*, and is 9.9"),
        ({"weft.engine.advise.candidates.divide_servers": lambda *given: ["1", "0"]}, "ranks was .*cores 1; 0$"),
        ({"OMP_NUM_THREADS": "2"}, "ranks was 1 thread.*, and is 2 thread"),
    ],
)
def test_times_of_another_source_or_binding_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: dict[str, Any], says: str
) -> None:
    """One line says what has changed. Measuring replaces the file."""
    monkeypatch.setattr("weft.engine.advise.candidates.own_cores", lambda: {0: [0, 1]})
    monkeypatch.setattr("weft.engine.config.cpu_shares.cores_of_engines", set)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(
        "weft.engine.advise.measure.measure",
        lambda candidate, load, progress: StepTable(*(dict.fromkeys(grid, 5.0) for grid in grids(candidate, load))),
    )

    def servers() -> Candidate:
        found, _ = find_candidates(EngineConfig(device="cpu"), 2, LOAD)
        return next(each for each in found if each.replicas == 2)

    step_times(before := servers(), LOAD, lambda what, part: None)
    step_times(before, LOAD)
    for name, value in change.items():
        monkeypatch.setattr(name, value) if "." in name else monkeypatch.setenv(name, value)
    later = servers()
    kept, stale = kept_times(described(later))
    assert kept is None and re.match(f"kept times of steps are not used: {says}", stale) and "\n" not in stale
    with pytest.raises(NotMeasured, match=f"^{re.escape(stale)}$"):
        step_times(later, LOAD)
    assert kept_loads([later]) == ([], stale)
    for _ in range(2):
        step_times(later, LOAD, lambda what, part: None)
    assert [text for text in caplog.messages if "measuring" in text] == [f"{stale}; measuring again"]
    assert kept_loads([later]) == ([LOAD], "") and len(list(cache_folder().glob("steps-*"))) == 1


def test_times_of_the_server_are_of_its_source(monkeypatch: pytest.MonkeyPatch, empty_cache: None) -> None:
    monkeypatch.setattr("weft.serve.cli.api_times.measure_api", lambda: ApiTimes(9.0, 1.0))
    assert api_times(None) == NO_API != api_times(lambda what, part: None) == api_times(None)
    monkeypatch.setattr("weft.serve.cli.api_times.source_version", lambda: "later")
    assert api_times(None) == NO_API


def test_a_source_version_follows_from_kernels_and_code(tmp_path: Path) -> None:
    """Each file that is compiled or imported counts, but for omitted folders. A version is computed once a process."""
    texts = {"kernels/a.inl": "1", "kernels/a.cuh": "1", "engine/a.py": "1", "serve/a.py": "1", "engine/a.md": "1"}
    found = set()
    for number, changed in enumerate(["", *texts]):
        root = tmp_path / str(number)
        for name, text in texts.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("2" if name == changed else text)
        found.add(source_version(root, "serve/"))
        assert (source_version(root, "serve/") == source_version(tmp_path / "0", "serve/")) == (
            changed in ("", "serve/a.py", "engine/a.md")
        )
    assert len(found) == 4


@pytest.mark.nightly
def test_ranks_are_measured_on_both_grids() -> None:
    """Each point of both grids has a time, and progress ends at 1. Ranks are threads, so nothing is exchanged."""
    shown = list[float]()
    load = ClientLoad(20, 8, 3)
    [candidate, *_], _ = find_candidates(EngineConfig(executor="thread", device="cpu"), 2, load)
    table = measure(candidate, load, lambda what, part: shown.append(part))
    assert table.holds(*grids(candidate, load)) and min(*table.decode.values(), *table.mixed.values()) > 0
    assert shown[-1] == 1.0 and len(table.residuals) > 4
    with pytest.raises(NotMeasured):
        table.us(StepShape(4, 20))


@pytest.mark.parametrize(("whole", "us"), [(3, 20.0 + 2 * 15), (4, 80.0)])
def test_a_deep_model_is_measured_by_some_layers(monkeypatch: pytest.MonkeyPatch, whole: int, us: float) -> None:
    """Layers beyond the measured ones cost the difference of the two measurements, if the model has too many."""
    monkeypatch.setattr("weft.engine.advise.measure.FEW_LAYERS", (1, 2))
    monkeypatch.setattr("weft.engine.advise.measure.WHOLE_LAYERS", whole)
    monkeypatch.setattr(StepRunner, "run_us", lambda self, *_: [5.0 * self._config.num_layers**2])
    load = ClientLoad(20, 8, 1)
    [candidate], _ = find_candidates(EngineConfig(executor="thread", device="cpu"), 1, load)
    table = measure(candidate, load, lambda what, part: None)
    assert candidate.model.num_layers == 4 and set(table.decode.values()) == {us}


def test_steps_are_measured_again_until_two_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is slow at first changes no time. Times that never agree give a wide interval."""
    turns = Counter[StepShape]()

    def run_us(self: StepRunner, shape: StepShape, input_len: int) -> list[float]:
        turns[shape] += 1
        slow = 9.0 - turns[shape] if shape == noisy or (turns[shape] < 3 and shape.decode == 2) else 1.0
        return [100.0 * slow]

    load = ClientLoad(20, 8, 2)
    [candidate], _ = find_candidates(EngineConfig(executor="thread", device="cpu"), 1, load)
    noisy = StepShape(1, load.shortest)
    monkeypatch.setattr(StepRunner, "run_us", run_us)
    table = measure(candidate, load, lambda what, part: None)
    assert {turns[each] for each in turns} == {ROUNDS, ROUNDS + 1, MAX_ROUNDS}
    assert table.decode[2, load.shortest] == 100.0 and turns[StepShape(2, load.shortest)] == ROUNDS + 1
    assert max(table.residuals) == 1.0 and turns[noisy] == MAX_ROUNDS


def test_steps_are_measured_on_both_sides_of_the_jump() -> None:
    """Steps of more rows than kernels for few rows take are not recorded, and took up to four times as long."""
    for each in find_candidates(EngineConfig(device="cpu"), 2, ClientLoad(192, 40, 8))[0]:
        last, (decode, mixed) = MAX_ROWS // each.config.attn_dp, grids(each, ClientLoad(192, 40, 8))
        assert {last, last + 1} <= {int(prompt) for _, prompt, _ in mixed} and max(rows for rows, _ in decode) < last


def test_groups_measure_steps_of_their_own_tokens() -> None:
    """Equal ones would choose the same experts, so that ranks read fewer of them than under a load."""
    sent = list[Step]()
    executor = SimpleNamespace(groups=(CacheGroup(Rule(), 16),), send=sent.append, collect=lambda: [])
    config = EngineConfig(device="cpu", attn_dp=2, kv_tokens=256)
    runner = StepRunner([executor], config, config.read_model())  # type: ignore[list-item]
    runner.run_us(StepShape(2, 20, 24), 16)
    chunked = [step for step in sent if step.groups[0].chunks]
    assert len(chunked) == len(sent) > 2
    for a, b in (step.groups for step in chunked):
        assert [x.count for x in a.chunks] == [x.count for x in b.chunks] and a.chunks != b.chunks
        assert (a.decode_rows, a.joins) == (b.decode_rows, b.joins)


def test_ctrl_c_is_not_lost_while_a_measurement_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the step that was sent ahead is awaited."""
    monkeypatch.setattr("weft.engine.controller.step_runner.POINT_S", 0.0)
    ends: list[Any] = [[], [], [], [], [], KeyboardInterrupt()]
    executor = Mock(groups=(CacheGroup(Rule(), 16),), collect=Mock(side_effect=ends))
    config = EngineConfig(device="cpu", kv_tokens=256)
    with pytest.raises(KeyboardInterrupt):
        StepRunner([executor], config, config.read_model()).run_us(StepShape(0, 0, 24), 16)


def test_loads_of_one_engine_share_no_prompts() -> None:
    """Otherwise the next load finds prefixes of the one before in the cache."""
    asked = list[int]()
    server = SimpleNamespace(send=lambda given: asked.append(given[2]), recv=lambda: [[0.0, 1.0, 2.0]])
    for load in (ClientLoad(20, 8, 2), ClientLoad(20, 8, 3)):
        run_load([server], load, 4, 0.0)  # type: ignore[list-item]
    assert len(set(asked)) == len(asked) == 6


def test_ranks_load_the_weights_of_the_model() -> None:
    """Made-up routers choose experts more evenly than trained ones. Made-up weights have times of their own."""
    load, formats = ClientLoad(20, 8, 1), ("auto", "dummy")
    [[trained], [dummy]] = (find_candidates(EngineConfig(device="cpu", load_format=f), 1, load)[0] for f in formats)  # type: ignore[arg-type]
    found = [configs(each, load, 2)[0] for each in (trained, dummy)]
    assert [(each.load_format, each.num_layers) for each in found] == [("auto", 2), ("dummy", 2)]
    assert kept_path(described(trained)) != kept_path(described(dummy))


def test_advice_is_for_all_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers with half of the clients each have twice the tokens of one with half."""
    given(monkeypatch, lambda candidate, shape: 1000.0)
    base = EngineConfig(device="cpu")
    two = next(p for p in advise(base, 2, ClientLoad(32, 16, 8)).predictions if p.candidate.replicas == 2)
    [one] = advise(base, 1, ClientLoad(32, 16, 4), Limits()).predictions
    assert two.figures.tokens_s == pytest.approx(2 * one.figures.tokens_s)
    assert two.figures.ttft_ms == one.figures.ttft_ms


def test_an_idle_group_brings_no_rows_to_a_priced_step() -> None:
    """Groups share the feed-forward blocks, and a prompt of one of them passes half of these on each of two ranks."""
    base, load = EngineConfig(model=preset_dir("llama-3.1-8b"), load_format="dummy"), ClientLoad(4096, 8, 1)
    found = find_candidates(base, 2, load, gpu=GPUS["h200"])[0]
    groups = next(each for each in found if each.config.attn_dp == 2)
    table, prompt = PricedSteps(GPUS["h200"], groups.footprint, groups.planner), StepShape(0, 0, 4096)
    one, both = step_us(table, [prompt, StepShape(0)]), step_us(table, [prompt, prompt])
    assert both == table.us(prompt) and 0.55 < one / both < 0.7


@pytest.mark.parametrize("clients", [1, 3])
def test_a_server_with_a_client_less_gives_fewer_tokens(monkeypatch: pytest.MonkeyPatch, clients: int) -> None:
    """Steps take the same time with one client and with two, so that tokens are as many as clients."""
    given(monkeypatch, lambda candidate, shape: 1000.0)
    found = advise(EngineConfig(device="cpu"), 2, ClientLoad(1, 64, clients)).predictions
    two = next(p for p in found if p.candidate.replicas == 2)
    assert two.figures.tokens_s == pytest.approx(clients * 1000, rel=0.1)


def test_a_recorded_load_keeps_servers_as_busy_as_its_requests() -> None:
    load = ClientLoad.recorded([Arrival(float(at), 4, 4) for at in range(3)])
    assert load.servers(1) == 1 and load.servers(2) == 1.5 and ClientLoad(4, 4, 8).servers(2) == 2


def test_published_gpus_stand_for_ones_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are priced, memory is that of the GPUs, and the first line says so. Hosts have a network between them."""
    sizes, said = ["--preset=llama-3.1-8b", "--input-len=64", "--output-len=8", "--concurrency=2"], dict[str, float]()
    monkeypatch.setattr("weft.serve.cli.cmd_advise.shown_progress", lambda what: nullcontext(said.__setitem__))
    code, out, err = weft_here("advise", *sizes, "--what-if", "h200x2")
    assert code == 0 and not err and out.startswith("what if h200x2: predicted from published figures")
    assert "each ± 35%" in out and "--preset llama-3.1-8b" in out
    assert 0 < said.pop("finding layouts") < 1
    assert len(said) == 3 and all(what.startswith("simulating") for what in said)
    base = EngineConfig(model=preset_dir("llama-3.1-8b"), load_format="dummy")
    load, small = ClientLoad(64, 8, 2), replace(GPUS["h200"], memory=12 << 30)
    one, refused = find_candidates(base, 1, load, gpu=small)
    assert not one and all("15.0 GiB" in why and "missing" in why for why in refused.values())
    [two] = [each for each in find_candidates(base, 2, load, gpu=small)[0] if each.config.attn_tp == 2]
    [over_hosts] = [
        each
        for each in find_candidates(base, 2, load, gpu=replace(small, per_host=1))[0]
        if each.config.attn_tp == 2 and each.config.dcp == 1
    ]
    assert (two.given.nnodes, over_hosts.given.nnodes, over_hosts.config.nnodes) == (None, 2, None)
    shape = StepShape(2, 100)
    near, far = (PricedSteps(small, each.footprint, each.planner).us(shape) for each in (two, over_hosts))
    assert near < far
    floor = two.footprint.bytes_read(shape, 2) / (small.gb_s * 1e3) / small.read
    assert near > floor + 32 * small.layer_us


@pytest.mark.usefixtures("empty_cache", "forked_servers")
def test_a_wrong_table_is_corrected_by_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that are planted 40 times too large: the second prediction is nearer to what was measured."""
    load, base = ClientLoad(20, 8, 2), EngineConfig(executor="thread", device="cpu")
    monkeypatch.setattr(
        "weft.engine.advise.measure.measure",
        lambda candidate, load, progress: StepTable(*(dict.fromkeys(g, 2e6) for g in grids(candidate, load)), [0.1]),
    )
    [wrong] = advise(base, 1, load, progress=lambda what, part: None).predictions
    report = correct(wrong, load, 0.0)["tokens_s"]
    better = predict(wrong.candidate, step_times(wrong.candidate, load), load, Limits(), 8)
    real = report["measured"]
    assert report["predicted"] < real / 10
    assert better.figures.tokens_s == pytest.approx(real, rel=0.05)
    assert step_times(wrong.candidate, load).factor < 0.1


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_server_of_a_measured_load_has_a_process(replicas: int) -> None:
    """The load's time is from the first request of all servers to the last token of all."""
    config = EngineConfig(executor="thread", device="cpu", cpu_bind="off", threads=1)
    with started_servers([config] * replicas) as servers:
        processes = active_children()
        assert len(processes) == replicas
        (ttft, _), (itl, _), rate = run_load(servers, ClientLoad(20, 8, 2), 4, 0.0, rounds=1)
        assert ttft > itl > 0 and 8 * 4 * replicas / rate > (ttft + 7 * itl) / 1e3
        processes[0].kill()
        with pytest.raises(EngineError, match="the process of a server was ended from outside"):
            run_load(servers, ClientLoad(20, 8, 2), 4, 0.0)
    assert not active_children()


@pytest.mark.usefixtures("forked_servers")
def test_errors_of_a_measured_server_reach_its_caller(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"), started_servers([EngineConfig(model=tmp_path)]):
        pytest.fail("it started")


def test_a_recorded_load_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Requests arrive as they were recorded: far apart, so that none waits for another."""
    given(monkeypatch, by_layout)
    file = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 5 + 3 * at, "input_length": 20 + at, "output_length": 4} for at in range(6)]
    file.write_text("\n".join(map(json.dumps, reversed(rows))))
    report = found("--trace", str(file))
    assert report["load"] | {"arrivals": 6, "input_len": 25, "output_len": 4} == report["load"]
    for each in report["layouts"]:
        assert each["tokens_s"]["value"] == pytest.approx(24 / 15 * 1, rel=0.25)  # 24 tokens in 15 s
        assert each["ttft_ms"]["p99"]["value"] < 1.5 * each["ttft_ms"]["median"]["value"]
    code, out, err = weft_here("advise", *SIZES, "--trace", str(tmp_path / "none"))
    assert code == 2 and "cannot read" in err and err.count("\n") == 1
    row = '{"timestamp": %s, "input_length": %s, "output_length": 3}'
    strange = (row % ("NaN", 5), row % ("Infinity", 5), row % ('"noon"', 5), row % (1, "1e400"), row % (1, "null"))
    for text in ("[]", '{"timestamp": 1}', "x", "", "[1]", row % (0, 0), "\udcff", *strange):
        file.write_text(text, errors="surrogateescape")
        code, out, err = weft_here("advise", *SIZES, "--trace", str(file))
        assert code == 2 and not out and err.count("\n") == 1, text
    file.write_text(f"{row % (0, 5)}\n\n{row % (1, 'x')}\n")
    assert "found in line 3: JSONDecodeError" in weft_here("advise", *SIZES, "--trace", str(file))[2]


def test_a_layout_that_fails_to_run_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have figures."""
    given(monkeypatch, by_layout)
    times = advice_module.step_times

    def fails(candidate: Candidate, *more: Any) -> StepTable:
        if candidate.config.attn_tp == 2:
            raise EngineError("rank 1 was killed")
        return times(candidate, *more)

    monkeypatch.setattr(advice_module, "step_times", fails)
    report = found()
    assert set(report["not_known"].values()) == {"rank 1 was killed"} and len(report["layouts"]) == 3


def test_help_has_the_command() -> None:
    assert "advise" in main.usage()


def test_the_grid_has_regret_and_errors() -> None:
    """Regret compares the layout of the best prediction with the best measurement."""
    table = runpy.run_path(str(ROOT / "bench" / "scripts" / "advisor_grid.py"))["table"]
    cell = {"model": "m", "ranks": 2, "load": "4x8x8", "http": True, "of": 3}
    rows = [
        cell | {"layout": name, "predicted": dict(tokens_s=a, ttft_ms=9, itl_ms=1), "measured": measured}
        for name, a, measured in [
            ("one", 100, dict(tokens_s=80, ttft_ms=10, itl_ms=2)),
            ("two", 90, dict(tokens_s=100, ttft_ms=10, itl_ms=2)),
        ]
    ]
    lines = table(rows)
    assert lines[2] == "| m | 2 | 4x8x8, over HTTP, 2 of 3 layouts | one | 1.25 | 18% | 10% | 50% |"
    other = [row | {"load": "short", "http": False, "of": 2} for row in rows[1:]]
    assert table([*rows, *other])[3:] == [
        "| m | 2 | short, 1 of 2 layouts | two | 1.00 | 10% | 10% | 50% |",
        "| **worst, median** | | | | 1.25 | 14% | 10% | 50% |",
    ]
    assert len(table([])) == 2


def test_the_grid_starts_the_servers_of_an_advice() -> None:
    """Also several on GPUs, each with variables of its own."""
    server_of = runpy.run_path(str(ROOT / "bench" / "scripts" / "advisor_grid.py"))["server_of"]
    assert server_of("weft serve --preset a --ep 2") == ({}, ["--preset", "a", "--ep", "2"])
    assert server_of("CUDA_VISIBLE_DEVICES=2,3 weft serve 'a b'") == ({"CUDA_VISIBLE_DEVICES": "2,3"}, ["a b"])


def test_unseen_loads_follow_from_a_seed() -> None:
    """Steps of three random loads lie on the grid that is measured for all loads."""
    script = runpy.run_path(str(ROOT / "bench" / "scripts" / "advisor_grid.py"))
    found = [script["load_of"](name) for name in script["unseen"](3)]
    assert script["unseen"](3) == script["unseen"](3) != script["unseen"](4) and len(found) == 3
    cover = script["load_of"]("cover")
    assert all(load.concurrency <= cover.concurrency and load.input_len >= cover.shortest for load in found)
    assert all(load.input_len <= cover.input_len and load.output_len <= cover.output_len for load in found)


@pytest.mark.parametrize(
    "loads", [["short", "mixed", "shared"], ["short", "long", "mixed", "shared"], ["1x8x4", "3x9x9"]]
)
def test_times_of_the_cover_hold_for_all_loads(loads: list[str]) -> None:
    """Also on each of two servers. Its largest step has fewer rows than all clients with the longest prompts."""
    script = runpy.run_path(str(ROOT / "bench" / "scripts" / "advisor_grid.py"))
    cover = ClientLoad.recorded([Arrival(0.0, *sizes) for sizes in script["cover_of"](loads)])
    for each in find_candidates(EngineConfig(device="cpu"), 2, cover)[0]:
        table = StepTable(*(dict.fromkeys(grid, 5.0) for grid in grids(each, cover)))
        assert all(table.holds(*grids(each, script["load_of"](name))) for name in loads)
        rows = max(prompt for _, prompt, _ in grids(each, cover)[1])
        assert "mixed" not in loads or rows < 800
