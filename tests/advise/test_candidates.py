"""Every layout that the advisor names starts and serves its load; every other one has its reason."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import small_model

from advise.capped import tree_bytes
from engine.conftest import byte_tokenizer
from weft.engine.advise.candidates import Candidate, ClientLoad, choose_ranks, find_candidates, layouts
from weft.engine.config.config import EngineConfig
from weft.engine.controller.engine import Engine
from weft.engine.messages.request import SamplingParams
from weft.engine.models.config_json.fields import ModelError
from weft.engine.worker import memory as ledger
from weft.planner.spec import LayoutError, Mesh

FAMILIES = {"qwen2_moe": {}, "llama": {}, "deepseek_v2": {}, "mistral": {}}
MIB = 1 << 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family, changes in FAMILIES.items():
        found[family] = tmp_path_factory.mktemp(family)
        small_model(family, 4, found[family], vocab_size=257, max_position_embeddings=256, **changes)
        byte_tokenizer(found[family])
    return found


def triples(seed: int, count: int) -> Iterator[tuple[str, int, ClientLoad]]:
    """Yield random models, bytes of memory and loads."""
    rng = random.Random(seed)
    for _ in range(count):
        load = ClientLoad(rng.randrange(1, 200), rng.randrange(1, 40), rng.randrange(1, 90), rng.choice([0.0, 0.5]))
        yield rng.choice(list(FAMILIES)), int(2 ** rng.uniform(-4, 6) * MIB), load


def check_starts(candidate: Candidate, load: ClientLoad, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with the printed options starts in its share of the memory, and gives two requests of the load."""
    share = memory // candidate.replicas
    monkeypatch.setattr(ledger, "os", SimpleNamespace(sysconf=lambda name: share if name == "SC_PHYS_PAGES" else 1))
    with Engine(replace(candidate.given, executor="thread")) as engine:
        params = SamplingParams(max_tokens=load.output_len, temperature=0.0, ignore_eos=True)
        results = engine.generate([[7] * load.input_len, [8] * load.input_len], params)
        assert all(len(result.token_ids) == load.output_len for result in results)
        assert engine.config.batch_sequences * candidate.config.attn_dp >= min(
            64, load.per_server(candidate.replicas).concurrency
        )


def check_triple(models: dict[str, Path], triple: tuple[str, int, ClientLoad], monkeypatch: pytest.MonkeyPatch) -> int:
    """Start a random layout of those that are named; return how many are."""
    family, memory, load = triple
    candidates, _ = find_candidates(EngineConfig(model=models[family], device="cpu"), 4, load, memory)
    for candidate in random.Random(memory).sample(candidates, min(2, len(candidates))):
        check_starts(candidate, load, memory, monkeypatch)
    return len(candidates)


def test_named_layouts_start(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    named = [check_triple(models, triple, monkeypatch) for triple in triples(3, 4)]
    assert max(named) > 1


@pytest.mark.nightly
def test_many_named_layouts_start(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    named = [check_triple(models, triple, monkeypatch) for triple in triples(4, 50)]
    assert 0 in named and max(named) > 4


def test_all_layouts_are_tried() -> None:
    assert set(layouts(2, experts=False)) == {(1, 1, 1, 1, 1), (1, 2, 1, 2, 1), (1, 2, 1, 2, 2), (2, 1, 2, 1, 1)}
    with_experts = set(layouts(4, experts=True))
    assert len(with_experts) == sum(
        dp * tp in (1, 2, 4) and ep * moe == dp * tp and tp % dcp == 0
        for dp in range(1, 5)
        for tp in range(1, 5)
        for ep in range(1, 5)
        for moe in range(1, 5)
        for dcp in range(1, tp + 1)
    )
    for each in with_experts:
        Mesh(*each)


def test_a_model_with_experts_has_more_layouts(models: dict[str, Path]) -> None:
    load, found = ClientLoad(20, 8, 4), {}
    for family in ("llama", "qwen2_moe"):
        found[family] = find_candidates(EngineConfig(model=models[family], device="cpu"), 2, load, 2048 * MIB)
    meshes = {family: {(str(c.config.mesh), c.replicas) for c in each} for family, (each, _) in found.items()}
    assert meshes["llama"] < meshes["qwen2_moe"] and {replicas for _, replicas in meshes["llama"]} == {1, 2}
    assert all(why.count("\n") == 0 and why for _, refused in found.values() for why in refused.values())


def test_memory_decides(models: dict[str, Path]) -> None:
    """The less memory, the fewer layouts, and the smaller their cache; too little is named."""
    base, load, before = EngineConfig(model=models["qwen2_moe"], device="cpu"), ClientLoad(100, 40, 6), -1
    for mib in (0.1, 0.4, 1, 4, 64):
        candidates, _ = find_candidates(base, 2, load, int(mib * MIB))
        assert len(candidates) >= before
        before = len(candidates)
    assert before > 2
    few, refused = find_candidates(base, 2, load, MIB // 10)
    assert not few and all("iB" in why or "dcp" in why for why in refused.values())


def test_processes_of_servers_count(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers with a rank each have five more processes than the one that looks: too many here. One has three."""
    monkeypatch.setattr("weft.engine.advise.candidates.available_bytes", lambda limit_gib: 6000 * MIB)
    monkeypatch.setattr("weft.engine.advise.candidates._own_bytes", lambda: 1500 * MIB)
    found, refused = find_candidates(EngineConfig(model=models["llama"], device="cpu"), 2, ClientLoad(20, 8, 4))
    assert {each.replicas for each in found} == {1}
    assert "0.0 GiB for each" in next(why for name, why in refused.items() if name.startswith("2 servers"))


FORK = """
import os, sys
shared = bytearray(b"x") * (64 << 20)
own = b"" if os.fork() else bytearray(b"x") * (32 << 20)
print(end=".", flush=True)
sys.stdin.read()
"""


def test_memory_of_processes_counts_shared_pages_once() -> None:
    """The memory that `advise.capped` samples: 64 MiB that a fork shares, and 32 MiB that it has for itself."""
    with subprocess.Popen([sys.executable, "-c", FORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdin and process.stdout.read(2) == b".."
        assert 96 * MIB < tree_bytes(process.pid) < 140 * MIB
        process.stdin.close()


def test_a_load_of_many_clients_gets_sizes(models: dict[str, Path]) -> None:
    base = EngineConfig(model=models["llama"], device="cpu", page_size=4)
    [one], _ = find_candidates(base, 1, ClientLoad(100, 40, 600), 4096 * MIB)
    assert one.config.batch_sequences == 600 and one.config.cached_tokens >= 600 * 140
    assert (one.given.max_running, one.given.kv_tokens) == (600, one.config.kv_tokens)
    for limit in ("max_batch_tokens", "mixed_batch_tokens"):  # each running sequence has a row of every step
        [limited], _ = find_candidates(replace(base, **{limit: 80}), 1, ClientLoad(100, 40, 600), 4096 * MIB)
        assert limited.config.batch_sequences == 80


def test_a_request_beyond_the_context_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="200 \\+ 100 tokens is beyond the 256 tokens"):
        find_candidates(EngineConfig(model=models["llama"], device="cpu"), 1, ClientLoad(200, 100, 1))


def test_a_cache_that_holds_no_request_is_refused(models: dict[str, Path]) -> None:
    base = EngineConfig(model=models["llama"], device="cpu", kv_tokens=32)
    found, refused = find_candidates(base, 1, ClientLoad(24, 9), 1 << 30)
    assert not found and list(refused.values()) == ["a cache of 32 tokens holds no request of 33"]
    assert find_candidates(base, 1, ClientLoad(24, 8), 1 << 30)[0]


def test_servers_have_cores_of_their_own(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.advise.candidates.own_cores", lambda: {0: [4, 5, 6, 7]})
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {4, 5, 6, 7})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found, _ = find_candidates(EngineConfig(model=models["llama"], device="cpu"), 4, ClientLoad(8, 8, 4), 4096 * MIB)
    cores = {(c.replicas, c.config.attn_tp): c.cores for c in found if c.config.attn_dp == 1}
    assert all(c.config.threads == 1 for c in found if c.replicas == 4)
    assert cores[4, 1] == ["4", "5", "6", "7"] and cores[2, 2] == ["4|5", "6|7"] and cores[1, 4] == ["auto"]


def test_ranks_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.advise.candidates.own_cores", lambda: {0: [0, 1, 2]})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert choose_ranks(None, "auto") == (3, "cpu") and choose_ranks(2, "auto") == (2, "cpu")
    for ranks, device, why in (
        (4, "auto", "4 ranks require a core each"),
        (1, "cuda", "1 rank requires a GPU"),
    ):
        with pytest.raises(LayoutError, match=why):
            choose_ranks(ranks, device)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert choose_ranks(None, "auto") == (2, "cuda") and choose_ranks(3, "auto") == (3, "cpu")
