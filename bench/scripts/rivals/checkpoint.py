"""Write a checkpoint with made-up weights, in Hugging Face's layout, for engines to compare.

Its weights are as with `weft serve --load-format dummy`, or with --quick torch's random numbers, which a CPU makes much
faster. Experts are chosen by weights, so engines that serve the same checkpoint route alike. Its tokenizer has a token
for every number of the vocabulary. A GPU makes the tensors, if there is one, and several files are written at once.

    python bench/scripts/rivals/checkpoint.py /dev/shm/model --preset qwen3-30b-a3b --num-layers 24
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from weft.engine.assets import preset_dir
from weft.engine.models.load import DummyTensor, dummy_checkpoint
from weft.engine.models.registry import FAMILIES, load_config

DTYPE = torch.bfloat16
FILE_BYTES = 1 << 30
"""Minimum bytes of a file's tensors."""
THREADS = 8


def write_checkpoint(
    folder: Path, source: Path, num_layers: int | None = None, quick: bool = False, drafts: bool = False
) -> int:
    """Write the model of source's config.json. Return the bytes of weights.

    Args:
        folder: new folder of the checkpoint.
        source: folder of the config.json.
        num_layers: number of its first layers; None: all.
        quick: make weights by torch's random numbers.
        drafts: with the draft layer.

    Raises ModelError for a model that cannot be written, OSError if the folder has too little space.
    """
    config = load_config(source, FAMILIES, num_layers)
    tensors = dummy_checkpoint(replace(config, drafts=True) if drafts else config)
    total = sum(map(_bytes, tensors))
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < total:
        raise OSError(f"{folder} has {free >> 30} GiB free, the weights take {-(-total >> 30)}: lower --num-layers")
    fields = json.loads((source / "config.json").read_text())
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    _write_tokenizer(folder, fields["vocab_size"])
    files = _files(tensors)
    names = [f"model-{number + 1:05}-of-{len(files):05}.safetensors" for number in range(len(files))]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(partial(_write, quick), [folder / name for name in names], files))
    places = {tensor.source.name: name for name, file in zip(names, files, strict=True) for tensor in file}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _bytes(tensor: DummyTensor) -> int:
    return torch.Size(tensor.source.shape).numel() * DTYPE.itemsize


def _files(tensors: Sequence[DummyTensor]) -> list[list[DummyTensor]]:
    files: list[list[DummyTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if size >= FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += _bytes(tensor)
    return files


def _write(quick: bool, path: Path, tensors: Sequence[DummyTensor]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    make = _random if quick else lambda tensor: tensor.make(DTYPE, device).cpu()
    made = {tensor.source.name: make(tensor) for tensor in tensors}
    save_file(made, path, metadata={"format": "pt"})


def _random(tensor: DummyTensor) -> torch.Tensor:
    if tensor.ones or len(tensor.source.shape) < 2:
        return tensor.make(DTYPE, torch.device("cpu"))
    bound = (3 / tensor.source.shape[-1]) ** 0.5
    return torch.empty(tensor.source.shape, dtype=DTYPE).uniform_(-bound, bound)


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer: the bytes, as in every byte-level tokenizer, then a word for each further number."""
    tokens = {text: number for number, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokens |= {f"Ġ{number}": number for number in range(len(tokens), vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write; a tmpfs such as /dev/shm/model is quickest")
    parser.add_argument("--preset", default="qwen3-30b-a3b", help="shape of the model, or a folder with a config.json")
    parser.add_argument("--num-layers", type=int, help="number of layers; defaults to all")
    parser.add_argument("--quick", action="store_true", help="make other weights, faster on a CPU")
    parser.add_argument("--drafts", action="store_true", help="write the draft layer too, for speculation.py")
    args = parser.parse_args()
    began = time.perf_counter()
    source = folder if (folder := Path(args.preset)).is_dir() else preset_dir(args.preset)
    total = write_checkpoint(args.folder, source, args.num_layers, args.quick, args.drafts)
    print(f"{total / 1e9:.1f} GB in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
