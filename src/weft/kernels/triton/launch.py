"""Faster launches of Triton's kernels: a launch reuses the compiled kernel of an earlier launch like it.

A step with a prompt launches about ten kernels a layer. For each launch Triton binds, types and specialises all
arguments again, which costs the host more time than many of the kernels run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor


def cdiv(x: int, y: int) -> int:
    """Return ⌈x / y⌉. (`triton.cdiv` costs the host microseconds.)"""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n, for n of 1 or more; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


class Gpu(NamedTuple):
    """Properties of a GPU that determine tiles. shared_bytes: maximum shared memory of a program."""

    multiprocessors: int
    shared_bytes: int


H200 = Gpu(132, 227 << 10)
"""GPU on which tiles were measured."""
DEFAULT_STAGES = 3
"""Triton's default of num_stages."""


@cache
def gpu() -> Gpu:
    """Return the GPU of this process; in the interpreter an H200."""
    if knobs.runtime.interpret:
        return H200
    has = driver.active.utils.get_device_properties(driver.active.get_current_device())
    return Gpu(has["multiprocessor_count"], has["max_shared_mem"])


def arch() -> int:
    """Return the architecture of this process's GPU, as 90 for sm_90; in the interpreter an H200's."""
    return 90 if knobs.runtime.interpret else driver.active.get_current_target().arch


def scaled(programs: int) -> int:
    """Scale a number of programs for an H200 to this GPU's multiprocessors; at least one."""
    return max(1, programs * gpu().multiprocessors // H200.multiprocessors)


def persistent(blocks: int) -> int:
    """Return the number of programs that loop over blocks: two for each multiprocessor, none without a block."""
    return min(2 * gpu().multiprocessors, blocks)


class Kernel(JITFunction):
    """Kernel that is launched as usual, `kernel[grid](*tensors, *descriptors, *numbers, **constants)`, at less cost.

    Triton's rules select the compiled kernel of a launch by the device; constants and options such as num_warps; each
    tensor's dtype and whether it begins at a multiple of 16 bytes; whether an integer is 1, a multiple of 16, or too
    large for 32 bits (with `do_not_specialize` only the last of these); and the dtype and block of each
    TensorDescriptor. A launch encodes a descriptor from its tensor into the kernel's own parameters: a CUDA graph holds
    it.
    """

    def __init__(self, function: Callable[..., Any], **how: Any):
        super().__init__(function, **how)
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {}
        self._tensors = 0
        self._descriptors = slice(0)
        self._values: list[int] = []  # indices of the integer arguments that Triton specialises by value
        self._sizes: list[int] = []  # indices of those specialised by size alone

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if not self._known:
            self._look(args)
        tensors, numbers = args[: self._tensors], args[self._tensors :]
        addresses = [x.data_ptr() for x in tensors]
        device = driver.active.get_current_device()
        key = (
            device,
            *constants,
            *constants.values(),
            *[x.dtype for x in tensors],
            *[x.is_cuda for x in tensors],  # Triton refuses CPU tensors, and the driver would read any address
            *[address % 16 == 0 for address in addresses],
            *[(x.base.dtype, x.base.is_cuda, *x.block_shape) for x in args[self._descriptors]],
            *[n if n < 16 else 16 + n % 16 + (n >> 31 << 5) for n in map(args.__getitem__, self._values)],
            *[args[i] >> 31 for i in self._sizes],
        )
        known = self._known.get(key)
        if known is None:
            compiled = self.run_fitting(*args, grid=grid, warmup=False, **constants)
            rest = tuple(constants[p.name] for p in self.params[len(args) :])
            self._known[key] = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None), rest
            return
        run, how, rest = known  # launched as JITFunction.run launches it, with no hooks
        stream = driver.active.get_current_stream(device)
        run(*grid, *(1,) * (3 - len(grid)), stream, *how, *addresses, *numbers, *rest)

    def run_fitting(self, *args: Any, **constants: Any) -> Any:
        """Run with fewer stages of the pipeline of loads if the GPU's shared memory is too small.

        The bits do not depend on the stages. Raises OutOfResources if one stage does not fit.
        """
        stages = constants.get("num_stages", DEFAULT_STAGES)
        try:
            return self.run(*args, **constants)
        except OutOfResources:
            if stages == 1:
                raise
        return self.run_fitting(*args, **constants | {"num_stages": stages - 1})

    def _look(self, args: tuple[Any, ...]) -> None:
        """Find the tensors, descriptors and integers among the arguments: the same in every launch."""
        self._tensors = sum(hasattr(x, "data_ptr") for x in args)
        first = self._tensors + sum(isinstance(x, TensorDescriptor) for x in args)
        self._descriptors = slice(self._tensors, first)
        whole = [i for i in range(first, len(args)) if not isinstance(args[i], float)]
        self._values = [i for i in whole if not self.params[i].do_not_specialize]
        self._sizes = [i for i in whole if self.params[i].do_not_specialize]


def kernel(function: Callable[..., Any] | None = None, **how: Any) -> Any:
    """Decorate a function in Triton's language. It is launched as with `triton.jit`; how: its options."""
    if function is None:
        return partial(kernel, **how)
    return triton.jit(function, **how) if knobs.runtime.interpret else Kernel(function, **how)
