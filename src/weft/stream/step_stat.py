"""Totals of a communicating step, as ranks report them: without torch, which readers of reports need not import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepStat:
    """Totals of one communicating step."""

    site: str  # the read that it serves, with layers folded into `*`
    step: str  # edge and placements
    group: str  # name of the group
    count: int = 0  # number of calls
    bytes: int = 0  # received by the busiest rank (`weft.planner.exchange.rows_received`); a transport may move more
    # Eager steps: measured in place, including waiting. CUDA graphs: in isolation, since no replay can be timed inside.
    seconds: float = 0.0
    predicted: float = 0.0  # seconds by the cost model
