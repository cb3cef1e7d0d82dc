"""Checks of weft-vllm under vLLM's interfaces, in a process a rank: vllm_ranks.py FOLDER.

vLLM, or the stand-in for it in engines/, is on the path. Every result is compared with gloo's, or with a definition in
plain torch.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import weft_vllm
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.platforms import current_platform

from library.worlds import numbers, run_ranks, summed
from weft.kernels.torch_reference import rms_norm, softmax_merge

WORLD = 2
SMALL = {"weft": {"max_bytes": 1 << 16}}


def group_of(name: str, config: VllmConfig) -> GroupCoordinator:
    with set_current_vllm_config(config):
        return GroupCoordinator([list(range(WORLD))], dist.get_rank(), "gloo", True, group_name=name)


def same(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous() and torch.equal(a, b), (a, b)


def check_collectives(group: GroupCoordinator, rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = numbers(rank, 6, 8, dtype=dtype)
        kept = x.clone()
        same(group.all_reduce(x), summed(x))
        assert torch.equal(x, kept)
        for dim in (0, 1, -1):
            every = torch.cat([numbers(r, 6, 8, dtype=dtype) for r in range(WORLD)], dim)
            same(group.all_gather(x, dim), every)
            gathered = group.gather(x, dst=1, dim=dim)
            assert gathered is None if rank == 0 else torch.equal(gathered, every)
            same(group.reduce_scatter(x, dim), summed(x).chunk(WORLD, dim)[rank].contiguous())
        same(group.reduce_scatter(x.view(2, 3, 8), -1), summed(x.view(2, 3, 8)).chunk(WORLD, -1)[rank].contiguous())
    for sizes in ([3, 1], [0, 2], [2, 2]):
        tokens, ids = numbers(rank, sizes[rank], 8), numbers(rank, sizes[rank], 3, dtype=torch.int32)
        gathered = group.all_gatherv([tokens, ids], 0, sizes)
        for got, dtype, width in zip(gathered, (torch.float32, torch.int32), (8, 3), strict=True):
            same(got, torch.cat([numbers(r, sizes[r], width, dtype=dtype) for r in range(WORLD)]))
        same(group.all_gatherv(tokens, 0, sizes), gathered[0])
        x = numbers(rank, sum(sizes), 8)
        own = summed(x).split(sizes)[rank]
        same(group.reduce_scatterv(x, 0, sizes), own)
        output = torch.empty_like(own)
        group.device_communicator.reduce_scatterv_into_output(x, output, 0, sizes)
        same(output, own)
    same(group.all_gatherv(x), torch.cat([numbers(r, 4, 8) for r in range(WORLD)]))
    same(group.reduce_scatterv(x, 0), summed(x).chunk(WORLD)[rank])


def check_what_weft_does_not_take(group: GroupCoordinator, rank: int) -> None:
    """Large calls and other dtypes go to vLLM, on every rank alike."""
    comm = group.device_communicator
    largest = comm.weft.max_bytes // 4
    for x, ours in (
        (numbers(rank, largest), True),
        (numbers(rank, largest + 1), False),
        (numbers(rank, 4, dtype=torch.int32), False),
    ):
        assert comm.takes("all_reduce", x) is ours
        expected = summed(x)  # some of vLLM's sum in place
        same(comm.all_reduce(x), expected)
    half = numbers(rank, largest // 2 + 1, 1)
    assert comm.takes("all_reduce", half) and not comm.takes("all_gatherv", half, 2 * len(half))
    same(comm.all_gather(half, 0), torch.cat([numbers(r, len(half), 1) for r in range(WORLD)]))


def check_merge(group: GroupCoordinator, rank: int) -> None:
    from weft_vllm.context_parallel import MERGES, _first

    outs = [numbers(r, 5, 4, 16) for r in range(WORLD)]
    lses = [numbers(r + 9, 5, 4) for r in range(WORLD)]
    lses[1][2] = float("inf")  # what some kernels say of no keys
    mine = slice(2 * rank, 2 * rank + 2)
    for name, modules in MERGES.items():
        module = _first(modules)
        merge = getattr(module, name)
        masks = [{}]
        if hasattr(module, "mask_dcp_empty_shards_"):
            start = torch.tensor([0, 2, 5], dtype=torch.int32)
            masks += [{"seq_lens": torch.tensor([1, rank], dtype=torch.int32), "query_start_loc": start}]
        for mask in masks:
            expected = [lse.clone() for lse in lses]
            if mask:
                expected[0][2:] = -float("inf")  # rank 0 holds no key of the second sequence
            every = torch.stack(expected)
            out, total = softmax_merge(torch.stack(outs), every.where(every.isfinite(), -float("inf")))
            for base, factor in ((True, 1.0), (False, 0.6931471805599453)):
                got = merge(outs[rank], lses[rank] / factor, group, return_lse=True, is_lse_base_on_e=base, **mask)
                torch.testing.assert_close(got[0], out[:, mine])
                torch.testing.assert_close(got[1] * factor, total[:, mine])
            torch.testing.assert_close(merge(outs[rank], lses[rank], group, **mask), out[:, mine])


def check_fusion(group: GroupCoordinator, config: VllmConfig, rank: int) -> None:
    """A graph as vLLM's passes get it: the op is put in where it fits, and the results are the same."""
    from weft_vllm.fusion import FuseNorms, WeftPassManager

    def block(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        reduced = torch.ops.vllm.all_reduce(x, group.unique_name)
        normed, residual = torch.ops.vllm_ir.fused_add_rms_norm(reduced, residual, weight, 1e-3)
        shared = torch.ops.vllm.all_reduce(normed * 2, group.unique_name)  # whose sum is used twice
        again, last = torch.ops.vllm_ir.fused_add_rms_norm(shared, residual, weight, 1e-6)
        return normed, again, last, shared

    x, residual, weight = numbers(rank, 3, 64), numbers(7, 3, 64), numbers(8, 64) / 4
    traced = make_fx(block, tracing_mode="fake")(x, residual, weight)
    expected = traced(x, residual, weight)
    FuseNorms()(traced.graph)
    traced.recompile()
    ops = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert ops.count("weft_vllm.all_reduce_add_rms_norm.default") == ops.count("vllm.all_reduce.default") == 1, ops
    assert all("val" in node.meta for node in traced.graph.nodes if node.op == "call_function")
    for got, want in zip(traced(x, residual, weight), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

    wide = torch.ones(group.device_communicator.weft.max_bytes // 64 + 1, 16)  # more than Weft takes
    stacked = torch.ops.weft_vllm.all_reduce_add_rms_norm(wide.clone(), wide, wide[0], 1e-6, group.unique_name)
    added, normed = stacked.unbind(0)
    same(added.contiguous(), wide * (WORLD + 1))
    torch.testing.assert_close(normed, rms_norm(added, wide[0], 1e-6))

    manager = WeftPassManager()
    assert manager.passes == []
    if not hasattr(config, "model_config"):  # vLLM's own passes want a GPU
        manager.configure(config)
        assert [type(each).__name__ for each in manager.passes] == ["FuseNorms", "RMSNormQuantFusionPass"]
        off = WeftPassManager()
        config = VllmConfig()
        config.compilation_config.pass_config.fuse_allreduce_rms = False
        off.configure(config)
        assert [type(each).__name__ for each in off.passes] == ["RMSNormQuantFusionPass"]


def check_switches(lines: list[str]) -> None:
    """Each switch leaves vLLM's own collectives and configuration, and says why in one line."""

    def config(additional: object = (), **parallel: bool) -> VllmConfig:
        made = VllmConfig()
        made.additional_config = dict(additional) if isinstance(additional, tuple) else additional
        for name, value in parallel.items():
            setattr(made.parallel_config, name, value)
        return made

    stand_in = not hasattr(VllmConfig(), "model_config")
    cases = [
        (config({"weft": False}), "additional-config"),
        (config(disable_custom_all_reduce=True), "disable_custom_all_reduce"),
        (config(enable_elastic_ep=True), "--enable-elastic-ep"),
        *([(config(use_ubatching=True), "--enable-dbo")] if stand_in else [(config(enable_dbo=True), "--enable-dbo")]),
    ]
    for number, (made, text) in enumerate(cases):
        before = made.compilation_config.pass_config.fuse_allreduce_rms, made.additional_config
        del lines[:]
        group = group_of("tp", made)
        assert group.device_communicator.weft is None and len(lines) == 1 and text in lines[0], (number, lines)
        assert before == (made.compilation_config.pass_config.fuse_allreduce_rms, made.additional_config)
        same(group.all_reduce(torch.ones(4)), torch.full((4,), float(WORLD)))
    del lines[:]
    assert group_of("pp", config()).device_communicator.weft is None and not lines
    try:
        group_of("tp", config({"weft": {"bytes": 3}}))
    except ValueError as error:
        assert "max_bytes" in str(error)
    else:
        raise AssertionError("an unknown option passes")


def checks() -> None:
    rank = dist.get_rank()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage()) if record.levelno >= logging.WARNING else None  # type: ignore[method-assign]
    weft_vllm.log.addHandler(handler)

    weft_vllm.register()
    assert current_platform.get_device_communicator_cls() == "weft_vllm.cuda.WeftCommunicator"
    assert current_platform.get_pass_manager_cls() == "weft_vllm.fusion.WeftPassManager"
    config = VllmConfig()
    config.additional_config = SMALL
    group = group_of("tp", config)
    assert config.additional_config["weft"].keys() == {"max_bytes", "version"}
    assert not config.compilation_config.pass_config.fuse_allreduce_rms
    with group.graph_capture():
        check_collectives(group, rank)
    check_what_weft_does_not_take(group, rank)
    check_fusion(group, config, rank)
    dcp = group_of("dcp", config)
    check_merge(dcp, rank)
    for each in (group, dcp):
        each.destroy()
        assert each.device_communicator.weft is None
    check_switches(lines)


if __name__ == "__main__":
    run_ranks(WORLD, Path(sys.argv[1]), checks)
