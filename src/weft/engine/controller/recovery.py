"""Recovery from failures of ranks: they start anew after a pause, or with one rank less once that is lost for good."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.controller.executor import Executor
from weft.engine.controller.fault_window import FaultWindow, one_line
from weft.engine.controller.startup import check_plans, resolve_defaults
from weft.engine.models.layers.model_config import ModelConfig
from weft.planner.spec import LayoutError, divisors

log = logging.getLogger(__name__)


class Recovery:
    """Ranks that may fail.

    Args:
        given: configuration as it was given.
        config: configuration with values for `auto`.
        executor: the controller's end of the ranks.

    Attributes:
        faults: counter of failures.
        lost_ranks: number of ranks that are lost for good.
    """

    def __init__(self, given: EngineConfig, config: EngineConfig, executor: Executor):
        self._given, self._executor = given, executor
        self.faults = FaultWindow(config.max_restarts, config.restart_window_s, backoff_s=config.restart_backoff_s)
        self.lost_ranks = 0

    def failed(self, error: Exception, model: ModelConfig) -> float:
        """Note a failure. Returns the seconds to wait before ranks start, which are fewer if one is lost for good.

        Raises EngineError after too many failures.
        """
        try:
            return self.faults.add(one_line(error), getattr(error, "rank", None))
        except EngineError as final:
            if final.rank is None or not self._given.shrink:
                raise
            self._go_on_without(final.rank, model)
            return 0.0

    def _go_on_without(self, rank: int, model: ModelConfig) -> None:
        self._given, config = without_rank(self._given, model, rank)
        self._executor.resize(config)
        self.faults.forget()
        self.lost_ranks += 1
        log.error("rank %d is lost for good; the engine goes on with %s", rank, config.mesh)


def without_rank(config: EngineConfig, model: ModelConfig, lost: int) -> tuple[EngineConfig, EngineConfig]:
    """Return the configuration of as many ranks as possible without one, at least shrink_to: as if given, and checked.

    config: as it was given. lost: number of the rank. Raises EngineError if no layout is possible.
    """
    world, why = config.mesh.world, f"shrink_to={config.shrink_to}"
    left = [rank for rank in range(world) if rank != lost]
    for ranks in range(world - 1, config.shrink_to - 1, -1):
        for smaller in _layouts(config, left[:ranks]):
            try:
                return smaller, check_plans(resolve_defaults(smaller), model)
            except LayoutError as error:
                why = str(error)
    raise EngineError(f"rank {lost} of {world} is lost for good, and no smaller layout is possible: {why}")


def _layouts(config: EngineConfig, left: Sequence[int]) -> Iterator[EngineConfig]:
    """Yield layouts of the ranks that are left. They keep DP groups, then dcp, as far as these divide the ranks."""
    mesh, ranks = config.mesh, len(left)
    attn_dp = _divisor(ranks, mesh.attn_dp)
    attn_tp = ranks // attn_dp
    ep = None if config.ep is None else ranks if mesh.moe_tp == 1 else _divisor(ranks, mesh.ep)
    cores = config.cpu_bind.split("|")
    cpu_bind = "|".join(cores[rank] for rank in left) if config.cores else config.cpu_bind
    for dcp in reversed([n for n in divisors(attn_tp) if n <= mesh.dcp]):
        yield replace(config, attn_dp=attn_dp, attn_tp=attn_tp, ep=ep, moe_tp=None, dcp=dcp, cpu_bind=cpu_bind)


def _divisor(ranks: int, limit: int) -> int:
    """Return the greatest divisor up to a limit."""
    return max(n for n in divisors(ranks) if n <= limit)
