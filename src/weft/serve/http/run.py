"""Listening, serving, and shutting down: requests may go on for a while, then each gets an error that says so."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import time
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from weft.serve.http.connections import ACCEPTED_AT_ONCE, connection_class
from weft.serve.http.options import Options
from weft.serve.http.sockets import QUEUED_BY_KERNEL

FAREWELL_S = 2.0
"""For clients to take their last bytes."""
SWITCH_INTERVAL_S = 1e-4
"""How long a thread that waits for Python's lock waits before it asks for it (Python's own value is 5 ms)."""


class Running(Protocol):
    """What the server waits for before it leaves; see `weft.serve.http.engine_client.EngineClient`."""

    @property
    def live(self) -> int: ...
    def close(self) -> None: ...
    def end_all(self) -> None: ...


def prepare_interpreter() -> None:
    """Sets up this process's garbage collector and threads for serving; call it once everything is loaded.

    A thread starts to wait anew whenever the lock is released. The event loop releases it for each system call, and
    has it again before another core has woken up. So with Python's own interval, which is longer than the time
    between two calls, the engine's thread did not run while a burst of requests was read: 150 ms on 16 cores.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()  # a collection that looked through all that is here would stop every stream for 0.3 s


class Server(uvicorn.Server):
    """Serves until SIGINT or SIGTERM, or until `stop`. A second signal ends the requests that still run at once."""

    def __init__(self, app: ASGIApp, engine_client: Running, options: Options):
        config = uvicorn.Config(
            app,
            http=connection_class(options),
            ws="none",
            timeout_keep_alive=options.idle_timeout_s,  # type: ignore[arg-type]  # it takes fractions too
            timeout_graceful_shutdown=2 * FAREWELL_S,  # type: ignore[arg-type]
            backlog=ACCEPTED_AT_ONCE,
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
        )
        super().__init__(config)
        self._intake, self._drain_s = engine_client, options.drain_s
        self._stops = 0
        self._deadline: float | None = None

    def stop(self) -> None:
        """As SIGTERM does; on any thread."""
        self._stops += 1

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(QUEUED_BY_KERNEL)  # asyncio has set it to the number that it accepts at once

    async def on_tick(self, counter: int) -> bool:
        if self._stops:
            now = time.monotonic()
            if self._deadline is None:
                self._deadline = now + self._drain_s
                self._intake.close()
            if self._intake.live and (now >= self._deadline or self._stops > 1):
                self._intake.end_all()
            self.should_exit = not self._intake.live
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        def abort() -> None:  # who does not read its last bytes
            for connection in list(self.server_state.connections):
                connection.transport.abort()

        timer = asyncio.get_running_loop().call_later(FAREWELL_S, abort)
        await super().shutdown(sockets)
        timer.cancel()
