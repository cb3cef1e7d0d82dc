"""How Triton's kernels are launched: straight to the compiled form that an earlier launch like it was given.

A step with a prompt launches about ten kernels a layer, and Triton binds, types and specialises all arguments anew for
each launch, which takes the host longer than a GPU needs for many a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


def cdiv(x: int, y: int) -> int:
    """⌈x / y⌉. (`triton.cdiv`, which kernels may call too, takes the host microseconds.)"""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n, for n of 1 or more; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


class Kernel(JITFunction):
    """A kernel that is launched as any other, `kernel[grid](*tensors, *numbers, **constants)`, at less cost.

    Which compiled form a launch takes follows, by Triton's rules, from the device, from constants and options such as
    num_warps, from each tensor's dtype and whether it begins at a multiple of 16 bytes, and from whether a whole number
    is 1, a multiple of 16, or too large for 32 bits; with `do_not_specialize` only from the last.
    """

    def __init__(self, function: Callable[..., Any], **how: Any):
        super().__init__(function, **how)
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {}
        self._tensors = 0
        self._values: list[int] = []  # which arguments are whole numbers whose value counts,
        self._sizes: list[int] = []  # and of which only the size does

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
            *[x.is_cuda for x in tensors],  # Triton refuses others, and the driver would read from anywhere
            *[address % 16 == 0 for address in addresses],
            *[n if n < 16 else 16 + n % 16 + (n >> 31 << 5) for n in map(args.__getitem__, self._values)],
            *[args[i] >> 31 for i in self._sizes],
        )
        known = self._known.get(key)
        if known is None:
            compiled = self.run(*args, grid=grid, warmup=False, **constants)
            rest = tuple(constants[p.name] for p in self.params[len(args) :])
            self._known[key] = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None), rest
            return
        run, how, rest = known  # as JITFunction.run has it, with no hooks
        stream = driver.active.get_current_stream(device)
        run(*grid, *(1,) * (3 - len(grid)), stream, *how, *addresses, *numbers, *rest)

    def _look(self, args: tuple[Any, ...]) -> None:
        """What is what among the arguments: the same in every launch."""
        self._tensors = sum(hasattr(x, "data_ptr") for x in args)
        whole = [i for i in range(self._tensors, len(args)) if not isinstance(args[i], float)]
        self._values = [i for i in whole if not self.params[i].do_not_specialize]
        self._sizes = [i for i in whole if self.params[i].do_not_specialize]


def kernel(function: Callable[..., Any] | None = None, **how: Any) -> Any:
    """Decorates a function in Triton's language that is launched, as `triton.jit` does; how: as it takes them."""
    if function is None:
        return partial(kernel, **how)
    return triton.jit(function, **how) if knobs.runtime.interpret else Kernel(function, **how)
