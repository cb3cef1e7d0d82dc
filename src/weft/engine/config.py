"""What an engine is started with."""

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

ABOVE_ZERO = (
    "page_size",
    "max_batch_tokens",
    "max_running",
    "max_waiting",
    "max_choices",
    "threads",
    "step_timeout_s",
    "restart_window_s",
)
KV_TOKENS = 65536
"""Tokens in the cache of a rank on CPUs, unless told otherwise."""
MAX_CORES = 1 << 16  # a slip of the finger must not fill memory


class EngineError(RuntimeError):
    """The engine cannot start or go on: one line that names the rank and the cause."""


class QueueFull(EngineError):
    """Too many requests are here already. retry_after_s: when there may be room again, as far as can be told."""

    def __init__(self, here: int, retry_after_s: float):
        super().__init__(f"{here} requests wait or run already; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class EngineConfig:
    """Checked on construction: LayoutError for a layout, ValueError for a number, each in one line.

    attn_dp, attn_tp, ep, moe_tp: the layout (`weft.place.spec.Mesh`). dtype auto: float32 on CPUs, bfloat16 on GPUs.
    dcp: neighbouring ranks of attn_tp among which the cached tokens are dealt out (decode context parallelism),
    dcp_interleave at a time (None: a page). dcp_exchange: how their attention is merged (`weft.place.recipes`).
    dcp_prefill: how prompts attend (a recipe of `weft.place.recipes.Prompt`; auto: whichever is quicker for a step).
    dcp_query: whether they gather their queries, or each makes those of all, which takes weights instead of time.
    page_size: tokens a page of the key-value cache. kv_tokens: its size on a rank: a DP group holds dcp times as many;
    None: KV_TOKENS on CPUs, and on GPUs what fits. gpu_memory_fraction: of a GPU, what may be used in all then.
    max_batch_tokens: rows of one step of a DP group, which cuts long prompts into chunks. max_running: its sequences.
    max_waiting: requests that may wait for a place, of all groups together; more are refused. max_choices: answers to
    one request of a client, its prompts times its choices.
    overlap: send a step before the tokens of the one before are back, so that the ranks never wait for the controller.
    max_model_len: prompt and answer together; None: what the model allows. prefix_cache: reuse pages of equal prefixes.
    executor: process (one process a rank) or thread (all ranks here, on the reference transport: for tests).
    plugins: modules or .py files that add model families (`weft.models.registry`) or transports.
    load_format auto: the directory's safetensors; dummy: made-up weights (`weft.models.load.dummy_model`), of which the
    text means nothing, so the tokenizer is the embedded model's. num_layers: only the model's first so many layers.
    split_vocabulary on: embedding and head are split over attn_tp; of rows that take their best token, or draw by
    temperature alone, only each rank's best travels, of the others all logits. auto: on GPUs, where decode steps are
    predicted to be quicker by it.
    float8: whether weights that a checkpoint has in FP8 stay so, and products with them are computed in it; off: they
    are dequantised when they are loaded (`weft.models.products`); auto: on for GPUs.
    experts: the form in which mixtures of experts take rows (`weft.place.experts`): gather, dispatch (on GPUs over
    peer alone), or auto: on CPUs whichever costs less, step by step. Where a step dispatches, shared experts are whole.
    device: cuda (a GPU a rank), cpu, or auto: GPUs where there are as many as ranks. cuda_graphs: steps replay captured
    graphs, but for those with prompts of some models (`weft.engine.worker.graph_inputs.captures_prompts`), or whose own
    logprobs are wanted.
    transport: of processes: one of `weft.comm.transport_registry.transports`, or auto: those of the ranks' device,
    chosen edge by edge by cost. cost: the cost model (`weft.place.cost.costs`); auto: this host's table where `weft
    tune` has written one, else what is known of hosts like it.
    plan: naive follows the plan of all-reduces that every other is compared with (`weft.place.plan.Planner.naive`).
    threads: of each rank's process; more ranks use more cores better. cpu_bind: cores of each rank, as `0-3|4-7`; auto:
    this process's cores dealt out evenly; None: wherever the system puts them. seed: of requests that bring none.
    step_timeout_s: a step that takes longer counts as a failure of the ranks. max_restarts: failures of ranks that are
    borne within restart_window_s seconds, by starting the ranks anew; one more ends the engine. restart_backoff_s: the
    wait after the second failure without a step in between; each further one doubles it, up to a minute.
    """

    model: Path = field(default_factory=embedded_model_dir)
    attn_dp: int = 1
    attn_tp: int = 1
    ep: int = 1
    moe_tp: int = 1
    dcp: int = 1
    dcp_interleave: int | None = None
    dcp_exchange: Literal["auto", "ag_rs", "a2a", "fused"] = "auto"
    dcp_prefill: Literal["auto", "gather", "merge"] = "auto"
    dcp_query: Literal["gather", "replicate"] = "gather"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    page_size: int = 16
    kv_tokens: int | None = None
    gpu_memory_fraction: float = 0.9
    max_batch_tokens: int = 2048
    max_running: int = 64
    max_waiting: int = 1024
    max_choices: int = 256
    max_model_len: int | None = None
    overlap: bool = True
    prefix_cache: bool = True
    executor: Literal["process", "thread"] = "process"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cuda_graphs: bool = True
    transport: str = AUTO
    cost: str = "auto"
    plan: Choice = "cheapest"
    threads: int = 1
    cpu_bind: str | None = None
    seed: int = 0
    step_timeout_s: float = 60.0
    max_restarts: int = 3
    restart_window_s: float = 600.0
    restart_backoff_s: float = 1.0
    plugins: tuple[str, ...] = ()
    load_format: Literal["auto", "dummy"] = "auto"
    num_layers: int | None = None
    split_vocabulary: Literal["off", "on", "auto"] = "auto"
    experts: Forms = "auto"
    float8: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        _ = self.mesh
        if self.cpu_bind is not None:
            _ = self.cores
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(get_args(kind))}")
        options = (AUTO, *transports())
        if self.transport not in options and self.transport not in (options := (AUTO, *transports(self.plugins))):
            raise ValueError(f"transport is {self.transport!r}; it must be one of {', '.join(options)}")
        for name in ABOVE_ZERO:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.num_layers is not None and self.num_layers <= 0:
            raise ValueError(f"num_layers is {self.num_layers}; it must be above 0")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(
                f"max_model_len is {self.max_model_len}; it must be 2 or more: a prompt and an answer of one token"
            )
        for name in ("max_restarts", "restart_backoff_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        run = self.page_size if self.dcp_interleave is None else self.dcp_interleave
        if run < 1 or self.page_size % run:
            divisors = [n for n in range(1, self.page_size + 1) if self.page_size % n == 0]
            near = [max((n for n in divisors if n < run), default=1), *[n for n in divisors if n > run][:1]]
            raise ValueError(
                f"dcp_interleave is {run}; it must divide a page of {self.page_size} tokens; nearest that do: "
                + " and ".join(map(str, dict.fromkeys(near)))
            )
        if not 0 < self.gpu_memory_fraction <= 1:
            raise ValueError(f"gpu_memory_fraction is {self.gpu_memory_fraction}; it must be above 0 and at most 1")
        if self.kv_tokens is not None and self.kv_tokens < self.page_size:
            raise ValueError(f"kv_tokens={self.kv_tokens} is less than one page of {self.page_size} tokens")
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens={self.max_batch_tokens} is less than max_running={self.max_running}: "
                "every running sequence needs a row in each step"
            )

    @property
    def mesh(self) -> Mesh:
        """The layout."""
        return Mesh(self.attn_dp, self.attn_tp, self.ep, self.moe_tp, self.dcp)

    @property
    def interleave(self) -> Interleave:
        """How cached tokens are dealt out. Pages of whole DP groups stand for `interleave.span` tokens."""
        return Interleave(self.dcp, self.dcp_interleave or self.page_size, self.page_size)

    @property
    def cores(self) -> list[set[int]]:
        """The cores of each rank. Raises ValueError."""
        here = sorted(os.sched_getaffinity(0))
        world = self.mesh.world
        if self.cpu_bind in (None, "auto"):
            if len(here) < world:  # ranks share cores, each still one only
                return [{here[rank % len(here)]} for rank in range(world)]
            return [set(here[rank * len(here) // world : (rank + 1) * len(here) // world]) for rank in range(world)]
        parts = str(self.cpu_bind).split("|")
        try:
            cores = [{c for run in part.split(",") for c in _run(run)} for part in parts]
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
    def tokenizer(self) -> Path:
        """The directory of the tokenizer."""
        return self.model if self.load_format == "auto" else embedded_model_dir()

    @property
    def num_pages(self) -> int:
        """Pages of a rank's key-value cache, each of which stands for `interleave.span` tokens of the DP group."""
        return (KV_TOKENS if self.kv_tokens is None else self.kv_tokens) // self.page_size

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
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"model": str(self.model)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineConfig:
        """The inverse of `to_dict`."""
        return cls(**values | {"model": Path(values["model"]), "plugins": tuple(values["plugins"])})


def _run(text: str) -> range:
    """`4-7` or `4`: one core at least. Raises ValueError."""
    first, to, last = text.partition("-")
    run = range(int(first), int(last if to else first) + 1)
    if not run or run[-1] >= MAX_CORES:
        raise ValueError
    return run
