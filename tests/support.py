"""Emulated worlds, and small random models with weights that give wrong sums nowhere to hide, for all tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from weft.comm.reference import ReferenceTransport, ReferenceWorld
from weft.comm.transport import CommError
from weft.planner.spec import NAMED_ROWS, Mesh, Rows

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
BASIC = frozenset(("all_reduce", "reduce_scatterv", "all_gatherv"))
"""Planned exchanges that NCCL has a call for."""
SUMS = frozenset(("all_reduce", "reduce_scatterv", "all_reduce+all_gatherv", "reduce_scatterv+all_reduce"))
EVERY = BASIC | SUMS
"""Every planned exchange."""
MODELS = {
    "qwen2_moe": Qwen2MoeForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "deepseek_v2": DeepseekV2ForCausalLM,
    "deepseek_v3": DeepseekV3ForCausalLM,
    "llama": LlamaForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "mistral": MistralForCausalLM,
    "mixtral": MixtralForCausalLM,
    "minimax_m2": MiniMaxM2ForCausalLM,
}
FAMILIES = ("qwen2_moe", "qwen3_moe", "qwen3", "deepseek_v2")
"""Families that every test of layouts runs; DeepSeek-V3 differs from V2 in its router alone."""


def run_world(world: int | ReferenceWorld, rank_main: Callable[[ReferenceTransport], T]) -> list[T]:
    """Run `rank_main` on every rank of an emulated world, a thread each; return the results in rank order.

    Raises the first rank's error that is not only an echo of another's.
    """
    world = ReferenceWorld(world, timeout_s=240) if isinstance(world, int) else world
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def main(transport: ReferenceTransport) -> None:
        try:
            with world.compute_lock.computing():
                results[transport.rank] = rank_main(transport)
        except BaseException as error:
            errors.append(error)
            world.abort()

    threads = [threading.Thread(target=main, args=(t,)) for t in world.transports()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, CommError)), errors[0])
    return [results[r] for r in range(len(threads))]


def run_with_changes(folder: Path, changes: Mapping[str, Mapping[str, str]], code: str) -> str:
    """Return what Python code prints with the sources of `weft` changed: by file, new texts for old ones.

    The changed copy is made in `folder`; each old text must stand once in its file. The code may import tests.
    """
    shutil.copytree(ROOT / "src", folder / "src")
    for file, texts in changes.items():
        text = (path := folder / "src" / "weft" / file).read_text()
        for old, new in texts.items():
            assert text.count(old) == 1, f"{file}: {old}"
            text = text.replace(old, new)
        path.write_text(text)
    paths = os.pathsep.join([str(folder / "src"), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": paths, "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def held(whole: torch.Tensor, mesh: Mesh, rows: Rows, rank: int, counts: tuple[int, ...]) -> torch.Tensor:
    """Return a rank's rows of a tensor of all tokens. counts: tokens per DP group. OWN rows may be several ranks'
    together."""
    if (known := mesh.rows(rows)) in NAMED_ROWS:
        ranges = [mesh.row_range(known, rank, counts)]
    else:
        ranges = [mesh.row_range(Rows.OWN, peer, counts) for peer in mesh.peers(known.over, rank)]
    return torch.cat([whole[start:stop] for start, stop in ranges])


def small_config(family: str, parts: int, **changes: Any) -> Any:
    """Return a small configuration that divides over `parts` ranks."""
    shape = dict(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2 * parts,
        num_key_value_heads={2: 2, 4: 2, 6: 1, 8: 2}.get(parts, parts),  # fewer than ranks too: replicated
        intermediate_size=8 * parts,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        eos_token_id=0,
    )
    moe = dict(
        num_experts=2 * parts if parts > 1 else 4,
        num_experts_per_tok=2,
        moe_intermediate_size=4 * parts,
        mlp_only_layers=[1],
    )
    if family == "llama":  # as 3.2: a tied head, and low frequencies stretched
        rope: dict[str, Any] = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, original_max_position_embeddings=16)
        rope |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
        rope = dict(rope_parameters=rope, tie_word_embeddings=True)
        return LlamaConfig(**shape | rope | dict(hidden_size=8 * parts, head_dim=8) | changes)
    if family == "qwen2":
        return Qwen2Config(**shape | dict(hidden_size=16 * parts) | changes)
    if family == "mistral":
        return MistralConfig(**shape | dict(head_dim=8, sliding_window=4) | changes)
    if family == "mixtral":
        routed = dict(num_local_experts=moe["num_experts"], num_experts_per_tok=2)
        return MixtralConfig(**shape | routed | dict(head_dim=8) | changes)
    if family == "minimax_m2":
        routed = dict(num_local_experts=moe["num_experts"], num_experts_per_tok=2)
        published = dict(attn_type_list=[1, 1, 1], qk_norm_type="per_layer", rotary_dim=4, scoring_func="sigmoid")
        published |= dict.fromkeys(("use_mtp", "use_qk_norm", "use_routing_bias"), True)
        published |= dict(shared_intermediate_size=0, num_mtp_modules=3, mtp_transformer_layers=1, bos_token_id=0)
        # The factor follows from rotary_dim, but older transformers (5.17) rotate all of a head without it.
        rope = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))
        return MiniMaxM2Config(**shape | routed | published | rope | dict(head_dim=8) | changes)
    if family == "qwen2_moe":
        shape["hidden_size"] = 8 * parts
        return Qwen2MoeConfig(**shape | moe | {"shared_expert_intermediate_size": 8 * parts} | changes)
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**shape | moe | {"head_dim": 8, "norm_topk_prob": True, "attention_bias": True} | changes)
    if family.startswith("deepseek"):
        rope = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
        latent = dict(q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
        routed = dict(
            n_routed_experts=moe["num_experts"],
            n_shared_experts=2,
            num_experts_per_tok=2,
            moe_intermediate_size=moe["moe_intermediate_size"],
            first_k_dense_replace=1,
            n_group=2,
            topk_group=1,
            topk_method="group_limited_greedy",
            routed_scaling_factor=1.5,
        )
        heads = dict(hidden_size=8 * parts, num_key_value_heads=2 * parts)
        rope |= dict(mscale=0.7, mscale_all_dim=0.9)
        if family == "deepseek_v3":
            del routed["topk_method"]
            return DeepseekV3Config(**shape | latent | routed | heads | {"rope_parameters": rope} | changes)
        return DeepseekV2Config(**shape | latent | routed | heads | {"rope_parameters": rope} | changes)
    return Qwen3Config(**shape | {"head_dim": 8, "tie_word_embeddings": True} | changes)


def converted(model: T, dtype: torch.dtype) -> T:
    """Return a transformers model with its weights in another dtype; rotary's frequencies stay in float32, as in a
    model that transformers loads in that dtype."""
    assert isinstance(model, torch.nn.Module)
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:
            weight.data = weight.data.to(dtype)
    return model


def small_model(family: str, parts: int, directory: Path, seed: int = 0, **changes: Any) -> Any:
    """Save a random transformers model of `small_config` in `directory`; every weight is random, a few are large."""
    torch.manual_seed(seed)
    model = MODELS[family](small_config(family, parts, **changes)).eval()
    with torch.no_grad():
        for name, weight in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                weight.uniform_(-0.5, 0.5)
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0, 0.5 if weight.dim() == 1 else 1.2 / weight.shape[-1] ** 0.5)
                weight.view(-1)[:: max(1, weight.numel() // 5)] *= 4
    model.save_pretrained(directory)
    return model
