"""Measured times of whole steps by their rows and cached tokens, kept next to the cost table."""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.planner.cost import cache_folder

Place = tuple[float, ...]
StepTime = tuple[float, float]
"""Time of a step in µs, and its relative error."""
QUANTILES = 200  # enough for a 99th percentile


class NotMeasured(LookupError):
    """A step outside the measured grid: its time is not known. The message names the step."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Rows of one DP group in a step.

    Attributes:
        decode: decode rows.
        context: mean number of cached tokens of a decode row.
        prompt: rows of prompts.
        cached: mean number of cached tokens before a prompt's rows.
        prompts: number of prompts that have these rows.
    """

    decode: int
    context: float = 0.0
    prompt: int = 0
    cached: float = 0.0
    prompts: int = 1

    def __str__(self) -> str:
        return (
            f"{self.decode} decode rows after {self.context:.0f} tokens"
            f" and {self.prompt} prompt rows after {self.cached:.0f}" * (self.prompt > 0)
        )


@dataclass
class StepTable:
    """Times of a layout's steps on a host: a grid of decode steps, and one of steps with prompts.

    A decode step is interpolated linearly between rows and contexts. A step with prompts is interpolated between its
    decode rows, prompt rows and cached tokens; its decode rows were measured at the smallest context, so the grid of
    decode steps gives the difference. Nothing is extrapolated.

    Attributes:
        decode: µs by (decode rows, context).
        mixed: µs by (decode rows, prompt rows, cached tokens).
        residuals: relative errors: of interpolated steps that were also measured, and of measured ones.
        spread: quantiles of single steps divided by the mean of their run; the mean is 1.
        factor: measured time of a whole load divided by the predicted one, by which all times are multiplied.
        about: what was measured, in words.
    """

    decode: dict[Place, float] = field(default_factory=dict)
    mixed: dict[Place, float] = field(default_factory=dict)
    residuals: list[float] = field(default_factory=list)
    spread: list[float] = field(default_factory=lambda: [1.0])
    factor: float = 1.0
    about: dict[str, Any] = field(default_factory=dict)

    def us(self, shape: StepShape) -> float:
        """Return the mean µs of a step. Raises NotMeasured."""
        return self.factor * self._measured(shape)

    def _measured(self, shape: StepShape) -> float:
        try:
            if not shape.prompt:
                return interpolate(self.decode, (shape.decode, shape.context))
            us = interpolate(self.mixed, (shape.decode, shape.prompt, shape.cached))
            if shape.decode:
                first = min(context for _, context in self.decode)
                us += interpolate(self.decode, (shape.decode, shape.context))
                us -= interpolate(self.decode, (shape.decode, first))
            return us
        except NotMeasured:
            raise NotMeasured(str(shape)) from None

    @property
    def error(self) -> float:
        """Relative error that nine of ten residuals do not exceed."""
        ordered = sorted(map(abs, self.residuals))
        return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))] if ordered else 0.0

    def holds(self, decode: Sequence[Place], mixed: Sequence[Place]) -> bool:
        """Tell whether a load's largest and smallest steps lie inside the grids."""
        try:
            for place in decode:
                interpolate(self.decode, place)
            for place in mixed:
                interpolate(self.mixed, place)
        except NotMeasured:
            return False
        return True

    def write(self, path: Path) -> None:
        """Write the table as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        grids = {name: [[*place, us] for place, us in getattr(self, name).items()] for name in ("decode", "mixed")}
        others = {name: getattr(self, name) for name in ("about", "residuals", "spread", "factor")}
        path.write_text(json.dumps(others | grids, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> StepTable | None:
        """Return the table of a file; None if there is none, or none that can be read."""
        try:
            found = json.loads(path.read_text())
            decode, mixed = ({tuple(place): us for *place, us in found[name]} for name in ("decode", "mixed"))
            return cls(decode, mixed, found["residuals"], found["spread"], found["factor"], found["about"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def table_path(about: Mapping[str, Any]) -> Path:
    """Return the path of a table: a file per host, versions, model shape, dtype and layout, which `about` names."""
    digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=8).hexdigest()
    return cache_folder() / f"steps-{socket.gethostname()}-{digest}.json"


def spread_of(runs: Sequence[Sequence[float]]) -> list[float]:
    """Return QUANTILES quantiles of the times of single steps, each divided by the mean of its run; their mean is 1."""
    ratios = sorted(us * len(run) / sum(run) for run in runs for us in run)
    found = [ratios[len(ratios) * (2 * at + 1) // (2 * QUANTILES)] for at in range(QUANTILES)]
    return [each * len(found) / sum(found) for each in found]


def best_of(rounds: Sequence[float]) -> StepTime:
    """Return the least of several measurements, as other work of the host only adds to them, and its relative distance
    from the next.
    """
    ordered = sorted(rounds)
    return ordered[0], ordered[min(1, len(ordered) - 1)] / ordered[0] - 1


def extrapolate(few: StepTime, many: StepTime, more: float) -> StepTime:
    """Return the time of a few layers and `more` times its difference to that of many, with the errors of both."""
    us = few[0] + max(0.0, many[0] - few[0]) * more
    return us, math.hypot((more - 1) * few[0] * few[1], more * many[0] * many[1]) / us


def interpolate(points: Mapping[Place, float], at: Sequence[float]) -> float:
    """Return the value between the points of a grid, linearly on each axis. Raises NotMeasured outside of it."""
    if not at:
        return points[()]
    axis = sorted({place[0] for place in points})
    above = bisect.bisect_left(axis, at[0])
    if above == len(axis) or (above == 0 and at[0] < axis[0]):
        raise NotMeasured

    def along(value: float) -> float:
        return interpolate({place[1:]: us for place, us in points.items() if place[0] == value}, at[1:])

    high = along(axis[above])
    if axis[above] == at[0]:
        return high
    low = axis[above - 1]
    return along(low) + (high - along(low)) * (at[0] - low) / (axis[above] - low)
