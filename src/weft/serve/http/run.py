"""Server process: listen, serve, and shut down in order: running requests continue for `drain_s`, then get an error."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import time
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from weft.serve.http.connections import ACCEPTED_AT_ONCE, Connection, connection_class
from weft.serve.http.engine_client import EngineClient
from weft.serve.http.loading import QUEUED_BY_KERNEL
from weft.serve.http.options import Options

FAREWELL_S = 2.0
"""Seconds for clients to read their last bytes."""
LAST_REQUESTS_S, TICK_S = 0.5, 0.01
"""Seconds for the first request of a connection that was accepted just before the end, as closing it would reset it,
and between two looks."""
YOUNG_OBJECTS = 10_000
"""New objects that a garbage collection waits for (Python's default: 700): one over a burst of requests takes 60 ms."""
SWITCH_INTERVAL_S = 1e-4
"""Seconds until a waiting thread requests the interpreter's lock (Python's default: 5 ms)."""


def prepare_interpreter() -> None:
    """Set up this process's garbage collector and threads for serving, once everything is loaded.

    A thread's wait restarts whenever the interpreter's lock is released. The event loop releases it at each system
    call, and takes it back before another core has woken up. With Python's interval, longer than the time between two
    calls, the engine's thread did not run while a burst of requests was read: 150 ms on 16 cores.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()  # a collection over all loaded objects would stop every stream for 0.3 s
    gc.set_threshold(YOUNG_OBJECTS)


def _awaits_first_request(connection: object) -> bool:
    return isinstance(connection, Connection) and connection.cycle is None


class Server(uvicorn.Server):
    """Server that runs until SIGINT, SIGTERM or `stop`. A second signal ends running requests at once."""

    def __init__(self, app: ASGIApp, engine_client: EngineClient, options: Options):
        config = uvicorn.Config(
            app,
            loop="asyncio",  # also where uvloop is installed: connections and API processes rely on asyncio's sockets
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
        """Stop the server like SIGTERM, from any thread."""
        self._stops += 1

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(QUEUED_BY_KERNEL)  # asyncio has set it to its own smaller number

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
        def abort() -> None:  # disconnect clients that do not read their last bytes
            for connection in list(self.server_state.connections):
                connection.transport.abort()

        loop = asyncio.get_running_loop()
        for listener in self.servers:
            listener.close()
        until = loop.time() + LAST_REQUESTS_S
        await asyncio.sleep(TICK_S)  # until connections that were just accepted are known
        while loop.time() < until and any(map(_awaits_first_request, self.server_state.connections)):
            await asyncio.sleep(TICK_S)
        timer = loop.call_later(FAREWELL_S, abort)
        await super().shutdown(sockets)
        timer.cancel()
