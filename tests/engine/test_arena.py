"""The shared memory of a rank: enough for every step, by proof, and refused where the machine has less."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import small_model
from torch import Tensor

from comm.processes import run_threads
from weft.comm.shm import ShmTransport
from weft.comm.transport import CommError
from weft.engine.attention.build_batch import SeqRows, build_batch
from weft.engine.config.config import EngineConfig
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.engine.models.load import load_model
from weft.engine.models.registry import load_config
from weft.engine.worker.arena import ArenaNeed, Ledger, arena_need, available_bytes, check_memory
from weft.engine.worker.model_runner import ModelRunner
from weft.engine.worker.open_transports import _arena
from weft.planner.experts import Forms
from weft.planner.spec import LayoutError, Mesh

PAGE = 4
LIMIT, STEPS = 64, 25


def engine_config(directory: Path, mesh: Mesh, **changes: Any) -> EngineConfig:
    layout = dict(attn_dp=mesh.attn_dp, attn_tp=mesh.attn_tp, ep=mesh.ep, moe_tp=mesh.moe_tp)
    return EngineConfig(directory, **layout, max_batch_tokens=LIMIT, max_running=4, **changes)


def random_steps(transport: ShmTransport, mesh: Mesh, directory: Path, steps: int, experts: Forms = "gather") -> int:
    """Steps of random sizes, as an engine runs them; gives the most blocks that were in use at once."""
    torch.set_num_threads(1)
    config = replace(load_config(directory), experts=experts)
    model = load_model(directory, config, mesh, transport.rank, workspace=transport.empty)
    runner = ModelRunner(model, mesh, transport.rank, [transport], [CacheGroup(Rule(), LIMIT // PAGE)], PAGE)
    rng = random.Random(3)
    for _ in range(steps):
        counts = tuple(rng.choice([0, 1, rng.randrange(LIMIT), LIMIT]) for _ in range(mesh.attn_dp))
        mine = counts[mesh.group_of(transport.rank)]
        seqs = [SeqRows(mine, 0, [list(range(-(-mine // PAGE)))], True)] if mine else []
        runner.forward(build_batch([5] * mine, seqs, PAGE), counts)
    return transport.peak_blocks


MESHES = [Mesh(4, 1, 4, 1), Mesh(2, 2, 2, 2), Mesh(1, 4, 1, 4)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_steps_of_every_size_fit_what_was_worked_out(mesh: Mesh, tmp_path: Path) -> None:
    small_model("qwen2_moe", 4, tmp_path / "model")
    need = arena_need(engine_config(tmp_path / "model", mesh), load_config(tmp_path / "model"), torch.float32)
    sizes = dict(blocks=need.blocks, block_bytes=need.block_bytes)
    peaks = run_threads(mesh, tmp_path, random_steps, tmp_path / "model", STEPS, **sizes)
    assert need.blocks // 2 <= max(peaks) <= need.blocks
    with pytest.raises(CommError, match="blocks"):
        run_threads(mesh, tmp_path, random_steps, tmp_path / "model", STEPS, **sizes | {"blocks": max(peaks) - 1})


@pytest.mark.parametrize("mesh", [Mesh(4, 1, 4, 1), Mesh(2, 2, 2, 2)], ids=str)
def test_rows_that_are_sent_to_their_experts_fit_too(mesh: Mesh, tmp_path: Path) -> None:
    small_model("qwen2_moe", 4, tmp_path / "model")
    config = replace(load_config(tmp_path / "model"), experts="dispatch")
    need = arena_need(engine_config(tmp_path / "model", mesh), config, torch.float32)
    sizes = dict(blocks=need.blocks, block_bytes=need.block_bytes)
    peaks = run_threads(mesh, tmp_path, random_steps, tmp_path / "model", 10, "dispatch", **sizes)
    assert need.blocks // 2 <= max(peaks) <= need.blocks


def test_any_order_of_any_sizes_fits(tmp_path: Path) -> None:
    """10⁵ steps that take and free in random order: what is in use at once never grows, and is never refused."""
    blocks, size, rng = 6, 1 << 16, random.Random(11)
    transport = ShmTransport(Mesh(), 0, tmp_path / "meet", blocks=blocks, block_bytes=size)
    like, alive = torch.empty(0, dtype=torch.uint8), []
    for step in range(100_000):
        rows = rng.choice([0, 1, 64, size // 3, size // 2 + 1, size - 1, size, rng.randrange(size + 1)])
        if len(alive) == blocks:
            del alive[rng.randrange(blocks)]
        alive.append(transport.empty(rows, like=like))
        if step % 97 == 0:  # as at the end of a step, in an order that no stack would like
            rng.shuffle(alive)
            del alive[rng.randrange(blocks) :]
    assert transport.peak_blocks == blocks
    alive += [transport.empty(1, like=like) for _ in range(blocks - len(alive))]
    with pytest.raises(CommError, match=r"all 6 blocks .* give the transport more blocks"):
        transport.empty(1, like=like)
    alive.clear()
    with pytest.raises(CommError, match=r"65537 bytes does not fit .* give the transport larger block_bytes"):
        transport.empty(size + 1, like=like)
    assert transport.empty(size, like=like).fill_(7).sum() == 7 * size
    transport.close()


def test_blocks_do_not_overlap_and_the_warmest_is_taken_first(tmp_path: Path) -> None:
    transport = ShmTransport(Mesh(), 0, tmp_path / "meet", blocks=64, block_bytes=5000)
    like = torch.empty(0, dtype=torch.uint8)
    tensors = [transport.empty(5000, like=like).fill_(i) for i in range(64)]
    assert all((t == i).all() for i, t in enumerate(tensors))
    assert all(t.data_ptr() % 64 == 0 for t in tensors), "streamed stores need it"
    last = tensors.pop(20).data_ptr()
    assert transport.empty(1, like=like).data_ptr() == last
    transport.close()


def test_the_ledger_counts_storages_not_names() -> None:
    ledger, like = Ledger(), torch.empty(0, device="meta")
    with torch.inference_mode():
        whole = ledger.empty(4, 2, like=like)
        view: Tensor | None = whole[1:]
        other = ledger.empty(4, 2, like=like)
        del whole, other
        third = ledger.empty(1, like=like)
        assert ledger.peak == 2  # the view keeps the first
        del third, view
        ledger.empty(1, like=like)
        assert ledger.peak == 2


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    config = EngineConfig(attn_dp=4, ep=4)
    need = ArenaNeed(blocks=6, block_bytes=2048 << 10)
    check_memory(config, need, 4 * 6 * (2048 << 10))
    with pytest.raises(LayoutError, match=r"take up to 48 MiB .* on 4 ranks, but 47 MiB .*max_batch_tokens=1024 would"):
        check_memory(config, need, (48 << 20) - 1)
    with pytest.raises(LayoutError, match="max_batch_tokens=32 with max_running=32 would fit"):
        check_memory(config, need, 1 << 20)
    with pytest.raises(LayoutError, match="max_batch_tokens=32 with mixed_batch_tokens=32 and max_running=32 would"):
        check_memory(replace(config, mixed_batch_tokens=64), need, 1 << 20)
    with pytest.raises(LayoutError, match="no max_batch_tokens would fit"):
        check_memory(config, need, 1 << 10)
    fewer = replace(config, max_batch_tokens=1024)  # and that is true
    model = config.read_model()
    large, small = (arena_need(c, model, torch.float32) for c in (config, fewer))
    assert small.bytes * 2 == large.bytes


GIB = 1 << 30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_DOT_", ".")).write_text(f"{text}\n")


@pytest.mark.parametrize(
    "lines, left",
    [
        ("0::/pod/rank", 3),  # the parent's limit of 5 GiB, less 4 GiB used, of which 2 GiB are file cache
        ("7:cpu:/\n4:cpuset,memory:/box", 6),
        ("0::/free", 9),
        ("", 9),
    ],
)
def test_memory_that_is_left(lines: str, left: int, tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, meminfo=f"MemTotal: {16 << 20} kB\nMemAvailable: {9 << 20} kB")
    write(proc / "self", cgroup=lines)
    stat = {"memory_DOT_stat": f"anon 1\ninactive_file {2 * GIB}"}
    write(groups / "pod", memory_DOT_max=5 * GIB, memory_DOT_current=4 * GIB, **stat)
    write(groups / "pod" / "rank", memory_DOT_max="max", memory_DOT_current=GIB, **stat)
    write(groups / "free", memory_DOT_max="max", memory_DOT_current=GIB, **stat)
    old = {"memory_DOT_limit_in_bytes": 7 * GIB, "memory_DOT_usage_in_bytes": GIB, "memory_DOT_stat": "cache 1"}
    write(groups / "memory" / "box", **old)
    write(proc / "self", smaps_rollup=f"5-6 ---p 0 00:00 0 [rollup]\nRss: 9 kB\nPss: {1 << 19} kB\nPss_Anon: 7 kB")
    assert available_bytes(proc, groups) == left * GIB
    for limit in (3.25, 40.0):  # half a GiB of it is used
        assert available_bytes(proc, groups, limit) == min(left, limit - 0.5) * GIB


def test_ranks_start_within_the_memory_that_is_given(tmp_path: Path) -> None:
    """The host has enough for their exchanges, and the server may use less."""
    _arena(config := EngineConfig(attn_tp=2))
    with pytest.raises(LayoutError, match="but 0 MiB are free here"):
        _arena(replace(config, host_memory_gib=1e-3))


def test_memory_of_this_machine() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50
    assert available_bytes(limit_gib=1e-3) == 0 < available_bytes(limit_gib=2) < 2 * GIB
