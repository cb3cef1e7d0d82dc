"""Kernels on a second stream of the GPU, which CUDA graphs capture as a branch.

A kernel of few rows is bound by latency and leaves most of the GPU idle. So two independent chains of such kernels take
hardly longer than one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

MAX_ROWS = 256
"""Maximum rows. Larger kernels fill the GPU, and memory of the second stream is not reused for the first."""
T = TypeVar("T")


def nothing() -> None:
    """Wait for nothing."""


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the second stream of a GPU."""
    return torch.cuda.Stream(device)


def on_side_stream(function: Callable[[], T], like: Tensor) -> tuple[T, Callable[[], None]]:
    """Return function's result, and a callable to call before the result is read or dropped.

    If like has few rows and is on a GPU, function's kernels run concurrently with the kernels that the caller launches
    until that call. They may read earlier results, and must not write what the caller's kernels read.
    """
    if not like.is_cuda or len(like) > MAX_ROWS:
        return function(), nothing
    current, side = torch.cuda.current_stream(like.device), side_stream(like.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        result = function()
    return result, lambda: current.wait_stream(side)
