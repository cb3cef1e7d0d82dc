"""`weft bench serving` against Weft's own server: the usage that it tells is what was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from e2e.here import weft_here
from server.conftest import Served, serve
from weft.engine.controller.engine import Engine


@pytest.mark.parametrize("chat", [False, True])
def test_every_token_is_counted(served: Served, chat_model_dir: Path, chat: bool) -> None:
    prompts = f"--backend openai-chat --tokenizer {chat_model_dir}" if chat else "--vocab-size 250"
    sizes = "--num-prompts 6 --random-input-len 20 --random-output-len 4 --ignore-eos --max-concurrency 3"
    command = f"bench serving --base-url {served.url} {sizes} {prompts} --json"
    code, out, err = weft_here(*command.split())
    assert code == 0, err
    found = json.loads(out)
    assert found["completed"] == 6 and found["total_output_tokens"] == 6 * 4 and found["model"] == "small"
    assert found["total_input_tokens"] > 6 * 20 if chat else found["total_input_tokens"] == 6 * 20
    if not chat:  # each token has its event, though a random model's bytes are seldom text
        assert 0 < found["mean_ttft_ms"] < found["mean_e2el_ms"] and found["mean_tpot_ms"] > 0


def test_a_profile_is_asked_for_at_the_start(served: Served, engine: Engine, tmp_path: Path) -> None:
    with served.http() as http:
        refused = http.post("/weft/profile")
    assert refused.status_code == 400 and "--profile-dir" in refused.json()["error"]["message"]
    for allowed in serve(engine, profile_dir=tmp_path):
        with allowed.http() as http:
            for steps in (1, 1001):
                assert http.post("/weft/profile", params={"steps": steps}).status_code == 400
            failed = http.post("/weft/profile")  # the ranks of this engine are threads
            assert failed.status_code == 409 and "profile them as processes" in failed.json()["error"]["message"]


def test_a_server_under_load_is_watched(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, files = {"unprofiled_step_us": 7.0}, ["rank0.json.gz"]
    asked: list[int | Path] = []

    def watch(engine: Engine, steps: int) -> SimpleNamespace:
        asked.append(steps)
        with other.http() as http:
            assert http.post("/weft/profile").status_code == 409
        return SimpleNamespace(report=found, write=lambda folder: asked.append(folder) or files)

    monkeypatch.setattr("weft.serve.http.shared.record", watch)
    for other in serve(served.engine, profile_dir=tmp_path):
        for _ in range(2):
            with other.http() as http:
                assert http.post("/weft/profile", params={"steps": 3}).json() == found | {"files": files}
    assert asked == [3, tmp_path] * 2
