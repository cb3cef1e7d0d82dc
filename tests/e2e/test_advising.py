"""`weft advise` on measured ranks and HTTP, and the layout that `weft serve` and `weft generate` choose by it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from e2e.here import weft_here
from weft.planner.cost import cache_folder

LOAD = ["--device=cpu", "--ranks=1", "--input-len=16", "--output-len=8", "--concurrency=2"]
AUTO = ["--device=cpu", "--layout=auto"]


@pytest.fixture(scope="module", autouse=True)
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the output of a first `weft advise`, which measures, with all kept times in a folder of its own."""
    kernels, folder = cache_folder() / "kernels", tmp_path_factory.mktemp("cache")
    kernels.mkdir(parents=True, exist_ok=True)
    (folder / "weft").mkdir()
    (folder / "weft" / "kernels").symlink_to(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        code, out, err = weft_here("advise", *LOAD, "--measure-load=0")
        assert code == 0, err
        yield out


def test_the_advice_is_printed_next_to_the_measured_load(measured: str) -> None:
    first, *lines = measured.splitlines()
    assert re.match(r"predicted / measured without HTTP: attn_dp=1.*: tokens_s [\d,.]+ / [\d,.]+, ttft_ms ", first)
    assert lines[0] == "1. attn_dp=1 attn_tp=1 ep=1 moe_tp=1" and " tokens/s, TTFT " in lines[1]
    assert lines[-1].strip() == "weft serve --device cpu"


def test_kept_times_are_used_again() -> None:
    """A second run measures nothing: its files stay as they are, and all figures are known."""
    before = {path: path.stat().st_mtime_ns for path in cache_folder().glob("*.json")}
    code, out, _ = weft_here("advise", *LOAD, "--json")
    report = json.loads(out)
    assert code == 0 and len(report["layouts"]) == 1 and report["api"]["request_us"] > report["api"]["token_us"] > 0
    assert before == {path: path.stat().st_mtime_ns for path in cache_folder().glob("*.json")} and len(before) == 3
    without = json.loads(weft_here("advise", *LOAD, "--json", "--no-http", "--no-measure")[1])
    assert without["api"]["http"] is False
    # Which is longer is the host's, and on a busy one either may be.
    assert without["layouts"][0]["ttft_ms"]["median"] != report["layouts"][0]["ttft_ms"]["median"]


def test_a_recorded_load_runs_on_kept_times(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = ({"timestamp": at, "input_length": 16, "output_length": 8} for at in (0, 1))
    file.write_text("\n".join(map(json.dumps, rows)))
    code, out, _ = weft_here("advise", *LOAD[:2], "--no-measure", "--trace", str(file), "--for", "sglang")
    assert code == 0 and "python -m sglang.launch_server --model-path" in out


@pytest.mark.nightly
def test_generate_and_serve_choose_by_kept_times() -> None:
    chosen = r"^layout attn_dp=1 attn_tp=1 ep=1 moe_tp=1, for 2 clients of 16 \+ 8 tokens: .* \(measured steps\)$"
    code, out, err = weft_here("generate", "--prompt=Tom", "--max-tokens=2", *AUTO)
    assert code == 0 and out and re.search(chosen, err, re.MULTILINE), err
    command = [
        sys.executable,
        "-m",
        "weft.serve.cli.main",
        *["serve", "--device", "cpu", "--layout", "auto", "--port", "0"],
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            lines = []
            for line in server.stderr:
                lines.append(line)
                if found := re.search(r"http://127.0.0.1:\d+", line):
                    assert urlopen(f"{found[0]}/health", timeout=60).status == 200
                    break
            assert re.search(chosen, "".join(lines), re.MULTILINE), lines
        finally:
            server.terminate()


@pytest.mark.parametrize(
    "command, text",
    [
        ("advise --gpus 1", "1 rank requires a GPU, and this host has none: drop --gpus and --device cuda"),
        ("advise --device cuda", "1 rank requires a GPU, and this host has none: drop --gpus and --device cuda"),
        ("advise --preset qwen3-235b-a22b --ranks 1 --no-measure", "no layout of 1 rank(s) starts; of attn_dp=1"),
        ("advise --preset gpt-oss-120b --what-if h200x1", "GiB are missing"),
        ("serve --preset llama-3.2-1b --layout auto --port 0", "is a shape without weights; add --load-format dummy"),
        ("generate --layout auto --attn-tp 4096 --prompt x", "has the sizes that are given: omit them"),
    ],
)
def test_bad_input_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, command: str, text: str) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    code, out, err = weft_here(*command.split())
    last = err.splitlines()[-1]
    assert code == 2 and not out and last.startswith("weft: ") and text in last, err
