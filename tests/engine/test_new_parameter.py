"""A sampling parameter that shapes the distribution is an edit of four files, here in a copy of the sources.

Three are what a CPU runs: the table of parameters, torch's sampling and the API's field. The fourth is the kernel of
GPUs, `engine/kernels/triton/sample.py`, which is given the rows' values by the parameter's name.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support import run_with_changes

from engine.test_engine import config, prompts
from weft.engine.controller.engine import Engine
from weft.engine.kv.cache_spec import Rule
from weft.engine.messages.rank_messages import GroupRows, Join, Sampling
from weft.engine.messages.request import SamplingParams
from weft.engine.output.text_processor import TextProcessor
from weft.engine.output.tokenizer_files import read_tokenizer
from weft.engine.worker.device_rows import DeviceRows
from weft.engine.worker.row_table import RowTable
from weft.serve.chat.protocol import SamplingFields

TILT = {
    "engine/messages/rank_messages.py": {
        "    min_p: float = 0.0\n": "    min_p: float = 0.0\n    tilt: float = 0.0\n",
        '    "min_p": (': '    "tilt": ("0 or more", lambda value: value >= 0),\n    "min_p": (',
    },
    "engine/worker/sampler.py": {
        "    threshold = scaled.amax": "    tilt = torch.tensor([[h.tilt] for h in chosen])\n"
        "    scaled = scaled - tilt * torch.arange(logits.shape[-1])\n"
        "    threshold = scaled.amax",
    },
    "serve/chat/protocol.py": {
        "    min_p: float | None = None\n": "    min_p: float | None = None\n    tilt: float | None = None\n"
    },
}
"""Edits by file, old text and new text: a token's logit falls by `tilt` for each token with a lower number."""
FREE = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)


def asked(model: Path, **fields: float) -> SamplingParams:
    """Return the API's sampling parameters for a request's fields."""
    text_processor = TextProcessor(read_tokenizer(model), model, 257, ())
    return SamplingFields(**fields).sampling(text_processor, max_tokens=6)


def use_tilt(model: Path) -> None:
    """Check the edited sources: the parameter reaches ranks, also with a share of the vocabulary, and the device."""
    steep = asked(model, temperature=1.0, seed=3, ignore_eos=True, tilt=1e6)
    for layout in ({}, dict(attn_tp=2, ep=2, split_vocabulary="on")):
        with Engine(config(model, **layout)) as engine:
            assert [r.token_ids for r in engine.generate(prompts(2), steep)] == [(0,) * 6] * 2
            print([r.token_ids for r in engine.generate(prompts(2), FREE)])
    table = RowTable(3, [Rule()], 4, torch.device("cpu"))
    rows, join = DeviceRows(table, 2), Join(1, 1, 5, ((0,),), Sampling(tilt=0.5, min_p=0.25, seed=7))
    table.apply(GroupRows(joins=(join,)))
    rows.apply(GroupRows(joins=(join,)))
    assert table.shaped == {1} and rows.parameters["tilt"].tolist() == [0, 0.5, 0] and rows.seed.tolist() == [0, 7, 0]
    assert rows.parameters["min_p"].tolist() == [0, 0.25, 0]
    (model / "generation_config.json").write_text('{"tilt": 0.5}')
    assert asked(model).tilt == 0.5
    with pytest.raises(ValueError, match=r"tilt is -1\.0; it must be 0 or more"):
        SamplingParams(tilt=-1.0)


@pytest.mark.nightly
def test_a_parameter_is_an_edit_of_four_files(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    code = f"from engine import test_new_parameter as t; t.use_tilt(t.Path({str(tmp_path / 'model')!r}))"
    printed = run_with_changes(tmp_path, TILT, code)
    with Engine(config(model_dir)) as engine:
        assert printed.splitlines() == [str([r.token_ids for r in engine.generate(prompts(2), FREE)])] * 2
