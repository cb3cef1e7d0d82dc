"""Launches by `weft.kernels.triton.launch` give a GPU what Triton's own would, the first time and every time after."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs triton, which the extra gpu brings")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from weft.kernels.triton.launch import Kernel, cdiv, next_power_of_2  # noqa: E402


def _add(x, out, rows, stride, factor, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i.to(tl.int64) * stride, mask=i < rows, other=0.0) * factor
    if TWICE is not None:
        value *= TWICE
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < rows)


class Launcher:
    """Stand-in for Triton's launcher of compiled kernels; it notes the launches that it is asked for."""

    seen: list[tuple[Any, ...]]

    def __init__(self, src: Any, metadata: Any):
        self._form = str((src.signature, src.constants, src.attrs, metadata.num_warps))

    def __call__(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        function, _metadata, _launch, _enter, _exit, *args = rest
        given = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        Launcher.seen.append((self._form, function, (x, y, z), stream, given))


class NoGpu:
    """Stands in for Triton's driver, with two GPUs that there would be; as `utils` it loads nothing."""

    launcher_cls = Launcher
    device = 0

    @property
    def utils(self) -> NoGpu:
        return self

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 7 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[int, ...]:
        return 1, 2 + device, 3, 4, 1024


def cases() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments of launches, of which each differs from the first in what decides the form, or in nothing of it."""
    memory = torch.empty(256)
    x, out, small = memory[:64], memory[64:128], memory.bfloat16()
    constants = dict(BLOCK=32, TWICE=None, num_warps=1)
    args = [
        (x, out, 5, 16, 0.5),
        (x[1:], out, 5, 16, 0.5),  # begins at no multiple of 16 bytes
        (x, out[2:], 5, 16, 0.5),
        (x[4:], out[8:], 5, 16, 0.5),
        (small, out, 5, 16, 0.5),
        (x, small, 5, 16, 0.5),
        (x, out, 5, 1, 0.5),
        (x, out, 5, 3, 0.5),
        (x, out, 5, 17, 0.5),  # as 3
        (x, out, 5, 32, 16.25),
        (x, out, 1, 16, 0.5),  # of rows only the size counts
        (x, out, 16, 16, 0.5),
        (x, out, 1 << 31, 16, 0.5),
        (x, out, 5, 1 << 40, 0.5),
        (x, out, 5, (1 << 40) + 1, 0.5),
        (x, out, -5, -16, 0.5),
    ]
    more = [dict(BLOCK=64), dict(TWICE=2.0), dict(num_warps=4)]
    return [(a, constants) for a in args] + [(args[0], constants | change) for change in more]


def test_every_launch_is_what_triton_would_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, plain, kernel = (
        NoGpu(),
        triton.JITFunction(_add, do_not_specialize=["rows"]),
        Kernel(_add, do_not_specialize=["rows"]),
    )
    monkeypatch.setattr(driver, "_active", gpu)
    launches = [(device, *case) for device in (0, 1) for case in cases()] * 3  # the last ones have all been met
    random.shuffle(launches)
    found = []
    for launched in (plain, kernel):
        monkeypatch.setattr(Launcher, "seen", [], raising=False)
        for at, (device, args, constants) in enumerate(launches):
            gpu.device = device
            launched[(at + 1, *(2,) * (at % 3))](*args, **constants)
        found.append(Launcher.seen)
    assert found[0] == found[1]
    assert len({form for form, *_ in found[0]}) == 13, "the cases differ in what they are meant to"


def test_compiles_once_for_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_active", NoGpu())
    monkeypatch.setattr(Launcher, "seen", [], raising=False)
    kernel, ran = Kernel(_add, do_not_specialize=["rows"]), []
    monkeypatch.setattr(kernel, "run", lambda *a, run=kernel.run, **how: ran.append(a) or run(*a, **how))
    x, out = torch.empty(64), torch.empty(64)
    for rows in (5, 1, 16, 64):
        kernel[(1,)](x, out, rows, 16, 0.5, BLOCK=32, TWICE=None)
    assert len(ran) == 1 and len(Launcher.seen) == 4


class OnGpu(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


def test_a_tensor_of_a_cpu_is_left_to_triton_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch like it was met before, with tensors of a GPU: the driver would read the CPU's memory from there."""
    monkeypatch.setattr(driver, "_active", NoGpu())
    monkeypatch.setattr(Launcher, "seen", [], raising=False)
    kernel, ran = Kernel(_add, do_not_specialize=["rows"]), []
    monkeypatch.setattr(kernel, "run", lambda *a, run=kernel.run, **how: ran.append(a) or run(*a, **how))
    here = torch.empty(64)
    there = here.as_subclass(OnGpu)
    for x, out in ((there, there), (there, there), (there, here), (here, there)):
        kernel[(1,)](x, out, 5, 16, 0.5, BLOCK=32, TWICE=None)
    assert [[type(tensor) for tensor in args[:2]] for args in ran] == [
        [OnGpu, OnGpu],
        [OnGpu, torch.Tensor],
        [torch.Tensor, OnGpu],
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 127, 128, 129, 1 << 20])
def test_host_arithmetic(n: int) -> None:
    assert next_power_of_2(n) == triton.next_power_of_2(n) and next_power_of_2(0) == triton.next_power_of_2(0) == 0
    assert [cdiv(n, by) for by in (1, 2, 3, 128)] == [triton.cdiv(n, by) for by in (1, 2, 3, 128)]


def _copy_blocks(out, x, rows, BLOCK: tl.constexpr):
    block = x.load([tl.program_id(0) * BLOCK, 0])
    i, j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, 64)
    tl.store(out + i[:, None] * 64 + j[None, :], block, mask=(i < rows)[:, None])


def test_launches_with_descriptors_are_what_triton_would_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_active", NoGpu())
    memory, out = torch.empty(2, 64, 64, dtype=torch.bfloat16), torch.empty(64, 64, dtype=torch.bfloat16)
    cases = [(x, block) for block in (16, 32) for x in (memory[0], memory[1], memory[1].view(torch.float16))]
    found = []
    for launched in (triton.JITFunction(_copy_blocks), Kernel(_copy_blocks)):
        monkeypatch.setattr(Launcher, "seen", [], raising=False)
        for x, block in cases * 2:
            launched[(4,)](out, TensorDescriptor.from_tensor(x, [block, 64]), 48, BLOCK=block)
        found.append(Launcher.seen)
    assert found[0] == found[1] and len({form for form, *_ in found[0]}) == 4
