"""Options of the plug-in, and its changes to the engine's configuration."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.config import VllmConfig

import weft

KEY = "weft"
"""Place of the options in vLLM's `--additional-config`: `{"weft": {"max_bytes": 8388608}}`, or `{"weft": false}`."""


@dataclass(frozen=True)
class Options:
    """Options. max_bytes: maximum of a call that Weft carries; each group allocates a little more than twice that per
    rank."""

    on: bool = True
    max_bytes: int = 8 << 20

    @classmethod
    def of(cls, config: VllmConfig | None) -> Options:
        """Read the options of a configuration. Raises ValueError for unknown options."""
        given = config.additional_config if config is not None else {}
        mine = given.get(KEY, {}) if isinstance(given, dict) else {}
        if mine is False:
            return cls(on=False)
        known = {"max_bytes", "version"}  # the version is what `apply_to` has left there
        if not isinstance(mine, dict) or set(mine) - known or not isinstance(mine.get("max_bytes", 1), int):
            raise ValueError(f'--additional-config: "weft" takes false or {{"max_bytes": BYTES}}, not {mine!r}')
        return cls(max_bytes=mine.get("max_bytes", cls.max_bytes))

    def apply_to(self, config: VllmConfig) -> None:
        """Tell the cache of compiled graphs that these are others, and turn off vLLM's own fused norm: its workspace
        needs multicast objects."""
        mine = {"max_bytes": self.max_bytes, "version": weft.__version__}
        config.additional_config = {**config.additional_config, KEY: mine}
        config.compilation_config.pass_config.fuse_allreduce_rms = False


def applied(config: VllmConfig) -> bool:
    """Return whether Weft carries the tensor-parallel group of this process, as `Options.apply_to` has noted."""
    return isinstance(config.additional_config, dict) and "version" in (config.additional_config.get(KEY) or {})


def why_off(config: VllmConfig | None, options: Options) -> str | None:
    """Return why Weft carries nothing in this engine, in a line; None if it carries something."""
    if config is None:
        return "there is no engine's configuration"
    parallel = config.parallel_config
    if not options.on:
        return f'--additional-config says {{"{KEY}": false}}'
    if not isinstance(config.additional_config, dict):
        return "additional_config is no dict, and compiled graphs could not be told apart"
    if parallel.disable_custom_all_reduce:
        return "disable_custom_all_reduce is set, by its option, batch invariance or several hosts"
    if parallel.use_ubatching:
        return "micro-batches use a group from two streams at a time (--enable-dbo)"
    if parallel.enable_elastic_ep:
        return "ranks come and go (--enable-elastic-ep)"
    return None
