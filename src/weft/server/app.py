"""The application: routes, authorisation, and running it."""

from __future__ import annotations

import secrets
import socket
import time
from dataclasses import asdict
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from weft.engine.engine import Engine
from weft.server import errors
from weft.server.completions import Service
from weft.server.errors import ApiError
from weft.server.metrics import Metrics

OPEN_PATHS = ("/health", "/metrics")
"""Paths that need no API key: probes and scrapers have none."""
MOST_PLANNED = 2**20
"""Tokens of the largest plan to ask for: far above any step, and numbers that the cost model can hold."""


def create_app(engine: Engine, model_name: str, api_key: str | None = None) -> FastAPI:
    """The OpenAI-compatible application. api_key: clients must send it as a Bearer token."""

    def authorise(request: Request) -> None:
        if api_key is not None and request.url.path not in OPEN_PATHS:
            given = request.headers.get("authorization", "")
            if not secrets.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
                message = "wrong or missing API key; send it as 'Authorization: Bearer KEY'"
                raise ApiError(401, message, code="invalid_api_key")

    # A dependency, not a middleware: that would hide from the handlers that a client has gone.
    app = FastAPI(title="Weft", dependencies=[Depends(authorise)], openapi_url=None)  # it would be open to all
    errors.install(app)
    metrics, created = Metrics(engine), int(time.time())
    card = {"id": model_name, "object": "model", "created": created, "owned_by": "weft"}
    card |= {"max_model_len": engine.max_model_len}
    app.include_router(Service(engine, metrics, model_name).router())

    @app.get("/health")
    async def health() -> Response:
        if engine.healthy:
            return JSONResponse({"status": "ok"})
        return ApiError(503, engine.error or "the engine is closed").response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != model_name:
            raise errors.unknown_model(name, model_name)
        return card

    # What asks the engine's thread waits for its current step, so it must not hold up the event loop.

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(await run_in_threadpool(metrics.text), media_type=CONTENT_TYPE_LATEST)

    @app.get("/weft/plan")
    async def plan(tokens: int = 1) -> Response:
        if not 0 <= tokens <= MOST_PLANNED:
            raise ApiError(400, f"tokens is {tokens}; it must be between 0 and {MOST_PLANNED}", param="tokens")
        return PlainTextResponse(await run_in_threadpool(engine.plan_text, tokens))

    @app.get("/weft/report")
    async def report() -> dict[str, Any]:
        ran, naive = await run_in_threadpool(engine.comm_report)
        return {"ran": [asdict(s) for s in ran], "naive": [asdict(s) for s in naive]}

    return app


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError where the port is taken; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio sets TCP_NODELAY only on connections whose socket says that it is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        why = error.strerror if isinstance(error, OSError) else "no such port"
        raise OSError(f"{host}:{port} cannot be listened on ({why}); choose another with --host or --port") from error
    return listener


def run(app: FastAPI, listener: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    server.run(sockets=[listener])
