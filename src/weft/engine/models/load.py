"""Weights: each rank reads its own slices of a checkpoint, or generates them, directly into its parameters."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weft.engine.models.config_json.fields import ModelError, first_line
from weft.engine.models.layers.attention import WholeNorms
from weft.engine.models.layers.basic import Builder, Head, Layer, NormLayer, Workspace, torch_empty
from weft.engine.models.layers.draft_head import DraftModel, Eagle3Head
from weft.engine.models.layers.model_config import LanguageModel, ModelConfig
from weft.engine.models.registry import plugin_line
from weft.engine.models.weights.checkpoint import Checkpoint, open_checkpoint
from weft.engine.models.weights.source import Source
from weft.engine.models.weights.weight_format import WeightFormat
from weft.engine.models.weights.weight_formats import PLAIN
from weft.planner.spec import LayoutError, Mesh, PlacementError

if TYPE_CHECKING:
    from weft.engine.models.weights.gguf_file import GgufFile  # the package is an optional dependency

Progress = Callable[[int, int], None]
NORMS = (NormLayer, WholeNorms)
"""Layers with dummy weights of 1."""
DUMMY_BLOCK, DUMMY_BLOCK_CPU = 1 << 24, 1 << 16
"""Elements that `dummy_model` generates at a time. On CPUs, temporaries of 20 bytes per element must fit a cache."""


def build_model(
    config: ModelConfig,
    mesh: Mesh,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    workspace: Workspace = torch_empty,
    shape_only: bool = False,
    stored: Checkpoint | GgufFile | None = None,
) -> LanguageModel:
    """Build the model of one rank with unfilled weights.

    Args:
        workspace: makes the tensors that the ranks will sum.
        shape_only: as of `Builder`.
        stored: checkpoint that has the weights to keep in the storage format; None: as in config.json.

    Raises LayoutError if heads, experts or features are fewer than the ranks, ModelError for impossible sizes.
    """
    queries = mesh.dcp if config.replicate_queries else 1

    def format_of(name: str) -> WeightFormat | None:
        return config.storage if config.float8 and config.storage.keeps(name, stored) else None

    try:
        units = config.storage if config.float8 else WeightFormat
        of_model = (config.experts, format_of, units.share_unit, units.whole_unit)
        model = config.build(Builder(mesh, rank, dtype, device, workspace, queries, shape_only, *of_model))
    except (LayoutError, PlacementError, ModelError):
        raise
    except Exception as error:  # sizes that torch rejects, or a plugin's mistake
        plugin = plugin_line(error, type(config))
        what = f"{plugin} builds no model" if plugin else "no model can be built"
        raise ModelError(f"{what} from config.json: {type(error).__name__}: {first_line(error)}") from error
    if config.draft_model is not None:
        draft = build_model(config.draft_model, mesh, rank, dtype, device, workspace, shape_only)
        return with_draft_model(model, config, draft)
    return model


def model_shape(
    config: ModelConfig, mesh: Mesh, dtype: torch.dtype, rank: int = 0, workspace: Workspace = torch_empty
) -> LanguageModel:
    """Build the model of one rank without memory, for its sizes and caches, or for a pass over zero rows. Args and
    errors: see `build_model`.

    It is on the CPU, since the `meta` device runs many operations in Python, with imports of seconds.
    """
    return build_model(config, mesh, rank, dtype, torch.device("cpu"), workspace, shape_only=True)


def with_draft_model(model: LanguageModel, config: ModelConfig, draft: LanguageModel) -> LanguageModel:
    """Return a model of `config` with its draft model or draft head, both loaded or both not."""
    model.config = config
    model.draft = draft.of(model) if isinstance(draft, Eagle3Head) else DraftModel(draft)
    return model


def load_model(
    model_dir: Path,
    config: ModelConfig,
    mesh: Mesh,
    rank: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    workspace: Workspace = torch_empty,
) -> LanguageModel:
    """Load the model of one rank, without a draft model. progress(done, total) counts tensors. workspace: see
    `build_model`. Raises LayoutError as `build_model`, and ModelError for tensors that are missing, misshapen, not
    floats, or not read by any weight."""
    config = replace(config, draft_model=None)
    with open_checkpoint(model_dir, config.storage) as checkpoint:
        if rank == 0:
            check_tensors(checkpoint, config)
        model = build_model(config, mesh, rank, dtype, torch.device(device), workspace, stored=checkpoint)
        for layer, name, source in _jobs(model, progress):
            if name in layer.kept and isinstance(checkpoint, Checkpoint):
                config.storage.load(layer.kept[name], checkpoint, source)
            else:
                layer.get_parameter(name).data[source.at].copy_(checkpoint.read(source))
        if isinstance(model, Eagle3Head) and isinstance(checkpoint, Checkpoint):
            model.read_others(checkpoint)
        # Use a head in the checkpoint even if config.json says that it is tied, like transformers: fine-tuning may have
        # changed it alone.
        for head in model.modules():
            if isinstance(head, Head) and head.tied and checkpoint.has(head.source.name):
                head.untie(checkpoint.read(head.source))
    return model


def check_tensors(checkpoint: Checkpoint | GgufFile, config: ModelConfig) -> None:
    """Raise ModelError for a tensor that no weight of the whole model reads, unless it is a known spare: frequencies of
    rotary embeddings, draft layers after the last one, and `config.spares`."""
    whole = model_shape(replace(config, float8=False), Mesh(), torch.float32)
    read = {source.name for _, _, source in _jobs(whole)}
    read |= {layer.source.name for layer in whole.modules() if isinstance(layer, Head)}
    read |= {name + end for name in list(read) for end in (*PLAIN.ends, *config.storage.ends)}
    layer = re.compile(rf"{re.escape(config.prefix)}\.layers\.(\d+)\.")
    for stored, path in checkpoint.names(read).items():
        for name in (stored, f"model.{stored}"):
            found = layer.match(name)
            spare = found is not None and int(found[1]) >= config.num_layers
            if name in read or spare or name.startswith(config.spares) or name.endswith(".rotary_emb.inv_freq"):
                break
        else:
            raise ModelError(
                f"{path} has a tensor {stored} that a model of config.json does not read; it may change what the model "
                "computes: remove it if it does not"
            )


def dummy_model(
    config: ModelConfig,
    mesh: Mesh,
    rank: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    workspace: Workspace = torch_empty,
) -> LanguageModel:
    """Build the model of one rank with dummy weights, to measure a shape without its checkpoint.

    A value is a hash of the tensor's name and the index in it. So all layouts, ranks and devices have parts of the same
    model, and each rank generates only its part. Matrices are uniform with a standard deviation of 1 / √inputs, rounded
    if they stay in the storage format; other vectors are within ± 0.1; the weights of norms are 1. Args and errors: see
    `load_model`.
    """
    config = replace(config, draft_model=None)
    model = build_model(config, mesh, rank, dtype, torch.device(device), workspace)
    for layer, name, source in _jobs(model, progress):
        part = layer.get_parameter(name).data[source.at]
        if isinstance(layer, NORMS):
            part.fill_(1.0)
        elif name in layer.kept:
            config.storage.make_up(layer.kept[name], source, _bound(source), _fill_dummy)
        else:
            _fill_dummy(part, source)
    return model


@dataclass(frozen=True)
class DummyTensor:
    """Whole tensor of a checkpoint with the values of `dummy_model`."""

    source: Source
    ones: bool

    def make(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return its values, of `source.shape`."""
        whole = torch.ones(self.source.shape, dtype=dtype, device=device)
        if not self.ones:
            _fill_dummy(whole, self.source)
        return whole


def dummy_checkpoint(config: ModelConfig) -> list[DummyTensor]:
    """Return the tensors of a checkpoint with the weights of `dummy_model`. Raises ModelError for a family that stores
    tensors in another form than it uses, or keeps them in a format."""
    tensors = {}
    for layer, name, source in _jobs(model_shape(config, Mesh(), torch.float32)):
        if source.views or name in layer.kept:
            raise ModelError(f"no checkpoint is written of {source.name}: it is not stored as it is used")
        tensors[source.name] = DummyTensor(replace(source, take=()), isinstance(layer, NORMS))
    return list(tensors.values())


def describe_products(config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> str:
    """Return one line about the ranks' products in the storage format, and their bytes; empty if there are none."""
    if not (config.float8 and config.storage.has_products):
        return ""
    names, size = dict[str, None](), 0
    for layer in model_shape(config, mesh, dtype).modules():
        for weight in layer.kept if isinstance(layer, Layer) else ():
            assert isinstance(layer, Layer)
            size += layer.get_parameter(weight).numel()
            names |= {s.name.removesuffix(".weight").rpartition(".")[2]: None for s in layer.sources[weight]}
    if not names:
        return ""
    kept = f"{config.storage.name}: {', '.join(names)} ({size / 1e9:.2f} GB a rank)"
    return f"products in {kept}; other weights are dequantised"


def _jobs(model: Layer, progress: Progress | None = None) -> Iterator[tuple[Layer, str, Source]]:
    """Yield all weights, by name, with each of their sources. progress: called after each."""
    layers = [layer for layer in model.modules() if isinstance(layer, Layer)]
    jobs = [(layer, name, source) for layer in layers for name, of in layer.sources.items() for source in of]
    for done, job in enumerate(jobs, 1):
        yield job
        if progress:
            progress(done, len(jobs))


def _bound(source: Source) -> float:
    """Return the maximum magnitude of a dummy tensor."""
    return float((3 / source.shape[-1]) ** 0.5) if len(source.shape) > 1 else 0.1


def _fill_dummy(part: torch.Tensor, source: Source, bound: float | None = None) -> None:
    """Fill a slice of a tensor with hashes of the whole tensor's indices. bound: maximum magnitude; None: `_bound`."""
    width = source.shape[-1]
    bound = _bound(source) if bound is None else bound
    name = f"{source.name}{source.views or ''}".encode()
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)
    starts = [take.start for take in source.used]
    columns = torch.arange(part.shape[-1], device=part.device) + starts[-1]
    row = torch.zeros(1, dtype=torch.int64, device=part.device)  # index of each row in the whole tensor
    for start, size, whole in zip(starts[:-1], part.shape[:-1], source.shape[:-1], strict=True):
        row = (row[:, None] * whole + torch.arange(start, start + size, device=part.device)).flatten()
    blocks = (part,) if part.is_contiguous() else part.unbind(0)  # rows of several experts are not evenly spaced
    step = max(1, (DUMMY_BLOCK_CPU if part.device.type == "cpu" else DUMMY_BLOCK) // part.shape[-1])
    for numbers, block in zip(row.view(len(blocks), -1), blocks, strict=True):
        for rows, out in zip(numbers.split(step), block.view(-1, part.shape[-1]).split(step), strict=True):
            # Two rounds of multiply and shift (as in SplitMix64) in wrapping integers: the same bits on all devices.
            value = rows[:, None] * width + columns
            value.add_(seed).mul_(-0x61C8864680B583EB).bitwise_xor_(value >> 29).mul_(-0x40A7B892E31B1A47)
            out.copy_((value >> 40).float().mul_(bound / (1 << 23)))
