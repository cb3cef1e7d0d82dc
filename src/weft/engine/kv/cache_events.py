"""Events of a prefix cache in vLLM's schema (`vllm/distributed/kv_events.py` of 0.25 to 0.33). Routers read them to
send a prompt to the server that caches most of it.

A block is a full page of tokens of one cache group. Its hash depends only on the salt and on all tokens up to its end,
so servers with equal prefixes have equal hashes. Partly filled pages are no blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from weft.engine.kv.cache_spec import Rule

MEDIUM = "GPU"
"""vLLM's name for the engine's own cache, on any device. Routers know offloaded copies by other names."""
HASH_BYTES = 8


class _Event(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Map with the class name as `type`. Fields without a default are always present."""


class BlockStored(_Event):
    """Consecutive blocks of one group. token_ids: tokens of all blocks. parent_block_hash: hash of the previous block,
    None at the start of a prompt. extra_keys: other inputs of each block's hash, here the salt."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(_Event):
    """Blocks of one group."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    """Everything was removed."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events of one DP group in order. ts: seconds since 1970."""

    ts: float
    events: list[CacheEvent]
    data_parallel_rank: int | None = None


def salt_hash(salt: str) -> int:
    """Return the parent hash of a prompt's first block."""
    return _hash(salt.encode())


def page_hash(parent: int, tokens: Sequence[int]) -> int:
    """Return the hash of a page with these tokens after its parent: 64 bits, as routers expect."""
    return _hash(parent.to_bytes(HASH_BYTES, "big") + array("q", tokens).tobytes())


def _hash(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=HASH_BYTES).digest(), "big")


class CacheEvents:
    """Events of one DP group since the last `take`."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []
        self._latest: dict[int, BlockStored | BlockRemoved] = {}  # last event of each group, which may still grow

    def stored(self, group: int, rule: Rule, block: int, parent: int | None, tokens: Sequence[int], salt: str) -> None:
        """Record a `block` of `tokens` of a group after `parent`. salt: empty, unless of a first block with a salt."""
        latest, extra = self._latest.get(group), (salt,) if salt else None
        if isinstance(latest, BlockStored) and latest.block_hashes[-1] == parent:
            latest.block_hashes.append(block)
            latest.token_ids.extend(tokens)
            if latest.extra_keys is not None:
                latest.extra_keys.append(None)
            return
        kind = "mamba" if rule.state else "full_attention" if rule.window is None else "sliding_window"
        self._add(
            group,
            BlockStored(
                block_hashes=[block],
                parent_block_hash=parent,
                token_ids=list(tokens),
                block_size=len(tokens),
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
                extra_keys=None if extra is None else [extra],
                group_idx=group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=rule.window,
            ),
        )

    def removed(self, group: int, block: int) -> None:
        """Record the removal of a block."""
        latest = self._latest.get(group)
        if isinstance(latest, BlockRemoved):
            latest.block_hashes.append(block)
        else:
            self._add(group, BlockRemoved([block], MEDIUM, group))

    def cleared(self) -> None:
        """Record that all groups are empty, and drop earlier events."""
        self._events, self._latest = [AllBlocksCleared()], {}

    def take(self) -> list[CacheEvent]:
        """Return and forget the events since the last call."""
        events, self._events, self._latest = self._events, [], {}
        return events

    def _add(self, group: int, event: BlockStored | BlockRemoved) -> None:
        self._events.append(event)
        self._latest[group] = event
