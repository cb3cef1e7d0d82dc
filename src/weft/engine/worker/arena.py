"""Memory of a rank's exchanges: the most that any step needs, and what this machine has."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.engine.config.config import EngineConfig
from weft.engine.models.model_config import ModelConfig
from weft.engine.worker.planning import trace
from weft.planner.chain import bucket
from weft.planner.experts import Dispatch
from weft.planner.recipes import Merge
from weft.planner.spec import LayoutError


@dataclass(frozen=True)
class ArenaNeed:
    """A rank's need. blocks: tensors alive at once in the worst step; block_bytes: of two of the largest exchanged."""

    blocks: int
    block_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of all blocks, each as large as the largest tensor."""
        return self.blocks * self.block_bytes


class Ledger:
    """A workspace that counts how many of its tensors are alive at once. peak: the largest count so far."""

    def __init__(self) -> None:
        self._alive = self.peak = 0

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        """An unfilled tensor of like's dtype and device. It counts until its storage is freed: views keep it alive."""
        out = like.new_empty(shape)
        self._alive += 1
        self.peak = max(self.peak, self._alive)
        weakref.finalize(out.untyped_storage(), self._free)
        return out

    def _free(self) -> None:
        self._alive -= 1


def arena_need(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> ArenaNeed:
    """Return the most that any step of this configuration needs, with any plan. Raises LayoutError.

    Alive at once are the residual, the last read, the blocks' sums or the deltas made of them, and while a collective
    runs with an epilogue, its plain result and its residual and norm together. The last is also the largest: two
    values of every group's rows, as many as a plan can be made for. Where tokens are sharded over dcp, attention also
    has gathered queries and merged outputs, a row for each running sequence. A row of a split vocabulary's logits must
    fit: more are gathered in turns. Rows that go to their experts are sent, arrive, and come back: any rank may get
    them all.
    """
    ledger, mesh = Ledger(), config.mesh
    chain = trace(model, mesh, dtype, ledger.empty)
    reads = [read for form in chain.forms for read in form]
    deltas = max(ledger.peak, *(len(read.deltas) for read in reads))
    # Plans are made for counts rounded up to a power of two.
    tokens, decode_rows = bucket((config.batch_tokens,))[0], bucket((config.batch_sequences,))[0]
    merged = max((v.bytes(decode_rows, mesh.dcp) for s in chain.inside if isinstance(v := s.value, Merge)), default=0)
    inside = (each.value for read in reads for each in read.inside)
    sent = max((v.bytes(tokens, mesh.world) for v in inside if isinstance(v, Dispatch)), default=0)
    logits = 4 * mesh.attn_tp * -(-model.vocab_size // mesh.attn_tp) if model.split_vocabulary else 0
    value = max(tokens * mesh.attn_dp * chain.width * chain.element_bytes, merged, logits, sent)
    return ArenaNeed(blocks=4 + deltas + (4 if merged else 0) + (4 if sent else 0), block_bytes=2 * value)


def check_memory(config: EngineConfig, need: ArenaNeed, available: int) -> None:
    """Raises LayoutError, in one line that says what would fit, where the ranks' arenas may outgrow this machine."""
    total = config.ranks_of_host * need.bytes
    if total <= available:
        return
    fits = config.batch_tokens * available // total
    fits = 1 << (fits.bit_length() - 1) if fits else 0  # plans are made for powers of two
    advice = f"max_batch_tokens={fits}" + (f" with max_running={fits}" if fits < config.batch_sequences else "")
    raise LayoutError(
        f"steps of {config.batch_tokens} tokens a group take up to {-(-total >> 20)} MiB of shared memory on "
        f"{config.ranks_of_host} ranks, but {available >> 20} MiB are free here; "
        + (f"{advice} would fit" if fits else "no max_batch_tokens would fit")
    )


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may still take: what the machine has, or less where a control group limits it.

    Reads Linux's /proc/meminfo and the files of cgroup v2 and v1; a group's file cache that can be dropped is free.
    """
    meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    found = [int(meminfo["MemAvailable"].split()[0]) << 10]
    for line in (proc / "self" / "cgroup").read_text().split():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.strip("/")
        found += [_left(folder, *names) for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return max(0, min(found))


def _left(group: Path, limit: str, usage: str, reclaimable: str) -> int:
    """Bytes that a control group leaves; very many where it sets no limit."""
    try:
        allowed = (group / limit).read_text().strip()
        used = int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return 1 << 62
    return 1 << 62 if allowed == "max" else int(allowed) - used + int(stat.get(reclaimable, 0))
