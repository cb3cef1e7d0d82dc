"""Ops between collectives with a torch form and a Triton form, and the function that joins two forms.

An op accepts the arguments of its torch form, and has its docstring. If the first argument is on a GPU, the Triton form
runs instead. Its arithmetic is in float32, and a result is rounded once, when it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from weft.kernels import float8, torch_reference

P = ParamSpec("P")
R = TypeVar("R")


def on_gpu(x: Any) -> bool:
    """Return True if Triton forms run for this first argument: a tensor, or a tuple of tensors with `is_cuda`."""
    return bool(x.is_cuda)


@cache
def _module(name: str) -> ModuleType:
    return import_module(name)  # when first needed: a CPU need not have Triton


def op(torch_form: Callable[P, R], triton_form: str) -> Callable[P, R]:
    """Return the op of two forms. triton_form: `module.function`, the module by its full name."""
    module, _, name = triton_form.rpartition(".")

    @wraps(torch_form)
    def run(*args: P.args, **more: P.kwargs) -> R:
        if not on_gpu(args[0]):
            return torch_form(*args, **more)
        found: R = getattr(_module(module), name)(*args, **more)
        return found

    return run


rms_norm = op(torch_reference.rms_norm, "weft.kernels.triton.rms_norm.rms_norm")
add_rms_norm = op(torch_reference.add_rms_norm, "weft.kernels.triton.rms_norm.add_rms_norm")
quantise = op(float8.quantise, "weft.kernels.triton.float8_rows.quantise")
scale_shard = op(torch_reference.scale_shard, "weft.kernels.triton.merge.scale_shard")
pack_shard = op(torch_reference.pack_shard, "weft.kernels.triton.merge.pack_shard")
merge_packed = op(torch_reference.merge_packed, "weft.kernels.triton.merge.merge_packed")
