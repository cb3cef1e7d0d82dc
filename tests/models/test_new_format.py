"""A format that products run in is one module and one row of a table: a toy of int8 runs a model on every layout."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import run_world, small_model
from torch import Tensor, nn

from models.layouts import drive, sequences
from models.test_formats import SLOW_BYTES, World, by_reference, by_shm, travelled
from weft.engine.config.device import check_formats
from weft.engine.kernels import model_reference
from weft.engine.models.config_json.common_fields import FLOATS
from weft.engine.models.layers.basic import Layer
from weft.engine.models.load import describe_products, dummy_model, load_model
from weft.engine.models.registry import load_config
from weft.engine.models.weights import weight_formats
from weft.engine.models.weights.source import Shape, Slices, Source
from weft.engine.models.weights.weight_format import Empty, FillDummy, StoredTensors, WeightFormat
from weft.planner.cost import Costs
from weft.planner.row_formats import Format
from weft.planner.spec import LayoutError, Mesh

__all__ = ["travelled"]  # a fixture

MESHES = (Mesh(), Mesh(1, 2, 1, 2), Mesh(1, 2, 2, 1), Mesh(2, 1, 2, 1), Mesh(2, 2, 2, 2))


class Int8Rows(NamedTuple):
    """values: int8 `[T, width]`. scales: float32 `[T, 1]`."""

    values: Tensor
    scales: Tensor

    def fill(self, x: Tensor) -> None:
        FILLED.append(len(x))
        for mine, made in zip(self, Int8().make(x), strict=True):
            mine.copy_(made)


FILLED: list[int] = []
"""Rows of the norms that filled the toy's."""


@dataclass(frozen=True)
class Int8(Format):
    """Rows as int8, with a float32 scale each."""

    def __str__(self) -> str:
        return "int8"

    def parts(self, width: int) -> tuple[int, ...]:
        return width, 4

    def make(self, x: Tensor) -> Int8Rows:
        scales = (x.float().abs().amax(-1).clamp(min=1e-9) / 127)[..., None]
        return Int8Rows((x / scales).round().to(torch.int8), scales)

    def tensors(self, rows: Int8Rows) -> tuple[Tensor, ...]:
        return rows

    def rows(self, *tensors: Tensor) -> Int8Rows:
        return Int8Rows(tensors[0].view(torch.int8), tensors[1].view(torch.float32))

    def unfilled(self, x: Tensor) -> Int8Rows:
        return Int8Rows(x.new_empty(x.shape, dtype=torch.int8), x.new_empty(len(x), 1, dtype=torch.float32))

    def dequantise(self, rows: Int8Rows, dtype: torch.dtype) -> Tensor:
        return rows.values.to(dtype) * rows.scales


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """int8 `[…, N, K]`, with float32 scales `[…, N, 1]`."""

    values: nn.Parameter
    scales: nn.Parameter
    format: ClassVar[Format] = Int8()
    experts = staticmethod(model_reference.experts)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return {"": self.values, "_scales": self.scales}

    def dequantise(self, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        whole = self.values.to(dtype) * self.scales
        return whole if expert is None else whole[expert]

    def product(self, x: Any, out: Tensor) -> Tensor:
        return model_reference.linear_quantised(x, self, out)


class Int8Format(WeightFormat):
    """`name`, int8, with `name_row_scale`, a scale for each output."""

    name, capability, ends = "INT8", (9, 9), ("_row_scale",)
    has_products = True

    def keeps(self, name: str, tensors: StoredTensors | None = None) -> bool:
        return "_proj" in name and (tensors is None or tensors.has(f"{name}_row_scale"))

    def _slices(self, tensors: StoredTensors, name: str, shape: Shape, take: Slices) -> tuple[Tensor, Tensor]:
        scales = tensors.part(f"{name}_row_scale", (*shape[:-1], 1), FLOATS)[(*take[:-1], slice(0, 1))]
        return tensors.part(name, shape, (torch.int8,))[take], scales

    def read(self, tensors: StoredTensors, name: str, shape: Shape, take: Slices) -> Tensor:
        if not tensors.has(f"{name}_row_scale"):
            return super().read(tensors, name, shape, take)
        return Int8().dequantise(Int8Rows(*self._slices(tensors, name, shape, take)), torch.float32)

    def declare(self, path: str, shape: Shape, sources: Iterable[Source], empty: Empty) -> Int8Weight:
        return Int8Weight(empty(*shape, dtype=torch.int8), empty(*shape[:-1], 1, dtype=torch.float32))

    def load(self, weight: Int8Weight, tensors: StoredTensors, source: Source) -> None:
        parts = self._slices(tensors, source.name, *source.stored())
        for whole, part in zip((weight.values, weight.scales), parts, strict=True):
            whole.data[source.at].copy_(source.restore(part))

    def make_up(self, weight: Int8Weight, source: Source, bound: float, fill: FillDummy) -> None:
        fill(weight.values.data[source.at], source, 127)
        weight.scales.data[source.at].fill_(bound / 127)


def globals_of_weft() -> dict[tuple[str, str], int]:
    modules = {name: module for name, module in sys.modules.items() if name.startswith("weft.")}
    return {(name, each): id(value) for name, module in modules.items() for each, value in vars(module).items()}


@pytest.fixture(params=["qwen3", "qwen3_moe"])
def directory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint in the toy's format, which is registered: that changes one row of one module."""
    small_model(request.param, 4, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        tensors[name], tensors[f"{name}_row_scale"] = Int8().make(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "int8"}}))
    before = globals_of_weft()
    row = {"int8": lambda method, plain: Int8Format()}
    monkeypatch.setattr(weight_formats, "WEIGHT_FORMATS", {**weight_formats.WEIGHT_FORMATS, **row})
    changed = {key for key, value in globals_of_weft().items() if before[key] != value}
    assert changed == {(weight_formats.__name__, "WEIGHT_FORMATS")}
    return tmp_path


def test_a_toy_runs_a_model_on_every_layout(directory: Path, travelled: Counter[str]) -> None:
    """Weights are equal, and rows are rounded: all layouts are equally far from the same model without the rounding."""

    def logits(mesh: Mesh, kept: bool) -> Tensor:
        run = sequences(mesh, 61)
        costs = Costs(f"toy {kept}", {"*": {0: replace(SLOW_BYTES, name=f"toy {kept}")}})
        found = run_world(mesh.world, lambda t: drive(t, directory, mesh, run, float8=kept, costs=costs))
        return torch.stack([found[0][key] for key in sorted(found[0])])

    def off(found: Tensor, wanted: Tensor) -> float:
        return ((found - wanted).norm(dim=1) / wanted.norm(dim=1)).median().item()

    exact, alone = logits(Mesh(), False), logits(Mesh(), True)
    rounding = off(alone, exact)
    assert 1e-3 < rounding < 0.05
    for mesh in MESHES:
        travelled.clear()
        found = logits(mesh, True)
        assert any(name.startswith("int8") for name in travelled) == (mesh.world > 1), mesh
        assert rounding / 1.5 < off(found, exact) < 1.5 * rounding, mesh
        assert off(logits(mesh, False), exact) < 1e-5, mesh


@pytest.mark.parametrize("by", [by_reference, by_shm])
def test_norms_fill_the_toy(by: World, directory: Path, tmp_path: Path) -> None:
    """Rows that a norm fills in the same call as a sum are what the format makes of its result."""
    mesh = Mesh(1, 2, 1, 2)
    run = sequences(mesh, 61)

    def logits(work: World, name: str) -> list[dict[tuple[int, int], Tensor]]:
        return work(mesh, tmp_path / name, lambda transport: drive(transport, directory, mesh, run, float8=True))

    FILLED.clear()
    found = logits(by, "filled")
    assert sum(FILLED)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Int8, "unfilled", lambda self, x: None)
        FILLED.clear()
        wanted = logits(by, "made")
    assert not FILLED
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_ranks_hold_the_toy_as_it_is_stored(directory: Path) -> None:
    config = load_config(directory)
    for mesh in MESHES:
        for rank in {0, mesh.world - 1}:
            wanted = dict(load_model(directory, config, mesh, rank).named_modules())
            found = load_model(directory, replace(config, float8=True), mesh, rank)
            kept = 0
            for path, layer in found.named_modules():
                for name, weight in layer.kept.items() if isinstance(layer, Layer) else ():
                    assert weight.parameters[""].dtype == torch.int8
                    assert torch.equal(weight.dequantise(torch.float32), wanted[path].get_parameter(name)), path
                    kept += 1
            assert kept and describe_products(found.config, mesh, torch.float32).startswith("products in INT8: ")


def test_dummy_weights_and_what_a_gpu_lacks_follow(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(load_config(directory), float8=True)
    whole, part = (dummy_model(config, mesh, 1 % mesh.world) for mesh in (Mesh(), Mesh(1, 2, 2, 1)))
    rows = whole.layers[0].attention.qkv.kept["weight"].values
    assert rows.dtype == torch.int8 and rows.float().std() > 50
    half = part.layers[0].attention.out.kept["weight"].values
    assert torch.equal(half, whole.layers[0].attention.out.kept["weight"].values.chunk(2, dim=1)[1])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    with pytest.raises(LayoutError, match=r"^H100 .* no matmuls in INT8, which require sm_99: --float8 off$"):
        check_formats(config, torch.bfloat16, torch.device("cuda", 0))
