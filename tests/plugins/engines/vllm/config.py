from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class PassConfig:
    fuse_allreduce_rms: bool = True


@dataclass
class CompilationConfig:
    pass_config: PassConfig = field(default_factory=PassConfig)


@dataclass
class ParallelConfig:
    disable_custom_all_reduce: bool = False
    enable_elastic_ep: bool = False
    use_ubatching: bool = False


@dataclass
class VllmConfig:
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    additional_config: object = field(default_factory=dict)


_current: list[VllmConfig] = []


def get_current_vllm_config_or_none():
    return _current[-1] if _current else None


@contextmanager
def set_current_vllm_config(vllm_config, check_compile=False, prefix=None):
    _current.append(vllm_config)
    yield
    _current.pop()
