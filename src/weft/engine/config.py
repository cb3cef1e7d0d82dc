"""What an engine is started with.

`EngineConfig` has all options as its own fields; each of its bases declares and checks those of one subject.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from weft.assets import embedded_model_dir
from weft.comm.transport_registry import AUTO, transports
from weft.dcp.interleave import Interleave
from weft.kv.cache_spec import CacheGroup, Rule
from weft.models.model_config import ModelConfig
from weft.models.registry import load_config, registry
from weft.place.experts import Forms
from weft.place.plan import Choice
from weft.place.spec import Mesh

KV_TOKENS = 65536
"""The default of kv_tokens on CPUs."""
MAX_CORES = 1 << 16
"""The highest core that `cpu_bind` may name: a typing error must not fill memory."""


STORE_PORT = 1
"""Added to `master_port`: the port of torch.distributed's store. Agents come to `master_port` itself."""


class EngineError(RuntimeError):
    """The engine cannot start or go on: one line that names the rank and the cause."""


class QueueFull(EngineError):
    """Too many requests wait or run. retry_after_s: an estimate of when there may be capacity again."""

    def __init__(self, here: int, retry_after_s: float):
        super().__init__(f"{here} requests wait or run already; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class _Options:
    """Options that belong together: a base of `EngineConfig`, which has the fields of them all."""

    def check(self) -> None:
        """Raises ValueError or LayoutError, in one line, for values that cannot be."""
        return

    def _above_zero(self, *names: str) -> None:
        for name in names:
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be above 0")

    def _not_negative(self, *names: str) -> None:
        for name in names:
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} is {value}; it must be 0 or more")


@dataclass(frozen=True)
class ModelOptions(_Options):
    """Which model is served, in which types, and what may be added to Weft."""

    model: Path = field(default_factory=embedded_model_dir)
    """A directory as Hugging Face publishes them."""
    plugins: tuple[str, ...] = ()
    """Modules or .py files that add model families (`weft.models.registry`) or transports."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto: the directory's safetensors; dummy: made-up weights (`weft.models.load.dummy_model`). Text of these means
    nothing, so the tokenizer is the embedded model's."""
    num_layers: int | None = None
    """Only the model's first so many layers; None: all."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; auto: float32 on CPUs, bfloat16 on GPUs."""
    float8: Literal["auto", "on", "off"] = "auto"
    """on: weights that a checkpoint has in FP8 stay so, and products with them are computed in it; off: they are
    dequantised when they are loaded (`weft.models.products`); auto: on for GPUs."""

    def check(self) -> None:
        self._above_zero("num_layers")

    @property
    def tokenizer(self) -> Path:
        """The directory of the tokenizer."""
        return self.model if self.load_format == "auto" else embedded_model_dir()


@dataclass(frozen=True)
class LayoutOptions(_Options):
    """How the model is split over the ranks (`weft.place.spec.Mesh`)."""

    attn_dp: int = 1
    """Data-parallel groups of the attention (DP groups), each with requests of its own."""
    attn_tp: int = 1
    """Ranks of a DP group, which share its attention heads."""
    ep: int = 1
    """Parts into which the experts are divided."""
    moe_tp: int = 1
    """Ranks that share each expert."""
    dcp: int = 1
    """Neighbouring ranks of attn_tp over which a DP group's cached tokens are sharded (decode context parallelism)."""
    dcp_interleave: int | None = None
    """Consecutive tokens on one of these ranks; it divides page_size; None: a page."""
    dcp_exchange: Literal["auto", "ag_rs", "a2a", "fused"] = "auto"
    """The recipe by which their attention is merged (`weft.place.recipes`); auto: the cheapest."""
    dcp_prefill: Literal["auto", "gather", "merge"] = "auto"
    """The recipe by which prompts attend (`weft.place.recipes.Prompt`); auto: the quicker one for each step."""
    dcp_query: Literal["gather", "replicate"] = "gather"
    """gather: the ranks gather their queries; replicate: each computes those of all, from more weights."""
    split_vocabulary: Literal["off", "on", "auto"] = "auto"
    """on: embedding and head are split over attn_tp; auto: on GPUs, where decode steps are predicted to be quicker."""
    experts: Forms = "auto"
    """How mixtures of experts exchange rows (`weft.place.experts`): gather, dispatch (on GPUs over peer alone), or
    auto: on CPUs the cheaper one for each step. Where a step dispatches, shared experts are whole on every rank."""

    nnodes: int = 1
    """Hosts that the ranks are on, as many on each. All run on this machine, as if on several: for tests of plans."""

    def check(self) -> None:
        _ = self.mesh

    @property
    def mesh(self) -> Mesh:
        """The layout. Raises LayoutError."""
        return Mesh(self.attn_dp, self.attn_tp, self.ep, self.moe_tp, self.dcp, self.nnodes)

    @property
    def ranks_of_host(self) -> int:
        """How many ranks a host has."""
        return self.mesh.world // self.nnodes

    def place_on_host(self, rank: int) -> int:
        """A rank's place among those of its host."""
        return self.mesh.peers("host", rank).index(rank)


@dataclass(frozen=True)
class CacheOptions(_Options):
    """The key-value cache of a rank. A DP group holds dcp times as many tokens."""

    page_size: int = 16
    """Tokens in a page."""
    kv_tokens: int | None = None
    """Tokens in the cache; None: KV_TOKENS on CPUs, and on GPUs as many as fit."""
    gpu_memory_fraction: float = 0.9
    """Share of a GPU's memory that may be used in all, where kv_tokens is None."""
    prefix_cache: bool = True
    """Whether pages of equal prefixes are reused."""

    def check(self) -> None:
        self._above_zero("page_size")
        if not 0 < self.gpu_memory_fraction <= 1:
            raise ValueError(f"gpu_memory_fraction is {self.gpu_memory_fraction}; it must be above 0 and at most 1")
        if self.kv_tokens is not None and self.kv_tokens < self.page_size:
            raise ValueError(f"kv_tokens={self.kv_tokens} is less than one page of {self.page_size} tokens")

    @property
    def num_pages(self) -> int:
        """Pages of a rank's key-value cache, each of which stands for `interleave.span` tokens of the DP group."""
        return (KV_TOKENS if self.kv_tokens is None else self.kv_tokens) // self.page_size


@dataclass(frozen=True)
class RequestOptions(_Options):
    """How many requests there may be, how long they may be, and how they are batched."""

    max_batch_tokens: int = 2048
    """Rows of one step of a DP group; longer prompts are cut into chunks."""
    max_running: int = 64
    """Sequences of a DP group that run at once."""
    max_waiting: int = 1024
    """Requests that may wait for a place, of all DP groups together; more are refused."""
    max_choices: int = 256
    """Completions of one request of a client: its prompts times its choices."""
    max_model_len: int | None = None
    """Tokens of a prompt and its completion together; None: what the model allows."""
    overlap: bool = True
    """Whether a step is sent before the tokens of the previous one are back, so that ranks never wait for the
    controller."""
    seed: int = 0
    """Seeds of requests that bring none follow from it."""

    def check(self) -> None:
        self._above_zero("max_batch_tokens", "max_running", "max_waiting", "max_choices")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(
                f"max_model_len is {self.max_model_len}; it must be 2 or more: a prompt and a completion of one token"
            )
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens={self.max_batch_tokens} is less than max_running={self.max_running}: "
                "every running sequence needs a row in each step"
            )


@dataclass(frozen=True)
class RankOptions(_Options):
    """Where ranks run, and what happens when they fail."""

    executor: Literal["process", "thread"] = "process"
    """process: one process for each rank; thread: all ranks in this process, on the reference transport, for tests."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cuda: a GPU for each rank; auto: GPUs where there are as many as ranks."""
    cuda_graphs: bool = True
    """Whether steps on GPUs replay captured graphs. Those with prompts of some models never do
    (`weft.engine.worker.graph_inputs.captures_prompts`), nor do those whose prompts' logprobs are wanted."""
    threads: int = 1
    """Threads of each rank's process; more ranks use cores better."""
    cpu_bind: str | None = None
    """Cores of each rank of a host, such as `0-3|4-7`; auto: this process's cores, divided evenly; None: not bound."""
    step_timeout_s: float = 60.0
    """Seconds after which a step counts as a failure of the ranks."""
    max_restarts: int = 3
    """Failures within restart_window_s after which the ranks are started anew; one more ends the engine."""
    restart_window_s: float = 600.0
    """Seconds over which failures are counted."""
    restart_backoff_s: float = 1.0
    """Seconds to wait after a second failure without a step in between; each further one doubles it, up to a minute."""

    def check(self) -> None:
        self._above_zero("threads", "step_timeout_s", "restart_window_s")
        self._not_negative("max_restarts", "restart_backoff_s")


@dataclass(frozen=True)
class CommunicationOptions(_Options):
    """What carries the exchanges between ranks, and how they are planned."""

    transport: str = AUTO
    """Of ranks that are processes: one of `weft.comm.transport_registry.transports`; auto: those of the ranks' device,
    chosen edge by edge by cost."""
    cost: str = "auto"
    """The cost model (`weft.place.cost.costs`); auto: this host's table where `weft tune` has written one, else what
    is known of hosts like it."""
    plan: Choice = "cheapest"
    """naive: the plan of all-reduces that others are compared with (`weft.place.plan.Planner.naive`)."""


@dataclass(frozen=True)
class ClusterOptions(_Options):
    """Where the ranks' hosts meet, with nnodes above 1. On each host an agent starts its ranks (docs/hosts.md)."""

    master_addr: str | None = None
    """Address of node 0, which holds the controller. None: all ranks run on this machine, in groups of a host's ranks
    that share no memory with other groups: for tests of layouts over hosts."""
    master_port: int = 29600
    """Port of node 0 to which agents connect; the next one is that of torch.distributed's store."""
    cluster_key: Path | None = None
    """A file with a secret, the same on every host: who does not know it is not heard."""
    interface: str | None = None
    """Network interface of this host, such as eth0; None: the one that leads to master_addr."""
    join_timeout_s: float = 600.0
    """Seconds to wait for hosts that are not there: at the start, and after one was lost."""

    def check(self) -> None:
        self._above_zero("join_timeout_s")
        if not 0 < self.master_port < 65535:
            raise ValueError(f"master_port is {self.master_port}; it and the next one must be ports, 1 to 65535")
        if self.master_addr is not None and self.cluster_key is None:
            raise ValueError("hosts meet by a secret: give cluster_key, a file that is the same on every host")


@dataclass(frozen=True)
class EngineConfig(
    ClusterOptions, CommunicationOptions, RankOptions, RequestOptions, CacheOptions, LayoutOptions, ModelOptions
):  # dataclasses order fields from the last base to the first: `model` comes first
    """All options of an engine. Raises LayoutError for a layout, ValueError for other values, each in one line."""

    def __post_init__(self) -> None:
        for part in PARTS:
            part.check(self)
        if self.cpu_bind is not None:
            _ = self.cores
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(kind))}")
        options = (AUTO, *transports())
        if self.transport not in options and self.transport not in (options := (AUTO, *transports(self.plugins))):
            raise ValueError(f"transport is {self.transport!r}; it must be one of {', '.join(options)}")
        self._check_interleave()

    def _check_interleave(self) -> None:
        run = self.page_size if self.dcp_interleave is None else self.dcp_interleave
        if run < 1 or self.page_size % run:
            divisors = [n for n in range(1, self.page_size + 1) if self.page_size % n == 0]
            near = [max((n for n in divisors if n < run), default=1), *[n for n in divisors if n > run][:1]]
            raise ValueError(
                f"dcp_interleave is {run}; it must divide a page of {self.page_size} tokens; nearest that do: "
                + " and ".join(map(str, dict.fromkeys(near)))
            )

    @property
    def interleave(self) -> Interleave:
        """How cached tokens are sharded over dcp. A page of each rank of a DP group stands for `span` tokens."""
        return Interleave(self.dcp, self.dcp_interleave or self.page_size, self.page_size)

    @property
    def cores(self) -> list[set[int]]:
        """The cores of each rank of a host. Raises ValueError."""
        here = sorted(os.sched_getaffinity(0))
        world = self.ranks_of_host
        if self.cpu_bind in (None, "auto"):
            if len(here) < world:  # ranks share cores, each still one only
                return [{here[rank % len(here)]} for rank in range(world)]
            return [set(here[rank * len(here) // world : (rank + 1) * len(here) // world]) for rank in range(world)]
        parts = str(self.cpu_bind).split("|")
        try:
            cores = [{c for text in part.split(",") for c in _core_range(text)} for part in parts]
        except ValueError:
            raise ValueError(
                f"cpu_bind {self.cpu_bind!r} is not auto or cores such as 0-3|4-7, a part a rank"
            ) from None
        if len(parts) != world:
            raise ValueError(
                f"cpu_bind {self.cpu_bind!r} has {len(parts)} part(s) for {world} rank(s); split them by |"
            )
        if missing := set().union(*cores) - set(here):
            raise ValueError(f"cpu_bind {self.cpu_bind!r}: this machine gives no core {min(missing)}, only {here}")
        return cores

    def read_model(self) -> ModelConfig:
        """The model's config.json, read. Raises ModelError."""
        found = load_config(self.model, registry(self.plugins), self.num_layers)
        replicates = self.dcp_query == "replicate"
        split, float8 = self.split_vocabulary == "on", self.float8 == "on"
        return replace(found, split_vocabulary=split, replicate_queries=replicates, experts=self.experts, float8=float8)

    @property
    def cached_tokens(self) -> int:
        """Tokens that the key-value cache of a DP group holds, in whole pages."""
        return self.num_pages * self.interleave.span

    def with_cache(self, groups: Sequence[CacheGroup]) -> EngineConfig:
        """The same with the size of the cache that ranks have made, for whoever must know it."""
        pages = next((g.size for g in groups if g.rule == Rule()), self.num_pages)
        return replace(self, kv_tokens=pages * self.page_size)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a rank's process."""
        key = None if self.cluster_key is None else str(self.cluster_key)
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"model": str(self.model), "cluster_key": key}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineConfig:
        """The inverse of `to_dict`."""
        key = values["cluster_key"] and Path(values["cluster_key"])
        return cls(**values | {"model": Path(values["model"]), "plugins": tuple(values["plugins"]), "cluster_key": key})


PARTS: tuple[type[_Options], ...] = (
    ModelOptions,
    LayoutOptions,
    CacheOptions,
    RequestOptions,
    RankOptions,
    CommunicationOptions,
    ClusterOptions,
)


def _core_range(text: str) -> range:
    """`4-7` or `4`: one core at least. Raises ValueError."""
    first, to, last = text.partition("-")
    run = range(int(first), int(last if to else first) + 1)
    if not run or run[-1] >= MAX_CORES:
        raise ValueError
    return run
