"""The options of an engine, by subject.

Each field is an option of every command that runs a model: its docstring is the help text, its type gives the values,
and `check` says what values there may be.

The module imports no torch, so that a command line is read without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weft.comm.transport_registry import ANY_TRANSPORT, TransportChoice
from weft.engine.attention.backend_registry import ANY_BACKEND, BackendChoice
from weft.planner.experts import Forms
from weft.planner.plan import Choice
from weft.planner.spec import Mesh

KV_TOKENS = 65536
"""The default of kv_tokens on CPUs."""
BATCH_TOKENS, BATCH_SEQUENCES = 2048, 64
"""The defaults of max_batch_tokens and max_running, where `weft.engine.worker.batch_limits` has chosen no others."""


class EngineOptions:
    """Options that belong together: a base of `weft.engine.config.config.EngineConfig`, which has the fields of them
    all."""

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
class ModelOptions(EngineOptions):
    """How the model is read, and what plugins add."""

    plugins: tuple[str, ...] = ()
    """Python modules or .py files that add model families, transports or attention backends; they run, so name only
    what you trust."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto: the model's own weights; dummy: made-up weights, to measure a shape. Their text means nothing, and the
    tokenizer is the embedded model's."""
    num_layers: int | None = None
    """Only the model's first so many layers; left out, all."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and activations; auto: float32 on CPUs, bfloat16 on GPUs."""
    chat_template: Path | None = None
    """A file with the Jinja template of chats; left out, the one that the model was published with."""
    float8: Literal["auto", "on", "off"] = "auto"
    """on: weights that a checkpoint has in FP8 stay so, and products with them are computed in it; off: they are
    dequantised when they are loaded; auto: on for GPUs."""

    def check(self) -> None:
        self._above_zero("num_layers")


@dataclass(frozen=True)
class LayoutOptions(EngineOptions):
    """How the model is split over the ranks: attn-dp × attn-tp = ep × moe-tp = the number of ranks."""

    attn_dp: int = 1
    """Data-parallel groups of the attention (DP groups), each with requests of its own."""
    attn_tp: int = 1
    """Ranks of a DP group, which share its attention heads."""
    ep: int | None = None
    """Parts into which the experts are divided; left out, the ranks by moe_tp, or as many as attn_dp."""
    moe_tp: int | None = None
    """Ranks that share each expert; left out, the ranks by ep, or as many as attn_tp."""
    dcp: int = 1
    """Neighbouring ranks of attn_tp over which a DP group's cached tokens are sharded, so that it holds so many times
    as many (decode context parallelism)."""
    dcp_interleave: int | None = None
    """Consecutive tokens on one of these ranks; it divides page_size; left out, a page."""
    dcp_exchange: Literal["auto", "ag_rs", "a2a", "fused"] = "auto"
    """The recipe by which their attention is merged; auto: the cheapest."""
    dcp_prefill: Literal["auto", "gather", "merge"] = "auto"
    """gather: prompts gather the tokens that they attend to; merge: their attention is merged, as that of decode rows
    is; auto: the quicker one for each step."""
    dcp_query: Literal["gather", "replicate"] = "gather"
    """gather: the ranks gather their queries; replicate: each computes those of all, from more weights."""
    split_vocabulary: Literal["off", "on", "auto"] = "auto"
    """on: embedding and head are split over attn_tp; auto: on GPUs, where decode steps are predicted to be quicker."""
    moe_exchange: Forms = "auto"
    """gather: every rank takes all rows; dispatch: rows go to the ranks of their experts and back (on GPUs with
    transport peer); auto: on CPUs the cheaper one for each step. Where a step dispatches, shared experts are whole on
    every rank."""
    nnodes: int | None = None
    """Hosts that the ranks are on, as many on each; left out, what torchrun, srun or LeaderWorkerSet say, else 1."""

    def check(self) -> None:
        _ = self.mesh

    @property
    def mesh(self) -> Mesh:
        """The layout. Raises LayoutError."""
        ep, moe_tp, world = self.ep, self.moe_tp, self.attn_dp * self.attn_tp
        if ep is None:
            ep = self.attn_dp if moe_tp is None else max(1, world // max(1, moe_tp))
        if moe_tp is None:
            moe_tp = self.attn_tp if self.ep is None else max(1, world // max(1, ep))
        return Mesh(self.attn_dp, self.attn_tp, ep, moe_tp, self.dcp, 1 if self.nnodes is None else self.nnodes)

    @property
    def ranks_of_host(self) -> int:
        """How many ranks a host has."""
        return self.mesh.world // self.mesh.hosts

    def place_on_host(self, rank: int) -> int:
        """A rank's place among those of its host."""
        return self.mesh.peers("host", rank).index(rank)


@dataclass(frozen=True)
class CacheOptions(EngineOptions):
    """The key-value cache of a rank. A DP group holds dcp times as many tokens."""

    page_size: int = 16
    """Tokens in a page."""
    kv_tokens: int | None = None
    """Tokens in the cache; left out, 65536 on CPUs, and on GPUs as many as fit."""
    kv_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """Of the cache's keys, values and latent vectors; auto: that of activations; fp8_e4m3: eight bits each and a power
    of two for each vector, so that it holds twice as many tokens (on GPUs from sm_89 on)."""
    gpu_memory_fraction: float = 0.9
    """Share of a GPU's memory that may be used in all, where kv_tokens is left out."""
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
class RequestOptions(EngineOptions):
    """How many requests there may be, how long they may be, and how they are batched."""

    max_batch_tokens: int | None = None
    """Rows of one step of a DP group; longer prompts are cut into chunks; left out, 2048, and 8192 on GPUs with 12 GiB
    or more beside the weights."""
    max_running: int | None = None
    """Sequences of a DP group that run at once; left out, 64, and on GPUs up to 1024, by the memory for their cache."""
    max_waiting: int = 1024
    """Requests that may wait for a place, of all DP groups together; more are refused, over HTTP with 429 and a time to
    retry after."""
    max_choices: int = 256
    """Completions of one request of a client: its prompts times its choices."""
    max_model_len: int | None = None
    """Tokens of a prompt and its completion together; left out, what the model allows."""
    overlap: bool = True
    """Whether a step is sent before the tokens of the previous one are back, so that ranks never wait for the
    controller."""

    def check(self) -> None:
        self._above_zero("max_batch_tokens", "max_running", "max_waiting", "max_choices")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(
                f"max_model_len is {self.max_model_len}; it must be 2 or more: a prompt and a completion of one token"
            )
        if self.batch_tokens < self.batch_sequences:
            raise ValueError(
                f"max_batch_tokens={self.max_batch_tokens} is less than max_running={self.max_running}: "
                "every running sequence needs a row in each step"
            )

    @property
    def batch_tokens(self) -> int:
        """max_batch_tokens, or what it is where it is left out."""
        if self.max_batch_tokens is None:
            return max(BATCH_TOKENS, self.max_running or 0)
        return self.max_batch_tokens

    @property
    def batch_sequences(self) -> int:
        """max_running, or what it is where it is left out."""
        return min(BATCH_SEQUENCES, self.batch_tokens) if self.max_running is None else self.max_running


@dataclass(frozen=True)
class RankOptions(EngineOptions):
    """Where ranks run, and what happens when they fail."""

    executor: Literal["process", "thread"] = "process"
    """process: one process for each rank; thread: all ranks in this process, on the reference transport: slow, for
    tests."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cuda: a GPU for each rank; auto: GPUs where there are as many as ranks."""
    cuda_graphs: bool = True
    """Whether steps on GPUs replay captured graphs. Those with prompts of some models never do, nor do those with
    requested logprobs of prompts."""
    attention_backend: BackendChoice = ANY_BACKEND
    """The kernels of attention over the cache. triton: Weft's own, on GPUs; fa3: FlashAttention 3, from an installed
    vLLM or sglang-kernel, on Hopper GPUs; fa3+triton: of these two the quicker for each kind of rows; flashinfer:
    FlashInfer's, where installed, without CUDA graphs; torch: plain torch, which gathers the tokens; or a plugin's;
    auto: fa3+triton where fa3 can run, else triton on GPUs, torch on CPUs."""
    threads: int = 1
    """Threads of each rank's process; more ranks use cores better."""
    cpu_bind: str | None = None
    """Cores of each rank of a host, such as 0-3|4-7; auto: this process's cores, divided evenly; left out: any."""
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
class CommunicationOptions(EngineOptions):
    """What carries the exchanges between ranks, and how they are planned."""

    transport: TransportChoice = ANY_TRANSPORT
    """What carries them, where ranks are processes: one by name, or a plugin's; auto: those of the ranks' device,
    chosen call by call by cost."""
    cost: str = "auto"
    """The planner's cost model: a preset, a table FILE.json of weft tune, or auto: this host's table where weft tune
    has written one, else what is known of hosts like it."""
    plan: Choice = "cheapest"
    """naive: the plan of all-reduces with which others are compared."""


@dataclass(frozen=True)
class ClusterOptions(EngineOptions):
    """Where the ranks' hosts meet, with nnodes above 1: start the same command on each, with its node_rank."""

    node_rank: int | None = None
    """Which of nnodes hosts this one is; 0 has the controller and the HTTP port; left out, as nnodes."""
    master_addr: str | None = None
    """Address of node 0, at which the others reach it; left out, as nnodes. Without one, ranks of all hosts run on this
    machine, in groups that share no memory with each other: for tests."""
    master_port: int = 29600
    """Port of node 0 to which the other hosts connect; the next one is that of torch.distributed's store."""
    cluster_key: Path | None = None
    """A file with a secret, the same on every host: head -c 32 /dev/urandom | base64 > cluster.key."""
    interface: str | None = None
    """Network interface of this host, such as eth0; left out, the one of the route to master_addr."""
    join_timeout_s: float = 600.0
    """Seconds to wait for hosts that are not there: at the start, and after one was lost."""

    @property
    def store_port(self) -> int:
        """The port of torch.distributed's store."""
        return self.master_port + 1

    def check(self) -> None:
        self._above_zero("join_timeout_s")
        if self.node_rank is not None and self.node_rank < 0:
            raise ValueError(f"node_rank is {self.node_rank}; it must be 0 or more")
        if not 0 < self.master_port < 65535:
            raise ValueError(f"master_port is {self.master_port}; it and the next one must be ports, 1 to 65535")
        if self.master_addr is not None and self.cluster_key is None:
            raise ValueError("hosts meet by a secret: give cluster_key, a file that is the same on every host")


PARTS: tuple[type[EngineOptions], ...] = (
    ModelOptions,
    LayoutOptions,
    CacheOptions,
    RequestOptions,
    RankOptions,
    CommunicationOptions,
    ClusterOptions,
)
