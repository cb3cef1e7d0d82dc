"""Checkpoints: each rank reads its own slices from safetensors, straight into its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weft.models.config import ModelConfig, ModelError
from weft.models.layers import Builder, Layer, Source, Workspace, torch_empty
from weft.models.qwen import Qwen
from weft.place.spec import Mesh

Progress = Callable[[int, int], None]


def build_model(
    config: ModelConfig,
    mesh: Mesh,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    workspace: Workspace = torch_empty,
) -> Qwen:
    """The model of one rank with unfilled weights (none at all on the `meta` device).

    workspace: makes the tensors that the ranks will sum.

    Raises LayoutError where the model's heads, experts or features do not divide over the layout.
    """
    return config.build(Builder(mesh, rank, dtype, device, workspace))


def load_model(
    model_dir: Path,
    config: ModelConfig,
    mesh: Mesh,
    rank: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    workspace: Workspace = torch_empty,
) -> Qwen:
    """The model of one rank, weights filled. progress(done, total) counts tensors; workspace: as `build_model`.

    Raises ModelError for missing or misshapen tensors, LayoutError as `build_model`.
    """
    model = build_model(config, mesh, rank, dtype, torch.device(device), workspace)
    jobs = [
        (getattr(layer, attribute), source)
        for layer in model.modules()
        if isinstance(layer, Layer)
        for attribute, sources in layer.sources.items()
        for source in sources
    ]
    files = _tensor_files(model_dir)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for done, (weight, source) in enumerate(jobs):
            path = files.get(source.name)
            if path is None:
                raise ModelError(f"{model_dir} has no tensor {source.name}; is the download complete?")
            if path not in opened:
                opened[path] = stack.enter_context(_open(path))
            _fill(weight, source, opened[path], path)
            if progress:
                progress(done + 1, len(jobs))
    return model


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}; is the download complete?") from error


def _tensor_files(model_dir: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        try:
            names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{index} is not a weight index: {error}") from error
        return {name: model_dir / file for name, file in names.items()}
    single = model_dir / "model.safetensors"
    if not single.is_file():
        raise ModelError(f"{model_dir} has no model.safetensors; Weft reads safetensors checkpoints only")
    with _open(single) as tensors:
        return dict.fromkeys(tensors.keys(), single)


def _fill(weight: torch.Tensor, source: Source, tensors: Any, path: Path) -> None:
    part = tensors.get_slice(source.name)
    shape = tuple(part.get_shape())
    if shape != source.shape:
        raise ModelError(f"{source.name} in {path} is {shape}, but config.json asks for {source.shape}")
    weight.data[source.at].copy_(part[source.take])
