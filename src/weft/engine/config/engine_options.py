"""The options of an engine, by subject.

Each field is an option of every command that runs a model: its docstring is the help text, its type gives the values,
`check` validates the value, and its class is the group in the help.

The module must not import torch: a command line is parsed without it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints

import msgspec

from weft.comm.transport_registry import ANY_TRANSPORT, TransportChoice
from weft.engine.attention.backend_registry import ANY_BACKEND, BackendChoice
from weft.planner.experts import Forms
from weft.planner.plan import Choice
from weft.planner.spec import Mesh

KV_TOKENS = 65536
"""Default of kv_tokens on CPUs."""
BATCH_TOKENS, BATCH_SEQUENCES = 2048, 64
"""Defaults of max_batch_tokens and max_running, unless `weft.engine.worker.batch_limits` chooses others."""


class PlainValues:
    """Base of dataclasses that another process gets in JSON's types."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for another process."""
        values: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(self, enc_hook=str))
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the object with these values of `to_dict`, paths as texts and tuples as lists."""
        kinds = cls.kinds()
        return cls(
            **{n: msgspec.convert(value, kinds[n], dec_hook=lambda kind, v: kind(v)) for n, value in values.items()}
        )

    @classmethod
    @cache
    def kinds(cls) -> dict[str, Any]:
        """Return the fields' types. They take 1 ms to find, and advice makes thousands of configurations."""
        return get_type_hints(cls)


@dataclass(frozen=True)
class OptionGroup:
    """Options on one subject, shown by commands as a group with the docstring as its heading."""

    @classmethod
    def groups(cls) -> list[type[OptionGroup]]:
        """Return the groups of a class of options, in the order of their fields."""
        return [each for each in reversed(cls.__mro__) if OptionGroup in each.__bases__]

    @classmethod
    def of(cls, options: OptionGroup) -> Self:
        """Return this group's fields of `options`."""
        return cls(**{each.name: getattr(options, each.name) for each in fields(cls)})

    def check(self) -> None:
        """Raise ValueError or LayoutError, in one line, for invalid values."""
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
class ModelOptions(OptionGroup):
    """Weights and data types of the model, and plugins."""

    plugins: tuple[str, ...] = ()
    """Python modules or .py files that add model families, transports or attention backends; they run, so name only
    what you trust."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto: the model's own weights; dummy: made-up weights and the embedded model's tokenizer, to measure a shape."""
    num_layers: int | None = None
    """Run the model's first layers only; omitted: all."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights and activations; auto: float32 on CPUs, bfloat16 on GPUs."""
    chat_template: Path | None = None
    """A file with the Jinja template of chats; omitted: the template that the model was published with."""
    float8: Literal["auto", "on", "off"] = "auto"
    """on: keep FP8 weights in FP8 and run their matmuls in FP8, and keep experts in MXFP4; off: dequantise them at
    load; auto: on for FP8 on GPUs."""

    def check(self) -> None:
        self._above_zero("num_layers")


@dataclass(frozen=True)
class LayoutOptions(OptionGroup):
    """Split of the model over the ranks: attn-dp × attn-tp = ep × moe-tp = the number of ranks."""

    attn_dp: int = 1
    """Data-parallel groups of the attention (DP groups); each has requests of its own."""
    attn_tp: int = 1
    """Ranks of a DP group, which share its attention heads."""
    ep: int | None = None
    """Parts into which the experts are divided; omitted: the ranks by moe_tp, or attn_dp."""
    moe_tp: int | None = None
    """Ranks that share each expert; omitted: the ranks by ep, or attn_tp."""
    dcp: int = 1
    """Neighbouring ranks of attn_tp that shard a DP group's cached tokens (decode context parallelism); the group holds
    dcp times the tokens."""
    dcp_interleave: int | None = None
    """Consecutive tokens on one rank of dcp; it divides page_size; omitted: a page."""
    dcp_exchange: Literal["auto", "ag_rs", "a2a", "fused"] = "auto"
    """Recipe that merges the attention of the ranks of dcp; auto: the cheapest."""
    dcp_prefill: Literal["auto", "gather", "merge"] = "auto"
    """gather: prompts gather the tokens that they attend to; merge: ranks merge their attention, as for decode rows;
    auto: the quicker one for each step."""
    dcp_query: Literal["gather", "replicate"] = "gather"
    """gather: the ranks of dcp gather their queries; replicate: each computes all queries, from more weights."""
    split_vocabulary: Literal["off", "on", "auto"] = "auto"
    """on: split embedding and head over attn_tp; auto: if predicted to pay, on CPUs for heads from 32 MiB on."""
    moe_exchange: Forms = "auto"
    """gather: every rank gets all rows; dispatch: rows go to the ranks of their experts and back (on GPUs with
    transport peer), and every rank holds whole shared experts; auto: gather on GPUs, on CPUs the cheaper for each
    step."""
    nnodes: int | None = None
    """Hosts, each with the same number of ranks; omitted: what torchrun, srun or LeaderWorkerSet say, else 1."""

    def check(self) -> None:
        _ = self.mesh

    @property
    def mesh(self) -> Mesh:
        """Layout of the ranks. Raises LayoutError."""
        ep, moe_tp, world = self.ep, self.moe_tp, self.attn_dp * self.attn_tp
        if ep is None:
            ep = self.attn_dp if moe_tp is None else max(1, world // max(1, moe_tp))
        if moe_tp is None:
            moe_tp = self.attn_tp if self.ep is None else max(1, world // max(1, ep))
        return Mesh(self.attn_dp, self.attn_tp, ep, moe_tp, self.dcp, 1 if self.nnodes is None else self.nnodes)

    @property
    def ranks_of_host(self) -> int:
        """Number of ranks on each host."""
        return self.mesh.world // self.mesh.hosts

    def place_on_host(self, rank: int) -> int:
        """Return a rank's index among the ranks of its host."""
        return self.mesh.peers("host", rank).index(rank)


@dataclass(frozen=True)
class CacheOptions(OptionGroup):
    """Key-value cache of a rank. A DP group holds dcp times the tokens."""

    page_size: int = 16
    """Tokens in a page."""
    kv_tokens: int | None = None
    """Tokens in the cache; omitted: 65536 on CPUs, on GPUs what fits."""
    kv_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """Data type of the cache; auto: that of activations; fp8_e4m3: eight bits a value and a power of two a vector, for
    twice the tokens (on GPUs from sm_89 on)."""
    gpu_memory_fraction: float = 0.9
    """Share of a GPU's memory that may be used in all, unless kv_tokens is given."""
    prefix_cache: bool = True
    """Reuse pages of equal prefixes."""

    def check(self) -> None:
        self._above_zero("page_size")
        if not 0 < self.gpu_memory_fraction <= 1:
            raise ValueError(f"gpu_memory_fraction is {self.gpu_memory_fraction}; it must be above 0 and at most 1")
        if self.kv_tokens is not None and self.kv_tokens < self.page_size:
            raise ValueError(f"kv_tokens={self.kv_tokens} is less than one page of {self.page_size} tokens")

    @property
    def num_pages(self) -> int:
        """Pages of a rank's key-value cache; each holds a share of `interleave.span` tokens of the DP group."""
        return (KV_TOKENS if self.kv_tokens is None else self.kv_tokens) // self.page_size


@dataclass(frozen=True)
class RequestOptions(OptionGroup):
    """Limits of requests, and of steps that batch them."""

    max_batch_tokens: int | None = None
    """Rows of one step of a DP group; longer prompts are cut into chunks; omitted: 2048, or 8192 on GPUs with 12 GiB or
    more next to the weights, and at least max_running and mixed_batch_tokens."""
    mixed_batch_tokens: int | None = None
    """Rows of one step of a DP group while sequences decode; fewer keep the time between their tokens short while
    others' prompts are read, which then takes longer; omitted: max_batch_tokens."""
    max_running: int | None = None
    """Sequences of a DP group that run at once; omitted: 64, on GPUs up to 1024, by the memory for their cache."""
    max_waiting: int = 1024
    """Requests that may wait, over all DP groups; more are refused, over HTTP with 429 and a time to retry after, but
    not of a client with less than an equal share."""
    max_choices: int = 256
    """Completions of one client's request: its prompts times its choices."""
    max_model_len: int | None = None
    """Tokens of a prompt and its completion; omitted: what the model allows."""
    overlap: bool = True
    """Send a step before the previous step's tokens are back, so that ranks never wait for the controller."""

    def check(self) -> None:
        self._above_zero("max_batch_tokens", "mixed_batch_tokens", "max_running", "max_waiting", "max_choices")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(
                f"max_model_len is {self.max_model_len}; it must be 2 or more: a prompt and a completion of one token"
            )
        for name, rows in (("max_batch_tokens", self.batch_tokens), ("mixed_batch_tokens", self.mixed_tokens)):
            if rows < self.batch_sequences:
                raise ValueError(
                    f"{name}={rows} is less than max_running={self.max_running}: "
                    "every running sequence needs a row in each step"
                )
        if self.mixed_tokens > self.batch_tokens:
            raise ValueError(
                f"mixed_batch_tokens={self.mixed_batch_tokens} is more than max_batch_tokens={self.batch_tokens}; "
                "it limits a part of the steps"
            )

    @property
    def batch_tokens(self) -> int:
        """max_batch_tokens, or its default, which the other limits raise."""
        if self.max_batch_tokens is None:
            return max(BATCH_TOKENS, self.max_running or 0, self.mixed_batch_tokens or 0)
        return self.max_batch_tokens

    @property
    def mixed_tokens(self) -> int:
        """mixed_batch_tokens, or its default."""
        return self.batch_tokens if self.mixed_batch_tokens is None else self.mixed_batch_tokens

    @property
    def batch_sequences(self) -> int:
        """max_running, or its default."""
        return min(BATCH_SEQUENCES, self.mixed_tokens) if self.max_running is None else self.max_running


@dataclass(frozen=True)
class SpeculationOptions(OptionGroup):
    """Speculative decoding: several tokens of a sequence in one step. It changes no output."""

    speculative: Literal["off", "ngram", "mtp", "eagle3", "draft", "auto"] = "off"
    """Source of drafts, which the model checks in one step. ngram: the tokens after an earlier occurrence of a
    sequence's last tokens. mtp: the checkpoint's draft layer; eagle3: an EAGLE-3 head; draft: another model. auto: mtp
    if it can run and is a tenth of the layers or less, otherwise ngram, and off for recurrent states. Sequences pause
    while drafts do not pay."""
    draft_model: Path | None = None
    """Model that drafts: smaller, with the same vocabulary, or an EAGLE-3 head; given like the first argument. Requires
    draft or eagle3."""
    speculative_tokens: int = 3
    """Maximum drafts of a sequence in one step; their number follows from the measured time of steps."""
    prompt_lookup_min: int = 2
    """Minimum last tokens that ngram searches for."""
    prompt_lookup_max: int = 4
    """Maximum last tokens that ngram searches for; more are searched for first."""

    def check(self) -> None:
        self._above_zero("speculative_tokens", "prompt_lookup_min")
        if (self.speculative in ("draft", "eagle3")) != (self.draft_model is not None):
            lacks = "draft_model, the model that drafts" if self.draft_model is None else "speculative draft or eagle3"
            raise ValueError(f"speculative={self.speculative} with draft_model={self.draft_model} lacks {lacks}")
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise ValueError(
                f"prompt_lookup_max={self.prompt_lookup_max} is below prompt_lookup_min={self.prompt_lookup_min}"
            )

    @property
    def drafts_on_ranks(self) -> bool:
        """True if ranks propose drafts, by a draft layer, head or model."""
        return self.speculative in ("mtp", "eagle3", "draft")

    @property
    def decode_tokens(self) -> int:
        """Maximum tokens of a decode row."""
        return 1 if self.speculative == "off" else 1 + self.speculative_tokens


@dataclass(frozen=True)
class RankOptions(OptionGroup):
    """Processes, devices and failures of ranks."""

    executor: Literal["process", "thread"] = "process"
    """process: a process for each rank; thread: all ranks in this process, on the reference transport (slow)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cuda: a GPU for each rank; auto: GPUs, if there is one for each rank."""
    cuda_graphs: bool = True
    """Replay captured graphs on GPUs, except for logprobs of prompts, and prompts of some models; on CPUs, recorded
    decode steps of few rows."""
    attention_backend: BackendChoice = ANY_BACKEND
    """Kernels of attention over the cache. triton: Weft's own, on GPUs; fa3: FlashAttention 3, from vLLM or
    sglang-kernel, on Hopper GPUs; fa3+triton: the quicker of the two for each kind of rows; flashinfer: FlashInfer's,
    without CUDA graphs; torch: plain torch, which gathers the tokens; or a plugin's; auto: fa3+triton where fa3 runs,
    else triton on GPUs, torch on CPUs."""
    threads: int | Literal["auto"] = "auto"
    """Threads of each rank's process; auto: a thread per core of the rank's share, or OMP_NUM_THREADS; on GPUs 1."""
    cpu_bind: str = "auto"
    """Cores of each rank of a host, such as 0-3|4-7; off: any; auto: on CPUs an equal share for each rank, in one NUMA
    node, unless cores are fewer than ranks, limited by a quota, in use by another engine, or OMP_NUM_THREADS is set."""
    host_memory_gib: float | None = None
    """GiB of each host that ranks on CPUs and their server may use; omitted: all that is available."""
    step_timeout_s: float = 60.0
    """Seconds after which a step counts as a failure of the ranks."""
    max_restarts: int = 3
    """Failures within restart_window_s after which ranks are restarted; one more ends the engine."""
    restart_window_s: float = 600.0
    """Seconds over which failures are counted."""
    restart_backoff_s: float = 1.0
    """Seconds to wait after a second failure without a step in between; each further failure doubles it, to 60 s."""
    shrink: bool = False
    """Go on with fewer ranks if max_restarts do not help as the same rank fails each time, its GPU cannot be used any
    more, or a host does not come back within join_timeout_s."""
    shrink_to: int = 1
    """Least number of ranks that --shrink goes on with."""

    def check(self) -> None:
        self._above_zero("step_timeout_s", "restart_window_s", *() if self.threads == "auto" else ("threads",))
        self._above_zero("shrink_to", "host_memory_gib")
        self._not_negative("max_restarts", "restart_backoff_s")


@dataclass(frozen=True)
class CommunicationOptions(OptionGroup):
    """Exchanges between ranks: their transports, costs and plan."""

    transport: TransportChoice = ANY_TRANSPORT
    """Transport between processes: one by name, or a plugin's; auto: the cheapest for each call, of the transports that
    run on the ranks' device."""
    cost: str = "auto"
    """The planner's cost model: a preset, or a table FILE.json of weft tune; auto: this host's table if weft tune has
    written one, else a preset of similar hosts."""
    plan: Choice = "cheapest"
    """naive: the plan of all-reduces, for comparison."""


@dataclass(frozen=True)
class ClusterOptions(OptionGroup):
    """Meeting of several hosts (--nnodes): start the same command on each host, with its --node-rank."""

    node_rank: int | None = None
    """Index of this host; 0 has the controller and the HTTP port; omitted: as for nnodes."""
    master_addr: str | None = None
    """Address at which the other hosts reach node 0; omitted: as for nnodes. Without one, the ranks of all hosts run on
    this machine and share no memory between hosts (for tests)."""
    master_port: int = 29600
    """Port of node 0 to which the other hosts connect; torch.distributed's store uses the next port."""
    cluster_key: Path | None = None
    """A file with a secret that all hosts share: head -c 32 /dev/urandom | base64 > cluster.key."""
    interface: str | None = None
    """Network interface of this host, such as eth0; omitted: that of the route to master_addr."""
    join_timeout_s: float = 600.0
    """Seconds to wait for missing hosts: at the start, and after one was lost."""

    @property
    def store_port(self) -> int:
        """Port of torch.distributed's store."""
        return self.master_port + 1

    def check(self) -> None:
        self._above_zero("join_timeout_s")
        if self.node_rank is not None and self.node_rank < 0:
            raise ValueError(f"node_rank is {self.node_rank}; it must be 0 or more")
        if not 0 < self.master_port < 65535:
            raise ValueError(f"master_port is {self.master_port}; it and the next one must be ports, 1 to 65535")
        if self.master_addr is not None and self.cluster_key is None:
            raise ValueError("hosts meet by a secret: give cluster_key, a file that is the same on every host")


@dataclass(frozen=True)
class EngineOptions(
    ClusterOptions,
    CommunicationOptions,
    RankOptions,
    SpeculationOptions,
    RequestOptions,
    CacheOptions,
    LayoutOptions,
    ModelOptions,
):
    """All options of an engine; bases in reverse, since dataclasses order fields from the last base on."""

    def check(self) -> None:
        for group in self.groups():
            group.check(self)
