"""Checks of weft-sglang under SGLang's interfaces, in a process a rank: sglang_ranks.py FOLDER.

The stand-in for SGLang in engines/ is on the path. Every result is compared with gloo's, or with a definition in plain
torch.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import weft_sglang
from sglang.srt import plugins
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers import dp_attention, flashinfer_comm_fusion
from sglang.srt.layers.dcp import comm as dcp
from sglang.srt.runtime_context import get_parallel, get_server_args
from torch import Tensor
from weft_sglang import groups
from weft_sglang.groups import comm_of

from library.worlds import numbers, run_ranks, summed
from weft.kernels.torch_reference import rms_norm, softmax_merge

WORLD = 2


def same(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous() and torch.equal(a, b), (a, b)


def group_of(name: str, *ranks: list[int]) -> GroupCoordinator:
    return GroupCoordinator(list(ranks) or [list(range(WORLD))], dist.get_rank(), "gloo", group_name=name)


def check_collectives(group: GroupCoordinator, rank: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = numbers(rank, 6, 8, dtype=dtype)
        kept = x.clone()
        same(group.all_reduce(x), summed(x))
        same(group._all_reduce_out_place(x, "auto"), summed(x))
        assert torch.equal(x, kept)
        output = torch.empty(12, 8, dtype=dtype)
        group.all_gather_into_tensor(output, x)
        same(output, torch.cat([numbers(r, 6, 8, dtype=dtype) for r in range(WORLD)]))
        output = torch.empty(3, 8, dtype=dtype)
        group.reduce_scatter_tensor(output, x)
        same(output, summed(x).chunk(WORLD)[rank])
        sent = x.view(-1).view(torch.uint8)  # as decode context parallelism sends
        output = torch.empty_like(sent)
        group.all_to_all_single(output, sent)
        every = [numbers(r, 6, 8, dtype=dtype).view(-1).view(torch.uint8) for r in range(WORLD)]
        same(output, torch.cat([part.chunk(WORLD)[rank] for part in every]))
    for sizes in ([3, 1], [0, 2], [2, 2]):
        tokens, ids = numbers(rank, sizes[rank], 8), numbers(rank, sizes[rank], 3, dtype=torch.int32)
        expected = torch.cat([numbers(r, sizes[r], 8) for r in range(WORLD)])
        gathered = group.all_gatherv([tokens, ids], sizes=sizes)
        same(gathered[0], expected)
        same(gathered[1], torch.cat([numbers(r, sizes[r], 3, dtype=torch.int32) for r in range(WORLD)]))
        output = torch.empty_like(expected)
        same(group.all_gatherv(tokens, sizes=sizes, output=output)[0], expected)
        same(output, expected)
        x = numbers(rank, sum(sizes), 8)
        own = summed(x).split(sizes)[rank]
        same(group.reduce_scatterv(x, sizes=sizes), own)
        output = torch.empty_like(own)
        assert group.reduce_scatterv(x, output=output, sizes=sizes) is output
        same(output, own)
    same(group.reduce_scatterv(x), summed(x).chunk(WORLD)[rank])
    assert group.calls == []


def check_what_weft_does_not_take(group: GroupCoordinator, rank: int) -> None:
    """Large calls and other dtypes go to SGLang, on every rank alike."""
    large = numbers(rank, groups.MAX_BYTES // 4 + 1, 1)
    same(group.all_reduce(large), summed(large))
    same(group._all_reduce_out_place(large, "auto"), summed(large))
    ids = numbers(rank, 4, dtype=torch.int64)
    same(group.all_reduce(ids), summed(ids))
    half = large[: len(large) // 2 + 1]
    output = torch.empty(WORLD * len(half), 1)
    group.all_gather_into_tensor(output, half)
    same(output, torch.cat([numbers(r, len(large), 1)[: len(half)] for r in range(WORLD)]))
    assert group.calls == ["pynccl", "auto", "pynccl", "all_gather"]
    group.calls.clear()


def check_attention_groups(tp: GroupCoordinator, dp: int) -> None:
    """Gathers and scatters of data-parallel attention, in dp groups of neighbours."""
    rank, world = dist.get_rank(), dist.get_world_size()
    attn_tp = world // dp
    attention = group_of("attention_tp", *([*range(first, first + attn_tp)] for first in range(0, world, attn_tp)))
    vars(get_parallel()).update(
        tp_size=world,
        tp_group=tp,
        attn_dp_size=dp,
        attn_tp_size=attn_tp,
        attn_cp_size=1,
        attn_tp_rank=rank % attn_tp,
        attn_tp_group=attention,
    )
    every = torch.stack([numbers(r, 4, 8) for r in range(world)]).unflatten(0, (dp, attn_tp))
    output, x = torch.empty(4 * dp, 8), every.flatten(0, 1)[rank]
    dp_attention._dp_gather_via_all_gather(output, x.clone(), None, True)
    same(output, every.sum(1).flatten(0, 1))
    dp_attention._dp_gather_via_all_gather(output, x.clone(), None, False)
    same(output, every[:, 0].flatten(0, 1))
    whole = numbers(rank, 4 * dp, 8)
    output = torch.empty(4, 8)
    dp_attention.dp_reduce_scatter_tensor(output, whole)
    same(output, summed(whole).chunk(dp)[rank // attn_tp])
    assert tp.calls == attention.calls == []


def groups_of_two() -> None:
    """Four ranks: two groups of two."""
    plugins.load_plugins()
    check_attention_groups(group_of("tp", [0, 1, 2, 3]), 2)


def check_merge(group: GroupCoordinator, rank: int) -> None:
    outs = [numbers(r, 5, 4, 16) for r in range(WORLD)]
    lses = [numbers(r + 9, 5, 4) for r in range(WORLD)]
    lses[1][2] = -float("inf")  # no keys
    out, _ = softmax_merge(torch.stack(outs), torch.stack(lses))
    for base, factor in ((True, 1.0), (False, 0.6931471805599453)):
        got = dcp.dcp_a2a_lse_reduce(outs[rank], lses[rank] / factor, group, is_lse_base_on_e=base)
        torch.testing.assert_close(got, out[:, 2 * rank : 2 * rank + 2])
    assert dcp.dcp_a2a_lse_reduce(outs[rank], lses[rank], group, comm_backend="fi_a2a") == "SGLang's own"


def check_fused_norm(rank: int) -> None:
    fused = flashinfer_comm_fusion.flashinfer_allreduce_residual_rmsnorm
    for rows in (3, groups.MAX_BYTES // 256 + 1):  # the more are not Weft's
        x, residual, weight = numbers(rank, rows, 64), numbers(7, rows, 64), numbers(8, 64) / 4
        expected = summed(x) + residual
        for attention in (True, False):
            normed, added = fused(
                input_tensor=x,
                residual=residual,
                weight=weight,
                eps=1e-3,
                max_token_num=rows,
                use_attn_tp_group=attention,
            )
            assert torch.equal(added, expected)
            torch.testing.assert_close(normed, rms_norm(expected, weight, 1e-3))
    compiled = torch.compile(lambda *given: fused(*given, 1e-3), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, residual, weight)[0], normed)
    flashinfer_comm_fusion.pre_initialize_workspaces(2048, 64, torch.float32)


def check_switches(lines: list[str]) -> None:
    """Each switch leaves SGLang's own collectives, and says why in one line."""
    options = get_server_args()
    for name, value, text in (
        ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
        ("enable_pdmux", True, "--enable-pdmux"),
        ("elastic_ep_backend", "mooncake", "--elastic-ep-backend"),
        ("", None, "--disable-custom-all-reduce"),
    ):
        kept = getattr(options, name, None)
        if name:
            setattr(options, name, value)
        else:
            parallel_state._ENABLE_CUSTOM_ALL_REDUCE = False
        del lines[:]
        group = group_of("tp")
        assert comm_of(group) is None and len(lines) == 1 and text in lines[0], lines
        same(group.all_reduce(torch.ones(4)), torch.full((4,), float(WORLD)))
        assert group.calls == ["pynccl"]
        if name:
            setattr(options, name, kept)
    parallel_state._ENABLE_CUSTOM_ALL_REDUCE = True
    del lines[:]
    assert comm_of(group_of("pp")) is None and comm_of(group_of("tp", [0], [1])) is None and not lines


def checks() -> None:
    rank = dist.get_rank()
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    weft_sglang.log.addHandler(handler)
    groups.MAX_BYTES = 1 << 16  # this rank's alone

    plugins.load_plugins()
    tp = group_of("tp")
    assert not lines and comm_of(tp) is not None, lines
    tp.flashinfer = True
    check_collectives(tp, rank)
    check_what_weft_does_not_take(tp, rank)
    check_attention_groups(tp, 2)
    check_attention_groups(tp, 1)
    check_merge(group_of("dcp"), rank)
    check_fused_norm(rank)
    tp.destroy()
    assert comm_of(tp) is None and tp.calls[-1] == "destroy"
    check_switches(lines)


if __name__ == "__main__":
    for world, work in ((WORLD, checks), (4, groups_of_two)):
        folder = Path(sys.argv[1], str(world))
        folder.mkdir()
        run_ranks(world, folder, work)
