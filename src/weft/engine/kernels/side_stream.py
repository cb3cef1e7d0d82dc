"""Kernels beside others: on a second stream of the GPU, which CUDA graphs capture as a branch.

A kernel of few rows takes as long as its latency, and leaves most of the GPU idle. Two chains of such kernels that do
not need each other's results take hardly longer than one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

MAX_ROWS = 256
"""Kernels of more rows fill the GPU; memory of the second stream is not used again for tensors of the first."""
T = TypeVar("T")


def nothing() -> None:
    """There is nothing to wait for."""


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The second stream of a GPU."""
    return torch.cuda.Stream(device)


def beside(function: Callable[[], T], like: Tensor) -> tuple[T, Callable[[], None]]:
    """function's result, and what the caller has to call before the result is read, or given up.

    Where like has few rows and lies on a GPU, function's kernels run beside those that the caller launches until then.
    They may read what was launched before, and must not write what the caller's kernels read.
    """
    if not like.is_cuda or len(like) > MAX_ROWS:
        return function(), nothing
    here, side = torch.cuda.current_stream(like.device), side_stream(like.device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        made = function()
    return made, lambda: here.wait_stream(side)
