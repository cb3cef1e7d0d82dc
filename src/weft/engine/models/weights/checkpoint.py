"""Checkpoints: slices of safetensors. Weights stored in eight or four bits are dequantised when read."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.engine.models.config_json.common_fields import FLOATS, Storage
from weft.engine.models.config_json.directory import is_gguf
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.config_json.json_file import read_json
from weft.engine.models.weights.source import Shape, Slices, Source

if TYPE_CHECKING:
    from weft.engine.models.weights.gguf_file import GgufFile

MXFP4_BLOCK = 32
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of a four-bit float with two bits of exponent and one of mantissa; the fourth bit is the sign."""
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0", torch.uint8: "U8"}
"""Names of dtypes in safetensors."""


class StoredTensor(NamedTuple):
    """Name of a tensor in its file."""

    name: str
    path: Path
    file: Any


class Checkpoint:
    """Tensors of a directory, read slice by slice. A context manager that keeps the files open.

    Args:
        float8_block: (rows, columns) of a weight that share a scale, if config.json says that weights are stored in
            FP8: `name`, float8_e4m3fn, with `name_scale_inv`, float32, the factor of each block (DeepSeek-V3, arXiv
            2412.19437).
        mxfp4: weights may be stored as `name_blocks`, two values a byte with the lower four bits first, and
            `name_scales`, the power of two of each 32 values plus 127 (OCP Microscaling Formats 1.0).
    """

    def __init__(self, directory: Path, float8_block: tuple[int, int] | None = None, mxfp4: bool = False):
        self.directory, self._block, self._mxfp4 = directory, float8_block, mxfp4
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
        shape, take = source.stored()
        if not self.has(source.name) and self._mxfp4 and self.has(f"{source.name}_blocks"):
            return source.restore(self._four_bits(source.name, shape, take))
        part = self._weight(source.name, shape)[take]
        if part.dtype == torch.float8_e4m3fn:
            part = part.float() * self._scales(source.name, shape, take)
        return source.restore(part)

    def has(self, name: str) -> bool:
        """Check if a tensor exists."""
        return name in self._stored

    def names(self, read: Collection[str] = ()) -> dict[str, Path]:
        """Return the stored names of all tensors, each with its file. read: names that weights have."""
        return {stored.name: stored.path for stored in self._stored.values()}

    def has_scales(self, name: str) -> bool:
        """Check if a weight is stored in FP8."""
        return self.has(f"{name}_scale_inv")

    def read_float8(self, source: Source, unit: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return the stored slice of a source, float8_e4m3fn, and a float32 scale per (rows, columns) of unit. unit
        divides the blocks and the offsets of the slice in them. Raises ModelError."""
        shape, take = source.stored()
        part = self._weight(source.name, shape)[take]
        scales = self._scales(source.name, shape, take, unit[1])
        return source.restore(part), source.restore(scales)[..., :: unit[0], :]

    def _scales(self, name: str, shape: Shape, take: Slices, columns: int = 1) -> Tensor:
        """Return a scale for each row and each `columns` columns of a slice."""
        if self._block is None:
            raise ModelError(f"{name} is stored in FP8, but config.json has no weight_block_size")
        if len(shape) < 2:
            raise ModelError(f"{name} is stored in FP8, but only blocks of a matrix can have scales")
        blocks = tuple(-(-size // block) for size, block in zip(shape[-2:], self._block, strict=True))
        units = tuple(
            slice(t.start // block, -(-t.stop // block)) for t, block in zip(take[-2:], self._block, strict=True)
        )
        stored = self._slice(f"{name}_scale_inv", (*shape[:-2], *blocks), (*FLOATS, torch.float8_e8m0fnu))
        scales: Tensor = stored[(*take[:-2], *units)].float()
        for dim, block, unit in zip((-2, -1), self._block, (1, columns), strict=True):
            at = torch.arange(take[dim].start, take[dim].stop, unit)
            scales = scales.index_select(dim, at // block - take[dim].start // block)
        return scales

    def _four_bits(self, name: str, shape: Shape, take: Slices) -> Tensor:
        groups = -(-shape[-1] // MXFP4_BLOCK)
        first, last = take[-1].start // MXFP4_BLOCK, -(-take[-1].stop // MXFP4_BLOCK)
        whole = (*take[:-1], slice(first, last))
        stored = (*shape[:-1], groups, MXFP4_BLOCK // 2)
        packed = self._slice(f"{name}_blocks", stored, (torch.uint8,))[(*whole, slice(0, MXFP4_BLOCK // 2))]
        scales = self._slice(f"{name}_scales", (*shape[:-1], groups), (torch.uint8,))[whole]
        values = torch.tensor((*MXFP4_VALUES, *(-v for v in MXFP4_VALUES)))
        pairs = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
        part = torch.ldexp(values[pairs.long()], scales.int()[..., None] - 127).flatten(-2)
        return part.narrow(-1, take[-1].start - first * MXFP4_BLOCK, take[-1].stop - take[-1].start)

    def _weight(self, name: str, shape: Shape) -> Any:
        part = self._slice(name, shape, (*FLOATS, torch.float8_e4m3fn))
        if self.has_scales(name) and (kind := part.get_dtype()) != DTYPES[torch.float8_e4m3fn]:
            raise ModelError(f"{name} has scales, but is stored in {kind}, not {DTYPES[torch.float8_e4m3fn]}")
        return part

    def _slice(self, name: str, shape: Shape, dtypes: Sequence[torch.dtype]) -> Any:
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


def open_checkpoint(model: Path, storage: Storage) -> Checkpoint | GgufFile:
    """Open the tensors of a directory or a GGUF file. Raises ModelError."""
    if is_gguf(model):
        from weft.engine.models.weights.gguf_file import GgufFile  # the package is an optional dependency

        return GgufFile(model)
    return Checkpoint(model, storage.float8_block, storage.mxfp4)


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
        raise ModelError(f"{model_dir} has no model.safetensors; Weft reads safetensors checkpoints only")
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise ModelError(f"{index} is not a weight index: weight_map is not an object from tensors to files")
    for file in sorted(set(named.values())):
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise ModelError(f"{index} is not a weight index: {file!r} is outside of the model's directory")
        if not os.path.isfile(model_dir / file):
            raise ModelError(f"{model_dir / file} is missing; is the download complete?")
    return [model_dir / file for file in sorted(set(named.values()))]
