"""Caches that layers declare, and the rule that allocates each to requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Key and value `[heads, dim]` per token. heads: heads of one rank."""

    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class Window:
    """PagedKV for sliding-window attention: a row sees itself and the size − 1 tokens before it."""

    size: int
    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class Latent:
    """One vector of `width` elements per token, the key of all heads. Its first `value_width` elements are their value.

    Multi-head latent attention with absorbed projections (DeepSeek-V2, arXiv 2405.04434).

    Attributes:
        expanded: (elements of a head's own part of a key, elements of a head's value) if prompts may expand the vectors
            to keys and values of heads; None: all rows attend to the vectors.
        heads: heads of a rank, which share the vector. Kernels split rows by it.
    """

    width: int
    value_width: int
    expanded: tuple[int, int] | None = None
    heads: int = 1


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Float32 tensors of these shapes per sequence, whatever its length (linear attention, convolutions).

    A state covers all tokens that have run. Earlier states exist only if they were kept.

    Attributes:
        by_starts: the layer reads `Batch.starts` on the device and not `Batch.spans`, so CUDA graphs may hold its
            prompts.
    """

    shapes: tuple[tuple[int, ...], ...]
    by_starts: bool = False


Spec = PagedKV | Window | Latent | Recurrent


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule that allocates the caches of a group. All layers of a group use the same pages or slots of a request.

    Attributes:
        state: one slot per sequence instead of pages.
        window: pages hold only the last `window` tokens, which a row may see.
    """

    state: bool = False
    window: int | None = None


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A rule, and its number of pages or slots in a DP group."""

    rule: Rule
    size: int


def rule(spec: Spec) -> Rule:
    """Return the rule of a cache. Layers with equal rules share page tables, whatever their bytes per token."""
    return Rule(state=isinstance(spec, Recurrent), window=spec.size if isinstance(spec, Window) else None)


def cache_groups(
    specs: Iterable[Spec],
    *,
    page_size: int,
    kv_tokens: int,
    max_running: int,
    max_batch_tokens: int,
    prefix_cache: bool = True,
) -> tuple[CacheGroup, ...]:
    """Return the groups of a model's caches with their sizes, the same on every rank.

    Pages of whole sequences hold `kv_tokens` tokens. Windows get the same number, or the maximum that `max_running`
    sequences need in a step of `max_batch_tokens` rows, if that is less. States get one slot per running sequence, and
    the same number for the prefix cache.
    """
    groups = []
    for group_rule in dict.fromkeys(map(rule, specs)):
        size = kv_tokens // page_size
        if group_rule.state:
            size = max_running * (2 if prefix_cache else 1)
        elif group_rule.window is not None:
            size = min(size, max_running * (-(-group_rule.window // page_size) + 2) + -(-max_batch_tokens // page_size))
        groups.append(CacheGroup(group_rule, size))
    return tuple(groups)
