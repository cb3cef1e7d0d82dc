"""What an engine is started with."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from weft.assets import embedded_model_dir
from weft.place.spec import Mesh


class EngineError(RuntimeError):
    """The engine cannot start or go on: one line that names the rank and the cause."""


@dataclass(frozen=True)
class EngineConfig:
    """Checked on construction: LayoutError for a layout, ValueError for a number, each in one line.

    attn_dp, attn_tp, ep, moe_tp: the layout (`weft.place.spec.Mesh`). dtype auto: float32 on CPUs.
    page_size: tokens a page of the key-value cache. kv_tokens: its size, for each DP group.
    max_batch_tokens: rows of one step of a DP group, which cuts long prompts into chunks. max_running: its sequences.
    max_model_len: prompt and answer together; None: what the model allows. prefix_cache: reuse pages of equal prefixes.
    executor: process (one process a rank over gloo) or thread (all ranks here, on the reference transport: for tests).
    threads: of each rank's process; more ranks use more cores better. seed: of requests that bring none.
    step_timeout_s: a step that takes longer fails the engine.
    """

    model: Path = field(default_factory=embedded_model_dir)
    attn_dp: int = 1
    attn_tp: int = 1
    ep: int = 1
    moe_tp: int = 1
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    page_size: int = 16
    kv_tokens: int = 65536
    max_batch_tokens: int = 2048
    max_running: int = 64
    max_model_len: int | None = None
    prefix_cache: bool = True
    executor: Literal["process", "thread"] = "process"
    threads: int = 1
    seed: int = 0
    step_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        _ = self.mesh
        for name in ("page_size", "kv_tokens", "max_batch_tokens", "max_running", "threads", "step_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.kv_tokens < self.page_size:
            raise ValueError(f"kv_tokens={self.kv_tokens} is less than one page of {self.page_size} tokens")
        if self.max_batch_tokens < self.max_running:
            raise ValueError(
                f"max_batch_tokens={self.max_batch_tokens} is less than max_running={self.max_running}: "
                "every running sequence needs a row in each step"
            )

    @property
    def mesh(self) -> Mesh:
        """The layout."""
        return Mesh(self.attn_dp, self.attn_tp, self.ep, self.moe_tp)

    @property
    def num_pages(self) -> int:
        """Pages of the key-value cache of a DP group."""
        return self.kv_tokens // self.page_size

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a rank's process."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"model": str(self.model)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineConfig:
        """The inverse of `to_dict`."""
        return cls(**values | {"model": Path(values["model"])})
