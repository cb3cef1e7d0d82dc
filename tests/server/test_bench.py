"""`weft bench serving` against Weft's own server: the usage that it tells is what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.here import weft_here
from server.conftest import Served


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
