"""Settings that can never serve are refused in one line, before any rank is started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.test_engine import config
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.controller.rank_executors import ProcessExecutor, ThreadExecutor
from weft.engine.controller.startup import check_plans, read_model
from weft.engine.models.config_json.fields import ModelError
from weft.engine.output.tokenizer_files import load_tokenizer
from weft.planner.spec import LayoutError


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(executor: Any, progress: Any) -> None:
        raise AssertionError("ranks were to be started")

    for kind in (ProcessExecutor, ThreadExecutor):
        monkeypatch.setattr(kind, "start", start)
    monkeypatch.setattr(ProcessExecutor, "prepare", lambda executor: None)


@pytest.fixture
def changed(model_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    def change(file: str, **values: Any) -> Path:
        directory = tmp_path / "model"
        shutil.copytree(model_dir, directory)
        path = directory / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return directory

    return change


def refused(kind: type[Exception], text: str, **changes: Any) -> None:
    with pytest.raises(kind, match=text) as error:
        Engine(config(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_model_or_layout_that_cannot_be(model_dir: Path, tmp_path: Path, executor: str) -> None:
    refused(ModelError, r"no config\.json", model_dir=tmp_path, executor=executor)
    refused(LayoutError, "8 are too few for (attn_tp|ep)=16", model_dir=model_dir, executor=executor, attn_tp=16, ep=16)
    both = dict(moe_exchange="dispatch", plan="naive", attn_dp=2, ep=2)
    refused(
        LayoutError, "the naive plan uses all-reduces, by which exp", model_dir=model_dir, executor=executor, **both
    )
    with pytest.raises(LayoutError, match="must be the number of ranks"):
        config(model_dir, attn_tp=2, ep=3)


@pytest.mark.parametrize("name, value", [("transport", "ib"), ("split_vocabulary", True), ("plan", "best")])
def test_a_word_that_an_option_does_not_know(name: str, value: Any) -> None:
    """It would be taken for another: the engine compares with the words that it knows."""
    with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be one of [a-z]+, "):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(
    "values",
    [
        dict(hidden_size="wide"),
        dict(num_attention_heads=0),
        dict(rope_parameters=7),
        dict(hidden_size=-64),
        dict(vocab_size=2**70),
        dict(num_hidden_layers=None),
    ],
)
def test_a_config_that_makes_no_sense(changed: Callable[..., Path], values: dict[str, Any]) -> None:
    refused(ModelError, r"config\.json", model_dir=changed("config.json", **values))


def test_weights_that_are_not_there(changed: Callable[..., Path]) -> None:
    """Folders have a config of their own, but no file of weights, or not every one."""
    model = changed("config.json")
    for path in model.glob("*.safetensors*"):
        path.unlink()
    refused(ModelError, r"has no model\.safetensors", model_dir=model)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one", "b": "two"}}))
    (model / "one").write_bytes(b"")
    refused(ModelError, "two is missing; is the download complete", model_dir=model)


def test_a_tokenizer_or_a_chat_template_that_cannot_be_read(changed: Callable[..., Path]) -> None:
    broken = changed("tokenizer_config.json", chat_template="hello\n{% for m in messages %}{{ m.content }")
    refused(ModelError, "the chat template of .*model, line 2, cannot be read", model_dir=broken)
    (broken / "tokenizer.json").write_text('{"model": 3}')
    refused(ModelError, "no usable tokenizer", model_dir=broken)


def test_a_chat_template_of_a_file(model_dir: Path, tmp_path: Path) -> None:
    """It takes the place of the model's own; one that cannot be read is refused by its name."""
    file = tmp_path / "chat.jinja"
    refused(ModelError, "--chat-template .*chat.jinja .*: .*No such file", model_dir=model_dir, chat_template=file)
    file.write_bytes(b"\xff")
    refused(ModelError, "--chat-template .*chat.jinja cannot be read", model_dir=model_dir, chat_template=file)
    file.write_text("hello\n{% for m in messages %}{{ m.content }")
    refused(ModelError, "template of .*chat.jinja, line 2, cannot be read", model_dir=model_dir, chat_template=file)
    file.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    given = config(model_dir, chat_template=file)
    tokenizer = load_tokenizer(given)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<hi>"
    assert EngineConfig.from_dict(json.loads(json.dumps(given.to_dict()))) == given, "ranks are started with it"


def test_no_tokenizer(changed: Callable[..., Path]) -> None:
    """Without tokenizer files transformers makes a Qwen model's tokenizer, which finds no token in any text."""
    model = changed("config.json")
    for path in model.glob("*token*"):
        path.unlink()
    refused(ModelError, "model has no usable tokenizer: .*; it needs the tokenizer.json", model_dir=model)


def test_a_template_that_only_refuses_a_message_is_no_fault(changed: Callable[..., Path]) -> None:
    picky = changed("tokenizer_config.json", chat_template="{{ raise_exception('a system message must come first') }}")
    with pytest.raises(AssertionError, match="ranks were to be started"):
        Engine(config(picky))


@pytest.mark.parametrize("length", [0, -5, 1])
def test_a_context_of_nothing(model_dir: Path, length: int) -> None:
    with pytest.raises(ValueError, match=f"max_model_len is {length}; it must be 2 or more"):
        config(model_dir, max_model_len=length)


def test_a_context_beyond_the_models(model_dir: Path) -> None:
    refused(ModelError, "max_model_len=257 is beyond the model's 256 positions", model_dir=model_dir, max_model_len=257)


def test_a_cost_table_without_an_edge_that_a_step_needs(model_dir: Path, tmp_path: Path) -> None:
    """No plan uses an edge that was not measured: `weft tune --ranks 2` omits the edges of two kinds of groups."""
    kinds = ["all_reduce", "reduce_scatterv", "all_gatherv", "all_to_allv"]

    def table(kinds: list[str]) -> str:
        rows = [
            {"world": 2, "kind": k, "ranks": 2, "bytes": size, "us": 5.0} for k in kinds for size in (1024, 1048576)
        ]
        path = tmp_path / "table.json"
        points = [[1024, 1.0], [1048576, 90.0]]
        both = {"shm": rows, "torchdist/gloo": rows}
        path.write_text(json.dumps({"local": points, "epilogue": points, "transports": both}))
        return str(path)

    layout = dict(model_dir=model_dir, executor="process", attn_dp=2, attn_tp=2, ep=2, moe_tp=2)
    refused(LayoutError, "all_gatherv on .* was not measured: run weft tune$", cost=table(kinds[:2]), **layout)
    with pytest.raises(AssertionError, match="ranks were to be started"):
        Engine(config(**layout, cost=table(kinds)))


@pytest.mark.parametrize("permute_us, settled", [(0.01, "auto"), (1e6, "gather")])
def test_experts_gather_unless_some_step_is_quicker_by_dispatch(
    model_dir: Path, tmp_path: Path, permute_us: float, settled: str
) -> None:
    """A shared expert is then not to be whole on every rank; what is asked for stays."""
    kinds = ("all_gatherv", "all_reduce", "reduce_scatterv", "all_to_allv")
    rows = [
        {"kind": kind, "ranks": 4, "world": 4, "bytes": 1, "us": permute_us if kind == "all_to_allv" else 100.0}
        for kind in kinds
    ]
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"transports": {"reference": rows}, "local": [[1, 0.01]], "epilogue": [[1, 0.01]]}))
    asked = config(model_dir, attn_dp=4, ep=4, cost=str(table))
    assert check_plans(asked, read_model(asked)).moe_exchange == settled
    for experts in ("gather", "dispatch"):
        forced = replace(asked, moe_exchange=experts)
        assert check_plans(forced, read_model(forced)) == forced


def test_the_model_is_the_first_option(tmp_path: Path) -> None:
    assert EngineConfig(tmp_path, attn_tp=2).model == tmp_path
