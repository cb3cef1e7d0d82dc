"""Process that serves HTTP for an engine: `python -m weft.serve.api_process SOCKET NUMBER DESCRIPTOR`.

SOCKET: of the engine's process. NUMBER: of this process. DESCRIPTOR: the inherited listening socket.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from weft.engine.messages import api_messages as messages
from weft.engine.messages.rank_sockets import RankSocket
from weft.engine.models.config_json.fields import ModelError
from weft.serve import app
from weft.serve.http import log, run
from weft.serve.http.engine_client import EngineClient
from weft.serve.http.metrics import Observations
from weft.serve.http.options import Options
from weft.serve.http.remote_engine import RemoteEngine


class ApiServer(run.Server):
    """Server of an API process: it accepts one connection at a time, so that idle processes take the next ones."""

    def __init__(self, application: Any, engine_client: EngineClient, options: Options, engine: RemoteEngine):
        super().__init__(application, engine_client, options)
        self.config.backlog = 1
        self._engine = engine

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]  # not a generator's
        """Leave signals ignored."""
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.serve(asyncio.get_running_loop(), self.stop)
        await super().startup(sockets)


def main(path: str, number: str, descriptor: str) -> int:
    """Serve until the engine's process says so, and return the exit code."""
    for each in (signal.SIGTERM, signal.SIGINT):  # a unit's processes all get it: the engine's passes it on
        signal.signal(each, signal.SIG_IGN)
    process = int(number)
    connection = RankSocket(Path(path), process)

    def send(message: messages.FromApi) -> None:
        connection.send(messages.encode(messages.ApiPacket(process, [message])))

    send(messages.ApiConnected())
    [setup] = messages.decode_to_api(connection.receive())
    assert isinstance(setup, messages.ApiSetup)
    values = setup.values
    log.configure(values["log_format"], values["log_level"])
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    options, observed = Options.from_dict(values["options"]), Observations()
    try:
        engine = RemoteEngine(connection, process, values, observed)
        engine_client = EngineClient(engine, observed, options.request_timeout_s)
        application = app.create_app(engine_client, engine, values["model_name"], options)
        server = ApiServer(application, engine_client, options, engine)
    except ModelError as error:
        send(messages.ApiStarted(str(error)))
        return 1
    run.prepare_interpreter()
    send(messages.ApiStarted())
    while not (engine.serving or engine.stopped):
        engine.receive()
    if engine.stopped:
        return 0
    with socket.socket(fileno=int(descriptor)) as listener:
        server.run(sockets=[listener])
    return 0


if __name__ == "__main__":
    try:
        code = main(*sys.argv[1:])
    except EOFError:  # the engine's process is gone
        os._exit(1)
    sys.exit(code)
