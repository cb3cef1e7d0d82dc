"""Ops between collectives with a torch form, a Triton form and a form for CPUs, and the function that joins the forms.

An op accepts the arguments of its torch form, and has its docstring. If the first argument is on a GPU, the Triton form
runs instead. On CPUs the native form runs, unless it returns None: `weft.kernels.cpu_rows` has the rule. Both compute
in float32, and round a result once, when it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

from weft.kernels import cpu_rows, float8, torch_reference

P = ParamSpec("P")
R = TypeVar("R")


def on_gpu(x: Any) -> bool:
    """Return True if Triton forms run for this first argument: a tensor, or a tuple of tensors with `is_cuda`."""
    return bool(x.is_cuda)


@cache
def _module(name: str) -> ModuleType:
    return import_module(name)  # when first needed: a CPU need not have Triton


def op(torch_form: Callable[P, R], triton_form: str, cpu_form: Callable[P, R | None] | None = None) -> Callable[P, R]:
    """Return the op of these forms; `torch_form` is its definition.

    Args:
        triton_form: `module.function`, the module by its full name.
        cpu_form: returns None for arguments that the torch form is to compute.
    """
    module, _, name = triton_form.rpartition(".")

    @wraps(torch_form)
    def run(*args: P.args, **more: P.kwargs) -> R:
        found: R | None
        if on_gpu(args[0]):
            found = getattr(_module(module), name)(*args, **more)
        else:
            found = None if cpu_form is None else cpu_form(*args, **more)
            found = torch_form(*args, **more) if found is None else found
        return cast(R, found)

    return run


rms_norm = op(torch_reference.rms_norm, "weft.kernels.triton.rms_norm.rms_norm", cpu_rows.rms_norm)
add_rms_norm = op(torch_reference.add_rms_norm, "weft.kernels.triton.rms_norm.add_rms_norm", cpu_rows.add_rms_norm)
quantise = op(float8.quantise, "weft.kernels.triton.float8_rows.quantise", cpu_rows.quantise)
scale_shard = op(torch_reference.scale_shard, "weft.kernels.triton.merge.scale_shard")
pack_shard = op(torch_reference.pack_shard, "weft.kernels.triton.merge.pack_shard")
merge_packed = op(torch_reference.merge_packed, "weft.kernels.triton.merge.merge_packed")
