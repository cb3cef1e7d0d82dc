"""Injection of faults of each kind in random order: when each was heard, and when the server served again."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaos.health import Health
from chaos.server_process import ServerError, ServerProcess
from weft.planner.show import columns

BACK_S = 300.0
"""Seconds until the server must serve again after a fault."""
HEAR_S = 60.0
"""Seconds after which a fault counts as not heard."""
RANK_S = 1.0
"""Bound of a killed rank (docs/guide/hosts.md)."""


@dataclass(frozen=True)
class Moment:
    """Time of a fault's injection. heard: when it was heard, if /health does not show it."""

    at: float
    heard: float | None = None


@dataclass(frozen=True)
class Fault:
    """Kind of fault.

    inject: returns None if there was nothing to do it to. bound_s: seconds until it must be heard; None: no bound.
    calm: only while the server serves and no other fault is under way, and the server must go on serving.
    """

    inject: Callable[[], Moment | None]
    bound_s: float | None = None
    calm: bool = False


class Injections:
    """Injection of faults into a server. factor: multiple of its bound that a fault may take to be heard."""

    def __init__(
        self,
        served: ServerProcess,
        health: Health,
        faults: Mapping[str, Fault],
        rng: random.Random,
        factor: float,
        say: Callable[[str], None],
    ):
        self._served, self._health, self._faults = served, health, faults
        self._rng, self._factor, self._say = rng, factor, say
        self._count: Counter[str] = Counter()
        self._heard: dict[str, list[float]] = defaultdict(list)
        self._back: dict[str, list[float]] = defaultdict(list)
        self._pending: list[tuple[str, float]] = []
        self.trouble: list[str] = []
        """Failures, a line each."""

    def run(self, count: int) -> None:
        """Inject `count` faults, each kind about equally often; end early if the server does not come back."""
        kinds = list(self._faults)
        order = [kinds[i % len(kinds)] for i in range(count)]
        self._rng.shuffle(order)
        for number, kind in enumerate(order):
            time.sleep(self._rng.uniform(0.0, 1.5))
            try:
                if self._faults[kind].calm:
                    self._settle()
                self._say(f"{number + 1} of {count}: {kind}")
                self._inject(kind)
                if self._rng.random() < 0.8:  # else the next fault comes while the server may still recover
                    self._settle()
            except (OSError, RuntimeError) as error:  # ServerError among them
                self.trouble.append(f"after fault {number + 1}, {kind}: {error}")
                return
        try:
            self._settle()
        except ServerError as error:
            self.trouble.append(f"after the last fault: {error}")

    def report(self) -> dict[str, dict[str, Any]]:
        """Return, by kind: count, bound_s, and the median and maximum of the seconds until it was heard and served
        again."""
        return {
            kind: {
                "count": self._count[kind],
                "bound_s": self._faults[kind].bound_s,
                "heard_s": spread(self._heard[kind]),
                "served_s": spread(self._back[kind]),
            }
            for kind in sorted(self._count)
        }

    def _inject(self, kind: str) -> None:
        fault, served = self._faults[kind], self._health.serving
        moment = fault.inject()
        self._count[kind] += 1
        if moment is None:
            return
        if fault.calm:
            if self._health.heard(False, moment.at) is not None:
                raise ServerError("the server did not go on serving")
            if moment.heard is not None:
                self._note(kind, moment.heard - moment.at)
        elif served and fault.bound_s is not None:
            self._pending.append((kind, moment.at))

    def _settle(self) -> None:
        """Wait until every fault was heard and the server serves. Raises ServerError if that does not happen."""
        for kind, at in self._pending:
            if (heard := self._health.heard(False, at, HEAR_S)) is None:
                raise ServerError(f"{kind!r} was not heard within {HEAR_S:g} s")
            self._note(kind, heard - at)
        if not self._pending:
            time.sleep(0.5)
        self._served.wait_healthy(BACK_S)
        for kind, at in self._pending[-1:]:  # those before it were disturbed by it
            self._back[kind].append(back := time.monotonic() - at)
            self._say(f"  served again after {back:.1f} s")
        self._pending.clear()

    def _note(self, kind: str, seconds: float) -> None:
        self._heard[kind].append(seconds)
        self._say(f"  {kind}: heard after {seconds:.1f} s")
        bound = self._faults[kind].bound_s
        if bound is not None and seconds > self._factor * bound:
            self.trouble.append(f"{kind!r} was heard after {seconds:.1f} s, more than {self._factor:g} × {bound:g} s")


def table(faults: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Format the report of `Injections`."""
    rows: list[tuple[str, ...]] = [("fault", "count", "bound s", "heard s", "max", "served s", "max")]
    for kind, row in faults.items():
        bound = "" if row["bound_s"] is None else f"{row['bound_s']:g}"
        rows.append((kind, str(row["count"]), bound, *_cells(row["heard_s"]), *_cells(row["served_s"])))
    return columns(rows)


def _cells(seconds: Mapping[str, float]) -> tuple[str, str]:
    return (f"{seconds['median']:.1f}", f"{seconds['max']:.1f}") if seconds else ("", "")


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median and maximum, rounded; nothing of nothing."""
    if not seconds:
        return {}
    return {"median": round(statistics.median(seconds), 2), "max": round(max(seconds), 2)}
