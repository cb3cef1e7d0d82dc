"""Communicators of SGLang's groups: which groups have one, and which calls it carries."""

from __future__ import annotations

from sglang.srt.distributed import parallel_state
from sglang.srt.runtime_context import get_server_args
from torch import Tensor

import weft
from weft_sglang import log

GROUPS = ("tp", "attention_tp", "attn_cp", "dcp", "moe_ep", "moe_tp", "moe_dp")
"""SGLang's groups that exchange activations, by the first part of their names."""
ATTRIBUTE = "weft_communicator"
"""Attribute of a group that holds its communicator."""
MAX_BYTES = 8 << 20
"""Maximum bytes of a call that Weft carries; each group allocates a little more than twice that per rank."""


def comm_of(group: parallel_state.GroupCoordinator) -> weft.Communicator | None:
    """Return the group's communicator, if Weft carries it."""
    return getattr(group, ATTRIBUTE, None)


def takes(group: parallel_state.GroupCoordinator, op: str, x: Tensor, rows: int | None = None) -> bool:
    """Return whether Weft carries the op. rows: rows of the result, if it has more than x.

    That follows from values that are equal on all ranks: the dtype, the shapes and the sizes of all ranks.
    """
    comm = comm_of(group)
    if comm is None or not comm.supports(op, x):
        return False
    return rows is None or rows * x.shape[1:].numel() * x.element_size() <= comm.max_bytes


def open_communicator(result, self, *args, **kwargs):
    """Give a new group its communicator. Collective over the group."""
    if self.world_size == 1 or self.unique_name.split(":")[0] not in GROUPS:
        return
    reason = why_off()
    if reason is None:
        try:
            name = f"sglang:{self.unique_name}"
            comm = weft.Communicator(self.cpu_group, device=self.device, max_bytes=MAX_BYTES, name=name)
            setattr(self, ATTRIBUTE, comm)
        except (RuntimeError, ValueError, OSError) as error:  # all ranks raise: see weft.comm.meeting
            reason = " ".join(str(error).split())
    if reason is not None:
        log.warning("weft-sglang is off for group %s: %s", self.unique_name, reason)
    else:
        log.info("weft-sglang carries group %s, calls of up to %d bytes", self.unique_name, MAX_BYTES)


def close(self):
    """Close a group's communicator before the group is destroyed. Collective over the group."""
    comm = comm_of(self)
    if comm is not None:
        delattr(self, ATTRIBUTE)
        comm.close()


def why_off() -> str | None:
    """Return why Weft carries nothing in this engine, in a line; None if it carries something."""
    options = get_server_args()
    if not parallel_state._ENABLE_CUSTOM_ALL_REDUCE:
        return "--disable-custom-all-reduce is set"
    if options.enable_two_batch_overlap:
        return "two batches use a group from two streams at a time (--enable-two-batch-overlap)"
    if options.enable_pdmux:
        return "prompts and decode steps use a group from two streams at a time (--enable-pdmux)"
    if options.elastic_ep_backend is not None:
        return "ranks come and go (--elastic-ep-backend)"
    return None
