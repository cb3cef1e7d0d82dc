"""Other libraries' exchanges on GPUs.

NCCL, NCCL over registered windows, torch's symmetric memory, and FlashInfer's kernels: TensorRT-LLM's and vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.transport import CommError, Epilogue
from weft.planner.spec import Mesh
from weft_bench.baselines import groups_of
from weft_bench.harness import Thunk

INSTALL_FLASHINFER = "pip install flashinfer-python==0.7.2.post1"  # as the extra bench-gpu has it


class Baseline:
    """Another implementation of the same exchanges. name: its name in tables. gives_result: a bare call returns the
    result."""

    name: str
    gives_result = False

    def calls(self, edge: str, xs: Sequence[Tensor], sizes: Sequence[int], norm: Epilogue | None = None) -> list[Thunk]:
        """Return a call for each input, with the norm if one is given; none if the case is not supported.

        sizes: rows of each rank, or of each DP group for the mixed edges.
        """
        bare = self.bare(edge, xs, sizes)
        return bare if norm is None else [partial(_then_norm, call, norm) for call in bare]

    def bare(self, edge: str, xs: Sequence[Tensor], sizes: Sequence[int]) -> list[Thunk]:
        """Return the calls without a norm."""
        raise NotImplementedError

    def captured(self) -> None:
        """Prepare the captured calls before the graph's first replay. Collective."""


def _then_norm(call: Thunk, norm: Epilogue) -> None:
    """Run a bare exchange, then an addition and torch's RMSNorm, as an engine does."""
    call()
    torch.nn.functional.rms_norm(norm.residual + norm.residual, norm.weight.shape, norm.weight, norm.eps)


class Nccl(Baseline):
    """torch.distributed's calls over NCCL, in the compositions that engines use where it has no call of its own."""

    name = "nccl"

    def __init__(self, mesh: Mesh, rank: int):
        self._mesh, self._rank, self._groups = mesh, rank, groups_of(mesh, rank)

    def bare(self, edge: str, xs: Sequence[Tensor], sizes: Sequence[int]) -> list[Thunk]:
        """Return a call for each input; NCCL supports every edge."""
        return [self._call(edge, x, sizes) for x in xs]

    def empty(self, like: Tensor, rows: int) -> Tensor:
        """Return memory for a result."""
        return like.new_empty(rows, *like.shape[1:])

    def _call(self, edge: str, x: Tensor, sizes: Sequence[int]) -> Thunk:
        equal, mine = len(set(sizes)) == 1, self._rank
        if edge == "all_reduce":
            return partial(dist.all_reduce, x)
        if edge == "all_gatherv":
            out = self.empty(x, sum(sizes))
            if equal:
                return partial(dist.all_gather_into_tensor, out, x)
            return partial(dist.all_gather, list(out.split(list(sizes))), x)
        if edge == "reduce_scatterv":
            out = self.empty(x, sizes[mine])
            if equal:
                return partial(dist.reduce_scatter_tensor, out, x)
            return partial(dist.reduce_scatter, out, list(x.split(list(sizes))))
        if edge == "all_to_allv":
            return partial(dist.all_to_all_single, self.empty(x, x.shape[0]), x)
        tp, dp = self._groups["attn_tp"], self._groups["attn_dp"]
        if edge == "all_reduce+all_gatherv":
            out = self.empty(x, sum(sizes))

            def gather() -> None:
                dist.all_reduce(x, group=tp)
                dist.all_gather_into_tensor(out, x, group=dp)

            return gather
        assert edge == "reduce_scatterv+all_reduce", edge
        part = self.empty(x, x.shape[0] // self._mesh.attn_dp)

        def scatter() -> None:
            dist.reduce_scatter_tensor(part, x, group=dp)
            dist.all_reduce(part, group=tp)

        return scatter


class NcclWindow(Nccl):
    """NCCL on tensors in memory that it has registered as a symmetric window; no ragged forms there."""

    name = "nccl window"

    def __init__(self, mesh: Mesh, rank: int, device: torch.device, arena_bytes: int):
        self._mesh, self._rank = mesh, rank
        backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self._arena = torch.empty(arena_bytes, dtype=torch.uint8, device=device)
        backend.register_mem_pool(self._pool, symm=True)
        self._used = 0

    def bare(self, edge: str, xs: Sequence[Tensor], sizes: Sequence[int]) -> list[Thunk]:
        """Return a call for each input; none for an edge that windows do not support."""
        if edge not in ("all_reduce", "all_gatherv", "reduce_scatterv") or len(set(sizes)) != 1:
            return []
        self._used = 0
        return [self._call(edge, self.empty(x, x.shape[0]).copy_(x), sizes) for x in xs]

    def empty(self, like: Tensor, rows: int) -> Tensor:
        size = rows * like.shape[1] * like.element_size()
        begin, self._used = self._used, self._used + -(-size // 512) * 512
        return self._arena[begin : begin + size].view(like.dtype).view(rows, like.shape[1])


class SymmetricMemory(Baseline):
    """torch's kernels over symmetric memory: one- and two-shot all_reduce, with no multicast."""

    def __init__(self, shots: str, rank: int, device: torch.device, arena_bytes: int):
        import torch.distributed._symmetric_memory as symm

        self.name = f"symm {shots}-shot"
        self._shots, self._group = shots, dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._arena = symm.empty(arena_bytes // 2, dtype=torch.bfloat16, device=device)
        symm.rendezvous(self._arena, self._group)

    def bare(self, edge: str, xs: Sequence[Tensor], sizes: Sequence[int]) -> list[Thunk]:
        """Return calls of all_reduce on copies in symmetric memory; none for other edges."""
        if edge != "all_reduce" or xs[0].dtype != self._arena.dtype:
            return []
        found: list[Thunk] = []
        for i, x in enumerate(xs):
            mine = self._arena[i * x.numel() : (i + 1) * x.numel()].view(x.shape)
            mine.copy_(x)
            if self._shots == "one":
                found.append(partial(torch.ops.symm_mem.one_shot_all_reduce, mine, "sum", self._group))
            else:
                found.append(partial(torch.ops.symm_mem.two_shot_all_reduce_, mine, "sum", self._group))
        return found


def has_flashinfer() -> bool:
    """Return whether FlashInfer is installed."""
    return find_spec("flashinfer") is not None


def flashinfer_baselines(world: int, rank: int, device: torch.device, max_bytes: int, inputs: int) -> list[Baseline]:
    """Return FlashInfer's implementations for `world` ranks. Collective. Raises CommError if FlashInfer does not load.

    Its kernels are compiled at their first use, for minutes. max_bytes: size of the largest all_reduce; inputs: number
    of inputs in rotation.
    """
    try:
        import flashinfer.comm as comm
    except ImportError as error:
        raise CommError(f"FlashInfer does not load ({error}): {INSTALL_FLASHINFER}") from error
    baselines: list[Baseline] = []
    if world in (2, 4, 8, 16):
        workspace = TrtLlmWorkspace(comm, world, rank, device, max_bytes)
        baselines += [TrtLlm(shots, workspace) for shots in ("one", "two")]
    if world in (2, 4, 6, 8):
        baselines.append(VllmCustom(comm, world, rank, device, max_bytes, inputs))
    return baselines


class _Shared:
    """Memory of every rank, zeroed: plain allocations that the other ranks map through CUDA IPC handles. Collective.

    pointers: addresses of all ranks' memory; mine: this rank's memory.
    """

    def __init__(self, comm: Any, rank: int, device: torch.device, size: int):
        self.pointers: list[int] = comm.create_shared_buffer(size)
        data = {"data": (self.pointers[rank], False), "shape": (size,), "typestr": "|u1", "version": 3}
        self.__cuda_array_interface__ = data
        self.mine = torch.as_tensor(self, device=device).zero_()


class TrtLlmWorkspace:
    """Workspace of TensorRT-LLM's kernels, for bf16 inputs of up to `max_bytes` bytes, in the layout that they expect.

    FlashInfer's own constructors allocate symmetric memory, and an NVLink multicast object that they do not use. This
    workspace is plain memory. lamport_bytes: size of each of the three buffers that one-shot calls rotate through.
    """

    def __init__(self, comm: Any, world: int, rank: int, device: torch.device, max_bytes: int):
        self.comm, self.world, self.rank = comm, world, rank
        self.lamport_bytes = min(world * max_bytes, 1 << 29)  # the kernel multiplies it by up to 2, in an int
        two_shot = _Shared(comm, rank, device, 2 * max_bytes)
        flags = _Shared(comm, rank, device, world * 256 * 4)
        lamport = _Shared(comm, rank, device, 3 * self.lamport_bytes)
        comm.trtllm_lamport_initialize(lamport.pointers[rank], 3 * self.lamport_bytes // 2, torch.float16)
        # Blocks that have come; the flag of two-shot calls; which of the three; the bytes of each; what to clear.
        state = torch.tensor([0, 0, 0, self.lamport_bytes, 0], dtype=torch.int32, device=device)
        self._kept = (two_shot, flags, lamport, state)
        pointers = [*two_shot.pointers, *flags.pointers, *lamport.pointers, state.data_ptr()]
        self.pointers = torch.tensor(pointers, dtype=torch.int64, device=device)
        torch.cuda.synchronize()
        dist.barrier()


class TrtLlm(Baseline):
    """TensorRT-LLM's all_reduce, with the norm in the same kernel, as FlashInfer launches it. shots: one or two."""

    gives_result = True

    def __init__(self, shots: str, workspace: TrtLlmWorkspace):
        self.name, self._one, self._space = f"trtllm {shots}-shot", shots == "one", workspace

    def calls(self, edge: str, xs: Sequence[Tensor], sizes: Sequence[int], norm: Epilogue | None = None) -> list[Thunk]:
        """Return calls of all_reduce in bf16: one shot up to the workspace's size, two with more rows than ranks."""
        x, space = xs[0], self._space
        fits = space.world * x.nbytes <= space.lamport_bytes if self._one else x.shape[0] > space.world
        if edge != "all_reduce" or x.dtype != torch.bfloat16 or not fits:
            return []
        return [partial(self._call, x, x.new_empty(2 if norm else 1, *x.shape), norm) for x in xs]

    def _call(self, x: Tensor, out: Tensor, norm: Epilogue | None) -> Tensor:
        space, patterns = self._space, self._space.comm.AllReduceFusionPattern
        space.comm.trtllm_allreduce_fusion(
            allreduce_in=x,
            world_size=space.world,
            world_rank=space.rank,
            token_num=x.shape[0],
            hidden_dim=x.shape[1],
            workspace_ptrs=space.pointers,
            launch_with_pdl=True,
            trigger_completion_at_end=True,  # like fp32_acc, as FlashInfer's allreduce_fusion has it
            fp32_acc=False,
            pattern_code=patterns.kARResidualRMSNorm if norm else patterns.kAllReduce,
            use_oneshot=self._one,
            allreduce_out=None if norm else out,
            residual_in=norm.residual if norm else None,
            residual_out=out[0] if norm else None,
            norm_out=out[1] if norm else None,
            quant_out=None,
            scale_out=None,
            rms_gamma=norm.weight if norm else None,
            rms_eps=norm.eps if norm else None,
            scale_factor=None,
            layout_code=None,
        )
        return out if norm else out[0]


class VllmCustom(Baseline):
    """vLLM's custom all_reduce, as FlashInfer has it, on inputs in registered memory, as in vLLM's graphs."""

    name, gives_result = "vllm custom", True
    BLOCKS = 36  # what vLLM launches, and the most

    def __init__(self, comm: Any, world: int, rank: int, device: torch.device, max_bytes: int, inputs: int):
        self._comm, self._world = comm, world
        self._max_bytes = -(-max_bytes // 256) * 256
        self._signals = _Shared(comm, rank, device, comm.vllm_meta_size() + self._max_bytes)
        self._inputs = _Shared(comm, rank, device, inputs * self._max_bytes)
        self._pointers = torch.empty(8 << 20, dtype=torch.uint8, device=device)  # 64 bytes a registered input
        torch.cuda.synchronize()
        dist.barrier()
        self._handle = comm.vllm_init_custom_ar(self._signals.pointers, self._pointers, rank, True)

    def bare(self, edge: str, xs: Sequence[Tensor], sizes: Sequence[int]) -> list[Thunk]:
        """Return calls of all_reduce on copies; none for other edges."""
        if edge != "all_reduce":
            return []
        found: list[Thunk] = []
        for i, x in enumerate(xs):
            begin = i * self._max_bytes
            mine = self._inputs.mine[begin : begin + x.nbytes].view(x.dtype).view(x.shape)
            mine.copy_(x)
            self._comm.vllm_register_buffer(self._handle, [pointer + begin for pointer in self._inputs.pointers])
            found.append(partial(self._call, mine, torch.empty_like(x)))
        return found

    def _call(self, x: Tensor, out: Tensor) -> Tensor:
        self._comm.vllm_all_reduce(self._handle, x, out, 0, 0, self.BLOCKS)  # no staging copy: x is registered
        return out

    def captured(self) -> None:
        """Give the kernels in the graph the addresses of each other's inputs."""
        everyones: list[Any] = [None] * self._world
        dist.all_gather_object(everyones, self._comm.vllm_get_graph_buffer_ipc_meta(self._handle))
        handles, offsets = zip(*everyones, strict=True)
        self._comm.vllm_register_graph_buffers(self._handle, list(handles), list(offsets))
