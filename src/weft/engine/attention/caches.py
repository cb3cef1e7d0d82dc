"""Caches of a rank, and the layers' access to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from weft.engine.attention.backend import Queries
from weft.engine.attention.backend_registry import TORCH
from weft.engine.attention.context_parallel import ContextParallel
from weft.engine.attention.forward_batch import Batch, PageTables, StateSlots
from weft.engine.attention.paged import AttentionPlan, PagedAttention
from weft.engine.attention.projections import Absorbed, HeadSplit, LatentSplit
from weft.engine.kernels.split_k import SplitKPartials
from weft.engine.kv.cache import KVCache, StateCache
from weft.engine.kv.cache_spec import CacheGroup, Recurrent, Spec, Window, rule
from weft.stream.group import ContextGroup


class CachedLayer(Protocol):
    """Layer that declares the cache of its share on a rank."""

    @property
    def path(self) -> str: ...

    @property
    def cache(self) -> Spec: ...


def cached_layers(model: nn.Module) -> dict[str, Spec]:
    """Return the caches that a model's layers declare, by path."""
    layers: dict[str, Spec] = {}
    for layer in model.modules():
        if isinstance(spec := getattr(layer, "cache", None), Spec):
            layers[str(layer.path)] = spec
    return layers


class Caches:
    """Caches of a model on a rank.

    Args:
        layers: result of `cached_layers`.
        groups: size of each rule's caches; batches have their tables in the same order.
        page_size: tokens of a sequence per entry of its page tables.
        dtype: as of `KVCache`.
        backend: makes the attention over a paged cache.
        group: the dcp group that shards the tokens of whole sequences. Each rank has all tokens of windows and all
            states.
    """

    def __init__(
        self,
        layers: dict[str, Spec],
        groups: Sequence[CacheGroup],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        backend: Callable[[KVCache], PagedAttention] = TORCH.make,
        group: ContextGroup | None = None,
    ):
        group_of = {group.rule: at for at, group in enumerate(groups)}
        paths: dict[Spec, list[str]] = {}
        for path, spec in layers.items():
            paths.setdefault(spec, []).append(path)
        self.paged: list[tuple[int, PagedAttention | ContextParallel]] = []
        self.states: list[tuple[int, StateCache]] = []
        self.places: dict[str, tuple[int, int]] = {}
        """Index of each layer's cache among the paged ones or the states, and the layer's index in it."""
        for spec, names in paths.items():
            at, kind = group_of[rule(spec)], len(self.states if isinstance(spec, Recurrent) else self.paged)
            self.places |= {name: (kind, i) for i, name in enumerate(names)}
            if isinstance(spec, Recurrent):
                self.states.append((at, StateCache(spec, len(names), groups[at].size, device)))
                continue
            shards = None if isinstance(spec, Window) else group
            slots = page_size if shards is None else shards.interleave.page_size
            attend = backend(KVCache(spec, len(names), groups[at].size, slots, dtype, device))
            self.paged.append((at, attend if shards is None else ContextParallel(attend, shards)))

    @property
    def bytes(self) -> int:
        """Bytes of the caches on this rank."""
        tensors = [t for _, b in self.paged for t in b.cache.tensors] + [t for _, s in self.states for t in s.states]
        return sum(t.nbytes for t in tensors)

    def plan(self, batch: Batch) -> StepCaches:
        """Plan the caches for the layers' calls of a step."""
        plans = []
        for at, backend in self.paged:
            tables = batch.tables[at]
            assert isinstance(tables, PageTables)
            plans.append((backend, backend.plan(batch, tables)))
        return StepCaches(batch, self, tuple(plans))

    def copy(self, pages: Tensor) -> None:
        """Copy pages of whole sequences, each rank its own part. All pages are read before the first write. pages:
        int64 `[N, 2]`, source and destination, on the caches' device."""
        for _, backend in self.paged:
            cache = backend.cache
            if not isinstance(cache.spec, Window):
                cache.copy(*pages.unbind(1))


@dataclass(frozen=True, slots=True)
class StepCaches:
    """Caches in one step of a batch. plans: for each paged cache its backend, and the plan of the step."""

    batch: Batch
    caches: Caches
    plans: tuple[tuple[PagedAttention | ContextParallel, AttentionPlan], ...]

    def attend(
        self, layer: CachedLayer, q: Tensor, k: Tensor, v: Tensor | None = None, *, scale: float, lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Store k and v in a layer's PagedKV, Window or Latent, then attend with q. Return the output and, if
        requested, the log-sum-exps (see `AttentionInputs`)."""
        backend, plan, at = self._of(layer)
        backend.cache.write(at, plan.stored, k, v)
        return backend.attend(plan, at, Queries(q, scale, lse))

    def project(
        self, layer: CachedLayer, qkv: Tensor | SplitKPartials, heads: HeadSplit, *, scale: float, lse: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from the result of a layer's projection. Requires a PagedKV or Window. See `attend`."""
        backend, plan, at = self._of(layer)
        q = heads.store(backend.cache, at, plan.stored, qkv)
        return backend.attend(plan, at, Queries(q, scale, lse, gathered=heads.gathered))

    def project_latent(
        self, layer: CachedLayer, q: Tensor, kv: Tensor, parts: LatentSplit, *, scale: float, absorbed: Absorbed
    ) -> Tensor:
        """Return attention over a layer's Latent, from its projections `q` and `kv`, with `parts` and the `scale`."""
        backend, plan, at = self._of(layer)
        # Queries that are sent to other ranks are absorbed after that.
        now = absorbed if plan.sharded is None or (plan.rows is None and parts.gathered) else None
        q, remainder = parts.store(backend.cache, at, plan.stored, q, kv, now, plan.absorbed_rows)
        return backend.attend(plan, at, Queries(q, scale, absorbed=remainder or absorbed, gathered=parts.gathered))[0]

    def load(self, layer: CachedLayer, sequences: slice = slice(None)) -> tuple[Tensor, ...]:
        """Return the states of a Recurrent layer's sequences before the step: float32 `[B, …]`, zeros for a new one."""
        states, at, slots = self._state(layer)
        return states.load(at, slots.before[sequences])

    def states_and_slots(self, layer: CachedLayer) -> tuple[tuple[Tensor, ...], StateSlots]:
        """Return all states of a Recurrent layer, float32 `[slots, …]`, and this step's slots, for a kernel that
        updates states in place. It may write only allocated slots."""
        cache, at, slots = self._state(layer)
        return tuple(states[at] for states in cache.states), slots

    def store(self, layer: CachedLayer, states: tuple[Tensor, ...], sequences: slice = slice(None)) -> None:
        """Store the states `[B, …]` of a `layer` and `sequences` after the step's rows."""
        cache, at, slots = self._state(layer)
        cache.store(at, slots.after[sequences], states)

    def _of(self, layer: CachedLayer) -> tuple[PagedAttention | ContextParallel, AttentionPlan, int]:
        cache, at = self.caches.places[layer.path]
        return *self.plans[cache], at

    def _state(self, layer: CachedLayer) -> tuple[StateCache, int, StateSlots]:
        cache, at = self.caches.places[layer.path]
        group, states = self.caches.states[cache]
        slots = self.batch.tables[group]
        assert isinstance(slots, StateSlots)
        return states, at, slots
