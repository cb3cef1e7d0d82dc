"""The planner with a model of one's own: torchrun --nproc-per-node 2 examples/planned_model.py

Blocks read normalised rows from a stream and add what they computed, with the sum that it owes; the planner chooses the
collectives. Here each rank has requests of its own, and the second block is split over all ranks, as experts are.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft


class Norm(nn.Module):
    def __init__(self, path: str, width: int):
        super().__init__()
        self.path, self.eps, self.weight = path, 1e-6, nn.Parameter(torch.ones(width))


class Block(nn.Module):
    def __init__(self, path: str, mesh: weft.Mesh, width: int, rows: weft.Rows, over: str):
        super().__init__()
        self.path, self.rows, self.norm = path, rows, Norm(f"{path}.norm", width)
        self.placement = mesh.placement(rows, owes=over)  # each rank of the group has a term of the sum
        self.up = nn.Linear(width, 4 * width // mesh.size(over), bias=False)
        self.down = nn.Linear(4 * width // mesh.size(over), width, bias=False)

    def forward(self, stream: weft.Stream) -> None:
        x = stream.read(self.norm, rows=self.rows).require_complete(self.path)
        stream.add(weft.Hidden(self.down(self.up(x).relu()), self.placement, stream.mesh, self.path))


class Model(nn.Module):
    def __init__(self, mesh: weft.Mesh, width: int):
        super().__init__()
        self.first = Block("first", mesh, width, weft.GROUP, "attn_tp")
        self.second = Block("second", mesh, width, weft.WORLD, "world")
        self.norm = Norm("norm", width)

    def forward(self, stream: weft.Stream, x: Tensor) -> Tensor:
        stream.add(weft.Hidden(x, stream.mesh.placement(weft.GROUP), stream.mesh, "input"))
        self.first(stream)
        self.second(stream)
        return stream.read(self.norm, rows=weft.GROUP).require_complete("output")


def main() -> None:
    dist.init_process_group()
    rank, ranks, width = dist.get_rank(), dist.get_world_size(), 64
    mesh = weft.Mesh(attn_dp=ranks, attn_tp=1, ep=ranks, moe_tp=1)
    torch.manual_seed(rank)
    model = Model(mesh, width)
    traced = weft.trace(model, mesh, torch.empty(0, width), width=width)
    with weft.Communicator(mesh=mesh, device="cpu") as comm, torch.inference_mode():
        rows = [3 + r for r in range(ranks)]  # tokens of each group, in this step
        plan = weft.plan(traced, rows, comm)
        stream = weft.Stream(plan, comm, rows)
        made = model(stream, torch.randn(rows[rank], width))
        stream.finish()
        if rank == 0:
            print(list(made.shape), *(f"before {site}: {op}" for site, op in plan.ops()), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
