"""How a call of transport peer is laid over a GPU: which algorithm, how many blocks and threads, how large an inbox.

One shot: sources push to every reader, which sums. Two shots: each part of a segment goes to one of those that share
it, which sums it and pushes the sum (the terms of MSCCL++ and of TensorRT-LLM's all-reduce kernels).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from weft.place.exchange import Exchange

MAX_RANKS, MAX_THREADS = 8, 480
UNIT_BYTES = 16
MAX_NORMED_BYTES = 64 << 10
"""Of a row that an epilogue takes. These four are the kernels' own: see `csrc/cuda/call.h`."""
NEVER = 1 << 40
"""More bytes than any call has."""


@dataclass(frozen=True)
class Split:
    """A call of from_bytes or more gives its blocks, of up to `threads` threads, a kind of work each."""

    from_bytes: int
    push: int
    sum: int  # none in one shot, where those that write sum
    write: int
    threads: int


@dataclass(frozen=True)
class PeerTuning:
    """What depends on the machine. Sizes are bytes of a call's larger tensor.

    one_shot_bytes: sums take two shots where that spares a rank more bytes of what it receives. few_bytes: up to here
    at most `blocks` blocks of `threads` threads or as many more as it takes for a unit each; beyond, wide_blocks of
    wide_threads; where rows are normalised, norm_blocks. Merges of attention: merge_blocks, of `threads` while that is
    a unit each, of merge_threads up to 1024 units a block, then of wide_threads. Of all these, as many as the GPU
    holds at a time; all do all work.
    split_…: large calls, by shots and with rows to be normalised or none. cluster: blocks that may share a row to be
    normalised, a power of two up to 8. Threads come in multiples of 32, up to MAX_THREADS. early: 1: a call's blocks
    take their places before the kernel before it ends (programmatic dependent launch). GPUs before Hopper have neither.
    """

    one_shot_bytes: int = 192 << 10
    few_bytes: int = 128 << 10
    blocks: int = 24
    threads: int = 128
    wide_blocks: int = 128
    wide_threads: int = 480
    norm_blocks: int = 256
    merge_blocks: int = 256
    merge_threads: int = 256
    split_one_shot: Split = Split(1 << 20, 32, 0, 96, 480)
    split_two_shot: Split = Split(2 << 20, 128, 224, 176, 224)
    split_one_shot_norm: Split = Split(4 << 20, 32, 0, 96, 480)
    split_two_shot_norm: Split = Split(6 << 20, 64, 96, 368, 224)
    cluster: int = 8
    early: int = 1

    def __post_init__(self) -> None:
        """Takes what JSON makes of a Split."""
        for name in SPLITS:
            if isinstance(given := getattr(self, name), dict):
                object.__setattr__(self, name, Split(**given))

    def split_from(self, size: int) -> PeerTuning:
        """The same, with calls of `size` bytes or more split, whatever the edge."""
        return replace(self, **{name: replace(getattr(self, name), from_bytes=size) for name in SPLITS})


SPLITS = tuple(f.name for f in fields(PeerTuning) if f.type == "Split")


@dataclass(frozen=True)
class Launch:
    """blocks: that push, sum and write; the last alone: that many do all. cluster: of blocks that share a row."""

    blocks: tuple[int, int, int]
    threads: int
    cluster: int = 1


def launch_of(t: PeerTuning, largest: int, two_shot: bool, normed_rows: int, row_bytes: int) -> Launch:
    """largest: bytes of the larger of input and result. normed_rows: 0 without an epilogue."""
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
    most, threads = (t.blocks, t.threads) if few else (wide, t.wide_threads)
    if few:  # a unit a thread
        threads = min(MAX_THREADS, max(threads, -(-largest // (32 * UNIT_BYTES * most)) * 32))
    wanted = max(1, min(most, -(-largest // (threads * UNIT_BYTES))))
    if not normed_rows:
        return Launch((0, 0, wanted), threads)
    cluster = t.cluster
    while cluster > 1 and (cluster * normed_rows > most or units < 64 * cluster):
        cluster //= 2
    blocks = min(most, max(wanted, normed_rows * cluster)) // cluster * cluster
    return Launch((0, 0, blocks), threads_for(-(-units // cluster), MAX_THREADS), cluster)


def merge_launch(t: PeerTuning, own_bytes: int) -> tuple[int, int]:
    """At most so many blocks, of so many threads, for a merge that gives this rank so many bytes."""
    each = own_bytes / UNIT_BYTES / t.merge_blocks  # units a block
    return t.merge_blocks, t.threads if each <= t.threads else t.merge_threads if each <= 1024 else t.wide_threads


def threads_for(units: int, most: int) -> int:
    """Of a block with so many units of a row, in whole warps: all with equally many, which are a few or one."""
    warps = max(1, -(-units // 32))
    turns = -(-32 * warps // most)
    return 32 * -(-warps // turns)


def inbox_bytes(ranks: int, max_bytes: int) -> int:
    """What an inbox of a group takes, whatever the shares of a call's rows.

    One shot fills a lane a rank, each with max_bytes at most, or an empty-lane flag. Two shots have half of it for
    parts of what a rank holds or wants, which at least two ranks share, and half for the sums.
    """
    return ranks * (max_bytes + 2 * UNIT_BYTES)


def spared_by_two_shot(exchange: Exchange, segment: int) -> float:
    """Bytes that a rank receives less of segments of so many bytes if they are summed in parts, each by one rank."""
    ranks, span, scatters = exchange.ranks, exchange.span, exchange.direction == "scatter"
    second = span - 1 if scatters else ranks - 1  # parts of summed segments
    first = ranks - 1 if scatters else span - 1  # parts of terms
    return segment * (ranks - 1 - (first + second) / span)
