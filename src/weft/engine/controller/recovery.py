"""Recovery from failures of ranks: they start anew after a pause, or fewer of them once some are lost for good."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.engine.config.config import EngineConfig, EngineError
from weft.engine.config.cpu_shares import cores_left
from weft.engine.config.device import dtype_of, on_gpus
from weft.engine.controller.executor import Executor
from weft.engine.controller.startup import check_plans, resolve_defaults
from weft.engine.models.config_json.fields import ModelError
from weft.engine.models.layers.model_config import ModelConfig
from weft.engine.worker.batch_limits import gpu_bytes
from weft.engine.worker.memory import check_weights, weight_bytes
from weft.planner.spec import LayoutError, divisors

log = logging.getLogger(__name__)
MAX_BACKOFF_S = 60.0
"""Maximum wait before a restart of ranks."""


class FaultWindow:
    """Counter of failures.

    Args:
        max_failures, window_s: number of failures allowed within seconds.
        clock: returns rising seconds.
        backoff_s: wait after the second failure without a step in between; each further failure doubles it.
    """

    def __init__(
        self, max_failures: int, window_s: float, clock: Callable[[], float] = time.monotonic, *, backoff_s: float = 0.0
    ):
        self._max_failures, self._window_s, self._clock, self._backoff_s = max_failures, window_s, clock, backoff_s
        self._in_a_row = 0
        self._failures: deque[tuple[float, str, tuple[int, ...]]] = deque()
        self.total = 0
        """Failures so far, also outside the window."""

    def worked(self) -> None:
        """Note that a step has succeeded, so the next failure is a new one."""
        self._in_a_row = 0

    def forget(self) -> None:
        """Forget the failures of the window, because other ranks run from now on."""
        self._failures.clear()
        self._in_a_row = 0

    def add(self, cause: str, ranks: tuple[int, ...] = (), for_good: bool = False) -> float:
        """Note a failure. Returns the seconds to wait before ranks are restarted: 0 after the first failure.

        cause, ranks, for_good: as in EngineError. Raises EngineError, with every failure of the window, if the limit is
        exceeded or the ranks are lost for good. Its `ranks` are these, or the ones that failed each time.
        """
        now = self._clock()
        self.total += 1
        self._failures.append((now, cause, ranks))
        while self._failures[0][0] < now - self._window_s:
            self._failures.popleft()
        if for_good or len(self._failures) > self._max_failures:
            causes = Counter(cause for _, cause, _ in self._failures)
            listed = "; ".join(f"{cause} ({n} times)" if n > 1 else cause for cause, n in causes.items())
            line = (
                f"gave up after {len(self._failures)} failures in {self._window_s:g} s "
                f"(max_restarts={self._max_failures}): {listed}"
                if self._max_failures
                else listed
            )
            same = for_good or all(each == ranks for _, _, each in self._failures)
            raise EngineError(line, ranks if same else ())
        self._in_a_row += 1
        doublings = min(self._in_a_row - 2, 62)
        return 0.0 if doublings < 0 else min(self._backoff_s * 2.0**doublings, MAX_BACKOFF_S)


def one_line(error: Exception) -> str:
    """Return an error in one line."""
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


class Recovery:
    """Ranks that may fail.

    Args:
        given: configuration as it was given.
        config: configuration with values for `auto`.
        executor: the controller's end of the ranks.

    Attributes:
        lost_places: node and place of each rank that is lost for good.
    """

    def __init__(self, given: EngineConfig, config: EngineConfig, executor: Executor):
        # Fewer ranks run on the same kind of device, which `auto` could change.
        self._given = replace(given, device="cuda" if on_gpus(config) else "cpu", gpus=config.gpus)
        self._executor, self._lost, self._lost_at = executor, "", -1
        self._left = {node: list(range(given.ranks_of_host)) for node in given.nodes}
        self.faults = FaultWindow(config.max_restarts, config.restart_window_s, backoff_s=config.restart_backoff_s)
        self.lost_places: list[tuple[int, int]] = []

    def failed(self, error: Exception, model: ModelConfig) -> float:
        """Note a failure. Returns the seconds to wait before ranks start, which are fewer if some are lost for good.

        Raises EngineError after too many failures.
        """
        if isinstance(error, ModelError) and self.faults.total == self._lost_at:  # of the first start since then
            raise EngineError(f"{self._lost} lost for good, and {self._executor.mesh} cannot run: {error}") from error
        for_good = getattr(error, "for_good", "") if self._given.shrink else ""
        try:
            return self.faults.add(one_line(error), getattr(error, "ranks", ()), bool(for_good))
        except EngineError as final:
            if not (final.ranks and self._given.shrink):
                raise
            self._go_on_without(final.ranks, for_good == "hosts", model)
            return 0.0

    def _go_on_without(self, ranks: Sequence[int], hosts: bool, model: ModelConfig) -> None:
        """Plan for the places that are left. hosts: all places of the ranks' hosts are lost with them."""
        before, several = self._executor.config, len(ranks) > 1
        lost = f"rank{'s' * several} {', '.join(map(str, ranks))} of {before.mesh.world} {'are' if several else 'is'}"
        for node, place in map(before.seat_of, ranks):
            self._left[node] = [] if hosts else [each for each in self._left[node] if each != place]
        try:
            config = smaller_layout(self._given, model, self._left)
        except LayoutError as error:
            raise EngineError(f"{lost} lost for good, and no smaller layout is possible: {error}") from error
        self._executor.resize(config)
        self.faults.forget()
        self.lost_places += map(before.seat_of, ranks)
        self._lost, self._lost_at = lost, self.faults.total
        log.error("%s lost for good; the engine goes on with %s%s", lost, config.mesh, self._places_line(config))

    def _places_line(self, config: EngineConfig) -> str:
        """Return which GPUs of one host run ranks, or which nodes, and how many ranks idle; empty for one host's
        CPUs."""
        if len(self._left) == 1:
            return f", on GPU {', '.join(map(str, config.places[0]))}" if config.gpus else ""
        idle = sum(map(len, self._left.values())) - config.mesh.world
        nodes = f", {config.ranks_of_host} on each of the nodes {', '.join(map(str, config.nodes))}"
        return nodes + (f"; {idle} more would run if hosts had equal numbers" if idle else "")


def smaller_layout(given: EngineConfig, model: ModelConfig, left: Mapping[int, Sequence[int]]) -> EngineConfig:
    """Return the checked configuration of most ranks, at least shrink_to, in the places that are left.

    Hosts have equally many ranks, so some hosts or places may stay empty; of layouts with equally many ranks, it is the
    one on more hosts. Raises LayoutError if none is possible or fits the GPUs, with the reason of that of most ranks.

    Args:
        given: configuration as it was given.
        model: its model.
        left: places by node.
    """
    why = f"shrink_to={given.shrink_to}" if left[0] else "node 0 has no rank left, and nobody serves without it"
    of_host, refusals = range(len(left[0]), 0, -1), list[str]()
    nodes = {count: [node for node in left if len(left[node]) >= count] for count in of_host}
    sizes = [(hosts * count, hosts, count) for count in of_host for hosts in range(1, len(nodes[count]) + 1)]
    for ranks, hosts, count in sorted(sizes, reverse=True):
        if ranks < given.shrink_to:
            break
        places = tuple(tuple(left[node][:count] if node in nodes[count][:hosts] else ()) for node in left)
        for smaller in _layouts(given, ranks, places):
            try:
                resolved = check_plans(resolve_defaults(smaller), model)
                if on_gpus(resolved):
                    check_weights(weight_bytes(model, resolved.mesh, 0, dtype_of(resolved)), 0, gpu_bytes(resolved))
                return resolved
            except LayoutError as error:
                refusals.append(str(error))
    raise LayoutError(refusals[0] if refusals else why)


def _layouts(given: EngineConfig, ranks: int, places: tuple[tuple[int, ...], ...]) -> Iterator[EngineConfig]:
    """Yield layouts of these ranks. They keep DP groups, then dcp, as far as these divide the ranks.

    Hosts cut no DP group in unequal parts: plans would exchange its rows over all ranks (docs/design/overview.md).
    """
    mesh, hosts = given.mesh, sum(map(bool, places))
    cut = [n for n in divisors(ranks) if hosts % n and n % hosts]
    attn_dp = max(n for n in divisors(ranks) if n <= mesh.attn_dp and n not in cut)
    attn_tp = ranks // attn_dp
    ep = None if given.ep is None else ranks if mesh.moe_tp == 1 else max(n for n in divisors(ranks) if n <= mesh.ep)
    of_hosts: Any = dict(nnodes=hosts, places=places, cpu_bind=cores_left(given.cpu_bind, places[0]))
    for dcp in reversed([n for n in divisors(attn_tp) if n <= mesh.dcp]):
        yield replace(given, attn_dp=attn_dp, attn_tp=attn_tp, ep=ep, moe_tp=None, dcp=dcp, **of_hosts)
