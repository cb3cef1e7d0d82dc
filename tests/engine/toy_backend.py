"""An attention backend that Weft does not know, as a plugin: one row. It notes that it attends."""

from __future__ import annotations

from weft.engine.attention.backend_registry import BackendEntry, Needs
from weft.engine.attention.sdpa import SDPA
from weft.engine.kv.cache import KVCache
from weft.engine.kv.cache_spec import Latent

MADE: list[ToyBackend] = []


class ToyBackend(SDPA):
    """Torch's attention under another name."""

    def __init__(self, cache: KVCache):
        super().__init__(cache)
        MADE.append(self)


def lacks(needs: Needs) -> str | None:
    latent = any(isinstance(spec, Latent) for spec in needs.caches())
    return "has no latent caches: take another" if latent else None


ATTENTION_BACKENDS = (BackendEntry("toy", "any", ToyBackend, lacks),)
