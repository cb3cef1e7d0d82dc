"""Checkpoints: slices of safetensors."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.engine.models.config_json.directory import is_gguf
from weft.engine.models.config_json.fields import ModelError, read_json
from weft.engine.models.weights.source import Shape, Source
from weft.engine.models.weights.weight_format import DTYPES, WeightFormat
from weft.engine.models.weights.weight_formats import PLAIN

if TYPE_CHECKING:
    from weft.engine.models.weights.gguf_file import GgufFile


class StoredTensor(NamedTuple):
    """Name of a tensor in its file."""

    name: str
    path: Path
    file: Any


class Checkpoint:
    """Tensors of a directory, read slice by slice. A context manager that keeps the files open."""

    def __init__(self, directory: Path, storage: WeightFormat = PLAIN):
        self.directory, self._storage = directory, storage
        self._stored: dict[str, StoredTensor] = {}
        with ExitStack() as stack:
            for path in weight_files(directory):
                file = stack.enter_context(_open(path))
                # Like transformers, read a name that two files have from the later file, whatever the index says.
                self._stored |= {name: StoredTensor(name, path, file) for name in file.keys()}  # noqa: SIM118
            self._stack = stack.pop_all()
        # Models saved without their head lack the prefix; transformers adds it.
        for name, stored in list(self._stored.items()):
            self._stored.setdefault(f"model.{name}", stored)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, source: Source) -> Tensor:
        """Return the slice of a source, float32 if it is stored quantised. Raises ModelError."""
        return source.restore(self._storage.read(self, source.name, *source.stored()))

    def has(self, name: str) -> bool:
        """Check if a tensor exists."""
        return name in self._stored

    def names(self, read: Collection[str] = ()) -> dict[str, Path]:
        """Return the stored names of all tensors, each with its file. read: names that weights have."""
        return {stored.name: stored.path for stored in self._stored.values()}

    def part(self, name: str, shape: Shape, dtypes: Sequence[torch.dtype]) -> Any:
        """Return a tensor to be sliced. Raises ModelError for another shape or dtype."""
        stored = self._stored.get(name)
        if stored is None:
            raise ModelError(f"{self.directory} has no tensor {name}; is the download complete?")
        part = stored.file.get_slice(stored.name)
        if tuple(part.get_shape()) != shape:
            raise ModelError(f"{name} in {stored.path} is {tuple(part.get_shape())}, but config.json asks for {shape}")
        if (kind := part.get_dtype()) not in {DTYPES[dtype] for dtype in dtypes}:
            supported = ", ".join(DTYPES[dtype] for dtype in dtypes)
            raise ModelError(
                f"{name} in {stored.path} is stored in {kind}; supported with this config.json: {supported}"
            )
        return part


def open_checkpoint(model: Path, storage: WeightFormat) -> Checkpoint | GgufFile:
    """Open the tensors of a directory or a GGUF file. Raises ModelError."""
    if is_gguf(model):
        from weft.engine.models.weights.gguf_file import GgufFile  # the package is an optional dependency

        return GgufFile(model)
    return Checkpoint(model, storage)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}; is the download complete?") from error


def weight_files(model_dir: Path) -> list[Path]:
    """Return the files of a checkpoint that transformers reads, in its order. Raises ModelError if there is none or one
    is missing."""
    if is_gguf(model_dir):
        from weft.engine.models.weights.gguf_file import GgufFile

        return [GgufFile(model_dir).path]
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(f"{model_dir} has no model.safetensors: add weights, or --load-format dummy to make some up")
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise ModelError(f"{index} is not a weight index: weight_map is not an object from tensors to files")
    for file in sorted(set(named.values())):
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise ModelError(f"{index} is not a weight index: {file!r} is outside of the model's directory")
        if not os.path.isfile(model_dir / file):
            raise ModelError(f"{model_dir / file} is missing; is the download complete?")
    return [model_dir / file for file in sorted(set(named.values()))]
