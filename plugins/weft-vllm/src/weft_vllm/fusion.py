"""all_reduce, add and RMSNorm as one op in vLLM's compiled graphs."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import VllmConfig
from vllm.distributed import parallel_state

from weft_vllm.options import applied


@torch.library.custom_op("weft_vllm::all_reduce_add_rms_norm", mutates_args=())
def all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group_name: str) -> Tensor:
    """Return `[2, …]`: residual plus the sum of every rank's x, then its RMSNorm.

    The group is looked up by name when the op runs, as compiled graphs are kept in files.
    """
    group = parallel_state._groups[group_name]()
    if group is None:
        raise ValueError(f"group {group_name} is destroyed")
    return group.device_communicator.all_reduce_add_rms_norm(x, residual, weight, eps)


@all_reduce_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group_name: str) -> Tensor:
    return x.new_empty(2, *x.shape)


class FuseNorms(InductorPass):
    """Pass that inserts the op where only a norm with residual reads an all_reduce's sum, whatever eps is."""

    def __call__(self, graph: fx.Graph) -> None:
        for norm in graph.find_nodes(op="call_function", target=torch.ops.vllm_ir.fused_add_rms_norm.default):
            found = self.matched(norm)
            if found is not None:
                self.replace(graph, norm, *found)
        graph.eliminate_dead_code()

    def matched(self, norm: fx.Node) -> tuple[fx.Node, Tensor | fx.Node, fx.Node, float, str] | None:
        """Return the all_reduce before a norm, and (residual, weight, eps, group name); None if it does not fit."""
        x, residual, weight, eps, width = (
            operands(norm).get(name) for name in ("x", "x_residual", "weight", "epsilon", "variance_size")
        )
        if not isinstance(x, fx.Node) or x.target != torch.ops.vllm.all_reduce.default or len(x.users) > 1:
            return None
        if weight is None or width is not None or weight.meta["val"].dtype not in (x.meta["val"].dtype, torch.float32):
            return None
        name = operands(x)["group_name"]
        return (x, residual, weight, eps, name) if name.split(":")[0] == "tp" else None

    def replace(self, graph: fx.Graph, norm: fx.Node, reduced: fx.Node, residual, weight, eps, name) -> None:
        tensor = operands(reduced)["tensor"]
        with graph.inserting_before(norm):
            args = (tensor, residual, weight, eps, name)
            stacked = call(graph, torch.ops.weft_vllm.all_reduce_add_rms_norm.default, args)
            parts = [call(graph, torch.ops.aten.select.int, (stacked, 0, place)) for place in (1, 0)]
        for user in list(norm.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(parts[user.args[1]])
            graph.erase_node(user)


def operands(node: fx.Node) -> dict[str, object]:
    """Return a call's arguments by their names in the op's schema, with defaults for omitted ones."""
    found = {argument.name: argument.default_value for argument in node.target._schema.arguments}
    return found | dict(zip(found, node.args, strict=False)) | node.kwargs


def call(graph: fx.Graph, op: torch._ops.OpOverload, args: tuple) -> fx.Node:
    """Return a node for a call, with the fake result that Inductor wants."""
    node = graph.call_function(op, args)
    fakes = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    with fakes[0].fake_mode:
        node.meta["val"] = op(*fakes)
    return node


class WeftPassManager(PostGradPassManager):
    """vLLM's passes, and the fused norm before those that fuse norms with a quantisation."""

    def configure(self, config: VllmConfig) -> None:
        super().configure(config)
        if applied(config):
            names = [type(each).__name__ for each in self.passes]
            place = names.index("RMSNormQuantFusionPass") if "RMSNormQuantFusionPass" in names else len(names)
            self.passes.insert(place, FuseNorms())
