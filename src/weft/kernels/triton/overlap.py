"""Programmatic dependent launch: a kernel's programs are started while the last ones of the kernel before still run.

Between two kernels of a stream a GPU otherwise idles for about a microsecond, which the hundreds of short kernels of a
decode step feel (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; Hopper and later).
A kernel that is launched with `options()` calls `begin` before it reads what the kernel before wrote, and before it
writes, in every one of its programs: that it has ended then says that all kernels before it have ended, too.
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
LEAST_ARCH = 90


@triton.jit
def begin():
    """Waits until the kernel before has ended and what it wrote can be read; then the next one may be started.

    So all kernels but the last one before had ended when this one was started: what they wrote may be read without
    waiting, by loads with cache modifier ".cg", as L1 may hold older values.
    """
    if not INTERPRETED and cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()


@cache
def options() -> dict[str, bool]:
    """Of a launch of a kernel that calls `begin`."""
    if knobs.runtime.interpret:
        return {}
    return {"launch_pdl": driver.active.get_current_target().arch >= LEAST_ARCH}
