"""`weft.Communicator` over gloo groups on CPUs, against torch.distributed and plain torch."""

from __future__ import annotations

import gc
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from library.random_calls import any_bits, random_calls
from library.worlds import run_ranks, same_bits
from weft.comm import meeting
from weft.kernels.build import BuildError
from weft.kernels.torch_reference import rms_norm
from weft.library import communicator
from weft.library.arguments import MOVED, OPS
from weft.library.communicator import Communicator

SMALL = 1 << 16


@pytest.mark.parametrize("world", [1, 2, 3])
def test_random_calls_equal_torchs(world: int, tmp_path: Path) -> None:
    run_ranks(world, tmp_path, random_calls, 10)


@pytest.mark.nightly
def test_a_hundred_thousand_calls_equal_torchs(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, random_calls, 7000)


def every_dtype() -> None:
    with Communicator(max_bytes=SMALL) as comm:
        for dtype in MOVED:
            assert comm.supports("all_gatherv", torch.empty(1, dtype=dtype))
            for seed in range(3):
                x = any_bits(seed, comm.rank, 5, 7, dtype=dtype)
                assert same_bits(comm.all_gatherv(x, [5] * comm.world_size)[comm.rank * 5 :][:5], x)
        ones = torch.full((4,), -1, dtype=torch.int32)
        assert comm.all_gatherv(ones, [4, 4]).tolist() == [-1] * 8
        for dtype in map(torch.__dict__.get, dir(torch)):
            if isinstance(dtype, torch.dtype) and dtype not in MOVED:
                refused(lambda d=dtype: comm.all_gatherv(torch.empty(2, dtype=d, device="meta"), [2, 2]), "not torch.")


def test_every_dtype_arrives_bit_for_bit_or_is_refused(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, every_dtype)


def refused(call: Callable[[], object], *texts: str, error: type[Exception] = ValueError) -> None:
    """Check that the call raises one line that has all texts."""
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message and all(text in message for text in texts), message


def wrong_calls() -> None:
    comm = Communicator(max_bytes=1024, name="mine")
    x, ints = torch.ones(2, 4), torch.ones(2, 4, dtype=torch.int32)
    refused(lambda: comm.all_reduce(ints), "all_reduce", "float32", "not torch.int32")
    refused(lambda: comm.reduce_scatterv(ints.bool(), [2]), "reduce_scatterv", "not torch.bool")
    refused(lambda: comm.all_reduce(x.to("meta")), "meta", "'mine' is on cpu")
    refused(lambda: comm.all_reduce(x.requires_grad_()), "torch.no_grad()")
    x = x.detach()
    refused(lambda: comm.all_reduce(x.to_sparse()), "sparse")
    refused(lambda: comm.all_reduce(torch.ones(300)), "1200 bytes", "max_bytes=1200")
    refused(lambda: comm.all_reduce(x, out=ints), "out must be float32 [2, 4] on cpu")
    refused(lambda: comm.all_gatherv(x, [3]), "has 2 rows", "counts say 3")
    refused(lambda: comm.all_gatherv(x, [1, 1]), "counts must be 1 integers of 0 or more, not [1, 1]")
    refused(lambda: comm.all_gatherv(x, [-2]), "0 or more, not [-2]")
    refused(lambda: comm.all_gatherv(x, 2), "1 integers")  # type: ignore[arg-type]
    refused(lambda: comm.all_gatherv(x, numpy.array([2])), "array pass .tolist()")  # type: ignore[arg-type]
    refused(lambda: comm.all_reduce([1.0]), "a list; pass a torch.Tensor")  # type: ignore[arg-type]
    refused(lambda: comm.all_reduce_add_rms_norm(x, x, None, 1e-6), "weight is a NoneType")  # type: ignore[arg-type]
    refused(lambda: comm.broadcast(x, 0.5), "root is 0.5")  # type: ignore[arg-type]
    refused(lambda: comm.all_gatherv(x, [2], capacity=3), "capacity")
    refused(lambda: comm.all_gatherv(x, torch.tensor([2])), "counts.tolist()")
    refused(lambda: comm.all_gatherv(torch.tensor(1.0), [1]), "[rows, …]")
    refused(lambda: comm.reduce_scatterv(x, [3]), "has 2 rows")
    refused(lambda: comm.all_to_allv(x, [2], [1]), "send[0] and receive[0]")
    refused(lambda: comm.broadcast(x, 1), "root is 1")
    refused(lambda: comm.all_reduce_add_rms_norm(x, ints, x[0], 1e-6), "residual must be float32 [2, 4]")
    refused(lambda: comm.all_reduce_add_rms_norm(x, x, x[0, :3], 1e-6), "weight must be float32 [4]")
    refused(lambda: comm.all_reduce_add_rms_norm(x[0, 0], x[0, 0], x[0], 1e-6), "[…, width], not []")
    refused(lambda: comm.reduce_scatterv_add_rms_norm(x[0], [4], x[0], x[0], 1e-6), "[rows, width], not [4]")
    grad = x.clone().requires_grad_()
    for _ in range(2):
        refused(lambda: comm.all_reduce(grad), "torch.no_grad()")
        refused(lambda: comm.all_reduce(x, out=grad), "out requires gradients")
        refused(lambda: comm.all_reduce_add_rms_norm(grad, x, x[0], 1e-6), "the tensor requires gradients")
        refused(lambda: comm.all_reduce_add_rms_norm(x, grad, x[0], 1e-6), "residual requires gradients")
        refused(lambda: comm.reduce_scatterv_add_rms_norm(x, [2], grad, x[0], 1e-6), "residual requires gradients")
        refused(lambda: comm.lse_reduce_scatter(x[None], grad[:1, :2]), "lse requires gradients")
        with torch.no_grad():  # what is accepted here is not accepted elsewhere
            comm.all_reduce(grad, out=x)
            comm.all_reduce_add_rms_norm(grad, grad, x[0], 1e-6)
    refused(lambda: comm.lse_reduce_scatter(x[None], x), "lse must be float32 [1, 2]")
    refused(lambda: comm.lse_reduce_scatter(x[None], x[:1, :2], "10"), "'e' or '2'")  # type: ignore[arg-type]
    refused(lambda: comm.all_reduce_all_gatherv(x, [1, 1]), "2 counts", "1 ranks")
    refused(lambda: comm.supports("scan", x), "'scan'", "all_gatherv")
    assert comm.supports("all_reduce", x) and not comm.supports("all_reduce", ints)
    refused(lambda: Communicator(name="mine"), "'mine' is open already")
    refused(lambda: Communicator(max_bytes=0), "max_bytes is 0")
    for wrong in (1.5, 8e6, "8M", None):
        refused(lambda w=wrong: Communicator(max_bytes=w), f"max_bytes is {wrong!r}", "an integer")
        refused(lambda w=wrong: Communicator(blocks=w), f"blocks is {wrong!r}", "an integer")
    for forever in (math.inf, math.nan, 1e7, "60", None):  # type: ignore[assignment]
        refused(lambda f=forever: Communicator(timeout_s=f), f"timeout_s is {forever!r}", "at most 1000000")
    for sizes in ({"max_bytes": 1 << 60}, {"max_bytes": 1 << 80}, {"blocks": 1 << 44}):
        refused(lambda s=sizes: Communicator(**s), "more than a process can address", "lower one")
    refused(lambda: Communicator(mesh=weft.Mesh(2, 1, 2, 1)), "2 ranks", "attn_tp")
    refused(lambda: Communicator(device="cuda"), "no GPU")
    refused(lambda: Communicator(dist.GroupMember.NON_GROUP_MEMBER), "no rank of the group")  # type: ignore[arg-type]
    kept = comm.all_reduce(x)
    comm.close()
    comm.close()
    assert torch.equal(kept, x)
    refused(lambda: comm.all_reduce(x), "closed", error=weft.CommError)
    Communicator(name="mine").close()
    with Communicator(max_bytes=1024, blocks=2) as comm:
        held = [comm.all_reduce(x), comm.all_reduce(x)]
        refused(lambda: comm.all_reduce(x), "2 blocks", error=weft.CommError)
        del held


def test_wrong_calls_are_one_line_that_says_what_would_do(tmp_path: Path) -> None:
    run_ranks(1, tmp_path, wrong_calls)


def test_without_a_process_group() -> None:
    refused(Communicator, "torchrun", "init_process_group")


DIFFER: list[Callable[[Communicator, Tensor, int], object]] = [
    lambda comm, x, differs: comm.reduce_scatterv(x, [2 - differs, 2 + differs]),
    lambda comm, x, differs: comm.all_reduce_add_rms_norm(x, x, x[0], 1e-6 + differs * 1e-9),
    lambda comm, x, differs: comm.all_reduce_add_rms_norm(x.half(), x.half(), x[0], 1e-6 + differs),  # weight is wide
    lambda comm, x, differs: comm.all_reduce_add_rms_norm(x.half(), x.half(), x[0].to(WIDE[differs]), 1e-6),
    lambda comm, x, differs: comm.reduce_scatterv_add_rms_norm(x, [2, 2], x[:2], x[0], 1e-6 + differs),
    lambda comm, x, differs: comm.broadcast(x, differs),
    lambda comm, x, differs: comm.broadcast(x[0, 0], differs),
    lambda comm, x, differs: comm.lse_reduce_scatter(x[None], x[:1], "e2"[differs]),  # type: ignore[arg-type]
    lambda comm, x, differs: comm.all_reduce_all_gatherv(x, [4] if differs else [4, 4]),
    lambda comm, x, differs: comm.reduce_scatterv_all_reduce(x, [4] if differs else [2, 2]),
    lambda comm, x, differs: comm.all_reduce(x.view(2, 8) if differs else x),
]
"""Calls of two ranks, for each argument that changes the result: the second rank's is another."""
WIDE = (torch.float32, torch.float16)


def calls_that_differ() -> None:
    x = torch.ones(4, 4)
    for mine, other in itertools.permutations((0, 1)):
        with Communicator(max_bytes=SMALL) as comm:
            calls = (lambda c=comm: c.all_reduce(x), lambda c=comm: c.all_gatherv(x, [4, 4]))
            refused(calls[mine if comm.rank else other], "another call", error=weft.CommError)
    for call in DIFFER:
        with Communicator(max_bytes=SMALL) as comm:
            refused(lambda c=comm, call=call: call(c, x, c.rank), "rank", error=weft.CommError)
    with Communicator(max_bytes=SMALL) as comm:
        if comm.rank:  # what is sent and what is received are compared by who receives it
            refused(lambda: comm.all_to_allv(x, [2, 2], [0, 2]), "sends 8 elements where", error=weft.CommError)
        else:
            comm.all_to_allv(x, [2, 2], [2, 2])
    with Communicator(max_bytes=SMALL) as comm:
        other = x.to((torch.float32, torch.int32)[comm.rank])
        refused(lambda: comm.all_gatherv(other, [4, 4]), "dtype", error=weft.CommError)
        refused(lambda: comm.all_gatherv(torch.ones(SMALL // 4), [SMALL // 4] * 2), f"max_bytes={2 * SMALL}")
        mixed = torch.ones(SMALL // 4), [SMALL // 4] * 2
        refused(lambda: comm.all_reduce_all_gatherv(*mixed), f"the result has {2 * SMALL} bytes")
        send = [0, SMALL // 8] if comm.rank == 0 else [0, SMALL // 8 + 1]
        if comm.rank:  # whose result is too large
            x = torch.ones(sum(send))
            refused(lambda: comm.all_to_allv(x, send, [SMALL // 8, SMALL // 8 + 1]), "the result has 65540 bytes")
    with Communicator(max_bytes=SMALL, timeout_s=0.3) as comm:
        if comm.rank:
            refused(lambda: comm.all_reduce(x), "waited 0.3 s for rank 0", error=weft.CommTimeout)
        dist.barrier()


def test_calls_that_differ_between_ranks(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, calls_that_differ)


def fails_for_rank_1(change: Callable[[pytest.MonkeyPatch], object], *texts: str, max_bytes: int = 1024) -> None:
    """Check that all ranks learn of rank 1's differing settings."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            change(patch)
        mine = max_bytes if dist.get_rank() == 1 else 1024
        refused(lambda: Communicator(max_bytes=mine), *texts, error=RuntimeError)


MEETINGS = "meetings" * 25
"""The name of a folder that is longer than a socket's address may be."""


def ranks_that_cannot_meet(folder: Path) -> None:
    def elsewhere(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(meeting, "BOOT_ID", folder / "boot")
        patch.setattr(meeting.socket, "gethostname", lambda: "far")

    def contained(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(meeting, "PID_NAMESPACE", folder / "namespace")

    def no_compiler(patch: pytest.MonkeyPatch) -> None:
        def fail() -> None:
            raise BuildError("shm.cc does not compile")

        patch.setattr(communicator, "cpu_kernels", fail)

    fails_for_rank_1(elsewhere, "rank 1: runs on host far", "one host's ranks")
    fails_for_rank_1(contained, "rank 1: runs in another container")
    fails_for_rank_1(no_compiler, "shm.cc does not compile")
    fails_for_rank_1(lambda patch: None, "rank 1: max_bytes is 2048", "1024 on rank 0", max_bytes=2048)
    device = ("cpu", "cuda")[dist.get_rank()]
    refused(lambda: Communicator(device=device), "no GPU", error=(weft.CommError, ValueError)[dist.get_rank()])
    meeting.tempfile.tempdir = str(folder / MEETINGS)
    with Communicator(max_bytes=1024):
        dist.barrier()
    assert not list((folder / MEETINGS).iterdir())


def test_ranks_that_cannot_meet_all_say_why(tmp_path: Path) -> None:
    (tmp_path / "namespace").symlink_to("pid:[1]")
    (tmp_path / "boot").write_text("another")
    (tmp_path / MEETINGS).mkdir()
    run_ranks(2, tmp_path, ranks_that_cannot_meet, tmp_path)


def groups_of_ranks() -> None:
    group = dist.new_group([2, 0])
    other = dist.new_group([1])
    mine = other if dist.get_rank() == 1 else group
    with Communicator(mine, max_bytes=SMALL) as comm, Communicator(max_bytes=SMALL) as world:
        assert (comm.rank, comm.world_size) == (mine.rank(), mine.size())
        x = torch.tensor([float(1 << dist.get_rank())])
        assert comm.all_reduce(x).item() == (2.0 if dist.get_rank() == 1 else 5.0)
        assert world.all_reduce(x).item() == 7.0
        assert comm.all_gatherv(x, [1] * comm.world_size)[comm.rank] == x


def test_any_group_of_ranks(tmp_path: Path) -> None:
    run_ranks(3, tmp_path, groups_of_ranks)


def held() -> tuple[int, int]:
    """This process's descriptors, and its mappings of arenas."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:weft")


def dropped() -> None:
    Communicator(max_bytes=SMALL).close()  # opens what the process group keeps
    x, before = torch.ones(2, 3), held()
    for number in range(3):
        comm = Communicator(max_bytes=SMALL)
        kept = comm.all_reduce(x)
        if comm.rank == number:  # it has left, as by `close`
            comm.close()
        del comm
        assert held() == (before[0], before[1] + 1) and torch.equal(kept, x * 2)
        del kept
        assert held() == before
    with Communicator(max_bytes=SMALL) as comm:
        normed, residual = comm.all_reduce_add_rms_norm(x[0], x[1], x[0], 1e-6)
        assert residual.tolist() == [3.0] * 3 and same_bits(normed, rms_norm(residual, x[0], 1e-6))


def test_a_communicator_that_nobody_closed_holds_nothing(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, dropped)


def a_rank_that_ends() -> None:
    comm = Communicator(max_bytes=SMALL)
    if comm.rank == 1:
        os._exit(0)
    refused(lambda: comm.all_reduce(torch.ones(1)), "rank 1 is gone", error=weft.PeerLost)
    refused(comm.check, "rank 1 is gone", error=weft.PeerLost)
    os._exit(0)


def test_a_rank_that_ends(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, a_rank_that_ends)


def compiled() -> None:
    comm = Communicator(max_bytes=SMALL)
    counts = [3, 1]
    mine = counts[comm.rank]

    def through_methods(x: Tensor, weight: Tensor) -> Tensor:
        x = comm.all_reduce(x * 2)
        x, residual = comm.all_reduce_add_rms_norm(x, x, weight, 1e-6)
        x = comm.reduce_scatterv(x + residual, counts)
        return comm.all_gatherv(x.relu(), counts) + 1

    def through_ops(x: Tensor, weight: Tensor) -> Tensor:
        x = torch.ops.weft.all_reduce(x * 2, comm.name)
        residual, x = torch.ops.weft.all_reduce_add_rms_norm(x, x, weight, 1e-6, comm.name).unbind()
        x = torch.ops.weft.reduce_scatterv(x + residual, counts, comm.name)
        assert x.shape == (mine, 8)
        return torch.ops.weft.all_gatherv(x.relu(), counts, comm.name) + 1

    x, weight = torch.randn(4, 8), torch.nn.Parameter(torch.rand(8))
    expected = through_methods(x, weight)
    for function, backend in ((through_methods, "aot_eager"), (through_ops, "eager")):
        assert torch.equal(torch.compile(function, backend=backend, fullgraph=True)(x, weight), expected)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(4, 8)
        assert through_ops(fake, fake[0]).shape == (4, 8)
        assert torch.ops.weft.all_gatherv(fake[:mine], counts, comm.name).shape == (4, 8)
    ops = {
        "all_reduce": (x,),
        "all_gatherv": (x[:mine], counts),
        "reduce_scatterv": (x, counts),
        "all_reduce_add_rms_norm": (x, x, weight, 1e-6),
    }
    for op, args in ops.items():
        torch.library.opcheck(getattr(torch.ops.weft, op), (*args, comm.name), test_utils=("test_faketensor",))
    for out in (torch.empty(8), torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(4, 8, requires_grad=True)):
        ops = {
            "all_reduce": lambda out=out: comm.all_reduce(x, out=out),
            "all_gatherv": lambda out=out: comm.all_gatherv(x[:mine], counts, out=out),
            "reduce_scatterv": lambda out=out: comm.reduce_scatterv(x, counts, out=out),
        }
        for op, call in ops.items():
            for made in (call, torch.compile(call, backend="eager")):
                refused(made, f"{op}: out")
    bad = x.clone().requires_grad_()
    refused(torch.compile(lambda: comm.all_reduce(bad), backend="eager"), "torch.no_grad()")
    refused(torch.compile(lambda: comm.all_gatherv(x, counts), backend="eager"), "has 4 rows")
    refused(torch.compile(lambda: comm.all_reduce(torch.ones(SMALL)), backend="eager"), "max_bytes=")
    refused(torch.compile(lambda: comm.all_reduce_add_rms_norm(x, bad, weight, 1e-6), backend="eager"), "residual")
    comm.barrier()
    comm.close()
    refused(lambda: torch.ops.weft.all_reduce(x, comm.name), "no communicator", error=RuntimeError)


def test_custom_ops_compile_without_a_break(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, compiled)


def documented_operations() -> None:
    """Check that the page's dtypes equal the ones of `supports`."""
    page = (Path(__file__).parents[2] / "docs" / "guide" / "library.md").read_text()
    table = page[page.index("| operation | CPU |") :].split("\n\n")[0].splitlines()[2:]
    said = {cells[0].strip(" `"): cells[1].strip() for cells in (line.strip("|").split("|") for line in table)}
    assert list(said) == list(OPS)
    with Communicator(max_bytes=SMALL) as comm:
        for op, dtypes in said.items():
            taken = {dtype for dtype in MOVED if comm.supports(op, torch.empty(2, 2, 8, dtype=dtype))}
            assert taken == (set(MOVED) if dtypes == "any" else {getattr(torch, name) for name in dtypes.split(", ")})


def test_the_page_says_what_is_supported(tmp_path: Path) -> None:
    run_ranks(1, tmp_path, documented_operations)


def test_importing_weft_imports_no_torch() -> None:
    code = "import sys, weft; assert 'torch' not in sys.modules; assert set(weft.__all__) <= set(dir(weft))"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(getattr(weft, name) for name in weft.__all__)
    with pytest.raises(AttributeError, match=r"has no attribute 'Comunicator'; it has .*, Communicator"):
        weft.Comunicator  # noqa: B018
