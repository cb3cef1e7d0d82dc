"""Kernels on CPUs (`csrc/model`), and the rule by which they run instead of torch: see `covers`.

A result's bits depend neither on the other rows, nor on the number of threads, nor on the CPU's instruction set.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from weft.kernels.build import BuildError, model_kernels
from weft.kernels.float8 import Fp8Rows, unfilled
from weft.kernels.torch_reference import UnfilledRows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNEL = "weft kernel "
"""First characters of a kernel's range in torch's profiler."""
BLOCK, MAX_ROWS = 16, 32
"""Rows that kernels multiply at a time, and maximum rows of a product, unless AMX multiplies bfloat16."""
MAX_COLUMNS = 1024
"""Maximum columns of FP8 values that share a scale."""
_log = logging.getLogger(__name__)


class Recorders(threading.local):
    """Recorder of the calling thread: `note(name, function, arguments)` is called after each kernel. None: none."""

    note: Callable[[str, Any, Sequence[object]], None] | None = None


recorders = Recorders()


@cache
def missing() -> str | None:
    """Return why this host has no kernels, after one warning if they do not compile; None: it has."""
    try:
        if model_kernels().isa() == "scalar":
            return "they have no vector form for this processor"
    except BuildError as error:
        _log.warning("weft: torch computes all products on this CPU, which is slower: %s", error)
        return str(error)
    return None


def covers(x: Tensor, *others: Tensor | None) -> bool:
    """Return True if kernels run for these tensors: on a CPU, not empty, in one dtype of DTYPES, with a dense last
    dimension. Products run for rows that `multiplies` allows."""
    dtype = x.dtype
    if dtype not in DTYPES or not x.is_cpu or not x.numel() or x.stride(-1) != 1:
        return False
    for y in others:  # a generator would cost as much as all else here
        if y is not None and (y.dtype != dtype or y.stride(-1) != 1):
            return False
    return missing() is None


def multiplies(x: Tensor) -> bool:
    """Return True if kernels multiply this number of rows: up to MAX_ROWS, or by AMX any number of bfloat16 rows."""
    return len(x) <= MAX_ROWS or (x.dtype == torch.bfloat16 and isa() == "amx")


def isa() -> str | None:
    """Return the instruction set of the kernels that run; None: torch computes."""
    return str(model_kernels().isa()) if missing() is None else None


def run(kernel: str, *args: object) -> None:
    """Run a kernel by torch's number of threads, as a range in torch's profiler while that records."""
    function, threads = _function(kernel), torch.get_num_threads()
    if not torch._C._autograd._profiler_enabled():
        function(*args, threads)
    else:
        with record_function(f"{KERNEL}{kernel}"):
            function(*args, threads)
    if recorders.note is not None:
        recorders.note(f"{KERNEL}{kernel}", function, (*args, threads))


@cache
def _function(kernel: str) -> Any:
    return getattr(model_kernels(), kernel)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, quantised: UnfilledRows | None = None) -> Tensor | None:
    """Compute `weft.kernels.torch_reference.rms_norm`; None: not covered."""
    if not _normalises(x, weight):
        return None
    out, width = torch.empty(x.shape, dtype=x.dtype), x.shape[-1]
    run("norm", x.reshape(-1, width), None, weight, eps, None, out.view(-1, width))
    _fill(quantised, out)
    return out


def add_rms_norm(
    residual: Tensor, delta: Tensor, weight: Tensor, eps: float, *, quantised: UnfilledRows | None = None
) -> tuple[Tensor, Tensor] | None:
    """Compute `weft.kernels.torch_reference.add_rms_norm`; None: not covered."""
    if residual.shape != delta.shape or residual.dim() != 2:
        return None
    if not _normalises(residual, weight) or not covers(delta, residual):
        return None
    total, out = torch.empty(residual.shape, dtype=residual.dtype), torch.empty(residual.shape, dtype=residual.dtype)
    run("norm", residual, delta, weight, eps, total, out)
    _fill(quantised, out)
    return total, out


def quantise(x: Tensor, group_size: int) -> Fp8Rows | None:
    """Compute `weft.kernels.float8.quantise`; None: not covered."""
    if x.dim() != 2 or group_size > MAX_COLUMNS or not covers(x):
        return None
    made = unfilled(x, group_size)
    run("quantise", x, *made)
    return made


def _fill(rows: UnfilledRows | None, x: Tensor) -> None:
    if isinstance(rows, Fp8Rows) and rows.group_size <= MAX_COLUMNS:
        run("quantise", x, *rows)
    elif rows is not None:
        rows.fill(x)


def _normalises(x: Tensor, weight: Tensor) -> bool:
    return covers(x) and weight.dtype in (x.dtype, torch.float32) and weight.is_contiguous()
