"""Programmatic dependent launch: a kernel's programs are started while the last ones of the kernel before still run.

Between two kernels of a stream a GPU otherwise idles for about a microsecond, which the hundreds of short kernels of a
decode step feel (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; Hopper and later).
A kernel that is launched with `options()` calls `begin` before all else but `prefetch`, in every one of its programs:
that it has ended then says that all kernels before it have ended, too.
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
LINE = tl.constexpr(128)
"""Bytes of a line of a GPU's caches."""


@triton.jit
def begin():
    """Waits until the kernel before has ended and what it wrote can be read; then the next one may be started.

    So all kernels but the last one before had ended when this one was started: what they wrote may be read without
    waiting, by loads with cache modifier ".cg", as L1 may hold older values.
    """
    if not INTERPRETED and cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers, wanted):
    """Asks for the lines of memory at a block of pointers to be brought into L2; for none where wanted is false.

    Nothing is read into the program, so this may come before `begin`, for what no kernel writes, such as weights; for
    addresses that come out of memory see there. One pointer for each `LINE` bytes is enough.
    """
    if not INTERPRETED and cuda_capability_geq(9, 0):
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r",
            [pointers.to(tl.int64), wanted.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch_run(first, count):
    """Asks for `count` contiguous elements to be brought into L2, as `prefetch` does for lines: by one instruction.

    first: a pointer to the first of them, at a multiple of 16 bytes, as long is the run, too.
    """
    if not INTERPRETED and cuda_capability_geq(9, 0):
        BYTES: tl.constexpr = first.dtype.element_ty.primitive_bitwidth // 8
        tl.inline_asm_elementwise(
            """{
                .reg .pred chosen; .reg .b32 thread;
                mov.u32 thread, %tid.x;
                setp.eq.u32 chosen, thread, 0;
                setp.gt.and.s32 chosen, $2, 0, chosen;
                @chosen cp.async.bulk.prefetch.L2.global [$1], $2;
                mov.b32 $0, 0;
            }""",
            "=r,l,r",
            [first.to(tl.int64), count * BYTES],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@cache
def options() -> dict[str, bool]:
    """Of a launch of a kernel that calls `begin`."""
    if knobs.runtime.interpret:
        return {}
    return {"launch_pdl": driver.active.get_current_target().arch >= LEAST_ARCH}
