"""Draft layers with random weights for small checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from weft.engine.models.layers.basic import Layer
from weft.engine.models.load import NORMS, build_model
from weft.engine.models.registry import load_config
from weft.planner.spec import Mesh


def add_draft_layer(directory: Path, seed: int = 1) -> Path:
    """Add a draft layer to the checkpoint of a directory, of small weights, so that it follows the model's rows."""
    path = directory / "config.json"
    values = json.loads(path.read_text())
    named = "num_nextn_predict_layers" if "first_k_dense_replace" in values else "mtp_num_hidden_layers"
    path.write_text(json.dumps(values | {named: 1}))
    config = replace(load_config(directory), drafts=True)
    model = build_model(config, Mesh(), 0, torch.float32, torch.device("meta"))
    assert model.draft is not None
    generator, tensors = torch.Generator().manual_seed(seed), load_file(directory / "model.safetensors")
    for layer in model.draft.modules():
        for sources in layer.sources.values() if isinstance(layer, Layer) else ():
            for source in sources:
                random = torch.randn(source.shape, generator=generator)
                tensors[source.name] = 1 + random / 10 if isinstance(layer, NORMS) else random / source.shape[-1] ** 0.5
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory
