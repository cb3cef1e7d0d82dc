"""State and calls of the engine's process that all API processes of a server share, among them stored responses."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from fastapi.concurrency import run_in_threadpool

from weft.engine.config.device import on_gpus
from weft.engine.controller.engine import Engine
from weft.engine.controller.profiling import MIN_STEPS, ProfileError, record
from weft.kernels.cpu_rows import isa
from weft.serve.http.errors import ApiError, bad_field
from weft.serve.http.metrics import Metrics
from weft.serve.http.options import Options

MAX_RESPONSES = 10_000
"""Maximum stored responses of any size."""
MAX_WATCHED = 1000
"""Maximum steps of a trace, which is written and read as a whole."""


class Stored(NamedTuple):
    """Stored response. body: as sent to the client. items: of the conversation up to its end, a JSON array per turn; a
    response that continues it shares the arrays, and both count them."""

    body: bytes
    items: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Bytes of the body and the items."""
        return len(self.body) + sum(map(len, self.items))


class Store:
    """Responses by id, in memory, at most `max_bytes` and MAX_RESPONSES; the least recently used are dropped first. For
    the event loop's thread alone."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._bytes = max_bytes, 0
        self._stored: OrderedDict[str, Stored] = OrderedDict()

    def put(self, name: str, body: bytes, items: Sequence[bytes]) -> None:
        """Store a response, with the fields of `Stored`, unless it alone exceeds `max_bytes`."""
        if (stored := Stored(body, tuple(items))).size > self._max_bytes:
            return
        self._stored[name] = stored
        self._bytes += stored.size
        while self._bytes > self._max_bytes or len(self._stored) > MAX_RESPONSES:
            self._bytes -= self._stored.popitem(last=False)[1].size

    def get(self, name: str) -> Stored | None:
        """Return a response and mark it as used; None if it is not stored."""
        if name in self._stored:
            self._stored.move_to_end(name)
        return self._stored.get(name)

    def delete(self, name: str) -> bool:
        """Delete a response; return False if it is not stored."""
        stored = self._stored.pop(name, None)
        self._bytes -= stored.size if stored else 0
        return stored is not None


class Shared:
    """Functions that `ask` calls by name, with plain arguments and results."""

    def __init__(self, engine: Engine, metrics: Metrics, options: Options, model_name: str):
        self.engine, self.metrics, self._options, self._model_name = engine, metrics, options, model_name
        self._store, self._recording = Store(int(options.max_stored_mb * 2**20)), threading.Lock()
        self.quick: dict[str, Callable[..., Any]] = {
            "metrics": self._metrics,
            "load": self._load,
            "stored": self._store.get,
            "store": self._store.put,
            "delete": self._store.delete,
        }
        """Functions that do not wait."""
        self.slow: dict[str, Callable[..., Any]] = {
            "plan": lambda tokens: engine.plan_text(tokens),
            "report": self._report,
            "profile": self._profile,
            "reset_cache": lambda: engine.reset_cache(),
        }
        """Functions that wait for the engine's thread and its current step."""

    async def ask(self, what: str, *arguments: Any) -> Any:
        """Return a function's result. Raises its error."""
        if (function := self.quick.get(what)) is not None:
            return function(*arguments)
        return await run_in_threadpool(self.slow[what], *arguments)

    def _metrics(self) -> bytes:
        return self.metrics.text(self._model_name)

    def _load(self) -> dict[str, int]:
        stats = self.engine.stats()
        tokens = sum(stats.kv_used) * self.engine.config.interleave.span
        return {"num_reqs": stats.running + stats.waiting, "num_waiting_reqs": stats.waiting, "num_tokens": tokens}

    def _report(self) -> dict[str, Any]:
        ran, naive = self.engine.comm_report()
        config, stats = self.engine.config, self.engine.stats()
        return {
            "attention_backend": str(config.attention_backend),
            "cpu_kernels": None if on_gpus(config) else isa(),
            "eager_because": self.engine.eager or None,
            "ranks": {"layout": str(config.mesh), "running": config.mesh.world, "lost": stats.lost_ranks}
            | {"lost_places": [{"node": node, "place": place} for node, place in stats.lost_places]},
            "max_running": config.batch_sequences,
            "max_batch_tokens": config.batch_tokens,
            "mixed_batch_tokens": config.mixed_tokens,
            "kv_tokens": config.cached_tokens,
            "speculative": self._speculative(),
            "ran": [asdict(s) for s in ran],
            "naive": [asdict(s) for s in naive],
        }

    def _speculative(self) -> dict[str, Any] | None:
        config, stats, speculation = self.engine.config, self.engine.stats(), self.engine.speculation
        if speculation is None:
            return None
        counts = {"drafted": stats.drafted, "accepted": stats.accepted}  # by position
        (k, price), rates = speculation.planned, speculation.rates
        why = "the time of steps without drafts is measured first"
        if price is not None:
            right = f"the first is right in {rates.found * rates.each[0]:.0%}"
            why = f"k drafts cost {price.fixed:.2f} + {price.each:.2f} k steps, and {right}"
        return {
            "source": config.speculative,
            "tokens": config.speculative_tokens,
            "overlap": "while all sequences pause",
        } | (counts | {"k": k, "why": why})

    def _profile(self, steps: int) -> dict[str, Any]:
        if not MIN_STEPS <= steps <= MAX_WATCHED:
            raise bad_field("steps", f" is {steps}; it must be between {MIN_STEPS} and {MAX_WATCHED}")
        assert self._options.profile_dir is not None
        if not self._recording.acquire(blocking=False):
            raise ApiError(409, "steps are being watched already")
        try:
            recording = record(self.engine, steps)
            return recording.report | {"files": recording.write(self._options.profile_dir)}
        except ProfileError as error:
            raise ApiError(409, str(error)) from error
        finally:
            self._recording.release()
