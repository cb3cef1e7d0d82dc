"""bench/scripts/rivals: the checkpoint that engines serve, engines that do not start, the table, and a dry run."""

from __future__ import annotations

import itertools
import json
import re
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from weft.engine.assets import embedded_model_dir, preset_dir
from weft.engine.models.load import dummy_model, load_model
from weft.engine.models.registry import load_config
from weft.planner.spec import Mesh

RIVALS = Path(__file__).parents[2] / "bench" / "scripts" / "rivals"
SMALL = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
SMALL |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 400}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The names of a script, which shares code with others of its folder."""
    monkeypatch.syspath_prepend(RIVALS)
    yield lambda name: runpy.run_path(str(RIVALS / f"{name}.py"))
    for name in ("engines", "results", "checkpoint", "bundle"):
        sys.modules.pop(name, None)


def test_the_command_of_readme_is_understood(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (RIVALS.parents[2] / "README.md").read_text()
    [command] = re.findall(r"^python (bench/scripts/rivals/compare.py .*)$", readme, re.MULTILINE)
    monkeypatch.setattr(sys, "argv", command.split())
    found = script("compare")["arguments"]()
    assert (found.engines, found.ranks, found.num_layers, found.together) == (["weft", "vllm", "sglang"], 2, None, True)
    assert len(found.python) == 2 and found.cache_tokens == 180_000


def test_cpu_engines_get_the_same_cores_and_format(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = script("engines")
    found = names["RunningEngine"].__init__.__globals__
    monkeypatch.setitem(found, "own_cores", lambda: {0: [0, 1, 2, 3]})
    started: list[tuple[str, str | None]] = []

    class Ended(Exception):
        pass

    def popen(command: list[str], env: dict[str, str], **named: Any) -> None:
        started.append((" ".join(command), env.get("VLLM_CPU_OMP_THREADS_BIND")))
        raise Ended

    monkeypatch.setitem(found, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=None))
    options = names["Options"](Path("model"), 0, device="cpu", ranks=2, sequences=8, tokens=2048)
    for name in ("weft", "vllm-cpu", "llama.cpp-f16", "transformers"):
        with pytest.raises(Ended):
            installed = names["Installation"]("python", None, Path())
            names["RunningEngine"](names["KINDS"][name], installed, options, Path("/dev/null"), 1.0)
    weft, vllm, llama, transformers = started
    assert "--attn-tp 2" in weft[0] and "--dtype bfloat16" in weft[0] and "--threads" not in weft[0]
    assert vllm[1] == "0-1|2-3" and "--dtype bfloat16 --max-num-seqs 8" in vllm[0]
    assert "model/f16.gguf" in llama[0] and "--threads 4 --parallel 8" in llama[0]
    assert transformers[0].endswith(" 4")


def test_the_checkpoint_holds_the_weights_of_a_dummy_model(script: Any, tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "written"
    source.mkdir()
    fields = json.loads((preset_dir("qwen3-30b-a3b") / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(fields | SMALL))
    names = script("checkpoint")
    names["write_checkpoint"].__globals__["FILE_BYTES"] = 50_000  # several files
    assert names["write_checkpoint"](folder, source, 2) == sum(
        p.numel() * 2 for p in dummy_model(load_config(source, num_layers=2), Mesh(), 0).parameters()
    )
    assert len(list(folder.glob("*.safetensors"))) > 2
    config = load_config(folder)
    assert config.num_layers == 2
    loaded = load_model(folder, config, Mesh(), 0, torch.bfloat16)
    made = dummy_model(load_config(source, num_layers=2), Mesh(), 0, torch.bfloat16)
    for (name, weight), other in zip(loaded.named_parameters(), made.parameters(), strict=True):
        assert torch.equal(weight, other), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 400 and tokenizer.decode([300, 399]) == " 300 399"
    names["write_checkpoint"](tmp_path / "quick", source, 2, quick=True)
    quick = load_model(tmp_path / "quick", config, Mesh(), 0, torch.bfloat16)
    for weight, other in zip(quick.parameters(), made.parameters(), strict=True):
        if not other.eq(1).all():  # another tensor of the same spread
            assert not torch.equal(weight, other) and 0.8 < weight.float().std() / other.float().std() < 1.25


def test_the_fatbins_of_a_library_keep_what_hopper_runs(script: Any) -> None:
    import struct

    def code(kind: int, arch: int) -> bytes:
        return struct.pack("<HHIQIIHHI", kind, 0, 64, 16, 0, 0, 0, 0, arch).ljust(64, b"\0") + bytes([arch] * 16)

    def fatbin(*entries: tuple[int, int]) -> bytes:
        body = b"".join(code(*entry) for entry in entries)
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body

    elf, ptx = 2, 1
    section = fatbin((elf, 80), (elf, 90), (ptx, 90)) + fatbin((elf, 120), (ptx, 80), (ptx, 100)) + bytes(16)
    names = b"\0.nv_fatbin\0"
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, 64 + len(section) + len(names))
    struct.pack_into("<HHH", header, 0x3A, 64, 2, 1)
    sections = struct.pack("<IIQQQQIIQQ", 1, 0, 0, 0, 64, len(section), 0, 0, 0, 0)
    sections += struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 64 + len(section), len(names), 0, 0, 0, 0)
    library = bytes(header) + section + names + sections
    trim = script("bundle")["trim"]
    trimmed = bytes(trim(bytearray(library)))
    kept = {arch: bytes([arch] * 16) in trimmed[64 : 64 + len(section)] for arch in (80, 90, 100, 120)}
    assert len(trimmed) == len(library) and kept == {80: True, 90: True, 100: False, 120: False}
    assert trimmed.count(bytes([90] * 16)) == 1 and trimmed.count(bytes([80] * 16)) == 1  # PTX 90, machine code 80
    named = bytes(trim(bytearray(library), re.escape(bytes([90] * 16))))  # of what Hopper runs, only such kernels
    assert named.count(bytes([90] * 16)) == 1 and bytes([80] * 16) not in named


def installed(folder: Path, name: str, files: dict[str, str]) -> None:
    """A package of an environment, as pip leaves it there."""
    about = f"{name}-1.0.dist-info"
    files |= {f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"}
    for file, text in (files | {f"{about}/RECORD": "".join(f'"{file}",,\n' for file in files)}).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)


def test_a_bundle_has_what_the_other_machine_lacks_and_the_engine_uses(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, out, names = tmp_path / "env", tmp_path / "out", script("bundle")
    patched: dict[str, dict[str, str]] = {"flashinfer": {}, "sglang": {}}
    for patch in (*names["FLASHINFER"], *names["ENGINES"]["sglang"].patches):
        patched[patch.file.partition("/")[0]][patch.file] = f"before\n{patch.old}after\n"
    sources = {f"flashinfer/data/csrc/{name}.cu": "" for name in ("norm", "gemm")}
    installed(environment, "flashinfer-python", patched["flashinfer"] | sources)
    configs = {f"sglang/configs/E=8,device_name={gpu}.json": "{}" for gpu in ("NVIDIA_H200", "AMD_MI300X")}
    files = {"sglang/srt/server.py": "", "sglang/multimodal_gen/a.py": ""}
    installed(environment, "sglang", files | configs | patched["sglang"])
    (compiled := tmp_path / "compiled" / "norm").mkdir(parents=True)
    (compiled / "norm.so").write_bytes(b"a library")
    for name in ("numpy", "Transformers", "tokenizers", "typing_extensions"):
        installed(environment, name, {f"{name}.py": ""})
    monkeypatch.setattr(sys, "path", [str(environment)])
    names["collect"](names["ENGINES"]["sglang"], {"numpy", "transformers", "typing-extensions"}, out, compiled.parent)
    found = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file() and "dist-info" not in str(file)}
    stubs = {"soundfile.py", "IPython/__init__.py", "IPython/display.py", "deep_gemm/__init__.py", "sitecustomize.py"}
    kept = {"sglang/srt/server.py", "sglang/configs/E=8,device_name=NVIDIA_H200.json", *patched["sglang"]}
    kept |= {"flashinfer/data/csrc/norm.cu", "flashinfer/data/aot/norm/norm.so", *patched["flashinfer"]}
    assert found == stubs | kept | {"Transformers.py", "tokenizers.py"}
    for patch in (*names["FLASHINFER"], *names["ENGINES"]["sglang"].patches):
        assert (out / patch.file).read_text() == f"before\n{patch.new}after\n"
    ask = "import os; print(*(os.environ[name] for name in sorted(__import__('sitecustomize').NO_MULTICAST)))"
    said = subprocess.run(
        [sys.executable, "-c", ask],
        env={"PYTHONPATH": str(out), "NCCL_NVLS_ENABLE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == ["0", "1", "1"], "whatever the environment says"


def test_an_engine_that_does_not_start_shows_the_end_of_its_log(script: Any, tmp_path: Path) -> None:
    names = script("engines")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no GPU here; exit 3\n")
    broken.chmod(0o755)
    options, installed = names["Options"](tmp_path, 0), names["Installation"](str(broken), None, tmp_path)
    for kind in names["KINDS"].values():
        engine = names["RunningEngine"](kind, installed, options, tmp_path / "log", 60.0)
        assert "MODEL" in engine.shown and str(tmp_path) not in engine.shown
        with pytest.raises(names["EngineFailed"], match="ended with 3:\nno GPU here"):
            while not engine.ready():
                pass


def test_where_engines_name_the_size_of_their_cache(script: Any) -> None:
    said = {
        "weft": 'weft_kv_cache_tokens{group="0"} 96.0\nweft_kv_cache_tokens{group="1"} 96.0\n',
        "vllm": 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="12"} 1.0\n'
        'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="12"} 1.0\n',
        # Of SGLang 0.5.17; its internal states name the same, once for each rank of data.
        "sglang": '{"mem_fraction_static": 0.818, "status": "ready", "max_total_num_tokens": 192, '
        '"max_req_input_len": 186, "internal_states": [{"max_running_requests": 256}], "version": "0.5.17"}',
        "llama.cpp-bf16": '{"default_generation_settings": {"n_ctx": 48}, "total_slots": 4}',
    }
    paths = {"weft": "/metrics", "vllm": "/metrics", "sglang": "/server_info", "llama.cpp-bf16": "/props"}
    kinds = script("engines")["KINDS"]
    found = {name: kinds[name].cache(lambda path, name=name: {paths[name]: said[name]}[path]) for name in said}
    assert found == dict.fromkeys(said, 192)


def test_the_table_has_means_over_rounds_and_what_is_better(script: Any, tmp_path: Path) -> None:
    names = script("results")
    results = names["Results"](tmp_path, {"host": {}}, ["weft", "vllm", "sglang"])
    results.add_start({"engine": "weft", "start_s": 31.0, "cache_tokens": 65536})
    results.add_start({"engine": "sglang", "error": "it ended with 1:\nno such module"})
    keys = [figure.key for figure in names["FIGURES"]]
    point = {"clients": 16, "input": 1024, "output": 128}
    for engine, scale in (("weft", 1.0), ("vllm", 2.0), ("vllm", 4.0), ("weft", 2.0)):
        results.add({"engine": engine} | point | dict.fromkeys(keys, 10.0 * scale))
    results.add({"engine": "vllm", "error": "1 request failed"} | point)
    text = (tmp_path / "table.txt").read_text()
    lines = [line.split() for line in text.splitlines()]
    assert "weft: 31 s to start, 65,536 tokens in the cache" in text and "sglang: did not start: it ended" in text
    assert ["weft", "16", "1024", "128", *["15.0"] * 7] in lines and [
        "vllm",
        "16",
        "1024",
        "128",
        *["30.0"] * 7,
    ] in lines
    assert ["weft", "/", "best", "other", "16", "1024", "128", *["0.50"] * 7] in lines
    found = json.loads((tmp_path / "compare.json").read_text())
    assert len(found["rows"]) == 5 and len(found["starts"]) == 2 and found["host"] == {}


@pytest.mark.parametrize("together, at_once", [(False, False), (True, False), (True, True)])
def test_rounds_alternate_and_no_engine_starts_in_vain(script: Any, together: bool, at_once: bool) -> None:
    names, done = script("compare"), []

    class Noted(names["Comparison"]):  # type: ignore[misc]
        def _start(self, labels: Sequence[str], stack: ExitStack, before: int = 0) -> dict[str, str]:
            for label in labels:
                done.append(f"start {label} {before}")
                stack.callback(done.append, f"end {label}")
            return {label: label for label in labels if label != "c"}

        def _measure(self, label: str, engine: str, at: int, number: int) -> None:
            assert engine == label
            done.append(f"{label}{at}.{number}")

    options = names["Options"](Path(), 0, cache_tokens=96 if at_once else None)
    compared = Noted(dict.fromkeys("abc"), options, {}, [None] * 2, 2, 0, None, Path(), 0.0, 0.0)
    if together:
        compared.together()
        starts = [f"start {label} {0 if at_once else before}" for before, label in enumerate("abc")]
        ends = ["end c", "end b", "end a"]
        assert done == [*starts, "a0.0", "b0.0", "b0.1", "a0.1", "a1.0", "b1.0", "b1.1", "a1.1", *ends]
    else:
        compared.one_after_the_other()
        wanted = [["start a 0", "a0.0", "a1.0", "end a"], ["start b 0", "b0.0", "b1.0", "end b"]]
        wanted += [
            ["start c 0", "end c"],
            ["start b 0", "b0.1", "b1.1", "end b"],
            ["start a 0", "a0.1", "a1.1", "end a"],
        ]
        assert done == list(itertools.chain(*wanted))


def test_no_prompt_that_is_measured_has_warmed_an_engine(script: Any) -> None:
    """It would be in the prefix cache. All points here have prompts of one length."""
    names, seen = script("compare"), list[tuple[int, ...]]()

    class Noted(names["Comparison"]):  # type: ignore[misc]
        def _load(self, engine: Any, point: Any, prompts: list[Any]) -> tuple[list[Any], float]:
            seen.extend(tuple(each.prompt) for each in prompts)
            return [], 1.0

    results = SimpleNamespace(add=lambda row: None, add_start=lambda row: None)
    engine = SimpleNamespace(
        start_s=0.0, cache_tokens=lambda: 0, shown="", end=lambda: None, tail=lambda: "", ready=lambda: True
    )
    found = names["Comparison"].__init__.__globals__
    points, options = [names["Point"](2, 8, 1, 3)] * 4, names["Options"](Path(), 0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(found, "RunningEngine", lambda *args: engine)
        patched.setitem(found, "summary", lambda *args: {})
        engines = {"a": ("weft", names["Installation"]("python", None, Path()))}
        Noted(engines, options, {}, points, 2, 1000, results, Path(), 1.0, float("inf")).one_after_the_other()
    assert len(seen) == 4 * 2 + 2 * 4 * 3 == len(set(seen))


def without_processes(names: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The globals of compare.py, for a run of `main` that starts none."""
    found = names["main"].__globals__
    context = SimpleNamespace(Pool=lambda count: nullcontext())
    monkeypatch.setitem(found, "multiprocessing", SimpleNamespace(get_context=lambda method: context))
    monkeypatch.setitem(found, "stop_on_sigterm", lambda: None)
    monkeypatch.setitem(found, "apart", lambda *command: "{}")
    return found


def test_the_limit_of_time_ends_a_load_and_keeps_what_there_is(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = script("compare")
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    arguments = ["--model", str(tmp_path), "--out", str(tmp_path / "out"), "--limit-s", "0", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    without_processes(names, monkeypatch)
    with pytest.raises(SystemExit) as ended:
        names["main"]()
    assert not ended.value.code and "ended after 0 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    "extra, weft, vllm, sglang",
    [
        (
            [],
            "--gpu-memory-fraction 0.9 --max-running 256 --max-batch-tokens 8192",
            "--gpu-memory-utilization 0.9 --max-num-seqs 256 --max-num-batched-tokens 8192",
            "--mem-fraction-static 0.900 --max-running-requests 256 --chunked-prefill-size 8192 "
            "--max-prefill-tokens 8192",
        ),
        (["--defaults"], "--gpu-memory-fraction 0.9", "--gpu-memory-utilization 0.9", "--mem-fraction-static 0.900"),
        (
            ["--together", "--memory", "0.75", "--sequences", "7", "--tokens", "70"],
            "--gpu-memory-fraction 0.25 --max-running 7 --max-batch-tokens 70",
            "--gpu-memory-utilization 0.25 --max-num-seqs 7 --max-num-batched-tokens 70",
            "--mem-fraction-static 0.250 --max-running-requests 7 --chunked-prefill-size 70 --max-prefill-tokens 70",
        ),
        (
            [
                *("--together", "--ranks", "4", "--attn-dp", "2", "--cache-tokens", "96", "--sequences", "8"),
                *("--more", "weft=--mixed-batch-tokens 64"),
            ],
            "--attn-tp 2 --gpu-memory-fraction 0.9 --attn-dp 2 --ep 4 --moe-tp 1 --kv-tokens 96 --max-running 8 "
            "--max-batch-tokens 8192 --mixed-batch-tokens 64",
            "--tensor-parallel-size 2 --gpu-memory-utilization 0.3 --data-parallel-size 2 --enable-expert-parallel "
            f"--kv-cache-memory-bytes {96 * 3 * 2 * 16 * 2} --max-num-seqs 8 --max-num-batched-tokens 8192",
            "--mem-fraction-static 0.900 --dp-size 2 --enable-dp-attention --ep-size 4 --max-running-requests 16 "
            "--chunked-prefill-size 16384 --max-prefill-tokens 8192 --max-total-tokens 96",
        ),
    ],
)
def test_the_commands_that_engines_start_with(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: list[str], weft: str, vllm: str, sglang: str
) -> None:
    names, asked = script("compare"), []
    fields = json.loads((preset_dir("qwen3-30b-a3b") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | SMALL))  # 3 layers, and a head of 16 on each of two GPUs
    fixed = ["--engines", "weft", "vllm", "sglang", "--model", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["compare.py", *fixed, *extra])
    found = without_processes(names, monkeypatch)

    class Failed:
        def __init__(self, kind: Any, installed: Any, options: Any, log: Path, limit_s: float) -> None:
            asked.append(" ".join([*kind.command(options), *options.more]))

        def ready(self) -> bool:
            raise found["EngineFailed"]("it ended with 1")

        def end(self) -> None:
            ended_early.append(self)

    ended_early: list[Any] = []
    monkeypatch.setitem(found, "RunningEngine", Failed)
    with pytest.raises(SystemExit) as ended:
        names["main"]()
    assert ended.value.code and len(asked) >= 3 and len(set(ended_early)) == len(asked) < len(ended_early)
    assert all(command.endswith(end) for command, end in zip(asked, (weft, vllm, sglang), strict=False)), asked


def test_the_share_of_memory_beside_an_engine_that_runs(script: Any) -> None:
    """Weft counts all that is taken, vLLM its own, and SGLang what is free at its start."""
    names = script("engines")
    options = names["Options"](Path("model"), 0, memory=0.45, before=0.45)
    commands = {name: names["KINDS"][name].command(options) for name in ("weft", "vllm", "sglang")}
    flags = {"weft": "--gpu-memory-fraction", "vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}
    shares = {name: command[command.index(flags[name]) + 1] for name, command in commands.items()}
    assert shares == {"weft": "0.9", "vllm": "0.45", "sglang": "0.818"}


@pytest.mark.nightly
def test_transformers_completes_a_batch_as_each_prompt_alone(script: Any, tmp_path: Path) -> None:
    names = script("engines")
    options = names["Options"](embedded_model_dir(), 0, device="cpu")
    installed = names["Installation"](sys.executable, None, tmp_path)
    engine = names["RunningEngine"](names["KINDS"]["transformers"], installed, options, tmp_path / "log", 120.0)
    while not engine.ready():
        time.sleep(0.1)

    def complete(prompt: list[int]) -> str:
        body = json.dumps({"prompt": prompt, "max_tokens": 3}).encode()
        with names["LOCAL"].open(f"{engine.url}/v1/completions", body, timeout=60) as response:
            return str(response.read().decode())

    prompts = [[20, 30, 40, 50], [60, 70, 80, 90]]
    try:
        alone = [complete(prompt) for prompt in prompts]
        with ThreadPoolExecutor() as clients:
            assert list(clients.map(complete, prompts)) == alone
    finally:
        engine.end()
    assert alone[0] != alone[1] and all(said.count("data: {") == 3 and said.endswith("[DONE]\n\n") for said in alone)


@pytest.mark.nightly
def test_a_dry_run(tmp_path: Path) -> None:
    """Two servers of the embedded model: both rounds, in alternating order, and nothing is left running."""
    command = [sys.executable, str(RIVALS / "compare.py"), "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "compare.json").read_text())
    order = [(row["engine"], row["round"]) for row in found["rows"]]
    assert order == [("weft", 0), ("weft-2", 0), ("weft-2", 1), ("weft", 1)] * 2
    assert all(row["failed"] == 0 and row["completed"] == (2, 40)[i // 4] for i, row in enumerate(found["rows"]))
    assert all(start["cache_tokens"] == 65536 for start in found["starts"]) and "weft / best other" in done.stdout
    places = (str(tmp_path), sys.executable, str(RIVALS.parents[2]))
    assert not any(place in (tmp_path / "compare.json").read_text() for place in places), "paths of one machine"
