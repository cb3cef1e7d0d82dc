"""The table of attention backends: one row each, and those that plugins add.

Options, help texts and errors at the start follow from a backend's row before its module is imported. The table imports
no torch, so that command lines parse quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from weft.kv.cache_spec import Spec
from weft.place.spec import LayoutError
from weft.plugins import PluginError, load_plugins

if TYPE_CHECKING:
    from weft.attention.sdpa import SDPA
    from weft.kv.cache import KVCache

AUTO = "auto"
"""The option that takes the default backend of the ranks' device."""


class BackendChoice(str):
    """An option of the table of attention backends, plugins' included, or AUTO."""


ANY_BACKEND = BackendChoice(AUTO)


@dataclass(frozen=True, slots=True)
class Needs:
    """What the ranks of an engine need of an attention backend.

    device: cpu or cuda. capability: of the GPU; None: on CPUs, and where no GPU has been asked yet. dtype: of
    activations and caches, as torch names it. caches: gives those that layers declare; it builds the model's shape.
    page_size: tokens of a page. dcp: ranks that share a sequence's tokens. dcp_prefill: as the option. graphs: whether
    steps are captured in CUDA graphs.
    """

    device: Literal["cpu", "cuda"]
    capability: tuple[int, int] | None
    dtype: str
    caches: Callable[[], Sequence[Spec]]
    page_size: int
    dcp: int
    dcp_prefill: str
    graphs: bool


@dataclass(frozen=True)
class BackendEntry:
    """A backend's row in the table.

    option: its name on command lines and in reports. device: of its ranks. make: makes it for a cache; it imports what
    the backend takes. lacks: what it cannot do of these needs, and what to do instead, in words that follow its name;
    None where it does all.
    """

    option: str
    device: Literal["cpu", "cuda", "any"]
    make: Callable[[KVCache], SDPA]
    lacks: Callable[[Needs], str | None] = lambda needs: None

    def check(self, needs: Needs) -> None:
        """Raises LayoutError, in one line, where the backend lacks something."""
        found: str | None = f"is of {'GPUs' if self.device == 'cuda' else 'CPUs'}; leave it out"
        if self.device in (needs.device, "any"):
            found = self.lacks(needs)
        if found is not None:
            raise LayoutError(f"attention_backend {self.option} {found}")


def _maker(module: str, name: str) -> Callable[[KVCache], SDPA]:
    """A class of a module, which is imported when the first cache is made."""

    def make(cache: KVCache) -> SDPA:
        made: SDPA = getattr(import_module(module), name)(cache)
        return made

    return make


def _torch_lacks(needs: Needs) -> str | None:
    if needs.graphs:
        return "reads the lengths of sequences on the host, which CUDA graphs cannot: add --no-cuda-graphs"
    return None


TORCH = BackendEntry("torch", "any", _maker("weft.attention.sdpa", "SDPA"), _torch_lacks)
TRITON = BackendEntry("triton", "cuda", _maker("weft.attention.paged_triton", "PagedTriton"))
BACKENDS = (TRITON, TORCH)


def backends(plugins: Sequence[str] = ()) -> dict[str, BackendEntry]:
    """The backends of Weft, then those of plugins' ATTENTION_BACKENDS, by option. Raises PluginError."""
    known = {entry.option: entry for entry in BACKENDS}
    for module in load_plugins(plugins):
        for entry in getattr(module, "ATTENTION_BACKENDS", ()):
            if known.setdefault(entry.option, entry) != entry or entry.option == AUTO:
                raise PluginError(
                    f"plugin {module.__name__} adds attention backend {entry.option}, but there is another of this name"
                )
    return known


def default_backend(device: str) -> BackendEntry:
    """What AUTO stands for on cpu or cuda."""
    return TRITON if device == "cuda" else TORCH
