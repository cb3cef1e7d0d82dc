"""A family that only a plugin knows, with caches of every kind, served by the engine: what it says is what it means."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import hybrid
from engine.conftest import byte_tokenizer, generate_together, outputs_of_some
from engine.hybrid import HybridConfig, PlainHybrid
from engine.test_engine import GREEDY, prompts
from weft.engine.attention.caches import cached_layers
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.kv.cache_spec import Latent, Recurrent, Window
from weft.engine.models.layers.basic import Builder, Layer
from weft.engine.models.registry import load_config, registry
from weft.planner.spec import Mesh

pytestmark = pytest.mark.usefixtures("planned_once")

PLUGIN = hybrid.__file__
CONFIG = dict(
    model_type="hybrid",
    vocab_size=257,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=32,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_parameters=dict(rope_type="default", rope_theta=1e4),
    mixers=["latent", "recurrent", "window", "recurrent"],
    eos_token_id=0,
    tie_word_embeddings=False,
)
LAYOUTS = {
    "1x1": dict(),
    "2x2": dict(attn_dp=2, attn_tp=2, ep=2, moe_tp=2),
    "1x2": dict(attn_dp=1, attn_tp=2, ep=1, moe_tp=2),
}


def small_hybrid(directory: Path) -> None:
    """Save a model there, with weights of every tensor that the layers name."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    byte_tokenizer(directory)
    config = load_config(directory, registry([PLUGIN]))
    model = config.build(Builder(Mesh(), 0, torch.float32, torch.device("meta")))
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for layer in model.modules():
        for source in (s for sources in layer.sources.values() for s in sources) if isinstance(layer, Layer) else ():
            norm = len(source.shape) == 1
            random_ = torch.randn(source.shape, generator=generator)
            weights[source.name] = 1 + 0.2 * random_ if norm else random_ / source.shape[-1] ** 0.5
    weights["embed.weight"] *= 32**0.5
    save_file(weights, directory / "model.safetensors")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small_hybrid(directory := tmp_path_factory.mktemp("hybrid"))
    return directory


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[tuple[int, ...]]:
    """Greedy outputs of the plain model."""
    config: Any = load_config(model_dir, registry([PLUGIN]))
    plain = PlainHybrid(config, load_file(model_dir / "model.safetensors"))
    outputs = []
    for prompt in prompts():
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(plain.logits(tokens).argmax()))
        outputs.append(tuple(tokens[len(prompt) :]))
    assert len({t for a in outputs for t in a}) > 20, "outputs that hardly differ would show little"
    return outputs


def engine(model_dir: Path, **changes: Any) -> Engine:
    values = dict(executor="thread", kv_tokens=512, page_size=4, max_batch_tokens=16, max_running=8)
    return Engine(EngineConfig(model=model_dir, plugins=(PLUGIN,), **values | changes))


@pytest.mark.parametrize("layout, executor", [*((layout, "thread") for layout in LAYOUTS), ("1x2", "process")])
def test_greedy_tokens_are_the_plain_models(model_dir: Path, expected: Any, layout: str, executor: str) -> None:
    """Prompts are cut into chunks; the second time they start from a cached prefix."""
    with engine(model_dir, executor=executor, **LAYOUTS[layout]) as served:
        asked = prompts()[: 3 if executor == "process" else None]
        cold, warm = (generate_together(served, asked, GREEDY) for _ in range(2))
        assert [r.token_ids for r in cold] == [r.token_ids for r in warm] == expected[: len(asked)]
        assert sum(r.cached_tokens for r in warm) > 20 > sum(r.cached_tokens for r in cold)
        served.check_idle()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_and_cancellation(model_dir: Path, expected: Any, prefix_cache: bool) -> None:
    rng = random.Random(2)
    layout = LAYOUTS["2x2"]
    with engine(model_dir, kv_tokens=64, max_batch_tokens=8, prefix_cache=prefix_cache, **layout) as served:
        for _ in range(2):
            cancelled = {at: rng.randrange(6) for at in rng.sample(range(7), 2)}
            reasons, outputs = outputs_of_some(served, prompts(), GREEDY, cancelled)
            for at in range(7):
                assert reasons[at] == ("abort" if at in cancelled else "length")
                assert outputs[at] == expected[at][: len(outputs[at])]
            served.check_idle()
        assert served.stats().preemptions > 0


def test_layers_declare_their_share_of_a_rank(model_dir: Path) -> None:
    config: HybridConfig = load_config(model_dir, registry([PLUGIN]))  # type: ignore[assignment]
    model = config.build(Builder(Mesh(2, 2, 2, 2), 1, torch.float32, torch.device("meta")))
    state = Recurrent(((2, 8, 8), (2, 8)))
    assert list(cached_layers(model).values()) == [Latent(24, 16), state, Window(6, 1, 8), state]
