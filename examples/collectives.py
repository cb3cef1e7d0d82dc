"""Collectives of a torch ProcessGroup: torchrun --nproc-per-node 2 examples/collectives.py"""

import torch
import torch.distributed as dist

import weft

dist.init_process_group()
with weft.Communicator(max_bytes=1 << 20, device="cpu") as comm:
    rows = [2 + rank for rank in range(comm.world_size)]  # of each rank; they may differ, and be 0
    x = torch.full((rows[comm.rank], 4), float(comm.rank))
    gathered = comm.all_gatherv(x, rows)
    own = comm.reduce_scatterv(gathered, rows)
    normed, residual = comm.all_reduce_add_rms_norm(gathered, gathered, torch.ones(4), eps=1e-6)
    if comm.rank == 0:
        print(gathered[:, 0].tolist(), own[:, 0].tolist(), residual[:, 0].tolist())
dist.destroy_process_group()
