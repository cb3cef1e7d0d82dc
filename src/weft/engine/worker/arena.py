"""Memory of a rank's exchanges: the maximum need of a step, and the memory available on this machine."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.engine.config.config import EngineConfig
from weft.engine.models.layers.model_config import ModelConfig
from weft.engine.worker.planning import trace
from weft.planner.chain import bucket
from weft.planner.experts import Dispatch
from weft.planner.recipes import Merge
from weft.planner.spec import LayoutError


@dataclass(frozen=True)
class ArenaNeed:
    """A rank's need. blocks: maximum tensors alive at once in a step; block_bytes: size of two of the largest ones."""

    blocks: int
    block_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of all blocks, each as large as the largest tensor."""
        return self.blocks * self.block_bytes


class Ledger:
    """Workspace that counts its tensors alive at once. peak: the maximum so far."""

    def __init__(self) -> None:
        self._alive = self.peak = 0

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        """Return an empty tensor of like's dtype and device. It counts until its storage is freed, views included."""
        out = like.new_empty(shape)
        self._alive += 1
        self.peak = max(self.peak, self._alive)
        weakref.finalize(out.untyped_storage(), self._free)
        return out

    def _free(self) -> None:
        self._alive -= 1


def arena_need(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> ArenaNeed:
    """Return the maximum need of any step of this configuration, with any plan. Raises LayoutError.

    Alive at once are the residual, the last read, the blocks' sums or the deltas made of them, and during a collective
    with an epilogue, its plain result and its residual and norm together. The last is also the largest: two values of
    every group's rows, up to the largest counts of a plan. If tokens are sharded over dcp, attention also has gathered
    queries and merged outputs, a row per token of the decode rows. A row of a split vocabulary's logits must fit: more
    rows are gathered in turns. Dispatched rows are sent, received, and returned, by any rank. Draft layers hold two.
    """
    ledger, mesh = Ledger(), config.mesh
    chain = trace(model, mesh, dtype, ledger.empty)
    reads = [read for form in chain.forms for read in form]
    deltas = max(ledger.peak, *(len(read.deltas) for read in reads))
    # Counts of plans are rounded up to a power of two.
    decoded = min(config.batch_tokens, config.batch_sequences * config.decode_tokens)
    tokens, decode_rows = bucket((config.batch_tokens,))[0], bucket((decoded,))[0]
    merged = max((v.bytes(decode_rows, mesh.dcp) for s in chain.inside if isinstance(v := s.value, Merge)), default=0)
    inside = (each.value for read in reads for each in read.inside)
    sent = max((v.bytes(tokens, mesh.world) for v in inside if isinstance(v, Dispatch)), default=0)
    logits = 4 * mesh.attn_tp * -(-model.vocab_size // mesh.attn_tp) if model.split_vocabulary else 0
    value = max(tokens * mesh.attn_dp * chain.width * chain.element_bytes, merged, logits, sent)
    return ArenaNeed(
        4 + deltas + 2 * (model.drafts or len(model.tapped_layers) > 0) + (4 if merged else 0) + (4 if sent else 0),
        block_bytes=2 * value,
    )


def check_memory(config: EngineConfig, need: ArenaNeed, available: int) -> None:
    """Raise LayoutError, in one line with limits that fit, if the ranks' arenas may exceed the available memory."""
    total = config.ranks_of_host * need.bytes
    if total <= available:
        return
    fits = config.batch_tokens * available // total
    fits = 1 << (fits.bit_length() - 1) if fits else 0  # counts of plans are powers of two
    limits = dict(mixed_batch_tokens=config.mixed_batch_tokens or 0, max_running=config.batch_sequences)
    lower = " and ".join(f"{name}={fits}" for name, limit in limits.items() if limit > fits)
    advice = f"max_batch_tokens={fits}" + (f" with {lower}" if lower else "")
    raise LayoutError(
        f"steps of {config.batch_tokens} tokens a group take up to {-(-total >> 20)} MiB of shared memory on "
        f"{config.ranks_of_host} ranks, but {available >> 20} MiB are free here; "
        + (f"{advice} would fit" if fits else "no max_batch_tokens would fit")
    )


def available_bytes(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup"), limit_gib: float | None = None
) -> int:
    """Return the memory available to this process: the machine's, or less if a control group or limit_gib limits it.

    Reads Linux's /proc/meminfo and the files of cgroup v2 and v1; a group's reclaimable file cache counts as free.
    limit_gib: GiB for the processes of a server; what this one has is not available any more. proc, cgroups: of tests.
    """
    meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    limits = [int(meminfo["MemAvailable"].split()[0]) << 10]
    for line in (proc / "self" / "cgroup").read_text().split():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.strip("/")
        limits += [_left(folder, *names) for folder in (group, *group.parents) if folder.is_relative_to(root)]
    if limit_gib is not None:
        rollup = dict(line.split(":", 1) for line in (proc / "self" / "smaps_rollup").read_text().splitlines()[1:])
        limits.append(int(limit_gib * (1 << 30)) - (int(rollup["Pss"].split()[0]) << 10))
    return max(0, min(limits))


def _left(group: Path, limit: str, usage: str, reclaimable: str) -> int:
    """Return the bytes available in a control group; a huge number without a limit."""
    try:
        allowed = (group / limit).read_text().strip()
        used = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return 1 << 62
    return 1 << 62 if allowed == "max" else int(allowed) - used + int(stat.get(reclaimable, 0))
