"""An all_reduce and a fused norm of one of vLLM's groups, by each of what can carry it, in one run on the same GPUs.

    torchrun --nproc-per-node 2 kernels.py --json kernels.json

Weft, vLLM's custom all-reduce, NCCL (by vLLM's PyNccl), and SGLang's CustomAllReduceV2 where sglang is installed; each
result is compared with NCCL's. On GPUs calls run in a CUDA graph of --calls, captured as vLLM captures; figures are
µs a call, the median of --replays, the slowest rank's. Nothing that takes multicast objects is turned on. On CPUs
(--device cpu) the same calls run without graphs, to see that the script works.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import rms_norm

Call = Callable[[], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    os.environ |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    group = group_of(rank, world, options.device)
    other, rows = sglang(group, options.device), []
    for count in options.rows:
        x, residual = (torch.randn(count, options.hidden, device=options.device).to(torch.bfloat16) for _ in range(2))
        weight = torch.ones(options.hidden, device=options.device, dtype=torch.bfloat16)
        given = x.clone()  # the calls' input: SGLang's overwrites it with the sum in graphs, from a size on
        for op, carrier, call in calls(group, other, given, residual, weight):
            row = {"op": op, "carrier": carrier, "rows": count, "us": timed(call, group, other, options)}
            given.copy_(x)
            row["error"] = error(call(), expected(op, x, residual, weight))
            rows.append(row)
            if rank == 0:
                print(json.dumps(row), flush=True)
    if rank == 0 and options.json:
        import vllm

        about = {"vllm": getattr(vllm, "__version__", None), "torch": torch.__version__, "hidden": options.hidden}
        about["device"] = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        lines = ",\n ".join(json.dumps(row) for row in rows)
        options.json.write_text(f'{{"about": {json.dumps(about)}, "rows": [\n {lines}\n]}}\n')
    group.destroy()
    dist.destroy_process_group()


def group_of(rank: int, world: int, device: str) -> Any:
    """Return vLLM's tensor-parallel group, made with the plug-in."""
    import weft_vllm
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import GroupCoordinator

    weft_vllm.register()
    with set_current_vllm_config(VllmConfig()):
        backend = "nccl" if device == "cuda" else "gloo"
        group = GroupCoordinator([list(range(world))], rank, backend, True, group_name="tp")
    if group.device_communicator.weft is None:
        raise SystemExit("weft-vllm is off; its line above says why")
    return group


def calls(group: Any, other: Any, x: Tensor, residual: Tensor, weight: Tensor) -> list[tuple[str, str, Call]]:
    """Return (op, carrier, call) of each carrier that supports x. other: SGLang's, if there is one."""
    comm = group.device_communicator
    reduces: dict[str, Call] = {"weft": lambda: comm.weft.all_reduce(x)}
    custom, nccl = getattr(comm, "ca_comm", None), getattr(comm, "pynccl_comm", None)
    if custom is not None and not custom.disabled and custom.should_custom_ar(x):
        reduces["vLLM custom"] = lambda: custom.custom_all_reduce(x)
    if nccl is not None and not nccl.disabled:
        reduces["NCCL"] = lambda: nccl.all_reduce(x)
    if other is not None and not other.disabled and other.should_custom_ar(x):
        reduces["SGLang v2"] = lambda: other.custom_all_reduce(x)

    def then_norm(reduce: Call) -> Call:
        def call() -> Tensor:
            return rms_norm(residual + reduce(), weight.shape, weight, 1e-6)

        return call

    norms = {f"{name}, then a norm": then_norm(reduce) for name, reduce in reduces.items()}
    norms["weft, fused"] = lambda: comm.all_reduce_add_rms_norm(x, residual, weight, 1e-6)[1]
    return [
        *(("all_reduce", name, call) for name, call in reduces.items()),
        *(("all_reduce+norm", name, call) for name, call in norms.items()),
    ]


def sglang(group: Any, device: str) -> Any:
    """Return SGLang's CustomAllReduceV2 over the group, if SGLang is installed."""
    if find_spec("sglang") is None or device == "cpu":
        return None
    module = import_module("sglang.srt.distributed.device_communicators.custom_all_reduce_v2")
    return module.CustomAllReduceV2(group=group.cpu_group, device=group.device)


def expected(op: str, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """Return the result in float32, by torch.distributed."""
    total = x.float()
    dist.all_reduce(total)
    return total if op == "all_reduce" else rms_norm(total + residual.float(), weight.shape, weight.float(), 1e-6)


def error(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, in units of bfloat16's precision at the largest value."""
    return float((got.float() - want).abs().max() / want.abs().max() * 2**8)


def timed(call: Call, group: Any, other: Any, options: argparse.Namespace) -> float:
    """Return µs per call: the median of the replays, of the slowest rank."""
    call()
    replay: Callable[[], object]
    if options.device == "cuda":
        graph = torch.cuda.CUDAGraph()
        registering = other.capture() if other is not None else nullcontext()
        with registering, group.graph_capture() as context, torch.cuda.graph(graph, stream=context.stream):
            for _ in range(options.calls):
                call()
        replay = graph.replay
    else:

        def replay() -> None:
            for _ in range(options.calls):
                call()

    times = []
    for _ in range(options.replays):
        dist.barrier(group.cpu_group)
        replay()  # ranks start at different times, and have met at its end
        begin = stamp(options.device)
        replay()
        times.append(microseconds(begin, stamp(options.device)))
    slowest = torch.tensor([statistics.median(times) / options.calls])
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group.cpu_group)
    return round(float(slowest), 3)


def stamp(device: str) -> Any:
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def microseconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return (end - begin) * 1e6
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


if __name__ == "__main__":
    main()
