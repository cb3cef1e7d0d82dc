"""Trial of a GPU in a process of its own, which sees no other: run as a script, it prints why the GPU cannot be used.

It calls the driver without torch, so it takes well under a second, and a driver that hangs or crashes does no harm.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

TRIAL_S = 60.0
"""Seconds after which a GPU that does not finish the trial counts as unusable."""
BYTES = 1 << 20
OUT_OF_MEMORY = 2
"""The driver's code for a GPU that is in use by others."""


def unusable(gpu: str) -> str:
    """Return why a GPU cannot be used, in one line; empty if it can, or if there is no driver to try it with.

    gpu: its UUID, as CUDA_VISIBLE_DEVICES takes it.
    """
    command, environ = [sys.executable, "-I", "-S", __file__], os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
    trial = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        said, _ = trial.communicate(timeout=TRIAL_S)
    except subprocess.TimeoutExpired:
        trial.kill()  # and do not wait: it may sleep in the driver for ever
        return f"the driver did not return within {TRIAL_S:g} s"
    return said.strip() or (f"the driver ended the trial with {trial.returncode}" if trial.returncode else "")


def try_gpu() -> str:
    """Write to the only visible GPU and read back. Returns the driver's error in one line; empty without one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    device, context, memory, back = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64(), (ctypes.c_ubyte * BYTES)()
    size = ctypes.c_size_t(BYTES)
    calls = (
        (cuda.cuInit, 0),
        (cuda.cuDeviceGet, ctypes.byref(device), 0),
        (cuda.cuDevicePrimaryCtxRetain, ctypes.byref(context), device),
        (cuda.cuCtxSetCurrent, context),
        (cuda.cuMemAlloc_v2, ctypes.byref(memory), size),
        (cuda.cuMemsetD8_v2, memory, ctypes.c_ubyte(7), size),
        (cuda.cuMemcpyDtoH_v2, back, memory, size),
    )
    for call, *arguments in calls:
        if code := call(*arguments):
            text = ctypes.c_char_p()
            cuda.cuGetErrorString(code, ctypes.byref(text))
            error = f"{call.__name__} failed with CUDA error {code}, {(text.value or b'unknown').decode()}"
            return "" if code == OUT_OF_MEMORY else error
    return "" if set(back) == {7} else "its memory does not hold what is written"


if __name__ == "__main__":
    print(try_gpu())
