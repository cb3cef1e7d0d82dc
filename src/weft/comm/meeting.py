"""Rendezvous of a ProcessGroup's ranks: they agree on a folder of the first rank, or all raise the same error.

An error on one rank travels with its facts, so that no rank waits for one that has given up.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from weft.comm.transport import CommError

T = TypeVar("T")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class Facts:
    """Facts of a rank for the other ranks."""

    host: str
    boot: str
    namespace: str
    terms: Mapping[str, object]  # values that must be equal on all ranks
    directory: str | None
    gpu: str | None  # UUID of its GPU
    visible: tuple[str, ...]  # UUIDs of all GPUs that its process sees, by their index; empty on CPUs
    problem: str  # one line, or empty


def gather_objects(group: dist.ProcessGroup, mine: T) -> list[T]:
    """Return all ranks' values, in rank order. Collective. Raises CommError."""
    gathered: list[T | None] = [None] * group.size()
    try:
        dist.all_gather_object(gathered, mine, group=group)
    except (RuntimeError, ValueError) as error:
        raise CommError(f"rank {group.rank()}: the ProcessGroup failed while the ranks met: {error}") from error
    return cast(list[T], gathered)


@contextmanager
def meeting_place(
    group: dist.ProcessGroup, terms: Mapping[str, object], device: torch.device, prepare: Callable[[], None]
) -> Iterator[Path]:
    """Yield a folder of this user that all ranks see, removed when the first rank leaves the context. Collective.

    Raises CommError on all ranks if they are on several hosts or in several containers, have different terms, share a
    GPU or cannot reach each other's GPUs. An exception of `prepare` is raised on its rank, and a CommError with that
    rank's number on the other ranks.

    Args:
        terms: JSON-like values that must be equal on all ranks.
        prepare: work that may fail on one rank.
    """
    own_error: Exception | None = None
    directory: str | None = None
    try:
        prepare()
        if group.rank() == 0:
            directory = tempfile.mkdtemp(prefix="weft-")
    except (RuntimeError, ValueError, OSError) as error:
        own_error = error
    try:
        facts = gather_objects(group, _facts(terms, device, directory, own_error))
        _raise_first([fact.problem for fact in facts], own_error)
        _raise_first(gather_objects(group, _problem(facts, group.rank(), device)), None)
        assert facts[0].directory is not None
        yield Path(facts[0].directory)
    finally:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def _facts(terms: Mapping[str, object], device: torch.device, directory: str | None, error: Exception | None) -> Facts:
    boot = namespace = ""
    with suppress(OSError):
        boot, namespace = BOOT_ID.read_text().strip(), str(PID_NAMESPACE.readlink())
    visible: tuple[str, ...] = ()
    if device.type == "cuda" and error is None:
        count = range(torch.cuda.device_count())
        visible = tuple(str(torch.cuda.get_device_properties(index).uuid) for index in count)
    gpu = visible[device.index] if visible and device.index is not None else None
    problem = "" if error is None else " ".join(str(error).split()) or type(error).__name__
    return Facts(socket.gethostname(), boot, namespace, terms, directory, gpu, visible, problem)


def _raise_first(problems: Sequence[str], own: Exception | None) -> None:
    if own is not None:
        raise own
    for rank, problem in enumerate(problems):
        if problem:
            raise CommError(f"rank {rank}: {problem}")


def _problem(facts: Sequence[Facts], rank: int, device: torch.device) -> str:
    """Return one line that says why this rank cannot work with the other ranks and what to do."""
    mine, first = facts[rank], facts[0]
    if mine.boot != first.boot:
        return (
            f"runs on host {mine.host}, rank 0 on {first.host}; a communicator takes a ProcessGroup of one host's ranks"
        )
    for key, value in mine.terms.items():
        if value != first.terms[key]:
            return f"{key} is {value}, but {first.terms[key]} on rank 0; pass the same on every rank"
    assert first.directory is not None
    if mine.namespace != first.namespace or not Path(first.directory).is_dir():
        return f"runs in another container than rank 0, or sees no {first.directory}; share /tmp and the PID namespace"
    for other, fact in enumerate(facts):
        if other == rank or mine.gpu is None or fact.gpu is None:
            continue
        if fact.gpu == mine.gpu:
            return f"is on the same GPU as rank {other}; call torch.cuda.set_device(LOCAL_RANK) before"
        if fact.gpu not in mine.visible:
            return f"does not see the GPU of rank {other}; let CUDA_VISIBLE_DEVICES name the GPUs of all ranks"
        if not torch.cuda.can_device_access_peer(device, mine.visible.index(fact.gpu)):
            return f"its GPU does not reach the memory of rank {other}'s GPU, which this needs; use NCCL on this host"
    return ""
