"""Programmatic dependent launch: a kernel's programs start while the last programs of the previous kernel still run.

Between two kernels of a stream a GPU otherwise idles for about a microsecond, and a decode step has hundreds of short
kernels (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; Hopper and later). Every
program of a kernel launched with `options()` calls `begin` before it reads the previous kernel's output, and before it
writes. When the previous kernel has ended, all kernels before it have ended, too.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq
from triton.runtime.driver import driver

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
MIN_ARCH = 90


@triton.jit
def begin():
    """Wait until the previous kernel has ended and its writes can be read; then the next kernel may start.

    All kernels before the previous one had ended when this one started. So their writes may be read without waiting, by
    loads with cache modifier ".cg": L1 may hold older values.
    """
    if not INTERPRETED and cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()


@cache
def options() -> dict[str, bool]:
    """Return the launch options of a kernel that calls `begin`."""
    if knobs.runtime.interpret:
        return {}
    return {"launch_pdl": driver.active.get_current_target().arch >= MIN_ARCH}
