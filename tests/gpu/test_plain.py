"""The plain form of peer's kernels, which GPUs before Hopper run, on whatever GPU is here, against the reference.

The driver translates PTX of compute_80. Ranks are processes, which share a GPU where there are too few:

    make test-gpu-parts PARTS=plain
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from gpu.merges import merge_everything
from gpu.replays import replay
from gpu.test_peer import GPUS, captured
from gpu.works import SHOTS, any_bits, everything
from weft.comm.peer import PeerTransport
from weft.kernels.build import CUDA_FLAGS, CUDA_KERNELS, compiled, module
from weft.planner.spec import Mesh

pytestmark = pytest.mark.skipif(GPUS < 1, reason="needs a GPU; this machine has none, and emulates it")
MESH = Mesh(1, 2, 2, 1, dcp=2)


def plain_kernels() -> Any:
    return module(compiled(*CUDA_KERNELS, flags=(*CUDA_FLAGS, "-gencode=arch=compute_80,code=compute_80")))


class PlainTransport(PeerTransport):
    def _load(self) -> Any:
        return plain_kernels()


def rank_main(rank: int, directory: str, work: Callable[..., None]) -> None:
    device = torch.device("cuda", rank % GPUS)
    torch.cuda.set_device(device)
    # The driver translates for a minute or two, and ranks of one GPU take turns.
    transport = PlainTransport(MESH, rank, f"{directory}/peer", device, max_bytes=32 << 20, timeout_s=300)
    assert (transport.tuning.cluster, transport.tuning.early) == (1, 0)
    with torch.cuda.stream(torch.cuda.Stream()):
        work(transport, MESH, device)
    transport.check()
    transport.close()


WORKS = {
    "every edge": partial(everything, tunings=SHOTS, large=GPUS > 1),
    "every bit": partial(any_bits, tunings=SHOTS),
    "graphs": partial(replay, rounds=100, again=captured),
    "merges": partial(merge_everything, large=GPUS > 1),
}


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
def test_the_plain_form_is_as_the_reference(work: Callable[..., None], tmp_path: Path) -> None:
    plain_kernels()  # compiled once
    mp.spawn(rank_main, (str(tmp_path), work), nprocs=MESH.world)
