"""Configuration of an engine: the options of `weft.engine.config.engine_options`, a model, and values derived from
them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from weft.comm.cores import core_list
from weft.comm.transport_registry import AUTO, transports
from weft.engine.assets import embedded_model_dir
from weft.engine.attention.backend_registry import ANY_BACKEND, backends
from weft.engine.config.engine_options import EngineOptions, PlainValues
from weft.engine.kv.cache_spec import CacheGroup, Rule
from weft.planner.spec import divisors
from weft.stream.interleave import Interleave

if TYPE_CHECKING:
    from weft.engine.models.layers.model_config import ModelConfig


class EngineError(RuntimeError):
    """The engine cannot start or go on.

    Args:
        line: the rank and the cause.
        ranks: the one that failed first, or all of a host; empty: not known.
        for_good: what these ranks have lost for good; empty: a restart may bring them back.
    """

    def __init__(self, line: str = "", ranks: tuple[int, ...] = (), for_good: Literal["", "devices", "hosts"] = ""):
        super().__init__(line)
        self.ranks, self.for_good = ranks, for_good


class QueueFull(EngineError):
    """Refusal of a request: too many wait or run. retry_after_s: estimated seconds until there is capacity again."""

    def __init__(self, here: int, retry_after_s: float):
        super().__init__(f"{here} requests wait or run already; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


MAX_STEP_DRAFTS = 256
"""Maximum drafts of a DP group's step: with more rows, a step's time is proportional to them."""


@dataclass(frozen=True)
class ModelDirectory:
    """The only positional option; the last base class, since dataclasses order fields from the last base on."""

    model: Path = field(default_factory=embedded_model_dir)
    """A model directory in Hugging Face's format, or a GGUF file."""


@dataclass(frozen=True)
class EngineConfig(EngineOptions, ModelDirectory, PlainValues):
    """All options of an engine. Raises LayoutError for a layout, ValueError for other values, each in one line."""

    seed: int = 0
    """Base of the seeds of requests without a seed."""
    places: tuple[tuple[int, ...], ...] = ()
    """Places of each node that ranks run in, after some are lost for good; empty: all places of all nodes."""
    gpus: tuple[str, ...] = ()
    """UUIDs of this host's GPUs by place, with --shrink: CUDA numbers GPUs anew once one is gone. Empty: the place is
    CUDA's index."""

    def __post_init__(self) -> None:
        self.check()
        if (self.node_rank or 0) >= (hosts := len(self.places) or self.mesh.hosts):
            raise ValueError(f"node_rank {self.node_rank} is none of {hosts} host(s): they are 0 to {hosts - 1}")
        _ = self.cores
        for name, kind in self.kinds().items():
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(kind))}")
        for name, auto, entries in ("transport", AUTO, transports), ("attention_backend", ANY_BACKEND, backends):
            value = getattr(self, name)
            known = (auto, *entries())  # load plugins only for names that Weft does not have
            if value not in known and value not in (known := (auto, *entries(self.plugins))):
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
        self._check_interleave()

    def _check_interleave(self) -> None:
        run = self.page_size if self.dcp_interleave is None else self.dcp_interleave
        if run < 1 or self.page_size % run:
            whole = divisors(self.page_size)
            near = [max((n for n in whole if n < run), default=1), *[n for n in whole if n > run][:1]]
            raise ValueError(
                f"dcp_interleave is {run}; it must divide a page of {self.page_size} tokens; nearest that do: "
                + " and ".join(map(str, dict.fromkeys(near)))
            )

    @property
    def tokenizer(self) -> Path:
        """Directory of the tokenizer."""
        return self.model if self.load_format == "auto" else embedded_model_dir()

    @property
    def interleave(self) -> Interleave:
        """Sharding of cached tokens over dcp. All ranks' pages of one number hold `span` tokens of a DP group."""
        return Interleave(self.dcp, self.dcp_interleave or self.page_size, self.page_size)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes that run ranks, in the order of the mesh's hosts."""
        return tuple(node for node, places in enumerate(self.places) if places) or tuple(range(self.mesh.hosts))

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """Return the ranks of a node; none if all of its ranks are lost, or it is not needed."""
        return tuple(rank for rank in range(self.mesh.world) if self.nodes[self.mesh.host_of(rank)] == node)

    def seat_of(self, rank: int) -> tuple[int, int]:
        """Return a rank's node, and its place among those that the node had at the start."""
        node, place = self.nodes[self.mesh.host_of(rank)], self.place_on_host(rank)
        return node, self.places[node][place] if self.places else place

    @property
    def cores(self) -> list[set[int]] | None:
        """Cores that cpu_bind names for each rank of a host; None for auto and off. Raises ValueError."""
        if self.cpu_bind in ("auto", "off"):
            return None
        here, parts, says = sorted(os.sched_getaffinity(0)), self.cpu_bind.split("|"), f"cpu_bind {self.cpu_bind!r}"
        try:
            cores = [core_list(part) for part in parts]
        except ValueError:
            raise ValueError(f"{says} is not auto, off or cores such as 0-3|4-7, a part a rank") from None
        if len(parts) != (world := self.ranks_of_host):
            raise ValueError(f"{says} has {len(parts)} part(s) for {world} rank(s); split them by |")
        if missing := set().union(*cores) - set(here):
            raise ValueError(f"{says}: this machine gives no core {min(missing)}, only {here}")
        return cores

    def read_model(self) -> ModelConfig:
        """Read the model's config.json. Raises ModelError."""
        # It imports torch, which checks do without.
        from weft.engine.models.registry import load_config, registry, with_draft

        model_config = load_config(self.model, registry(self.plugins), self.num_layers)
        replicates = self.dcp_query == "replicate"
        split, float8 = self.split_vocabulary == "on", self.float8 == "on"
        shared = dict[str, Any](replicate_queries=replicates, experts=self.moe_exchange, float8=float8)
        head, mtp = self.speculative == "eagle3", self.speculative == "mtp" and model_config.draft_layers > 0
        model_config = replace(model_config, split_vocabulary=split, drafts=mtp, **shared)
        return with_draft(model_config, self.draft_model, head, self.plugins)

    @property
    def step_drafts(self) -> int:
        """Maximum drafts of a DP group's step."""
        return min(self.batch_sequences * (self.decode_tokens - 1), MAX_STEP_DRAFTS)

    @property
    def batch_sampled(self) -> int:
        """Maximum sampled tokens of a DP group's step."""
        return min(self.batch_sequences + self.step_drafts, self.batch_tokens)

    @property
    def cached_tokens(self) -> int:
        """Tokens in the key-value cache of a DP group, in whole pages."""
        return self.num_pages * self.interleave.span

    def with_cache(self, groups: Sequence[CacheGroup]) -> EngineConfig:
        """Return this configuration with the size of the cache that ranks have allocated."""
        pages = next((g.size for g in groups if g.rule == Rule()), self.num_pages)
        return replace(self, kv_tokens=pages * self.page_size)
