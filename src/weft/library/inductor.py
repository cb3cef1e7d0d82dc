"""Inductor's lowering of collectives, which keeps their order.

Inductor keeps ops that are registered as effects, but its scheduler swaps ops that share no tensor. In its own class of
effectful kernels each one reads the previous one, which no pass can swap.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch._ops import OpOverload
from torch.utils import _pytree as pytree


def keep_order(ops: Sequence[OpOverload]) -> None:
    """Register the lowerings once Inductor is imported: that costs seconds, and not every program compiles."""
    inductor = sys.modules.get("torch._inductor.lowering")
    if inductor is None or ops[0] in inductor.lowerings:
        return
    for op in ops:
        inductor.register_lowering(op, type_promotion_kind=None)(partial(_lowered, op))


def _lowered(op: OpOverload, *arguments: Any) -> Any:
    from torch._inductor import ir

    def boxed(x: Any) -> Any:
        return ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x

    return pytree.tree_map(boxed, ir.EffectfulKernel.create(op, *arguments))
