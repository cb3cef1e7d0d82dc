"""The caches that layers declare, and the rule by which each is handed out to requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PagedKV:
    """A key and a value `[heads, dim]` for every token. heads: those of one rank."""

    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class Window:
    """As PagedKV, for attention in which a row sees itself and the size − 1 tokens before it."""

    size: int
    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class Latent:
    """One vector of `width` for every token, all heads' key; its first `value_width` elements are all heads' value.

    Multi-head latent attention with its projections absorbed (DeepSeek-V2, arXiv 2405.04434).

    expanded: (elements of a head's own part of a key, elements of a head's value) where prompts may be computed with
    keys and values of heads, expanded from the vectors; None: all rows attend to the vectors.
    heads: of a rank, that share the vector. Kernels choose by it how they cut rows.
    """

    width: int
    value_width: int
    expanded: tuple[int, int] | None = None
    heads: int = 1


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Float32 tensors of these shapes for each sequence, however long it is (linear attention, convolutions).

    A state stands for all tokens up to the last that has run: an earlier one is had only where it was kept.

    by_starts: the layer finds the rows of sequences by `Batch.starts` on the device, without `Batch.spans`. So CUDA
    graphs may hold its steps with prompts.
    """

    shapes: tuple[tuple[int, ...], ...]
    by_starts: bool = False


Spec = PagedKV | Window | Latent | Recurrent


@dataclass(frozen=True, slots=True)
class Rule:
    """How the caches of a group are handed out: all layers of a group use the same pages, or slots, of a request.

    state: a slot a sequence instead of pages. window: pages hold only the last so many tokens that a row may see.
    """

    state: bool = False
    window: int | None = None


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A rule, and how many pages or slots there are of it in a DP group."""

    rule: Rule
    size: int


def rule(spec: Spec) -> Rule:
    """The rule of a cache; layers with equal rules share page tables, whatever a token takes in each."""
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
    """The groups of a model's caches, and their sizes, the same on every rank.

    Pages of whole sequences hold `kv_tokens` tokens. Windows get as much, or what `max_running` sequences need at the
    most in a step of `max_batch_tokens` rows, where that is less. A running sequence has a state; there are as many
    again to keep for the prefix cache.
    """
    groups = []
    for each in dict.fromkeys(map(rule, specs)):
        size = kv_tokens // page_size
        if each.state:
            size = max_running * (2 if prefix_cache else 1)
        elif each.window is not None:
            size = min(size, max_running * (-(-each.window // page_size) + 2) + -(-max_batch_tokens // page_size))
        groups.append(CacheGroup(each, size))
    return tuple(groups)
