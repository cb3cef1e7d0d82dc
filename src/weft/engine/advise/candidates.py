"""Layouts that a model's engine accepts on a number of ranks, by the checks and the memory ledger of the engine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal, TypeVar

import torch

from weft.comm.cores import own_cores
from weft.comm.transport_registry import SHM
from weft.engine.advise.step_prices import PublishedGpu
from weft.engine.config.config import EngineConfig
from weft.engine.config.cpu_shares import divide_servers
from weft.engine.config.device import check_formats, device_of, dtype_of, enabled_transports, on_gpus
from weft.engine.controller.startup import check_plans, context_tokens, planner_of, read_model, resolve_defaults
from weft.engine.kv.cache_spec import CacheGroup
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.layers.model_config import ModelConfig
from weft.engine.models.layers.moe import Experts
from weft.engine.models.load import model_shape
from weft.engine.worker.arena import arena_need, available_bytes, check_memory
from weft.engine.worker.batch_limits import choose_limits, gpu_bytes
from weft.engine.worker.footprint import Footprint
from weft.engine.worker.memory import CacheNeed, Memory, check_weights, parameter_bytes
from weft.planner.plan import Planner
from weft.planner.spec import LayoutError, Mesh, PlacementError, divisors

T = TypeVar("T")
KvDtype = Literal["auto", "fp8_e4m3"]
MAX_RECORDED = 64
"""Sequences of a recorded load that may run at once."""
SIZES = ("attn_dp", "attn_tp", "ep", "moe_tp", "dcp")
"""Sizes of a layout, as options of the engine."""


@dataclass(frozen=True)
class Arrival:
    """A request of a recorded load: seconds from the first one, and tokens of its prompt and output."""

    seconds: float
    input_len: int
    output_len: int


@dataclass(frozen=True)
class ClientLoad:
    """Clients that each wait for their output and then send the next request; or requests at recorded times.

    Raises ValueError.
    """

    input_len: int = 256  # tokens of a prompt
    output_len: int = 128  # tokens of an output
    concurrency: int = 8  # clients
    shared_prefix: float = 0.0  # fraction of a prompt that is the same in all prompts
    arrivals: tuple[Arrival, ...] = ()  # recorded requests; lengths above are their maxima, and clients a limit

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "concurrency"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more")
        if not 0 <= self.shared_prefix < 1:
            raise ValueError(f"shared_prefix is {self.shared_prefix}; it must be from 0 to below 1")

    @property
    def tokens(self) -> int:
        """Tokens of a request: prompt and output."""
        return self.input_len + self.output_len

    @property
    def shortest(self) -> int:
        """Minimum tokens of a prompt."""
        return min((each.input_len for each in self.arrivals), default=self.input_len)

    @classmethod
    def recorded(cls, arrivals: Sequence[Arrival]) -> ClientLoad:
        """Return the load of recorded requests, in the order of their arrival. Raises ValueError."""
        known = all(0 <= each.seconds < math.inf and min(each.input_len, each.output_len) > 0 for each in arrivals)
        if not (arrivals and known):
            raise ValueError("a recorded load needs requests, at 0 s or later, with 1 token or more in and out")
        first = min(each.seconds for each in arrivals)
        ordered = sorted(
            (replace(each, seconds=each.seconds - first) for each in arrivals), key=lambda each: each.seconds
        )
        input_len, output_len = (max(getattr(each, name) for each in arrivals) for name in ("input_len", "output_len"))
        return cls(input_len, output_len, min(len(arrivals), MAX_RECORDED), arrivals=tuple(ordered))

    @property
    def text(self) -> str:
        """The load in words."""
        if self.arrivals:
            return f"{len(self.arrivals)} recorded requests of up to {self.input_len} + {self.output_len} tokens"
        return f"{self.concurrency} clients of {self.input_len} + {self.output_len} tokens"

    def per_server(self, replicas: int) -> ClientLoad:
        """Return the load of the busiest of several equal servers."""
        return replace(self, concurrency=-(-self.concurrency // replicas), arrivals=self.arrivals[::replicas])

    def per_group(self, groups: int) -> int:
        """Return the clients of the busiest of a server's DP groups."""
        return -(-self.concurrency // groups)

    def servers(self, replicas: int) -> float:
        """Return the number of servers that the load keeps as busy as the busiest: some have a client less."""
        own = self.per_server(replicas)
        return len(self.arrivals) / len(own.arrivals) if self.arrivals else self.concurrency / own.concurrency


@dataclass(frozen=True)
class Candidate:
    """A layout that starts."""

    given: EngineConfig  # options of `weft serve`, without cores
    config: EngineConfig  # configuration of ranks, as `check_plans` returns it
    replicas: int  # servers with this layout, each with a share of the clients
    model: ModelConfig
    groups: tuple[CacheGroup, ...]
    planner: Planner
    cores: list[str]  # cpu_bind of each server
    footprint: Footprint

    @property
    def crowded(self) -> bool:
        """True if ranks on CPUs leave no core to the HTTP server."""
        threads = self.config.threads
        ranks = self.replicas * self.config.mesh.world
        return not on_gpus(self.config) and ranks * (1 if threads == "auto" else threads) >= _cores()

    def __str__(self) -> str:
        servers = f"{self.replicas} servers of " if self.replicas > 1 else ""
        dtype = "" if self.config.kv_dtype == "auto" else f" kv_dtype={self.config.kv_dtype}"
        rows = "" if (limit := self.given.mixed_batch_tokens) is None else f" mixed_batch_tokens={limit}"
        return f"{servers}{self.config.mesh}{dtype}{rows}"


def measured_servers(servers: Sequence[T], config: EngineConfig) -> Sequence[T]:
    """Return the servers to measure: all on CPUs, and one on GPUs, where servers share nothing."""
    return servers[:1] if on_gpus(config) else servers


def _own_bytes() -> int:
    """Return the bytes of this process that no file and no other process shares."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _cores() -> int:
    return sum(map(len, own_cores().values()))


def choose_ranks(ranks: int | None, device: str) -> tuple[int, Literal["cpu", "cuda"]]:
    """Return the number of ranks and their device. ranks: None: a rank per GPU or core. device: auto: GPUs if any.

    Raises LayoutError if this host has fewer.
    """
    gpus, cores = torch.cuda.device_count(), _cores()
    cuda = device == "cuda" or (device == "auto" and 0 < (ranks or 1) <= gpus)
    have, what = (gpus, "GPU") if cuda else (cores, "core")
    ranks = max(1, have) if ranks is None else ranks
    if not 1 <= ranks <= have:
        remedy = f"choose from 1 to {have}" if have else "drop --gpus and --device cuda to use cores"
        need = f"{ranks} ranks require a {what} each" if ranks != 1 else f"1 rank requires a {what}"
        raise LayoutError(f"{need}, and this host has {have or 'none'}: {remedy}")
    return ranks, "cuda" if cuda else "cpu"


def no_layout(ranks: int, refused: Mapping[str, str]) -> LayoutError:
    """Return the error that no layout starts. refused: as of `find_candidates`."""
    if not refused:
        return LayoutError(f"no layout of {ranks} rank(s) has the sizes that are given: omit them")
    last = min([*refused][::-1], key=lambda layout: "dcp=" in layout)  # few models allow dcp; memory tells more
    return LayoutError(f"no layout of {ranks} rank(s) starts; of {last}: {refused[last]}")


def find_candidates(
    base: EngineConfig,
    ranks: int,
    load: ClientLoad,
    memory: int | None = None,
    kv_dtypes: Sequence[KvDtype] = ("auto",),
    one_server: bool = False,
    gpu: PublishedGpu | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> tuple[list[Candidate], dict[str, str]]:
    """Return every layout of `ranks` ranks, in one server or several equal ones, that starts and can hold its load.

    Also return the reason of each layout that does not start.

    Args:
        base: the model and options that all layouts share; sizes of a layout that are not the defaults are kept.
        ranks: number of ranks, all used.
        load: clients of all servers.
        memory: bytes of this host; None: what is available now.
        kv_dtypes: dtypes of the cache to consider.
        one_server: one server with any number of ranks that divides `ranks`, instead of several.
        gpu: GPU of each rank, on hosts that are not here; None: this host.
        progress: called with (what, fraction).

    Raises ModelError for a model that cannot be read, or a request beyond its context.
    """
    model = read_model(base)
    context = context_tokens(base, model)
    if load.tokens > context:
        raise ModelError(
            f"a request of {load.input_len} + {load.output_len} tokens is beyond the {context} tokens of the model's "
            "context: lower --input-len or --output-len"
        )
    # A server's controller, its fork server and each rank, which writes to most of its copy of the fork server, have
    # what this process has; this one is counted as used already.
    own, memory = (_own_bytes(), available_bytes(limit_gib=base.host_memory_gib)) if memory is None else (0, memory)
    found, refused = list[Candidate](), dict[str, str]()
    whole = model_shape(model, Mesh(), dtype_of(base))
    experts = any(isinstance(layer, Experts) for layer in whole.modules())
    pinned = [(at, size) for at, name in enumerate(SIZES) if (size := getattr(base, name)) not in (None, 1)]
    asked = list(product(layouts(ranks, experts), kv_dtypes))
    for done, (sizes, kv_dtype) in enumerate(asked):
        if progress:
            progress("finding layouts", done / len(asked))
        if any(sizes[at] != size for at, size in pinned):
            continue
        attn_dp, attn_tp, ep, moe_tp, dcp = sizes
        replicas = 1 if one_server else ranks // (attn_dp * attn_tp)
        given = replace(base, attn_dp=attn_dp, attn_tp=attn_tp, dcp=dcp, kv_dtype=kv_dtype)
        if (ep, moe_tp) != (attn_dp, attn_tp):
            given = replace(given, ep=ep, moe_tp=moe_tp)
        try:
            each = load.per_server(replicas)
            if gpu is None:
                share = (memory - (2 * replicas - 1) * own) // (replicas * attn_dp * attn_tp) - own
                found.append(check(given, replicas, each, max(0, share)))
            else:
                found.append(check_published(given, replicas, each, gpu))
        except (LayoutError, PlacementError, ModelError) as error:
            refused[f"{replicas} servers of " * (replicas > 1) + str(given.mesh)] = str(error)
    return found, refused


def layouts(ranks: int, experts: bool) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (attn_dp, attn_tp, ep, moe_tp, dcp) of each mesh with a number of ranks that divides `ranks`.

    experts: the model has some; without, ep and moe_tp change nothing, and have their defaults.
    """
    for world in divisors(ranks):
        for attn_tp in divisors(world):
            attn_dp = world // attn_tp
            for ep in divisors(world) if experts else [attn_dp]:
                for dcp in divisors(attn_tp):
                    yield attn_dp, attn_tp, ep, world // ep, dcp


def check(given: EngineConfig, replicas: int, load: ClientLoad, share: int) -> Candidate:
    """Return a layout that starts and can hold a request, with sizes for its load. Raises the errors of a start.

    Args:
        given: options of each server.
        replicas: number of servers.
        load: load of one server.
        share: bytes of the host's memory for a rank, if it runs on a CPU.
    """
    clients = load.per_group(given.attn_dp)
    if given.max_running is None and not on_gpus(given) and clients > given.batch_sequences:
        given = replace(given, max_running=min(clients, given.mixed_tokens))
    cores = ["auto"] * replicas
    if replicas > 1 and not on_gpus(given):
        cores = divide_servers(own_cores(), given.mesh.world, replicas)
    config = resolve_defaults(replace(given, cpu_bind=cores[0]))
    model = read_model(config)
    layers = model_shape(model, config.mesh, dtype_of(config))
    need, weights = CacheNeed.of(config, layers), parameter_bytes(layers)
    if on_gpus(config):
        check_formats(model, need.dtype, device_of(config, 0))
        need = _fit_gpu(need, weights, gpu_bytes(config))
    else:
        if config.mesh.world > 1 and SHM in enabled_transports(config):
            check_memory(config, arena := arena_need(config, model, dtype_of(config)), share * config.mesh.world)
            weights += arena.bytes
        need = need.fit((load.tokens, clients * load.tokens), weights, share)
        if need.config.kv_tokens != config.kv_tokens:
            given = replace(given, kv_tokens=need.config.kv_tokens)
    _check_request(need.config, load)
    config = check_plans(need.config, model)
    footprint = Footprint.of(layers, model, config.mesh, need.dtype)
    return Candidate(given, config, replicas, model, need.groups(), planner_of(config, model), cores, footprint)


def check_published(given: EngineConfig, replicas: int, load: ClientLoad, gpu: PublishedGpu) -> Candidate:
    """Return a layout that fits the memory of GPUs that are not here. Arguments and errors are as in `check`.

    Its configuration stands for ranks on GPUs, and is one of CPUs, so that nothing looks for GPUs here.
    """
    hosts = -(-given.mesh.world // gpu.per_host)
    given = replace(given, nnodes=hosts if hosts > 1 else None)
    config = replace(given, device="cpu", dtype="bfloat16", moe_exchange="gather", split_vocabulary="off")
    config = replace(config, float8="on" if config.read_model().storage.automatic else "off")
    model = config.read_model()
    layers = model_shape(model, config.mesh, dtype_of(config))
    need, weights = CacheNeed.of(config, layers), parameter_bytes(layers)
    need = _fit_gpu(replace(need, config=choose_limits(need, weights, gpu.memory)), weights, gpu.memory)
    _check_request(need.config, load)
    footprint, planner = Footprint.of(layers, model, config.mesh, need.dtype), gpu.planner(config, layers)
    alone = replace(need.config, nnodes=None)
    return Candidate(given, alone, replicas, model, need.groups(), planner, ["auto"] * replicas, footprint)


def _check_request(config: EngineConfig, load: ClientLoad) -> None:
    """Raise LayoutError if the cache holds no request of the load."""
    if load.tokens > config.cached_tokens:
        raise LayoutError(f"a cache of {config.cached_tokens} tokens holds no request of {load.tokens}")


def _fit_gpu(need: CacheNeed, weights: int, total: int) -> CacheNeed:
    """Return the cache that fits a GPU of `total` bytes next to the weights. Memory of steps and graphs, which only
    ranks can measure, is not subtracted."""
    config = need.config
    check_weights(weights, 0, total)
    if config.kv_tokens is not None:
        need.check(total - weights)
        return need
    return need.sized(Memory(total, total - weights, 0, 0), lambda pages: pages)
