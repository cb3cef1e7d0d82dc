"""A block of a plain torch model, tensor parallel: torchrun --nproc-per-node 2 examples/tensor_parallel.py

Each rank holds a run of the hidden features. One call sums what the ranks computed, adds it to the residual, and makes
the norm that the next block reads.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft


class Block(nn.Module):
    """residual + down(relu(up(normed))), and its RMSNorm."""

    def __init__(self, comm: weft.Communicator, up: Tensor, down: Tensor):
        super().__init__()
        self.comm, self.weight = comm, nn.Parameter(torch.ones(len(down)))
        self.up = nn.Parameter(up.chunk(comm.world_size, dim=0)[comm.rank])
        self.down = nn.Parameter(down.chunk(comm.world_size, dim=1)[comm.rank])

    def forward(self, normed: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        part = (normed @ self.up.T).relu() @ self.down.T
        return self.comm.all_reduce_add_rms_norm(part, residual, self.weight, 1e-6)


dist.init_process_group()
torch.manual_seed(0)  # the same weights and rows on every rank
up, down, x = torch.randn(256, 64), torch.randn(64, 256), torch.randn(5, 64)
with weft.Communicator(max_bytes=1 << 20, device="cpu") as comm, torch.inference_mode():
    normed, residual = Block(comm, up, down)(x, x)
    expected = x + (x @ up.T).relu() @ down.T
    torch.testing.assert_close(residual, expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(normed, nn.functional.rms_norm(expected, (64,), eps=1e-6), rtol=1e-4, atol=1e-3)
    if comm.rank == 0:
        print(f"{comm.world_size} ranks compute what one does")
dist.destroy_process_group()
