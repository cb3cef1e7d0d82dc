"""Launch of a call of transport peer: the algorithm, the number of blocks and threads, and the size of an inbox.

One shot: each source pushes its rows to all readers, and each reader sums. Two shots: each part of a segment goes to
one of the ranks that share it, which sums the part and pushes the sum (the terms of MSCCL++ and of TensorRT-LLM's
all-reduce kernels).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from weft.planner.exchange import Exchange

MAX_RANKS, MAX_THREADS = 8, 480
UNIT_BYTES = 16
MAX_NORMED_BYTES = 64 << 10
"""Maximum bytes of a row with an epilogue. These four constants are the kernels' own: see `csrc/cuda/call.h`."""
NEVER = 1 << 40
"""Threshold that no call reaches, in bytes."""


@dataclass(frozen=True)
class Split:
    """Blocks of a call of from_bytes or more, each with one kind of work. threads: maximum of a block."""

    from_bytes: int
    push: int
    sum: int  # 0 in one shot: there the blocks that write also sum
    write: int
    threads: int


@dataclass(frozen=True)
class PeerTuning:
    """Machine-dependent settings. Sizes are bytes of a call's larger tensor.

    Blocks are limited to the number that the GPU holds at a time. Threads are multiples of 32, up to MAX_THREADS:
    `threads` while that is one per unit, merge_threads up to 1024 units a block, then wide_threads. GPUs before Hopper
    have neither clusters nor early launch.

    The split_… are for large calls, by number of shots and with or without rows to normalise.
    """

    one_shot_bytes: int = 192 << 10  # sums use two shots if that saves a rank more than this number of received bytes
    few_bytes: int = 128 << 10  # up to this size: `blocks` and `threads`; above: wide_blocks and wide_threads
    blocks: int = 24  # maximum, or enough blocks for one unit per thread
    threads: int = 128
    wide_blocks: int = 128
    wide_threads: int = 480
    norm_blocks: int = 256  # blocks of calls that normalise rows
    merge_blocks: int = 256  # for merges of attention
    merge_threads: int = 256  # for merges of attention
    split_one_shot: Split = Split(1 << 20, 32, 0, 96, 480)
    split_two_shot: Split = Split(2 << 20, 128, 224, 176, 224)
    split_one_shot_norm: Split = Split(4 << 20, 32, 0, 96, 480)
    split_two_shot_norm: Split = Split(6 << 20, 64, 96, 368, 224)
    cluster: int = 8  # maximum blocks that share a row to normalise, a power of two up to 8
    early: int = 1  # 1: a call's blocks start before the previous kernel ends (programmatic dependent launch)

    def __post_init__(self) -> None:
        """Convert each Split from its JSON form."""
        for name in SPLITS:
            if isinstance(value := getattr(self, name), dict):
                object.__setattr__(self, name, Split(**value))

    def split_from(self, size: int) -> PeerTuning:
        """Return this tuning with calls of `size` bytes or more split, for all edges."""
        return replace(self, **{name: replace(getattr(self, name), from_bytes=size) for name in SPLITS})


SPLITS = tuple(f.name for f in fields(PeerTuning) if f.type == "Split")


@dataclass(frozen=True)
class Launch:
    """Blocks that push, sum and write; if only the last is not 0, they do all work. cluster: blocks of a row."""

    blocks: tuple[int, int, int]
    threads: int
    cluster: int = 1


def launch_of(t: PeerTuning, largest: int, two_shot: bool, normed_rows: int, row_bytes: int) -> Launch:
    """Return the launch of a call with the tuning `t`.

    largest: bytes of the larger of input and result. normed_rows: 0 without an epilogue. two_shot, row_bytes: of its
    form and rows.
    """
    if normed_rows:
        split = t.split_two_shot_norm if two_shot else t.split_one_shot_norm
    else:
        split = t.split_two_shot if two_shot else t.split_one_shot
    units = -(-row_bytes // UNIT_BYTES)
    if largest >= split.from_bytes:
        threads = split.threads if not normed_rows else threads_for(units, split.threads)
        return Launch((split.push, split.sum, split.write), threads)
    few = largest <= t.few_bytes
    wide = t.norm_blocks if normed_rows else t.wide_blocks
    limit, threads = (t.blocks, t.threads) if few else (wide, t.wide_threads)
    if few:  # one thread for each unit
        threads = min(MAX_THREADS, max(threads, -(-largest // (32 * UNIT_BYTES * limit)) * 32))
    blocks_needed = max(1, min(limit, -(-largest // (threads * UNIT_BYTES))))
    if not normed_rows:
        return Launch((0, 0, blocks_needed), threads)
    cluster = t.cluster
    while cluster > 1 and (cluster * normed_rows > limit or units < 64 * cluster):
        cluster //= 2
    blocks = min(limit, max(blocks_needed, normed_rows * cluster)) // cluster * cluster
    return Launch((0, 0, blocks), threads_for(-(-units // cluster), MAX_THREADS), cluster)


def merge_launch(t: PeerTuning, own_bytes: int) -> tuple[int, int]:
    """Return (maximum of blocks, threads of each) of a merge that gives this rank `own_bytes` bytes."""
    units = own_bytes / UNIT_BYTES / t.merge_blocks  # units of a block
    return t.merge_blocks, t.threads if units <= t.threads else t.merge_threads if units <= 1024 else t.wide_threads


def threads_for(units: int, limit: int) -> int:
    """Return a block's threads for a row of `units` units: whole warps, at most `limit`, with equal work per thread."""
    warps = max(1, -(-units // 32))
    passes = -(-32 * warps // limit)
    return 32 * -(-warps // passes)


def inbox_bytes(ranks: int, max_bytes: int) -> int:
    """Return the bytes of a group's inbox, for any split of a call's rows over ranks.

    One shot fills one lane for each rank, with at most max_bytes, or an empty-lane flag. Two shots use half of it for
    parts of a rank's input or result, which at least two ranks share, and half for the sums.
    """
    return ranks * (max_bytes + 2 * UNIT_BYTES)


def two_shot_savings(exchange: Exchange, segment: int) -> float:
    """Return the received bytes that a rank saves if segments of `segment` bytes are summed in parts, each by one
    rank."""
    ranks, span, scatters = exchange.ranks, exchange.span, exchange.direction == "scatter"
    second = span - 1 if scatters else ranks - 1  # parts of summed segments
    first = ranks - 1 if scatters else span - 1  # parts of terms
    return segment * (ranks - 1 - (first + second) / span)
