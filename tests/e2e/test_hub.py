"""Models by their names on the hub: only needed files come, once, and each failure is a line."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from e2e.here import weft_here
from e2e.hub_endpoint import COMMIT, Hub, serving
from engine.conftest import byte_model

URL = "/{repo_id}/resolve/{revision}/{filename}"
TEXT = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
SPLIT_FILES = {"model-a.safetensors", "model.safetensors.index.json"}


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders with a byte model, with a repository's extra files, and with its weights behind an index."""
    whole = byte_model(tmp_path_factory.mktemp("hub") / "tiny")
    others = ("README.md", "modeling_x.py", "pytorch_model.bin", "consolidated.safetensors", "tiny.gguf")
    for other in (*others, "original/model.safetensors", "onnx/config.json"):
        (whole / other).parent.mkdir(exist_ok=True)
        (whole / other).write_bytes(b"none of these is needed")
    split = whole.with_name("split")
    shutil.copytree(whole, split)
    names = dict.fromkeys(["any.weight"], "model-a.safetensors")
    (split / "model.safetensors").rename(split / "model-a.safetensors")
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    bare = whole.with_name("bare")
    bare.mkdir()
    (bare / "x.gguf").write_bytes(b"GGUF")
    return {"org/tiny": whole, "org/split": split, "org/bare": bare, "org/gated": whole}


@pytest.fixture
def hub(repositories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An endpoint that this process uses as the hub, and an empty cache."""
    with serving(Hub(repositories, gated={"org/gated"})) as found:
        at = dict(ENDPOINT=found.address, HUGGINGFACE_CO_URL_TEMPLATE=found.address + URL, HF_HUB_DISABLE_XET=True)
        for name, value in (at | dict(HF_HUB_CACHE=str(tmp_path / "cache"))).items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.chdir(tmp_path)
        yield found


def test_a_model_is_named_as_on_the_hub(hub: Hub) -> None:
    generate = ["generate", "org/tiny", "--prompt", "ab", "--max-tokens", "4", "--json", "--executor", "thread"]
    code, out, err = weft_here(*generate)
    assert code == 0, err
    assert len(json.loads(out)["token_ids"]) == 4
    assert sorted(hub.fetched) == sorted({*TEXT, "model.safetensors"})


def test_a_plan_needs_the_config_alone(hub: Hub) -> None:
    code, out, err = weft_here("plan", "org/split", "--tokens", "1", "--revision", COMMIT)
    assert code == 0 and "collectives" in out, err
    assert hub.fetched == ["config.json"]


SNAPSHOT = """
import sys
from weft.engine.models.weights.hub import snapshot
print(snapshot(sys.argv[1], None))
assert "torch" not in sys.modules
"""


def test_the_environment_of_huggingface_hub_holds(hub: Hub, tmp_path: Path) -> None:
    """Its endpoint, its home and its offline switch: what the cache has needs no network, what it lacks is a line."""

    def ask(name: str, **more: str) -> subprocess.CompletedProcess[str]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        environ |= {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"} | more
        command = [sys.executable, "-c", SNAPSHOT, name]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)

    first = ask("org/split")
    assert first.returncode == 0, first.stderr
    directory = Path(first.stdout.strip())
    assert directory.is_relative_to(tmp_path / "home") and directory.name == COMMIT
    assert SPLIT_FILES < {path.name for path in directory.iterdir()} <= TEXT | SPLIT_FILES
    hub.fetched.clear()
    again = ask("org/split", HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    missing = ask("org/tiny", HF_HUB_OFFLINE="1")
    assert "org/tiny, revision main, is not whole in" in missing.stderr and "HF_HUB_OFFLINE is set" in missing.stderr
    assert not hub.fetched


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["serve", "org/none"], "there is no directory org/none, and no such model on {hub}; if it is private, log in"),
        (["serve", "org/gated"], "org/gated is gated: ask for access on {hub}/org/gated, then log in with `hf auth"),
        (["plan", "org/tiny", "--revision", "v9"], "org/tiny on {hub} has no revision 'v9'; give a branch, a tag or a"),
        (["plan", "org/bare"], "org/bare on the hub has no config.json; for a GGUF file of it, run `hf"),
        (["plan", "or--g/..x"], "there is no directory or--g/..x, and it cannot be the name of a model on the hub"),
        (["plan", "--revision", "main"], "--revision main requires a model on the hub, ORG/NAME"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_each_failure_is_a_line(hub: Hub, arguments: list[str], message: str) -> None:
    code, _, err = weft_here(*arguments)
    lines = [line for line in err.replace("\r", "\n").splitlines() if line.startswith("weft: ")]
    assert code == 2 and len(lines) == 1, err
    assert message.format(hub=hub.address) in lines[0]


def test_a_hub_that_fails_is_a_line(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.status = 500
    code, _, err = weft_here("plan", "org/tiny")
    assert code == 2 and f"{hub.address} gives status 500" in err and err.count("\n") == 1, err
    hub.status = None
    (tmp_path / "cache").write_text("a file where a folder should be")
    code, _, err = weft_here("plan", "org/tiny")
    assert code == 2 and "name another folder with HF_HOME" in err.splitlines()[-1], err


def test_a_signal_ends_a_download(hub: Hub) -> None:
    """Threads that wait for the hub do not hold the end up, and `serve` leaves with 0."""
    hub.stuck = "model.safetensors"

    def leave() -> None:
        if hub.asked.wait(60):
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=leave)
    thread.start()
    code, _, err = weft_here("serve", "org/tiny", "--port", "0")
    thread.join()
    assert hub.asked.is_set() and code == 0, err
    assert not multiprocessing.active_children()
