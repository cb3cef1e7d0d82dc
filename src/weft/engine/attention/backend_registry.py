"""Table of attention backends: one entry each, including plugins' backends.

Options, help texts and errors at the start follow from a backend's entry before its module is imported. The table
imports no torch, so that command lines parse quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weft.engine.kv.cache_spec import Latent, PagedKV, Recurrent, Spec
from weft.planner.spec import LayoutError
from weft.plugins import PluginError, load_plugins

if TYPE_CHECKING:
    from weft.engine.attention.backend import DecodeKernel, PromptKernel
    from weft.engine.attention.paged import PagedAttention
    from weft.engine.kv.cache import KVCache

AUTO = "auto"
"""Option for the fastest backend that supports the ranks' device and model."""


FA3_LIBRARIES = (
    ("vllm", "vllm_flash_attn/_vllm_fa3_C.abi3.so", "_vllm_fa3_C"),
    ("sgl_kernel", "flash_ops.abi3.so", "sgl_kernel"),
)
"""Packages with FlashAttention 3: the file in each, and the namespace of its operators."""


class BackendChoice(str):
    """Option of the table of attention backends, including plugins, or AUTO."""


ANY_BACKEND = BackendChoice(AUTO)


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of an engine's ranks on an attention backend.

    Args:
        device: cpu or cuda.
        capability: of the GPU; None on CPUs, and before a GPU has been queried.
        dtype: of activations, by torch's name.
        kv_dtype: of caches, as the option.
        caches: returns the caches that layers declare; it builds the model's shape.
        page_size: tokens of a page.
        dcp: number of ranks that share a sequence's tokens.
        dcp_prefill: as the option.
        graphs: steps are captured in CUDA graphs.
    """

    device: Literal["cpu", "cuda"]
    capability: tuple[int, int] | None
    dtype: str
    kv_dtype: str
    caches: Callable[[], Sequence[Spec]]
    page_size: int
    dcp: int
    dcp_prefill: str
    graphs: bool


@dataclass(frozen=True)
class BackendEntry:
    """Entry of a backend in the table.

    Args:
        option: name on command lines and in reports.
        device: device of its ranks.
        decode: makes the kernel of sequences of one row for a cache; imports the packages that it requires.
        prompts: makes the kernel of sequences of several rows.
        lacks: returns the unsupported need and a remedy, in words that follow the backend's name; None if it supports
            all.
        float8: supports FP8 caches (`weft.kernels.float8.Fp8Vectors`).
    """

    option: str
    device: Literal["cpu", "cuda", "any"]
    decode: Callable[[KVCache], DecodeKernel]
    prompts: Callable[[KVCache], PromptKernel]
    lacks: Callable[[Needs], str | None] = lambda needs: None
    float8: bool = False

    def make(self, cache: KVCache) -> PagedAttention:
        """Make attention over a cache with these kernels."""
        from weft.engine.attention.paged import PagedAttention  # imports torch

        return PagedAttention(cache, self.decode(cache), self.prompts(cache))

    def refusal(self, needs: Needs) -> str | None:
        """Return the reason why the backend cannot serve these needs, in words that follow its name; None if it can."""
        if self.device not in (needs.device, "any"):
            return f"runs on {'GPUs' if self.device == 'cuda' else 'CPUs'} only; omit it"
        if needs.kv_dtype != AUTO and not self.float8:
            return "does not support FP8 caches: use --kv-dtype auto, or another backend"
        return self.lacks(needs)

    def check(self, needs: Needs) -> None:
        """Raise LayoutError, in one line, if the backend lacks something."""
        if (problem := self.refusal(needs)) is not None:
            raise LayoutError(f"attention_backend {self.option} {problem}")


Make = Callable[["KVCache"], Any]


def _kernels(module: str, name: str) -> tuple[Make, Make]:
    """Return the kernels of a module of this folder, which is imported when the first cache is made."""
    decode, prompts = (
        lambda cache, kind=kind: getattr(import_module(f"weft.engine.attention.{module}"), name + kind)(cache)
        for kind in ("Decode", "Prompts")
    )
    return decode, prompts


def _by_cache(latent: Make, other: Make) -> Make:
    """Return a factory of one kernel for latent caches and another for caches of keys and values."""
    return lambda cache: (latent if isinstance(cache.spec, Latent) else other)(cache)


def _torch_lacks(needs: Needs) -> str | None:
    if needs.graphs:
        return "reads the lengths of sequences on the host, which CUDA graphs cannot: add --no-cuda-graphs"
    return None


def _native_lacks(needs: Needs) -> str | None:
    from weft.kernels.cpu_rows import DTYPES, missing  # imports torch

    if needs.dtype not in (names := [str(dtype).removeprefix("torch.") for dtype in DTYPES]):
        return f"computes in {', '.join(names)}, not in {needs.dtype}: omit it"
    if (why := missing()) is not None:
        return f"requires Weft's CPU kernels: {why}"
    return None


def fa3_library() -> tuple[str, Path] | None:
    """Return the operators' namespace and the file of FlashAttention 3 in an installed package; None without one."""
    for package, file, namespace in FA3_LIBRARIES:
        library = find_spec(package)
        for folder in (library and library.submodule_search_locations) or ():
            if (path := Path(folder) / file).is_file():
                return namespace, path
    return None


def _fa3_lacks(needs: Needs, latents_merge: bool = False) -> str | None:
    """latents_merge: prompts over latents, which use other kernels, are merged over dcp."""
    if needs.capability is not None and needs.capability[0] != 9:
        return f"requires a GPU of sm_90, and this one is sm_{''.join(map(str, needs.capability))}; omit it"
    if fa3_library() is None:
        return "requires vLLM or sglang-kernel, and neither is installed: pip install vllm, or omit it"
    if needs.dtype != "bfloat16":
        return f"computes in bfloat16, not in {needs.dtype}: add --dtype bfloat16"
    caches = needs.caches()
    for spec in caches:
        if isinstance(spec, Latent):
            rest = spec.width - spec.value_width
            if not (256 <= spec.value_width <= 512 and 8 <= rest <= 64) or spec.value_width % 8 or rest % 8:
                return f"supports latent vectors of 256 to 512 + up to 64 elements, not {spec.value_width} + {rest}"
        elif not isinstance(spec, Recurrent) and (spec.dim > 256 or spec.dim % 8):
            return f"supports heads of multiples of 8 up to 256 elements, not {spec.dim}"
    if latents_merge and not any(isinstance(spec, PagedKV) for spec in caches):
        return None
    return _merge_lacks(needs)


def _merge_lacks(needs: Needs) -> str | None:
    if needs.dcp > 1 and needs.dcp_prefill != "gather":
        return "does not merge prompts over dcp: add --dcp-prefill gather"
    return None


def _flashinfer_lacks(needs: Needs) -> str | None:
    if find_spec("flashinfer") is None:
        return "requires FlashInfer, which is not installed: pip install flashinfer-python, or omit it"
    if needs.graphs:
        return "plans each step on the host, which CUDA graphs cannot: add --no-cuda-graphs"
    if needs.dtype != "bfloat16":
        return f"computes in bfloat16, not in {needs.dtype}: add --dtype bfloat16"
    for spec in needs.caches():
        if isinstance(spec, Latent):
            if (parts := (spec.value_width, spec.width - spec.value_width)) != (512, 64):
                return f"supports latent vectors of 512 + 64 elements, not {parts[0]} + {parts[1]}"
        elif not isinstance(spec, Recurrent) and spec.dim not in (64, 128, 256):
            return f"supports heads of 64, 128 and 256 elements, not {spec.dim}"
    return _merge_lacks(needs)


TORCH = BackendEntry("torch", "any", *_kernels("sdpa", "Torch"), _torch_lacks, float8=True)
NATIVE = BackendEntry("native", "cpu", *_kernels("cpu_decode", "Native"), _native_lacks, float8=True)
"""Backend with Weft's CPU kernels."""
TRITON = BackendEntry("triton", "cuda", *_kernels("paged_triton", "Triton"), float8=True)
FA3 = BackendEntry("fa3", "cuda", *_kernels("fa3", "Fa3"), _fa3_lacks)
MIXED = BackendEntry(
    "fa3+triton",
    "cuda",
    decode=_by_cache(latent=FA3.decode, other=TRITON.decode),
    prompts=_by_cache(latent=TRITON.prompts, other=FA3.prompts),
    lacks=partial(_fa3_lacks, latents_merge=True),
)
"""Backend with the faster kernel for each kind of rows."""
FLASHINFER = BackendEntry("flashinfer", "cuda", *_kernels("paged_flashinfer", "FlashInfer"), _flashinfer_lacks)
BACKENDS = (TRITON, FA3, MIXED, FLASHINFER, NATIVE, TORCH)


def backends(plugins: Sequence[str] = ()) -> dict[str, BackendEntry]:
    """Return Weft's backends, then plugins' ATTENTION_BACKENDS, by option. Raises PluginError."""
    known = {entry.option: entry for entry in BACKENDS}
    for module in load_plugins(plugins):
        for entry in getattr(module, "ATTENTION_BACKENDS", ()):
            if known.setdefault(entry.option, entry) != entry or entry.option == AUTO:
                raise PluginError(
                    f"plugin {module.__name__} adds attention backend {entry.option}, but there is another of this name"
                )
    return known


def default_backend(device: str) -> BackendEntry:
    """Return the default backend of a device, cpu or cuda, which requires no other package."""
    return TRITON if device == "cuda" else TORCH


def automatic_backend(needs: Needs) -> BackendEntry:
    """Return the fastest backend that supports all needs, the choice of AUTO."""
    if needs.device == "cuda" and needs.capability is not None and MIXED.refusal(needs) is None:
        return MIXED
    if needs.device == "cpu" and NATIVE.refusal(needs) is None:
        return NATIVE
    return default_backend(needs.device)
