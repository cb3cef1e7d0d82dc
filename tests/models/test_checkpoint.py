"""Tensors that are stored otherwise than they are used: every slice is the same slice of the restored whole."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import small_model
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from models.layouts import float8
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.load import load_model
from weft.engine.models.registry import load_config
from weft.engine.models.weights.checkpoint import Checkpoint
from weft.engine.models.weights.float8_weights import Float8Format
from weft.engine.models.weights.mxfp4_weights import Mxfp4Format
from weft.engine.models.weights.source import Fused, Source, Stacked, Transposed, View
from weft.planner.spec import Mesh

W = torch.arange(7 * 10.0).view(7, 10)
STACK = torch.stack([W, W + 100, W + 200])
RUNS = [(0, 7), (2, 5), (6, 7), (3, 3)]

# What a source means in plain indexing: (stored tensor, the views, the tensor as it is used).
VIEWS: dict[str, tuple[Tensor, tuple[View, ...], Tensor]] = {
    "plain": (W, (), W),
    "transposed": (W.T.contiguous(), (Transposed(),), W),
    "stacked": (STACK, (Stacked(1, 3),), STACK[1]),
    "fused": (torch.cat((W + 1, W)), (Fused(7, 14),), W),
    "taking turns": (torch.stack((W + 1, W), dim=1).flatten(0, 1), (Fused(1, 14, 2),), W),
    "stacked, transposed": (STACK.transpose(1, 2).contiguous(), (Transposed(), Stacked(2, 3)), STACK[2]),
    "turns, transposed, stacked": (
        torch.stack((STACK, STACK + 1), dim=2).flatten(1, 2).transpose(1, 2).contiguous(),
        (Fused(0, 14, 2), Transposed(), Stacked(2, 3)),
        STACK[2],
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str, tmp_path: Path) -> None:
    stored, views, used = VIEWS[name]
    save_file({"w": stored}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        for (a, b), (c, d) in itertools.product(RUNS, [(0, 10), (4, 9)]):
            source = Source("w", (7, 10), (slice(a, b), slice(c, d)), views=views)
            assert torch.equal(checkpoint.read(source), used[a:b, c:d])
        assert torch.equal(checkpoint.read(Source("w", (7, 10), (slice(None),), views=views)), used)
        with pytest.raises(ModelError, match=r"w in .* is .*, but config\.json asks for"):
            checkpoint.read(Source("w", (7, 11), (slice(None),), views=views))


@pytest.mark.parametrize("shape", [(40, 24), (3, 17, 33)])
def test_float8_blocks(shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    stored, scales, used = float8(torch.randn(shape), 8)
    save_file({"w": stored, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, Float8Format((8, 8))) as checkpoint:
        for a, b, c, d in ((0, 17, 0, 24), (3, 11, 5, 6), (8, 16, 16, 24), (16, 17, 1, 20)):
            take = (*[slice(None)] * (len(shape) - 2), slice(a, b), slice(c, d))
            assert torch.equal(checkpoint.read(Source("w", shape, take)), used[take])
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ModelError, match=r"stored in FP8, but config\.json has no"):
        checkpoint.read(Source("w", shape, (slice(None),)))
    save_file({"w": stored}, tmp_path / "model.safetensors")
    with (
        Checkpoint(tmp_path, Float8Format((8, 8))) as checkpoint,
        pytest.raises(ModelError, match="no tensor w_scale_inv"),
    ):
        checkpoint.read(Source("w", shape, (slice(None),)))


def test_mxfp4_is_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(120, 132, (2, 6, 3), dtype=torch.uint8)
    used = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)  # [2, 6, 96]
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, Mxfp4Format()) as checkpoint:
        for a, b, c, d in ((0, 6, 0, 96), (1, 4, 32, 64), (5, 6, 7, 50)):
            take = (slice(None), slice(a, b), slice(c, d))
            assert torch.equal(checkpoint.read(Source("w", (2, 6, 96), take)), used[take])
            one = Source("w", (6, 96), take[1:], views=(Stacked(1, 2),))
            assert torch.equal(checkpoint.read(one), used[1, a:b, c:d])
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(ModelError, match="no tensor w;"):
        checkpoint.read(Source("w", (2, 6, 96), (slice(None),)))


def test_a_float8_model(tmp_path: Path) -> None:
    """Linear layers are in FP8, but not norms, routers and embeddings, as in published Qwen3-MoE models."""
    small_model("qwen3_moe", 4, tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, wanted = load_file(file), {}
    for name in [n for n in tensors if "proj.weight" in n]:
        stored, scales, wanted[name] = float8(tensors[name], 16)
        tensors |= {name: stored, f"{name}_scale_inv": scales}
    save_file(tensors, file)
    method = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[16, 16])
    plain = json.loads(config.read_text())
    config.write_text(json.dumps(plain | {"quantization_config": method}))
    mesh = Mesh(1, 4, 2, 2)
    quantised = [dict(load_model(tmp_path, load_config(tmp_path), mesh, r).named_parameters()) for r in range(4)]
    config.write_text(json.dumps(plain))
    with pytest.raises(ModelError, match=r"stored in FP8, but config\.json has no weight_block_size"):
        load_model(tmp_path, load_config(tmp_path), mesh, 0)
    save_file({n: t for n, t in (tensors | wanted).items() if not n.endswith("_inv")}, file)
    for rank, ours in enumerate(quantised):
        for name, weight in load_model(tmp_path, load_config(tmp_path), mesh, rank).named_parameters():
            assert torch.equal(ours[name], weight), name
