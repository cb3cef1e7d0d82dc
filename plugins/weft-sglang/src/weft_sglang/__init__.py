"""SGLang's collectives by Weft: the entry point that SGLang calls in each of its processes."""

from __future__ import annotations

import logging
from importlib.metadata import version

VERSIONS = ("0.5.17", "0.5.23")
"""SGLang's versions with the interfaces that this package uses; tests/plugins compares them."""

log = logging.getLogger(__name__)


def register() -> None:
    """Register the hooks, which SGLang then applies."""
    found = version("sglang")
    if found not in VERSIONS:
        log.warning("weft-sglang is off: it is tested with SGLang %s, and this is %s", ", ".join(VERSIONS), found)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils.common import is_cuda

    if not is_cuda():
        log.warning("weft-sglang is off: it is for NVIDIA GPUs")
        return
    from weft_sglang.hooks import hooks

    for target, (kind, hook) in hooks().items():
        HookRegistry.register(target, hook, HookType(kind))
