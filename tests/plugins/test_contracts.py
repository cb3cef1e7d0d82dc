"""Contracts of the plug-ins hold in the wheels of vLLM and SGLang, as in contracts/ (`make plugin-contracts`)."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plugins import contracts, vllm_events
from plugins.contracts import ENGINES, NEEDS, Need, extract, numbers, problems, stored, versions

KNOWN = [(engine, version) for engine in ENGINES for version in versions(engine)]
NEWEST = [(engine, versions(engine)[-1]) for engine in ENGINES]


def found_in(engine: str, version: str) -> dict[str, dict[str, Any]]:
    return json.loads(stored(engine, version).read_text())


@pytest.mark.parametrize(("engine", "version"), KNOWN)
def test_the_plugin_fits_the_version(engine: str, version: str) -> None:
    assert problems(NEEDS[engine], found_in(engine, version), version) == []


def test_no_other_versions_are_stored() -> None:
    assert {path.stem for path in stored("", "").parent.glob("*.json")} == {f"{e}-{v}" for e, v in KNOWN}


@pytest.mark.parametrize("engine", ENGINES)
def test_the_stand_in_has_what_tests_call(engine: str) -> None:
    """Signatures of the stand-in's functions equal the newest version's."""
    version = versions(engine)[-1]
    root, real = Path(__file__).parent / "engines", found_in(engine, version)
    stand_in = extract(root, NEEDS[engine])
    assert len(stand_in) >= 20
    for name, it in stand_in.items():
        if "parameters" in it and not name.endswith("__init__"):
            assert it["parameters"] == real[name]["parameters"], name


@pytest.mark.parametrize("version", versions("vllm"))
def test_vllms_decoder_reads_kv_events(version: str) -> None:
    """Events decode by the fields that each version has; `make plugin-contracts` runs vLLM's own source."""
    found = found_in("vllm", version)
    assert vllm_events.problems(vllm_events.load(vllm_events.source_of(found))) == []
    name = f"{contracts.KV_EVENTS}:BlockStored"
    for changed, problem in (
        (["key: int", *found[name]["fields"]], "missing required field `key`"),
        ([each for each in found[name]["fields"] if "group_idx" not in each], "BlockStored.group_idx is read as None"),
        ([each.replace("token_ids", "tokens") for each in found[name]["fields"]], "missing required field `tokens`"),
    ):
        source = vllm_events.source_of({**found, name: {**found[name], "fields": changed}})
        assert problem in str(vllm_events.problems(vllm_events.load(source)))


def altered(it: dict[str, Any], each: Need) -> Iterator[dict[str, Any]]:
    """A symbol with one thing changed that the plug-in uses: each parameter, name, base and value."""
    taken = len(it["parameters"]) if each.same_as else len(each.takes)
    for place in range(taken):
        yield {**it, "parameters": [*it["parameters"][:place], "other", *it["parameters"][place + 1 :]]}
    if each.same_as:
        yield {**it, "parameters": [*it["parameters"], "other"]}
    for name in each.mentions:
        yield {**it, "mentions": [other for other in it["mentions"] if other != name]}
    if each.bases:
        yield {**it, "bases": []}
    if each.value:
        yield {**it, "value": "'other'"}


@pytest.mark.parametrize(("engine", "version"), NEWEST)
def test_what_is_missing_or_altered_is_reported(engine: str, version: str) -> None:
    found = found_in(engine, version)
    for each in NEEDS[engine]:
        assert problems([each], {key: it for key, it in found.items() if key not in each.names}, version), each
        for name in (name for name in each.names if name in found):
            for change in altered(found[name], each):
                assert problems([each], {**found, name: change}, version), (name, change)


def test_a_signature_that_changes_in_the_source_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "vllm/distributed/device_communicators/cuda_communicator.py"
    file.parent.mkdir(parents=True)
    needs = [each for each in NEEDS["vllm"] if f"{contracts.CUDA}.all_gatherv" in each.names]
    assert len(needs) == 1
    for signature, fits in (
        ("self, input_, dim=0, sizes=None", True),
        ("self, input_: Tensor, dim: int = 0, sizes: list[int] | None = None", True),
        ("self, input_, dim=0", True),  # the plug-in's may have more with defaults
        ("self, input_, dim=-1, sizes=None", False),
        ("self, input_, sizes=None, dim=0", False),
        ("self, input_, dim=0, sizes=None, output=None", False),
        ("self, input_, dim=0, *, sizes=None", False),
    ):
        file.write_text(f"class CudaCommunicator:\n    def all_gatherv({signature}):\n        pass\n")
        assert (problems(needs, extract(tmp_path, needs), "0.33.0") == []) is fits, signature


def test_what_is_replaced_is_in_the_contract() -> None:
    """Every target of a hook of weft-sglang, and every method that weft-vllm overrides."""

    def needed(engine: str) -> set[str]:
        return {name.split(":")[1].split(".")[-1] for each in NEEDS[engine] for name in each.names}

    table = definition("weft-sglang/src/weft_sglang/hooks.py", "hooks")
    keys = [key for each in ast.walk(table) if isinstance(each, ast.Dict) for key in each.keys if key is not None]
    targets = {ast.unparse(key).strip("'f").split(".")[-1] for key in keys}
    assert len(targets) >= 14 and targets <= needed("sglang")
    methods = definition("weft-vllm/src/weft_vllm/collectives.py", "WeftCollectives")
    assert isinstance(methods, ast.ClassDef)
    names = {each.name for each in methods.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")}
    own = {"takes", "all_reduce_add_rms_norm"}
    assert names > own and names - own <= needed("vllm")


def definition(file: str, symbol: str) -> ast.AST:
    found = contracts.lookup(ast.parse((contracts.PLUGINS / file).read_text()), symbol)
    assert found is not None
    return found


def test_versions_are_in_order() -> None:
    for engine in ENGINES:
        assert list(versions(engine)) == sorted(versions(engine), key=numbers)
